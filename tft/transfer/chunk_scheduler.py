"""
The schedule of a fetch: which source brings which chunk of a shard. It is the only object that the
thread of the fetch and the threads of its sources share.

A source is identified by its place in the order's list of sources. Each source makes its offer. The
thread of the fetch settles which offer is valid for the shard. Then the sources pick chunks until
none is left. Chunks that a source had picked when it was lost, or that it sent damaged, are picked
by other sources. A lost source is never used again.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable

from tft.transfer.wire import Offer, Request, Run, fingerprint

_STRIKES = 3
"""The number of damaged chunks after which a source is not used any more. The number is more than
one, because the only source may be behind a link that flips a bit now and then. Such a source is
still better than none."""

_ODD = "its description of the shard differs from that of the other sources"


class ChunkScheduler:
    """
    The state of one fetch. Every method may be called on any thread.

    After `close`, no chunk is given out, and threads that wait here are woken.
    """

    def __init__(self, sources: int) -> None:
        self._changed = threading.Condition()
        self._sources = range(sources)
        self._offers: dict[int, Offer] = {}
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
        Wait until `fact` about this scheduler is true, for at most `seconds`. Return whether it is true
        now.
        """
        with self._changed:
            return self._changed.wait_for(fact, seconds)

    def begun(self) -> bool:
        """
        Return whether a source has made its offer, or all sources are lost.
        """
        return bool(self._offers) or not self._living()

    def decided(self) -> bool:
        """
        Return whether further offers can no longer change which offer is the most common.
        """
        with self._changed:
            votes = Counter(self._keys.values())
            most = max(votes.values(), default=0)
            return 2 * most > len(self._sources) or all(
                source in self._keys or source in self._lost for source in self._sources
            )

    def ended(self) -> bool:
        """
        Return whether all chunks have come, or no source is left to bring them.
        """
        return self.complete() or not self._living()

    def complete(self) -> bool:
        """
        Return whether all chunks have come.
        """
        return self._settled is not None and not self._left

    def quiet(self) -> bool:
        """
        Return whether no thread of a source writes to the buffers. After `close`, no thread begins
        to write again.
        """
        return not any(self._picked.values())

    def common(self) -> Offer | None:
        """
        Return the most common offer; among equally common ones, that of the first source in the
        list. Return None when there is no offer.
        """
        with self._changed:
            votes = Counter(self._keys.values())
            heard = sorted(self._offers)
            best = max(heard, key=lambda source: votes[self._keys[source]], default=None)
            return None if best is None else self._offers[best]

    def settle(self, offer: Offer, room: Run, chunks: Iterable[Request]) -> None:
        """
        Settle the valid offer of the shard, the memory `room` for the shard, and the chunks to
        fetch. Sources that made another offer are lost.
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
        End the fetch, after success or failure.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def lost(self) -> dict[int, str]:
        """
        Return the lost sources, each with the reason.
        """
        with self._changed:
            return dict(self._lost)

    def given(self) -> dict[int, int]:
        """
        Return for each source the number of bytes that it brought undamaged.
        """
        with self._changed:
            return {source: self._given[source] for source in self._sources}

    # ------------------------------------------------------------ the thread of a source

    @property
    def closed(self) -> bool:
        """
        Whether the fetch is over. The buffers must not be written after that.
        """
        return self._closed

    def offer(self, source: int, offer: Offer) -> tuple[bytes, Run] | None:
        """
        Make the offer of a source, and wait until an offer is settled or the fetch is over. Return
        the fingerprint of the offer and the memory for the chunks if this offer was settled. Return
        None if another offer was settled, or the fetch is over.
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
        Return a chunk that this source should bring. Return None when there is no chunk for the
        source now; with `wait`, only when there will be none any more.
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
        Record that a picked chunk is in its place in memory, and that its digest is right.
        """
        with self._changed:
            self._picked[source].remove(chunk)
            self._given[source] += chunk.length
            self._left -= 1
            if not self._left:
                self._changed.notify_all()

    def spoilt(self, source: int, chunk: Request) -> bool:
        """
        Record that a picked chunk came damaged. Return whether its source may go on.
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
        Record that a source is lost: it brings no more chunks, and its thread writes nothing any
        more. After `close`, the reason is not recorded, because the end of the fetch ends the
        source.
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
        # A chunk that a source sent damaged goes to other sources, unless all sent it damaged.
        return (source, chunk) not in self._spoilt or all(
            (other, chunk) in self._spoilt for other in self._living()
        )
