"""
What the end of a part means, and with what code `tft run` leaves: decided here, done elsewhere.
"""

import signal
from collections import deque

COMPLETED = 0
REFUSED = 2
DUMPED = 3
FAILED = 4
CANCELLED = (128 + signal.SIGINT, 128 + signal.SIGTERM)

RESULTS = (COMPLETED, DUMPED, FAILED, *CANCELLED)
"""What a controller, or an agent that was told to end, leaves with; all else is an accident."""


class Restarts:
    """
    How often a part may be started again: it is meant for accidents, and one that happens every
    time is none.
    """

    def __init__(self, *, limit: int = 10, within: float = 60.0) -> None:
        self.limit = limit
        self.within = within
        self._started: deque[float] = deque(maxlen=limit)

    def again(self, at: float) -> bool:
        """
        Whether a part that ended at `at` (seconds) may be started once more.
        """
        if len(self._started) == self.limit and at - self._started[0] < self.within:
            return False
        self._started.append(at)
        return True


def exit_code(result: int, stopped_by: int | None) -> int:
    """
    The code of `tft run` for a job that ended with `result`, after the signal `stopped_by` if
    there was one. A job that completed all the same has completed.
    """
    if stopped_by is None or result == COMPLETED:
        return result
    return 128 + stopped_by


def ended(code: int) -> str:
    """
    How a process ended, in words, from its exit status or minus its signal.
    """
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-code}"
