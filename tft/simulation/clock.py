"""
Virtual time: a queue of calls, ordered by the moment at which they are due.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Call = Callable[..., object]

START = 100.0
"""The time of the simulated cluster when a run begins, in virtual seconds."""


class Clock:
    """
    The time of one simulated cluster. Calls that are due at the same moment are made in the order
    in which they were requested. So a run depends only on its seed.
    """

    def __init__(self, now: float) -> None:
        self.now = now
        self.happened = 0
        """The number of calls that were made so far."""
        self._turn = 0
        # Any: the arguments of the waiting calls may have any type
        self._heap: list[tuple[float, int, Call, tuple[Any, ...]]] = []

    # Any: the arguments of `call` may have any type
    def at(self, moment: float, call: Call, *arguments: Any) -> None:
        """
        Request that the function `call` is called with `arguments` at the virtual time `moment`, in
        seconds.
        """
        self._turn += 1
        heappush(self._heap, (moment, self._turn, call, arguments))

    # Any: the arguments of `call` may have any type
    def after(self, delay: float, call: Call, *arguments: Any) -> None:
        """
        Request that the function `call` is called with `arguments` after `delay` virtual seconds.
        """
        self._turn += 1
        heappush(self._heap, (self.now + delay, self._turn, call, arguments))

    def tick(self) -> bool:
        """
        Advance the virtual time to the next requested call, and make this call. Return False when
        the queue of calls is empty.
        """
        if not self._heap:
            return False
        moment, _, call, arguments = heappop(self._heap)
        if moment > self.now:
            self.now = moment
        self.happened += 1
        call(*arguments)
        return True
