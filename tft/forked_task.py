"""
The messages between an agent, its fork server and the processes that the fork server forks.

The fork server is a process that has already imported the modules that a rank needs. To make a new
process, the fork server forks a child, and the child forks the new process and ends. So the new
process becomes a child of the agent. The new process then waits for its task, which is to become a
rank or the rendezvous store.
"""

import json
import os
import socket
from dataclasses import dataclass
from typing import Literal

from tft.config import descriptor_variables

READY = b"ready"
"""The message with which a fork server tells its agent that it is ready. A fork server that cannot
fork safely sends a sentence with the reason instead."""
WAITING = b"waiting "
"""The beginning of the message with which a warm process tells its agent that the script waits for
a rank. After it comes the line of the script, as FILE:LINE."""
WARM = "--warm"
"""The option of `tft.worker.launch` for a warm process, before the number of the socket through
which the process gets its rank."""
ANOTHER = b"another"
"""The message with which the agent asks a fork server to fork a process. The new process itself
answers the agent (see `introduce`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkedTask:
    """
    The task of a forked process: to run the script of a rank, to run a rendezvous store, or to be a
    warm process. A warm process runs the script until it needs a rank. It then gets a second task
    through the same socket: to be that rank.

    The file descriptors in this object are valid only in the process that has the object. When a
    task is sent to another process, the received object has other descriptor numbers, which refer
    to the same files.
    """

    work: Literal["rank", "store", "warm"]
    arguments: tuple[str, ...]
    """For a rank or a warm process: the script and its arguments. For a rendezvous store: the
    adaptor and the host."""
    environment: dict[str, str]
    """The complete environment of the forked process, except for the variables that contain the
    numbers of `descriptors`. The forked process adds these, because only it knows the numbers."""
    output: int
    """The descriptor for stdout and stderr."""
    descriptors: tuple[int, ...]
    """For a rank: the descriptors of its shared memory (`RankSettings.page`) and of the file for
    the stacks of its threads (`LaunchSettings.words`). If the job has several nodes, also the
    descriptor of the pipe that wakes the agent (`RankSettings.bell`). For a rendezvous store: the
    descriptor of the pipe into which the store writes its port. For a warm process: none."""

    def variables(self) -> dict[str, str]:
        """
        Return the complete environment of the process that does this task.
        """
        if self.work != "rank":
            return self.environment
        page, words, *bell = self.descriptors
        numbers = descriptor_variables(page=page, words=words, bell=bell[0] if bell else "")
        return self.environment | numbers


def introduce(door: socket.socket) -> socket.socket:
    """
    Announce this forked process to the agent, which listens at the other end of the socket `door`.
    Return the socket on which this process will receive its task.
    """
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pidfd = os.pidfd_open(os.getpid())
    with theirs:
        socket.send_fds(door, [str(os.getpid()).encode()], [pidfd, theirs.fileno()])
    os.close(pidfd)
    return mine


def give_task(channel: socket.socket, task: ForkedTask) -> None:
    """
    Send the task to the forked process at the other end of the socket `channel`. Raises OSError
    when that process has ended. The call does not block, because each socket carries only one short
    message, which fits into the buffer of the socket.
    """
    told = json.dumps([task.work, task.arguments, task.environment])
    # send the text as a file in memory, because it can be larger than a message may be
    text = os.memfd_create("tft-task")
    try:
        with os.fdopen(text, "w", closefd=False) as writing:
            writing.write(told)
        descriptors = [text, task.output, *task.descriptors]
        socket.send_fds(channel, [b"task"], descriptors, socket.MSG_NOSIGNAL)
    finally:
        os.close(text)


def take_task(channel: socket.socket) -> ForkedTask | None:
    """
    Wait for the task of this process. Return None if the agent closes the socket `channel` without
    sending a task. The caller must close the file descriptors in the task.
    """
    said, received, _, _ = socket.recv_fds(channel, 16, 5)
    if not said:
        return None
    text, output, *descriptors = received
    work, arguments, environment = json.loads(os.pread(text, os.fstat(text).st_size, 0))
    os.close(text)
    return ForkedTask(
        work=work,
        arguments=tuple(arguments),
        environment=environment,
        output=output,
        descriptors=tuple(descriptors),
    )
