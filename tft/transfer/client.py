"""
The receiving end of a transfer.

`fetch` reads one shard from all ranks that hold a copy, and writes the bytes directly into the
shard's memory.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import structlog

from tft.clock import SystemClock
from tft.errors import TransferFailed
from tft.logs import quiet_log
from tft.protocol.messages import Transfer
from tft.spi.types import Buffer
from tft.transfer.chunk_scheduler import ChunkScheduler
from tft.transfer.fetch_worker import TICK, bring
from tft.transfer.tls import Tls
from tft.transfer.wire import Hello, Run, ShardOffer, chunks

log = structlog.get_logger()

PATIENCE = 5.0
"""The time in seconds after which a source that sends no byte counts as hanging. This time is
longer than any pause of a healthy machine. If a source hangs, the fetch takes longer by this time,
because the missing chunks are requested from other sources only afterwards."""
_GATHERING = 0.5
"""The time in seconds that `fetch` waits for offers of other sources after the first offer. A
source whose offer comes later still takes part if its offer is equal to the chosen one. An offer is
a source's description of its copy of the shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    """
    The rank that fetches a shard, and what this rank needs to connect to the sources.
    """

    job: str
    """The name of the job. A source sends nothing to a client that gives another name."""
    rank: int
    tls: Tls | None = None
    """The TLS settings of the connections to the sources. None means that the connections are not
    encrypted."""


def fetch(
    transfer: Transfer,
    step: int,
    receiver: Receiver,
    take: Callable[[bytes], Sequence[Buffer]],
    taken: Callable[[bytes], None],
    abandoned: threading.Event,
    *,
    patience: float = PATIENCE,
) -> dict[int, str]:
    """
    Fetch a shard as it was at the end of `step`, from all its sources at once. Return the ranks of
    the sources that were lost during the fetch, each with the reason.

    `take(meta)` must return writable buffers with the same names and sizes as the buffers of the
    sources. `meta` is the adaptor's description of the shard, which the sources send. The fetch
    writes into these buffers in any order. `taken(meta)` is called after the whole shard has
    arrived and all digests were right. Both functions are called on the calling thread.

    Each source offers its copy with `meta` and the names and sizes of its buffers. A source whose
    offer differs from the most common offer is not used. A source counts as lost if it sends
    nothing for `patience` seconds; while it prepares the shard, it sends signs of life
    (`Preparing`).

    Raises `TransferFailed` when the shard cannot be fetched whole; the error names every source and
    its failure. If another thread sets `abandoned`, raises `TransferFailed` as well, within a few
    times `TICK` seconds. After an error the content of the buffers is undefined. No thread writes
    to the buffers any more when this function returns or raises.
    """
    clock = SystemClock()
    began, scheduler = clock.now(), ChunkScheduler(len(transfer.sources))
    hello = Hello(job=receiver.job, rank=receiver.rank, shard=transfer.shard, step=step)
    threads: dict[int, threading.Thread] = {}
    try:
        for place, thread in enumerate(
            _threads(transfer, hello, scheduler, patience, receiver.tls)
        ):
            if _started(thread, place, scheduler):
                threads[place] = thread
        offer = _agree(transfer, step, scheduler, abandoned)
        room = _room(transfer.shard, offer, take(offer.meta))
        scheduler.settle(offer, room, chunks(room.size, len(threads)))
        _until(scheduler.ended, scheduler, abandoned)
        if not scheduler.complete():
            raise _failure(transfer, step, scheduler)
    finally:
        _close(transfer, scheduler, threads.values())
    taken(offer.meta)
    lost = scheduler.lost()
    # leave out sources for which this rank could not start a thread: they have not failed
    odd = {transfer.sources[place].rank: lost[place] for place in threads if place in lost}
    quiet_log.info(
        "shard_fetched",
        shard=transfer.shard,
        step=step,
        size=room.size,
        seconds=round(clock.now() - began, 6),
        given={transfer.sources[place].rank: size for place, size in scheduler.given().items()},
    )
    return odd


def _threads(
    transfer: Transfer, hello: Hello, scheduler: ChunkScheduler, patience: float, tls: Tls | None
) -> list[threading.Thread]:
    return [
        threading.Thread(
            target=bring,
            args=(source, place, hello, scheduler, patience, tls),
            name=f"tft-fetch-{transfer.shard}-from-{source.rank}",
            daemon=True,
        )
        for place, source in enumerate(transfer.sources)
    ]


def _started(thread: threading.Thread, place: int, scheduler: ChunkScheduler) -> bool:
    """
    Start the thread of a source, and return True. If the system has no more threads, record the
    source as lost and return False.
    """
    try:
        thread.start()
    except RuntimeError as error:
        scheduler.lose(place, f"this rank cannot start a thread for this source: {error}")
        return False
    return True


def _close(
    transfer: Transfer, scheduler: ChunkScheduler, threads: Iterable[threading.Thread]
) -> None:
    """
    End the fetch: wait until no thread writes to the buffers any more, and log the lost sources.
    """
    scheduler.close()
    while not scheduler.wait(scheduler.quiet, TICK):
        pass
    for thread in threads:
        # wait at most `TICK` seconds: a thread that hangs in the lookup of a host name may live
        # on, because it does not write to the buffers
        thread.join(TICK)
    for place, why in scheduler.lost().items():
        source = transfer.sources[place]
        log.warning("source_lost", shard=transfer.shard, source=source.rank, why=why)


def _agree(
    transfer: Transfer, step: int, scheduler: ChunkScheduler, abandoned: threading.Event
) -> ShardOffer:
    _until(scheduler.begun, scheduler, abandoned)
    _until(scheduler.decided, scheduler, abandoned, ticks=int(_GATHERING / TICK))
    offer = scheduler.common()
    if offer is None:
        raise _failure(transfer, step, scheduler)
    return offer


def _room(shard: str, offer: ShardOffer, buffers: Sequence[Buffer]) -> Run:
    room = [(buffer.name, buffer.view.nbytes) for buffer in buffers]
    for index, (there, here) in enumerate(zip_longest(offer.buffers, room)):
        if there != here:
            raise TransferFailed(
                f"the buffers for shard {shard!r} do not match those of its sources: buffer "
                f"{index} is {_buffer(there)} there and {_buffer(here)} here. Check that all ranks "
                "build the same model"
            )
    for buffer in buffers:
        if buffer.view.readonly:
            raise TransferFailed(
                f"the memory for buffer {buffer.name!r} of shard {shard!r} is read-only: `tft_take` "
                "must return writable buffers"
            )
    return Run([buffer.view for buffer in buffers])


def _buffer(named: tuple[str, int] | None) -> str:
    return "missing" if named is None else f"{named[0]!r} of {named[1]} bytes"


def _until(
    fact: Callable[[], bool],
    scheduler: ChunkScheduler,
    abandoned: threading.Event,
    ticks: int | None = None,
) -> None:
    """
    Wait until `fact()` is true, but not much longer than `ticks` times `TICK` seconds.

    `ticks` None means no time limit. Raises `TransferFailed` when `abandoned` is set.
    """
    while not abandoned.is_set():
        if scheduler.wait(fact, TICK) or ticks == 0:
            return
        ticks = None if ticks is None else ticks - 1
    raise TransferFailed(
        "the fetch of the shard was cancelled, because the controller no longer needs it"
    )


def _failure(transfer: Transfer, step: int, scheduler: ChunkScheduler) -> TransferFailed:
    lost = scheduler.lost()
    sources = "; ".join(
        f"rank {source.rank} at {source.address}: {lost[place]}"
        for place, source in enumerate(transfer.sources)
    )
    return TransferFailed(
        f"shard {transfer.shard!r} at step {step} could not be fetched whole: "
        + (sources or "the order names no source")
    )
