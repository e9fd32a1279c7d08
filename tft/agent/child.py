"""
A process that the agent has started: watched through its pidfd, so the kernel tells of its end at
once. It is reaped here and nowhere else, so a signal never reaches another process of the same pid.

The agent is also given the children of those that end before them (`tft.parent_death.adopt_orphans`).
Some it waits for, as they were forked for it; the others are strangers, and are only reaped.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import structlog

from tft.files import write_whole

log = structlog.get_logger(__name__)

_watched: set[int] = set()
"""The pids that a `Child` reaps. One set, as there is one table of children in the kernel."""


class Child:
    """
    One started process, the leader of a session and group of its own.
    """

    def __init__(self, pid: int, pidfd: int, wait: Callable[[], int]) -> None:
        self.pid = pid
        self.code: int | None = None
        """Exit status, or minus the signal that ended it; None while it lives."""
        self._pidfd = pidfd
        self._wait = wait
        self._gone = asyncio.Event()

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        ended: Callable[["Child"], None],
        stdin: int = subprocess.DEVNULL,
        output: int | None = None,
        inherited: Sequence[int] = (),
    ) -> "Child":
        """
        Start `command`; `ended` is called on the loop as soon as it is gone.

        `output` takes stdout and stderr; None leaves it the agent's. `inherited` are further
        descriptors it gets under their numbers here. Raises OSError if it cannot be started.
        """
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=stdin,
            stdout=output,
            stderr=output,
            pass_fds=inherited,
            start_new_session=True,
        )
        child = cls(process.pid, os.pidfd_open(process.pid), process.wait)
        child._watch(ended)
        return child

    @classmethod
    def adopt(cls, pid: int, pidfd: int, *, ended: Callable[["Child"], None]) -> "Child":
        """
        Watch a process that was forked elsewhere and is a child of this one now, not reaped yet.
        Closes `pidfd` in the end.
        """
        child = cls(pid, pidfd, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        child._watch(ended)
        return child

    def _watch(self, ended: Callable[["Child"], None]) -> None:
        _watched.add(self.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end, ended)

    def _on_end(self, ended: Callable[["Child"], None]) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self.end()  # its group, while the zombie still keeps the number from being given away
        self.code = self._wait()
        _watched.discard(self.pid)
        os.close(self._pidfd)
        self._gone.set()
        reap_strangers()  # those that stood behind this one
        ended(self)

    def signal(self, number: int) -> None:
        """
        Send a signal to the main thread of the process, if it still lives. A stopped process that
        is sent another one and then SIGCONT does nothing on that thread before it takes the first.
        """
        if self.code is None:  # not reaped yet: nobody else can have got its number
            signal_main_thread(self.pid, number)

    def end(self) -> None:
        """
        Kill the process and whatever it started in its group.
        """
        if self.code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def stopped(self) -> bool:
        """
        Whether the process is stopped, as by SIGSTOP.
        """
        return is_stopped(self.pid)

    async def gone(self) -> None:
        """
        Returns when the process has ended.
        """
        await self._gone.wait()


def signal_main_thread(pid: int, number: int) -> None:
    """
    Send a signal to the main thread of a process, which must not have been reaped.
    """
    ctypes.CDLL(None).tgkill(pid, pid, number)


def is_stopped(pid: int) -> bool:
    """
    Whether a process is stopped, as by SIGSTOP.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in "Tt"


def reap_strangers() -> None:
    """
    Reap what has ended and is no `Child`. To be called on the loop when SIGCHLD comes.
    """
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in _watched:
            return  # its own turn comes on the loop, and the others' after it
        os.waitpid(ended.si_pid, 0)


def write_pid(path: Path, pid: int) -> None:
    """
    Write a pid file: whoever reads it finds the whole number or no file. It is for others to
    read, so a disk that is full is logged and no reason to stop.
    """
    try:
        write_whole(path, str(pid))
    except OSError as error:
        log.warning("pid_not_written", path=str(path), why=error.strerror)
