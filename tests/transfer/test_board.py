"""
The board: whatever happens to the sources, no chunk is forgotten and nobody waits for nothing.
"""

from hypothesis import given
from hypothesis import strategies as st

from tft.transfer.chunk_scheduler import Board
from tft.transfer.wire import Offer, Request, Run

OFFER = Offer(meta=b"meta", buffers=(("weights", 100),))


def settled(sources: int, chunks: int) -> Board:
    """
    A board on which all sources agree.
    """
    board = Board(sources)
    board.settle(
        OFFER,
        Run([memoryview(bytearray(100))]),
        [Request(offset=at, length=1) for at in range(chunks)],
    )
    return board


@given(st.integers(1, 4), st.integers(0, 6), st.data())
def test_a_fetch_ends_whatever_happens(sources: int, chunks: int, data: st.DataObject) -> None:
    """
    When sources pick, bring, spoil and are lost in any order, then as long as one is left it can
    pick or has picked, until every chunk has come exactly once.
    """
    board = settled(sources, chunks)
    living = set(range(sources))
    picked: list[tuple[int, Request]] = []
    came: list[Request] = []

    while not board.ended():
        for source in sorted(living):
            if (chunk := board.pick(source, wait=False)) is not None:
                picked.append((source, chunk))
        assert picked, "every source that is left waits"
        source, chunk = picked.pop(data.draw(st.integers(0, len(picked) - 1)))
        what = data.draw(st.sampled_from(["came", "spoilt", "lost"]))
        if what == "came":
            board.came(source, chunk)
            came.append(chunk)
        elif what == "lost" or not board.spoilt(source, chunk):
            board.lose(source, "the test wants it")
            living.discard(source)
            picked = [one for one in picked if one[0] != source]

    assert board.complete() == (len(came) == chunks)
    assert len(set(came)) == len(came)
    assert board.complete() or not living


def test_a_spoilt_chunk_goes_to_another_source() -> None:
    """
    When a source has spoilt a chunk, then it does not get it again as long as another is left
    that has not.
    """
    board = settled(sources=2, chunks=1)
    chunk = board.pick(0, wait=False)
    assert chunk is not None

    assert board.spoilt(0, chunk)
    assert board.pick(0, wait=False) is None
    board.lose(1, "it died")
    assert board.pick(0, wait=False) == chunk


def test_a_majority_decides_before_the_rest_is_heard() -> None:
    """
    When more than half of the sources agree, then the fetch need not wait for the others.
    """
    board = Board(3)
    board.close()  # so that nobody waits in `offer`
    assert not board.begun()

    board.offer(2, OFFER)
    assert board.begun()
    assert not board.decided()
    board.offer(1, OFFER)
    assert board.decided()
    assert board.common() == OFFER


def test_nothing_is_given_out_after_the_end() -> None:
    """
    When the fetch is over, then a source that asks late gets no chunk, and its loss is no fault.
    """
    board = settled(sources=1, chunks=3)
    board.close()

    assert board.pick(0, wait=True) is None
    board.lose(0, "the fetch is over")
    assert board.lost() == {}
