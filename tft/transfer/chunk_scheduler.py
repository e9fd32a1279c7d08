"""
The scheduler of a fetch: decides which source rank sends which chunk of a shard.

A fetch has one main thread (the caller of `fetch`) and one thread for each source. These threads
exchange data only through the scheduler. A source is identified by its index in the list of sources
of the transfer (`Transfer.sources`).

Each source first makes an offer, which describes its copy of the shard. The main thread decides
which offer is valid. Then the thread of each source picks chunks until no chunk is left. If a
source is lost or sends a damaged chunk, the missing chunks are picked again, by other sources where
possible. A lost source is never used again in this fetch.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable

from tft.transfer.wire import Request, Run, ShardOffer, fingerprint

_STRIKES = 3
"""The number of damaged chunks after which a source is not used any more. One damaged chunk is not
enough: network links flip a bit now and then, and this source may be the only one that has the
shard."""

_ODD = "the source describes the shard differently than the other sources do"


class ChunkScheduler:
    """
    The state of one fetch that its threads share: the offers and failures of the sources, and the
    chunks that are still missing. Every method may be called on any thread.

    `close` wakes the threads that wait in a method. After `close`, no chunk is assigned to a
    source.
    """

    def __init__(self, sources: int) -> None:
        self._changed = threading.Condition()
        self._sources = range(sources)
        self._offers: dict[int, ShardOffer] = {}
        self._keys: dict[int, bytes] = {}
        self._lost: dict[int, str] = {}
        self._settled: tuple[bytes, Run] | None = None
        self._todo: deque[Request] = deque()
        self._left = 0
        self._picked: dict[int, list[Request]] = {source: [] for source in self._sources}
        self._spoilt: set[tuple[int, Request]] = set()
        self._strikes: Counter[int] = Counter()
        self._given: Counter[int] = Counter()
        self._closed = False

    # ------------------------------------------------------------ the thread of the fetch

    def wait(self, fact: Callable[[], bool], seconds: float) -> bool:
        """
        Wait at most `seconds` seconds until `fact()` is true. Return the last value of `fact()`.

        `fact` is a method of this scheduler, such as `complete`.
        """
        with self._changed:
            return self._changed.wait_for(fact, seconds)

    def begun(self) -> bool:
        """
        Return True if at least one source has made its offer (the description of its copy of the
        shard), or if all sources are lost and no offer will come.
        """
        return bool(self._offers) or not self._living()

    def decided(self) -> bool:
        """
        Return True if no later offer can change which offer is the most common. An offer is a
        source's description of its copy of the shard.

        Either more than half of the sources have made the same offer, or every source has made its
        offer or is lost.
        """
        with self._changed:
            votes = Counter(self._keys.values())
            most = max(votes.values(), default=0)
            return 2 * most > len(self._sources) or all(
                source in self._keys or source in self._lost for source in self._sources
            )

    def ended(self) -> bool:
        """
        Return True if all chunks of the shard have arrived, or if all source ranks are lost.
        """
        return self.complete() or not self._living()

    def complete(self) -> bool:
        """
        Return True if all chunks of the shard have arrived undamaged.
        """
        return self._settled is not None and not self._left

    def quiet(self) -> bool:
        """
        Return True if it is certain that no source thread is writing a chunk to the buffers now.

        If the result is True after `close`, no source thread will write to the buffers again.
        """
        return not any(self._picked.values())

    def common(self) -> ShardOffer | None:
        """
        Return the offer (description of a shard) that most sources have made, or None when there is
        no offer.

        If several offers are equally common, the offer of the first source in the list is returned.
        """
        with self._changed:
            votes = Counter(self._keys.values())
            heard = sorted(self._offers)
            best = max(heard, key=lambda source: votes[self._keys[source]], default=None)
            return None if best is None else self._offers[best]

    def settle(self, offer: ShardOffer, room: Run, chunks: Iterable[Request]) -> None:
        """
        Record which offer (description of the shard) is the valid one, the memory `room` that
        receives the shard, and the chunks to fetch.

        Sources that made a different offer are recorded as lost.
        """
        with self._changed:
            self._settled = (fingerprint(offer), room)
            self._lost |= {
                source: _ODD for source, key in self._keys.items() if key != self._settled[0]
            }
            self._todo.extend(chunks)
            self._left = len(self._todo)
            self._changed.notify_all()

    def close(self) -> None:
        """
        Record that the fetch of the shard is over, after success or failure.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def lost(self) -> dict[int, str]:
        """
        Return why each lost source rank was lost. A key is the index of a source in the list of
        sources.
        """
        with self._changed:
            return dict(self._lost)

    def given(self) -> dict[int, int]:
        """
        Return how many undamaged bytes each source rank has sent. A key is the index of a source in
        the list of sources.
        """
        with self._changed:
            return {source: self._given[source] for source in self._sources}

    # ------------------------------------------------------------ the thread of a source

    @property
    def closed(self) -> bool:
        """
        True when the fetch of the shard is over. Then the threads of the sources must not write to
        the buffers any more.
        """
        return self._closed

    def offer(self, source: int, offer: ShardOffer) -> tuple[bytes, Run] | None:
        """
        Record the offer of a source (the description of its copy of the shard). Then wait until
        `settle` has chosen one of the offers, or until the fetch is over.

        If this offer was chosen, returns its fingerprint and the memory for the chunks. Returns
        None if another offer was chosen (the source is then lost), or if the fetch is over.
        """
        with self._changed:
            self._offers[source] = offer
            self._keys[source] = fingerprint(offer)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._settled is not None or self._closed)
            if self._settled is None or self._settled[0] == self._keys[source]:
                return self._settled
            self._lost[source] = _ODD
            return None

    def pick(self, source: int, *, wait: bool) -> Request | None:
        """
        Assign a chunk to the source `source` and return the chunk. Return None when there is no
        chunk to fetch from this source.

        With `wait` False, returns None at once if no chunk is available to this source now. With
        `wait` True, waits for a chunk, and returns None only when all chunks have arrived or the
        fetch is over.
        """
        with self._changed:
            while self._left and not self._closed:
                for chunk in self._todo:
                    if self._may(source, chunk):
                        self._todo.remove(chunk)
                        self._picked[source].append(chunk)
                        return chunk
                if not wait:
                    return None
                self._changed.wait()
            return None

    def came(self, source: int, chunk: Request) -> None:
        """
        Record that a chunk from a source was written to its place in memory, and that the received
        bytes match their digest.
        """
        with self._changed:
            self._picked[source].remove(chunk)
            self._given[source] += chunk.length
            self._left -= 1
            if not self._left:
                self._changed.notify_all()

    def spoilt(self, source: int, chunk: Request) -> bool:
        """
        Record that a chunk from a source arrived damaged, and let the chunk be fetched again.

        Return False when the source has sent `_STRIKES` (3) damaged chunks. The caller must then
        stop using the source.
        """
        with self._changed:
            self._picked[source].remove(chunk)
            self._spoilt.add((source, chunk))
            self._strikes[source] += 1
            self._todo.appendleft(chunk)
            self._changed.notify_all()
            return self._strikes[source] < _STRIKES

    def lose(self, source: int, why: str) -> None:
        """
        Record that a source is lost for the reason `why`, and make the unfinished chunks of this
        source available again.

        The thread of the source must not write to the buffers after this call. After `close` the
        reason is not recorded: the source has not failed; its thread ends because the fetch is
        over.
        """
        with self._changed:
            if not self._closed:
                self._lost[source] = why
            self._todo.extendleft(reversed(self._picked[source]))
            self._picked[source].clear()
            self._changed.notify_all()

    def _living(self) -> list[int]:
        return [source for source in self._sources if source not in self._lost]

    def _may(self, source: int, chunk: Request) -> bool:
        # A source that has sent this chunk damaged must not send it again, as long as another
        # source can send it. If every source has sent the chunk damaged, all of them may try again.
        return (source, chunk) not in self._spoilt or all(
            (other, chunk) in self._spoilt for other in self._living()
        )
