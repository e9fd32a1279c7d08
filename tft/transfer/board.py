"""
Who fetches what: the one thing the thread that fetches a shard and those of its sources share.

Sources are known by their place in the order's list. Each makes its offer; the thread of the
fetch settles which offer is the shard's; then the sources pick chunks until none is left. What a
source had picked when it was lost, or sent damaged, is picked by others. A source that has been
lost never comes back.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable

from tft.transfer.wire import Offer, Request, Run, fingerprint

_STRIKES = 3
"""Damaged chunks after which a source is used no more. Not one: the only source may be behind a
link that flips a bit now and then, and is still better than none."""

_ODD = "it describes the shard otherwise than the sources that were used"


class Board:
    """
    The state of one fetch. Every method may be called on any thread.

    Once `close` has been called no chunk is given out, and who waits here is let go.
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
        Wait for a fact about this board, that long at most; whether it is one by now.
        """
        with self._changed:
            return self._changed.wait_for(fact, seconds)

    def begun(self) -> bool:
        """
        A source has made its offer, or all are lost.
        """
        return bool(self._offers) or not self._living()

    def decided(self) -> bool:
        """
        No source that is yet to be heard can change which offer is the most common.
        """
        with self._changed:
            votes = Counter(self._keys.values())
            most = max(votes.values(), default=0)
            return 2 * most > len(self._sources) or all(
                source in self._keys or source in self._lost for source in self._sources
            )

    def ended(self) -> bool:
        """
        All chunks have come, or nobody is left to bring them.
        """
        return self.complete() or not self._living()

    def complete(self) -> bool:
        """
        All chunks have come.
        """
        return self._settled is not None and not self._left

    def quiet(self) -> bool:
        """
        No thread of a source writes. After `close` that stays so.
        """
        return not any(self._picked.values())

    def common(self) -> Offer | None:
        """
        The most common offer, of equals that of the first in the list; None where there is none.
        """
        with self._changed:
            votes = Counter(self._keys.values())
            heard = sorted(self._offers)
            best = max(heard, key=lambda source: votes[self._keys[source]], default=None)
            return None if best is None else self._offers[best]

    def settle(self, offer: Offer, room: Run, chunks: Iterable[Request]) -> None:
        """
        This is the shard, its place in memory, and the chunks it is to be fetched in.
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
        The fetch is over, whatever came of it.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def lost(self) -> dict[int, str]:
        """
        Why each source was lost.
        """
        with self._changed:
            return dict(self._lost)

    def given(self) -> dict[int, int]:
        """
        Good bytes by source.
        """
        with self._changed:
            return {source: self._given[source] for source in self._sources}

    # ------------------------------------------------------------ the thread of a source

    @property
    def closed(self) -> bool:
        """
        The fetch is over: its memory is not to be written any more.
        """
        return self._closed

    def offer(self, source: int, offer: Offer) -> tuple[bytes, Run] | None:
        """
        Make an offer and wait until one is settled, or the fetch is over. The key and the place
        of the chunks if it was this one; None if another was.
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
        A chunk for this source to bring. None where there is none for it now; with `wait`, where
        there will be none any more.
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
        A picked chunk is in its place, and its digest holds.
        """
        with self._changed:
            self._picked[source].remove(chunk)
            self._given[source] += chunk.length
            self._left -= 1
            if not self._left:
                self._changed.notify_all()

    def spoilt(self, source: int, chunk: Request) -> bool:
        """
        A picked chunk came damaged; whether its source may go on.
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
        A source brings nothing any more, and its thread writes nothing any more. After `close`
        that is no fault of its own.
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
        # What a source has spoilt is for the others, unless all of them have spoilt it too.
        return (source, chunk) not in self._spoilt or all(
            (other, chunk) in self._spoilt for other in self._living()
        )
