"""
The clock of the processes of a job. The code that decides how the job reacts to faults (`tft.core`)
does not use this clock: each event that the code handles contains the time.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """
    The clock that the controller, the agents and the workers read.
    """

    def now(self) -> float:
        """
        Return the time in seconds. The time never goes back. Times that processes of one machine
        have read can be compared.
        """
        raise NotImplementedError


class SystemClock:
    """
    The clock CLOCK_MONOTONIC, which all processes of a machine share until the machine restarts.
    """

    def now(self) -> float:
        return time.monotonic()


def processor_time() -> float:
    """
    Return the seconds for which this thread has used a processor. A thread that waits, or is kept
    waiting by others, uses none.
    """
    return time.thread_time()


def unix_time() -> float:
    """
    Return the seconds since 1970. Only for records that people read, or that are read on another
    machine: this time may jump.
    """
    return time.time()  # noqa: TID251 # no deadline
