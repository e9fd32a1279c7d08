"""
Rules about how processes end: whether a broker or controller that has died is started again, what
its exit status means, and which exit code `tft run` has. This module starts and ends no process.
"""

import signal
from collections import deque

from tft.ending_signals import ENDING

COMPLETED = 0
REFUSED = 2
DUMPED = 3
FAILED = 4
CANCELLED = tuple(128 + number for number in ENDING)

RESULTS = (COMPLETED, DUMPED, FAILED, *CANCELLED)
"""The exit codes of a controller whose job is over. Any other exit code of a controller, except
`REFUSED` (the process refused to start), means that the controller died by accident."""


class Restarts:
    """
    Limits how often the broker or the controller may be restarted. One object counts the restarts
    of one of these processes. Without a limit, a process that can never work would be restarted
    forever.
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

    `result` is the exit code that the end of the job gives. `stopped_by` is the signal that asked
    `tft run` to end the job, or None. After a signal the exit code is 128 + the signal number,
    unless the job completed nevertheless.
    """
    if stopped_by is None or result == COMPLETED:
        return result
    return 128 + stopped_by


def ended(code: int) -> str:
    """
    Return words that say how a process ended, such as "exited with 1". `code` is the exit status of
    the process, or the negative number of the signal that killed the process.
    """
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # most real-time signals have no name
        return f"was killed by signal {-code}"
