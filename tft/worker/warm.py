"""
Warm processes (option `--warm-ranks`). A warm process has run the user's script up to the first use
of the session, and has no rank yet. Imports are done and the model is built. When a rank is lost,
the agent gives the rank to the warm process, which goes on in the script at once.
"""

import os
import resource
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tft.clock import SystemClock
from tft.config import descriptor_variables, rank_settings, replace_environment, set_environment
from tft.forked_task import WAITING, ForkedTask, take_task
from tft.worker.session import Session

_LOWEST = 19
"""The nice value of a warm process until it has a rank: the lowest priority."""
_CAP_SYS_NICE = 23
"""The number of the bit for CAP_SYS_NICE in a set of capabilities. A process with this capability
may raise its own priority."""

_begin: tuple[socket.socket, Callable[[], None]] | None = None
"""Set in a warm process that has no rank yet: the socket on which its rank will arrive, and the
function that prepares the process for that rank."""


def wait_in_session(channel: socket.socket, begin: Callable[[], None]) -> None:
    """
    Make this process a warm process: its script runs with the lowest priority, and waits at the
    first use of the session.

    The agent sends the rank through the socket `channel`. Then `begin` is called, which prepares
    the process for the rank.
    """
    global _begin
    _begin = channel, begin
    if may_raise_priority():
        os.setpriority(os.PRIO_PROCESS, 0, _LOWEST)


def is_warm() -> bool:
    """
    Return True if this process is a warm process that has no rank yet.
    """
    return _begin is not None


class WarmSession(Session):
    """
    The session of a warm process. The first use of any attribute waits until the agent gives a rank
    to this process. Then this object becomes an ordinary `Session` of that rank.
    """

    def __init__(self) -> None:
        pass  # `_become_session` calls the `__init__` of `Session`, when the rank is known

    def __getattribute__(self, name: str) -> Any:  # Any: each attribute has its own type
        """
        Wait for the rank, then return the attribute `name` of the session of that rank.
        """
        _become_session(self)
        return getattr(self, name)


def _become_session(session: WarmSession) -> None:
    wait_for_rank()
    at = SystemClock().now()
    object.__setattr__(session, "__class__", Session)
    Session.__init__(session, rank_settings())
    session.open(at)


def wait_for_rank() -> None:
    """
    Tell the agent that this process waits for a rank, and wait until the agent sends one. End the
    process if the agent closes the connection instead.
    """
    global _begin
    assert _begin is not None
    channel, begin = _begin
    with channel:
        task = None
        with suppress(OSError):  # the agent has ended, and the kernel kills this process
            channel.send(WAITING)
            task = take_task(channel)
    if task is None:
        os._exit(0)
    _begin = None
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # the script may have closed a stream
            stream.flush()
    # the script may have set environment variables, which must be kept
    take_on(task, set_environment)
    if may_raise_priority():
        # a thread that the script has started has the priority of the process at that time. So
        # raise the priority of all threads: of all processes in this process group, which has this
        # process as its leader
        os.setpriority(os.PRIO_PGRP, 0, 0)
    begin()


def take_on(
    task: ForkedTask, set_variables: Callable[[dict[str, str]], None] = replace_environment
) -> None:
    """
    Give this process the output and the environment of `task`.

    `set_variables` is called with the environment variables of the task.
    """
    for stream in (1, 2):
        os.dup2(task.output, stream)
    os.close(task.output)
    numbers = {}
    if task.work == "rank":
        page, words, *bell = task.descriptors
        numbers = descriptor_variables(page=page, words=words, bell=bell[0] if bell else "")
    set_variables(task.environment | numbers)


def may_raise_priority() -> bool:
    """
    Return True if this process may raise its priority again after it has lowered it.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NICE)
    if soft == resource.RLIM_INFINITY or soft >= 20:  # 20 permits the ordinary nice value 0
        return True
    status = Path("/proc/self/status").read_text()
    effective = next(line for line in status.splitlines() if line.startswith("CapEff"))
    return bool(int(effective.split()[1], 16) >> _CAP_SYS_NICE & 1)
