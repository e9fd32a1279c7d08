"""
The tie between a process of tft and the one that started it: the child dies with its parent.

And the last thing a hanging child can be asked for before it is ended: where it hangs.

The kernel holds the tie (PR_SET_PDEATHSIG), so it works for a parent that is killed with SIGKILL
and for a child that hangs. The child ties itself, as the first thing it does: between fork and
exec in the parent would be earlier, but no Python may run there in a process that has threads.

Some children are forked elsewhere, from a process that has imported already what they need, and
become the agent's when the process between the two ends. What is said between an agent, that
process and these children is here, where both sides can see it.
"""

import ctypes
import json
import os
import signal
import socket
from dataclasses import dataclass

from tft.config import parent_variable, take_parent

LAST_WORDS = signal.SIGRTMAX - 3
"""
Asks a training process for the stacks of its threads, and ends it. A real-time signal from the far
end: debuggers, profilers and virtual machines take theirs from SIGRTMIN up.
"""

READY = b"ready"
"""Said to the agent by a fork server that works; in its place, a sentence on why it cannot."""
ANOTHER = b"another"
"""Said to a fork server: fork a process. That one answers itself, see `introduce`."""

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def parent_death_tie() -> dict[str, str]:
    """
    To be added to the environment of a process that calls `die_with_parent`.

    Start that process on a thread that lives as long as it should: the kernel takes the end of
    the starting thread for the end of the parent.
    """
    return parent_variable(os.getpid())


def die_with_parent() -> None:
    """
    From now on SIGKILL comes to this process when the one that started it ends.

    A process that nobody gave a `parent_death_tie` was started by hand, and lives on without its shell.
    """
    parent = take_parent()
    if parent is None:
        return
    die_with(parent)


def die_with(parent: int) -> None:
    """
    From now on SIGKILL comes to this process when its parent ends; at once, if `parent` is not its
    parent any more.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # it ended before the kernel was told: no signal will come any more
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans(*, yes: bool = True) -> None:
    """
    From now on a descendant whose own parent ends becomes a child of this process, which has to
    reap it; with `yes` false no more.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, int(yes))


def name_process(name: str) -> None:
    """
    The name that `ps` and `top` show; 15 bytes of it.
    """
    _prctl(_PR_SET_NAME, name.encode())


def _prctl(option: int, argument: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


# ---------------------------------------------------------------- forked ahead of its task


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """
    What a process that was forked is to become. The descriptors are numbered as they are in the
    process that has the object.
    """

    arguments: tuple[str, ...]
    """The script and its arguments."""
    environment: dict[str, str]
    """The whole of it, but for `page` and `words`: their numbers are its own."""
    output: int
    """Its stdout and stderr."""
    page: int
    """See `RankSettings.page`."""
    words: int
    """See `LaunchSettings.words`."""


def introduce(door: socket.socket) -> socket.socket:
    """
    Tell the agent at the other end of `door` of this process; where it will then be told its task.
    """
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pidfd = os.pidfd_open(os.getpid())
    with theirs:
        socket.send_fds(door, [str(os.getpid()).encode()], [pidfd, theirs.fileno()])
    os.close(pidfd)
    return mine


def give_task(channel: socket.socket, task: Task) -> None:
    """
    Have the process at the other end begin. Never blocks; raises OSError if it has ended.
    """
    told = json.dumps({"arguments": task.arguments, "environment": task.environment})
    text = os.memfd_create("tft-task")  # an environment can be larger than a message
    try:
        with os.fdopen(text, "w", closefd=False) as writing:
            writing.write(told)
        descriptors = [text, task.output, task.page, task.words]
        socket.send_fds(channel, [b"task"], descriptors, socket.MSG_NOSIGNAL)
    finally:
        os.close(text)


def take_task(channel: socket.socket) -> Task | None:
    """
    Wait for the task; None when there will be none. Its descriptors are this process's to close.
    """
    said, descriptors, _, _ = socket.recv_fds(channel, 16, 4)
    if not said:
        return None
    text, output, page, words = descriptors
    told = json.loads(os.pread(text, os.fstat(text).st_size, 0))
    os.close(text)
    return Task(
        arguments=tuple(told["arguments"]),
        environment=told["environment"],
        output=output,
        page=page,
        words=words,
    )
