"""
The priority of a warm process, which runs beside ranks that train.
"""

import os
import threading
from contextlib import suppress
from pathlib import Path

_LOWEST = 19
"""The lowest priority, as a nice value."""
_AUTOGROUP = Path("/proc/self/autogroup")
"""The file with the priority of all processes that `setsid` has put together with this one. Many
kernels divide the processor time among such sets of processes first (man 7 sched). The nice value
of a process then counts only within its own set."""


class LowPriority:
    """
    Gives this process the lowest priority, until `restore` is called.

    The priority is lowered only if this process may raise it again, which most users may not.
    """

    def __init__(self) -> None:
        self._nice = os.getpriority(os.PRIO_PROCESS, 0)
        self._lowered = _may_raise(self._nice)
        if self._lowered:
            os.setpriority(os.PRIO_PROCESS, 0, _LOWEST)
        self._autogroup = _read(_AUTOGROUP).rpartition(" nice ")[2]
        # as a test, first write the present value twice: for most users the kernel accepts only one
        # write to this file in a tenth of a second. If the test fails, do not lower the priority,
        # because raising it again soon might fail
        self._autogroup_lowered = (
            bool(self._autogroup)
            and all(_write(_AUTOGROUP, self._autogroup) for _ in range(2))
            and _write(_AUTOGROUP, str(_LOWEST))
        )

    def restore(self) -> None:
        """
        Give this process the priority back that it had before, with all of its threads and the
        child processes in its process group.
        """
        if self._lowered:
            # a process of the group that may not be changed keeps its priority
            with suppress(OSError):
                os.setpriority(os.PRIO_PGRP, 0, self._nice)
        if self._autogroup_lowered:
            _write(_AUTOGROUP, self._autogroup)


def _may_raise(nice: int) -> bool:
    """
    Return True if this process may raise its priority to `nice` again after lowering it. To find
    out, a thread lowers its own priority by one and tries to raise it again: if it may not, the
    lower priority ends with the thread. The capabilities of the process do not answer the question:
    in a container with its own user ids, the kernel refuses the change even if the process has the
    capability.
    """
    if nice >= _LOWEST:
        return False
    raised = []

    def tries() -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, nice + 1)  # 0: the calling thread
            os.setpriority(os.PRIO_PROCESS, 0, nice)
            raised.append(True)

    thread = threading.Thread(target=tries, name="tft-priority")
    try:
        thread.start()
    except RuntimeError:  # the system has no room for a thread
        return False
    thread.join()
    return bool(raised)


def _read(path: Path) -> str:
    """
    Return the content of a file of the kernel, or an empty string if the kernel has no such file.
    """
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _write(path: Path, value: str) -> bool:
    """
    Write to a file of the kernel. Return False if the system does not permit it.
    """
    try:
        path.write_text(value)
    except OSError:
        return False
    return True
