"""
Time. The only place that reads a clock; everything else is told.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """
    Where a shell takes its time from.
    """

    def now(self) -> float:
        """
        Seconds, monotonic, comparable between the processes of one machine.
        """
        raise NotImplementedError


class SystemClock:
    """
    CLOCK_MONOTONIC, which Linux shares between processes until the machine restarts.
    """

    def now(self) -> float:
        return time.monotonic()
