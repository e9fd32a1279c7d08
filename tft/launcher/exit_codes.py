"""
Decides what the end of a broker, controller or agent means for the job, and what the exit code of
`tft run` is. Pure functions.
"""

import signal
from collections import deque

COMPLETED = 0
REFUSED = 2
DUMPED = 3
FAILED = 4
CANCELLED = (128 + signal.SIGINT, 128 + signal.SIGTERM)

RESULTS = (COMPLETED, DUMPED, FAILED, *CANCELLED)
"""The exit codes of a controller that has ended its job, or of an agent that was told to end. Any
other code except `REFUSED` means that the process died by accident."""


class Restarts:
    """
    Limits how often the broker or the controller may be restarted, because a process that dies
    again and again will not recover.
    """

    def __init__(self, *, limit: int = 10, within: float = 60.0) -> None:
        self.limit = limit
        self.within = within
        self._started: deque[float] = deque(maxlen=limit)

    def again(self, at: float) -> bool:
        """
        Return True if a process that ended at `at` (seconds) may be started again.

        At most `limit` restarts are allowed within `within` seconds.
        """
        if len(self._started) == self.limit and at - self._started[0] < self.within:
            return False
        self._started.append(at)
        return True


def exit_code(result: int, stopped_by: int | None) -> int:
    """
    Return the exit code of `tft run` for a job that ended with `result`.

    `stopped_by` is the signal that asked for the end, or None. A job that completed in spite of the
    signal counts as completed.
    """
    if stopped_by is None or result == COMPLETED:
        return result
    return 128 + stopped_by


def ended(code: int) -> str:
    """
    Return how a process ended, as part of a sentence. `code` is the exit status, or the negative
    number of the signal.
    """
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-code}"
