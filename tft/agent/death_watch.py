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
"""The bit in the flags of /proc/PID/stat that is set while a process is ending (PF_EXITING)."""
_FLAGS, _EXIT_CODE = 6, 49
"""The positions of the flags and of the exit status among the fields of /proc/PID/stat that follow
the name of the process, counted from 0."""


class DeathWatch:
    """
    Watches one process of a rank until it ends.
    """

    def __init__(self, page: Page, pid: int, ending: Callable[[int], None]) -> None:
        """
        Call `ending` as soon as the training thread of the process `pid` has ended and the process
        itself is ending. The argument is the exit code in the form of `Child.code`. The call is
        made on a separate thread.

        `ending` is not called if the process never joins the job, or if no thread can be started.
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
    signal that ends it. Return None if the process is not ending, or does not exist any more.
    Return None also if its exit status is 0, because the kernel shows 0, too, if this process is
    not permitted to see the status.
    """
    try:
        told = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # the name of the process may have blanks and parentheses: read only what follows the last one
    fields = told.rpartition(")")[2].split()
    if not int(fields[_FLAGS]) & _EXITING:
        return None
    code = os.waitstatus_to_exitcode(int(fields[_EXIT_CODE]) & ~0x80)  # drop the core-dump bit
    return code or None
