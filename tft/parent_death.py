"""
The parent-death tie between a process of tft and its parent: the child dies with its parent.

Also the signal that asks a hanging child for the stacks of its threads before the child is killed.

The kernel holds the tie (PR_SET_PDEATHSIG), so it works for a parent that is killed with SIGKILL
and for a child that hangs. The child makes the tie itself, as its first action. A tie between fork
and exec would be earlier, but no Python may run there in a process that has threads.

Some children are forked by the fork server, which has already imported their modules. They become
children of the agent when the process between them and the fork server ends. The messages between
the agent, the fork server and these children are defined here, for all sides.
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
The signal that makes a training process write the stacks of its threads, and end. It is a real-time
signal near SIGRTMAX, because debuggers, profilers and virtual machines use those from SIGRTMIN up.
"""

READY = b"ready"
"""The message of a fork server that works to the agent. A fork server that cannot work sends a
sentence with the reason instead."""
ANOTHER = b"another"
"""The request of the agent to a fork server to fork a process. The forked process itself answers,
see `introduce`."""

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def parent_death_tie() -> dict[str, str]:
    """
    Return the variables to add to the environment of a process that calls `die_with_parent`.

    Start that process on a thread that lives as long as the process should: the kernel treats the
    end of the starting thread as the end of the parent.
    """
    return parent_variable(os.getpid())


def die_with_parent() -> None:
    """
    Let the kernel kill this process with SIGKILL when its parent ends.

    Does nothing in a process without a `parent_death_tie` in its environment. Such a process was
    started by hand, and lives on without its shell.
    """
    parent = take_parent()
    if parent is None:
        return
    die_with(parent)


def die_with(parent: int) -> None:
    """
    Let the kernel kill this process with SIGKILL when its parent ends. The process kills itself at
    once when the process `parent` is not its parent any more.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # the parent ended before the tie was made, so the kernel will send no signal
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans(*, yes: bool = True) -> None:
    """
    Make descendants whose own parent ends children of this process. This process must reap them.
    With `yes` false, end this.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, int(yes))


def name_process(name: str) -> None:
    """
    Set the name that `ps` and `top` show for the calling thread. Only 15 bytes of it are used.
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
    The task of a forked process: the rank that the process becomes. The numbers of the descriptors
    are those of the process that has the object.
    """

    arguments: tuple[str, ...]
    """The script and its arguments."""
    environment: dict[str, str]
    """The whole environment, except the variables of `page` and `words`: their descriptor numbers
    differ in each process."""
    output: int
    """The descriptor for stdout and stderr."""
    page: int
    """See `RankSettings.page`."""
    words: int
    """See `LaunchSettings.words`."""


def introduce(door: socket.socket) -> socket.socket:
    """
    Announce this process to the agent at the other end of `door`. Return the socket on which this
    process then gets its task.
    """
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pidfd = os.pidfd_open(os.getpid())
    with theirs:
        socket.send_fds(door, [str(os.getpid()).encode()], [pidfd, theirs.fileno()])
    os.close(pidfd)
    return mine


def give_task(channel: socket.socket, task: Task) -> None:
    """
    Send the task to the forked process at the other end. Raises OSError when the process has ended.
    Does not block: each socket carries one task only.
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
    Wait for the task. Return None when there will be none. The caller must close the descriptors of
    the task.
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
