"""
The chunk scheduler: whatever happens to the sources, no chunk is lost and no source waits without
reason.
"""

from hypothesis import given
from hypothesis import strategies as st

from tft.transfer.chunk_scheduler import ChunkScheduler
from tft.transfer.wire import Request, Run, ShardOffer

OFFER = ShardOffer(meta=b"meta", buffers=(("weights", 100),))


def settled(sources: int, chunks: int) -> ChunkScheduler:
    """
    Return a scheduler whose sources all agree.
    """
    scheduler = ChunkScheduler(sources)
    scheduler.settle(
        OFFER,
        Run([memoryview(bytearray(100))]),
        [Request(offset=at, length=1) for at in range(chunks)],
    )
    return scheduler


@given(st.integers(1, 4), st.integers(0, 6), st.data())
def test_fetch_ends_under_any_order_of_chunks_and_losses(
    sources: int, chunks: int, data: st.DataObject
) -> None:
    """When sources deliver, damage chunks and are lost in any order, then the fetch always ends.
    Each chunk arrives exactly once, unless all sources are lost."""
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


def test_damaged_chunk_is_requested_from_another_source() -> None:
    """When a source has damaged a chunk, then this source does not get the chunk again while
    another source can deliver it."""
    scheduler = settled(sources=2, chunks=1)
    chunk = scheduler.pick(0, wait=False)
    assert chunk is not None

    assert scheduler.spoilt(0, chunk)
    assert scheduler.pick(0, wait=False) is None
    scheduler.lose(1, "it died")
    assert scheduler.pick(0, wait=False) == chunk


def test_majority_of_the_sources_decides_without_the_others() -> None:
    """When more than half of the sources agree, then the offer is decided without the other
    sources."""
    scheduler = ChunkScheduler(3)
    scheduler.close()  # so that `offer` does not wait
    assert not scheduler.begun()

    scheduler.offer(2, OFFER)
    assert scheduler.begun()
    assert not scheduler.decided()
    scheduler.offer(1, OFFER)
    assert scheduler.decided()
    assert scheduler.common() == OFFER


def test_no_chunk_is_given_out_after_the_end_of_the_fetch() -> None:
    """When the fetch is over, then a source gets no chunk, and the loss of a source is not
    recorded."""
    scheduler = settled(sources=1, chunks=3)
    scheduler.close()

    assert scheduler.pick(0, wait=True) is None
    scheduler.lose(0, "the fetch is over")
    assert scheduler.lost() == {}
