"""
The parent-death tie between a process of tft and its parent: the kernel kills the child when its
parent dies (PR_SET_PDEATHSIG).

The tie also works if the parent is killed with SIGKILL, and if the child hangs. The child makes the
tie itself, as its first action. The tie is not made earlier, between fork and exec, because Python
code that runs there can deadlock if the parent has threads.

This file also defines the signal that asks a hanging child for the stacks of its threads before the
child is killed.
"""

import ctypes
import os
import signal

from tft.config import parent_variable, take_parent

LAST_WORDS = signal.SIGRTMAX - 3
"""
The signal that makes a training process write the stacks of its threads, and end. It is a real-time
signal near SIGRTMAX, because debuggers, profilers and virtual machines use the signals from
SIGRTMIN upwards.
"""

# the numbers of three options of the system call prctl, from <linux/prctl.h>
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def parent_death_tie() -> dict[str, str]:
    """
    Return the environment variables for a child process that must die with this process. The child
    must call `die_with_parent`.

    Start the child on a thread that lives as long as the child should: for the kernel, the end of
    the thread that started the child is the end of the parent.
    """
    return parent_variable(os.getpid())


def die_with_parent() -> None:
    """
    Let the kernel kill this process with SIGKILL when its parent ends.

    Do nothing if the environment has no variable from `parent_death_tie`. Such a process was
    started by hand, and may outlive its shell.
    """
    parent = take_parent()
    if parent is None:
        return
    die_with(parent)


def die_with(parent: int) -> None:
    """
    Let the kernel kill this process with SIGKILL when its parent ends. `parent` is the pid that the
    parent should have. If the parent has another pid, the expected parent has already ended, and
    this process kills itself at once.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # the parent ended before the tie was made, so the kernel will send no signal
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans(*, yes: bool = True) -> None:
    """
    Make this process the new parent of each descendant whose own parent ends. This process must
    then reap these descendants. If `yes` is False, undo an earlier call: from then on, the process
    init (pid 1) becomes the new parent of such descendants.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, int(yes))


def name_process(name: str) -> None:
    """
    Set the name that `ps` and `top` show for the calling thread. Only the first 15 bytes of the
    name are used.
    """
    _prctl(_PR_SET_NAME, name.encode())


def _prctl(option: int, argument: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")
