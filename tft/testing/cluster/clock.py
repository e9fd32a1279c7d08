"""
Virtual time: what is to happen, in the order in which it happens.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Call = Callable[..., object]


class Clock:
    """
    The time of one simulated cluster. Things due at the same moment happen in the order in which
    they were asked for, so a run depends on nothing but its seed.
    """

    def __init__(self, now: float) -> None:
        self.now = now
        self.happened = 0
        """How many things have happened."""
        self._turn = 0
        self._heap: list[tuple[float, int, Call, tuple[Any, ...]]] = []  # Any: what `call` takes

    def at(self, moment: float, call: Call, *arguments: Any) -> None:  # Any: what `call` takes
        """
        Have something done at a moment.
        """
        self._turn += 1
        heappush(self._heap, (moment, self._turn, call, arguments))

    def after(self, delay: float, call: Call, *arguments: Any) -> None:  # Any: what `call` takes
        """
        Have something done so many seconds from now.
        """
        self._turn += 1
        heappush(self._heap, (self.now + delay, self._turn, call, arguments))

    def tick(self) -> bool:
        """
        Let the next thing happen; False when nothing is left to.
        """
        if not self._heap:
            return False
        moment, _, call, arguments = heappop(self._heap)
        if moment > self.now:
            self.now = moment
        self.happened += 1
        call(*arguments)
        return True
