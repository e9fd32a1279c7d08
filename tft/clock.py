"""
The clock from which the processes of a job get the time of events and deadlines.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """
    The clock that the controller, the agents and the workers read.
    """

    def now(self) -> float:
        """
        Return the time in seconds. It never goes back, and can be compared between the processes of
        one machine.
        """
        raise NotImplementedError


class SystemClock:
    """
    The clock CLOCK_MONOTONIC, which all processes of a machine share until the machine restarts.
    """

    def now(self) -> float:
        return time.monotonic()
