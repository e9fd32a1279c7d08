"""
The tie between a process of tft and the one that started it: the child dies with its parent.

And the last thing a hanging child can be asked for before it is ended: where it hangs.

The kernel holds the tie (PR_SET_PDEATHSIG), so it works for a parent that is killed with SIGKILL
and for a child that hangs. The child ties itself, as the first thing it does: between fork and
exec in the parent would be earlier, but no Python may run there in a process that has threads.
"""

import ctypes
import os
import signal

from tft.config import parent_variable, take_parent

LAST_WORDS = signal.SIGRTMAX - 3
"""
Asks a training process for the stacks of its threads, and ends it. A real-time signal from the far
end: debuggers, profilers and virtual machines take theirs from SIGRTMIN up.
"""

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def lifeline() -> dict[str, str]:
    """
    To be added to the environment of a process that calls `die_with_parent`.

    Start that process on a thread that lives as long as it should: the kernel takes the end of
    the starting thread for the end of the parent.
    """
    return parent_variable(os.getpid())


def die_with_parent() -> None:
    """
    From now on SIGKILL comes to this process when the one that started it ends.

    A process that nobody gave a `lifeline` was started by hand, and lives on without its shell.
    """
    parent = take_parent()
    if parent is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent:
        # it ended before the kernel was told: no signal will come any more
        os.kill(os.getpid(), signal.SIGKILL)
