"""
Learns that a rank's process is ending before the kernel has freed its memory.

The training thread of a rank holds a robust mutex on the page of the rank. A thread of the agent
waits for this mutex.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import structlog

from tft.page import Page

log = structlog.get_logger(__name__)

_LOOK = 0.05
"""The time in seconds between two checks whether the rank already holds the mutex."""
_EXITING = 0x4
"""The flag of a thread that is ending (PF_EXITING)."""
_FLAGS, _EXIT_CODE = 6, 49
"""The places of the flags and of the exit status in /proc/PID/stat, counted after the name."""


class DeathWatch:
    """
    Watches one process of a rank until it ends.
    """

    def __init__(self, page: Page, pid: int, ending: Callable[[int], None]) -> None:
        """
        Call `ending` with the exit code (of the form that `Child.code` has) on a thread of its own,
        as soon as the training thread of the process `pid` has ended together with the process.

        Nothing is called if the process never joins the job, or if the system has no more threads.
        """
        self._page = page
        self._pid = pid
        self._ending = ending
        self._over = threading.Event()
        thread = threading.Thread(target=self._watch, name="tft-death-watch", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            log.warning("deaths_noticed_later", pid=pid, why="the system has no more threads")

    def stop(self) -> None:
        """
        Stop watching, because the process has ended.
        """
        self._over.set()

    def _watch(self) -> None:
        while not self._page.is_alive():
            if self._over.wait(_LOOK):
                return
        if self._page.wait_for_death() and (code := ending_code(self._pid)) is not None:
            self._ending(code)


def ending_code(pid: int) -> int | None:
    """
    Return the exit code of a process that is ending: its exit status, or the negative number of the
    signal that ends it. Return None if it is not ending, or is not there any more, or if its exit
    status is 0: this is also what the kernel says to those who may not know the status.
    """
    try:
        told = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # the name of the process may have blanks and parentheses
    fields = told.rpartition(")")[2].split()
    if not int(fields[_FLAGS]) & _EXITING:
        return None
    code = os.waitstatus_to_exitcode(int(fields[_EXIT_CODE]) & ~0x80)  # without "core dumped"
    return code or None
