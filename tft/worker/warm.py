"""
Warm processes (option `--warm-ranks`). A warm process has run the user's script up to the first use
of the session, and has no rank yet. Imports are done and the model is built. When a rank is lost,
the agent gives the rank to the warm process, which goes on in the script at once.
"""

import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tft.clock import SystemClock
from tft.config import inherited_environment, rank_settings, set_environment
from tft.errors import UsageError
from tft.forked_task import WAITING, ForkedTask, take_task
from tft.worker.priority import LowPriority
from tft.worker.session import Session

_OUTPUTS = (1, 2)
"""The file descriptors of stdout and stderr."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """
    The values that a warm process (started in advance, without a rank) keeps until the agent gives
    it a rank.
    """

    pid: int
    channel: socket.socket
    """The socket through which the agent sends the rank."""
    begin: Callable[[], None]
    """Prepares this process for the rank that its environment names."""
    priority: LowPriority
    environment: dict[str, str]
    """The environment variables of this process before its script ran. They show later which
    variables the rank needs with other values."""
    outputs: dict[int, int]
    """The inode numbers of stdout and stderr before the script ran, by file descriptor. They show
    later whether the script has redirected its output."""


_waiting: _Waiting | None = None
"""What this warm process keeps until it gets a rank. None if this process already has its rank."""
_joining = False
"""True while the session of this process joins the job, after the process has got its rank."""
_taking = threading.RLock()
"""Held while the session waits for its rank, because several threads may use the session."""


def wait_in_session(channel: socket.socket, begin: Callable[[], None]) -> None:
    """
    Make this process a warm process: its script runs with the lowest priority, and waits at the
    first use of the session.

    The agent sends the rank through the socket `channel`. Then `begin` is called, which prepares
    the process for the rank.
    """
    global _waiting
    _waiting = _Waiting(
        pid=os.getpid(),
        channel=channel,
        begin=begin,
        priority=LowPriority(),
        environment=inherited_environment(),
        outputs={fd: os.fstat(fd).st_ino for fd in _OUTPUTS},
    )


def is_warm() -> bool:
    """
    Return True if this process is a warm process that has no rank yet.
    """
    return _waiting is not None


class WarmSession(Session):
    """
    The session of a warm process. The first use of the session waits until the agent gives a rank
    to this process. Then this object becomes an ordinary `Session` of that rank.
    """

    def __init__(self) -> None:
        pass  # `_become_session` calls the `__init__` of `Session`, when the rank is known

    def __getattribute__(self, name: str) -> Any:  # Any: each attribute has its own type
        """
        Wait for the rank, then return the attribute `name` of the session of that rank.
        """
        # `isinstance` and other parts of Python read names such as `__class__`; this must not count
        # as the first use of the session
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        _become_session(self)
        return object.__getattribute__(self, name)


def _become_session(session: WarmSession) -> None:
    global _joining
    with _taking:
        # return at once if another thread has got the rank while this thread waited for the lock.
        # Return at once, too, if the session joins the job now and uses itself
        if type(session) is Session or _joining:
            return
        wait_for_rank()
        if type(session) is Session:  # a signal handler has used the session during the wait
            return
        _joining = True
        at = SystemClock().now()
        Session.__init__(session, rank_settings())
        Session.open(session, at)
        object.__setattr__(session, "__class__", Session)
        _joining = False


def wait_for_rank() -> None:
    """
    Tell the agent that this process waits for a rank, and wait until the agent sends one. End the
    process if the agent closes the connection instead.

    Raises `UsageError` in a child process of the warm process, which cannot become the rank.
    """
    global _waiting
    assert _waiting is not None
    waiting = _waiting
    if waiting.pid != os.getpid():
        raise UsageError(
            "a child process of a warm process (--warm-ranks) uses the session before the warm "
            "process has its rank: use the session in the process of the script only"
        )
    # raise the priority already now: a process that waits uses no processor time, and must be fast
    # when it gets its rank
    waiting.priority.restore()
    with waiting.channel:
        task = None
        with suppress(OSError):  # the agent has ended, and the kernel kills this process
            waiting.channel.send(WAITING + _line().encode())
            task = take_task(waiting.channel)
    if _waiting is not waiting:  # a signal handler has used the session, and has got the rank
        return
    if task is None:
        os._exit(0)
    _waiting = None
    _take_over(task, waiting)
    waiting.begin()


def _take_over(task: ForkedTask, waiting: _Waiting) -> None:
    """
    Give this process the output and the environment of its rank. Output that the script has
    redirected or closed is not changed. A variable is set only if the rank's value differs from the
    value before the script ran, so most changes by the script are kept.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # the script may have closed a stream
            stream.flush()
    for fd, inode in waiting.outputs.items():
        with suppress(OSError):  # the script has closed this descriptor
            if os.fstat(fd).st_ino == inode:
                os.dup2(task.output, fd)
    os.close(task.output)
    variables = task.variables()
    set_environment(
        {name: value for name, value in variables.items() if waiting.environment.get(name) != value}
    )


def _line() -> str:
    """
    Return the line (FILE:LINE) at which the script uses the session.
    """
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
