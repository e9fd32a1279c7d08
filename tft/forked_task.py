"""
The messages between an agent, its fork server and the forked processes, for all three sides.

The fork server has already imported the modules that a rank needs. A process that it forks becomes
a child of the agent when the process between them ends. The forked process then waits for its task:
it becomes a rank or the rendezvous store.
"""

import json
import os
import socket
from dataclasses import dataclass
from typing import Literal

READY = b"ready"
"""The message of a fork server that works to the agent. A fork server that cannot work sends a
sentence with the reason instead."""
ANOTHER = b"another"
"""The request of the agent to a fork server to fork a process. The forked process itself answers,
see `introduce`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkedTask:
    """
    What a forked process is to do: run the script of a rank, or run a rendezvous store.

    Its file descriptors are numbers in the process that has this object, not in the one that sent
    it.
    """

    work: Literal["rank", "store"]
    arguments: tuple[str, ...]
    """Of a rank: the script and its arguments. Of the store: the adaptor and the host."""
    environment: dict[str, str]
    """The whole environment, except the variables that name `descriptors`, whose numbers differ in
    each process."""
    output: int
    """The descriptor for stdout and stderr."""
    descriptors: tuple[int, ...]
    """Of a rank: `RankSettings.page` and `LaunchSettings.words`. Of the store: the pipe into which
    it writes its port."""


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


def give_task(channel: socket.socket, task: ForkedTask) -> None:
    """
    Send the task to the forked process at the other end. Raises OSError when the process has ended.
    Does not block: each socket carries one task only.
    """
    told = json.dumps([task.work, task.arguments, task.environment])
    text = os.memfd_create("tft-task")  # an environment can be larger than a message
    try:
        with os.fdopen(text, "w", closefd=False) as writing:
            writing.write(told)
        descriptors = [text, task.output, *task.descriptors]
        socket.send_fds(channel, [b"task"], descriptors, socket.MSG_NOSIGNAL)
    finally:
        os.close(text)


def take_task(channel: socket.socket) -> ForkedTask | None:
    """
    Wait for the task of this process. Return None if the agent will send none. The caller must
    close the descriptors of the task.
    """
    said, received, _, _ = socket.recv_fds(channel, 16, 4)
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
