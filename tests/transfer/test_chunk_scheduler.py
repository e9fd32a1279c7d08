"""
The scheduler: whatever happens to the sources, no chunk is forgotten and nobody waits for nothing.
"""

from hypothesis import given
from hypothesis import strategies as st

from tft.transfer.chunk_scheduler import ChunkScheduler
from tft.transfer.wire import Offer, Request, Run

OFFER = Offer(meta=b"meta", buffers=(("weights", 100),))


def settled(sources: int, chunks: int) -> ChunkScheduler:
    """
    A scheduler on which all sources agree.
    """
    scheduler = ChunkScheduler(sources)
    scheduler.settle(
        OFFER,
        Run([memoryview(bytearray(100))]),
        [Request(offset=at, length=1) for at in range(chunks)],
    )
    return scheduler


@given(st.integers(1, 4), st.integers(0, 6), st.data())
def test_a_fetch_ends_whatever_happens(sources: int, chunks: int, data: st.DataObject) -> None:
    """
    When sources pick, bring, spoil and are lost in any order, then as long as one is left it can
    pick or has picked, until every chunk has come exactly once.
    """
    scheduler = settled(sources, chunks)
    living = set(range(sources))
    picked: list[tuple[int, Request]] = []
    came: list[Request] = []

    while not scheduler.ended():
        for source in sorted(living):
            if (chunk := scheduler.pick(source, wait=False)) is not None:
                picked.append((source, chunk))
        assert picked, "every source that is left waits"
        source, chunk = picked.pop(data.draw(st.integers(0, len(picked) - 1)))
        what = data.draw(st.sampled_from(["came", "spoilt", "lost"]))
        if what == "came":
            scheduler.came(source, chunk)
            came.append(chunk)
        elif what == "lost" or not scheduler.spoilt(source, chunk):
            scheduler.lose(source, "the test wants it")
            living.discard(source)
            picked = [one for one in picked if one[0] != source]

    assert scheduler.complete() == (len(came) == chunks)
    assert len(set(came)) == len(came)
    assert scheduler.complete() or not living


def test_a_spoilt_chunk_goes_to_another_source() -> None:
    """
    When a source has spoilt a chunk, then it does not get it again as long as another is left
    that has not.
    """
    scheduler = settled(sources=2, chunks=1)
    chunk = scheduler.pick(0, wait=False)
    assert chunk is not None

    assert scheduler.spoilt(0, chunk)
    assert scheduler.pick(0, wait=False) is None
    scheduler.lose(1, "it died")
    assert scheduler.pick(0, wait=False) == chunk


def test_a_majority_decides_before_the_rest_is_heard() -> None:
    """
    When more than half of the sources agree, then the fetch need not wait for the others.
    """
    scheduler = ChunkScheduler(3)
    scheduler.close()  # so that nobody waits in `offer`
    assert not scheduler.begun()

    scheduler.offer(2, OFFER)
    assert scheduler.begun()
    assert not scheduler.decided()
    scheduler.offer(1, OFFER)
    assert scheduler.decided()
    assert scheduler.common() == OFFER


def test_nothing_is_given_out_after_the_end() -> None:
    """
    When the fetch is over, then a source that asks late gets no chunk, and its loss is no fault.
    """
    scheduler = settled(sources=1, chunks=3)
    scheduler.close()

    assert scheduler.pick(0, wait=True) is None
    scheduler.lose(0, "the fetch is over")
    assert scheduler.lost() == {}
