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
    Return the processor time of this thread in seconds. It does not grow while the thread waits for
    something, or waits for a processor that others use.
    """
    return time.thread_time()


def unix_time() -> float:
    """
    Return the seconds since 1970. Use this time only in records that people or other machines read,
    and not for time limits: it jumps when the machine's clock is set.
    """
    return time.time()  # noqa: TID251 # no deadline
