"""
Handling of processes of a job that were stopped with SIGSTOP, for example by a person, a debugger
or a container runtime. The parent of a stopped process continues the process (SIGCONT).

This is needed because a stopped process holds up the whole job. No other process can take over its
work: the stopped process still has its connections and, if it is an agent, the ranks of its node.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

LIMIT = 1.0
"""The time in seconds for which a process of the job may be stopped. After this time, its parent
continues the process, unless somebody else has continued it before."""


def is_stopped(pid: int) -> bool:
    """
    Return whether a process is stopped, for example by SIGSTOP. Return False if there is no process
    with this pid.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in "Tt"


class StopGuard:
    """
    Continues one child of this process after the child was stopped for `LIMIT` seconds.

    `continued` is called each time that this object has continued the child. Call `close` before
    the child is reaped: after that, another process may have the same pid.
    """

    def __init__(self, pid: int, continued: Callable[[], None]) -> None:
        self._pid = pid
        self._continued = continued
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def look(self) -> None:
        """
        If the child is stopped, start the timer after which it is continued. Call this after each
        SIGCHLD, which the kernel sends to the parent when a child is stopped.
        """
        if self._timer is None and not self._closed and is_stopped(self._pid):
            self._timer = asyncio.get_running_loop().call_later(LIMIT, self._continue)

    def close(self) -> None:
        """
        Do not continue the child any more: it has ended, or is about to be ended.
        """
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _continue(self) -> None:
        self._timer = None
        if is_stopped(self._pid):
            os.kill(self._pid, signal.SIGCONT)
            self._continued()
