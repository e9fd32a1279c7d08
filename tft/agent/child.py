"""
The processes that the agent has started. The agent watches each process through a pidfd, which is a
file descriptor for a process. It becomes readable as soon as the process has ended. Only this
module reaps the processes. Until a process is reaped, the kernel gives its pid to no other process.
So a signal of the agent never reaches a wrong process.

The agent also becomes the parent of orphans (`tft.parent_death.adopt_orphans`): descendants whose
own parent has ended. Orphans that were forked to become ranks are watched. All other orphans are
only reaped.
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

from tft.files import write_pid
from tft.stopped import StopGuard, is_stopped

log = structlog.get_logger(__name__)

_watched: set[int] = set()
"""The pids of the processes that some `Child` object watches and reaps. The set is global, because
the kernel keeps one list of child processes for the whole agent."""


_guards: dict[int, StopGuard] = {}
"""The guards of the processes that must not stay stopped (SIGSTOP), by pid. A guard sends SIGCONT
to its process."""


class Child:
    """
    A process that the agent has started, or adopted from the fork server. The process is the leader
    of its own process group, so that it can be killed together with its descendants in that group.
    """

    def __init__(self, pid: int, pidfd: int, wait: Callable[[], int]) -> None:
        self.pid = pid
        self.code: int | None = None
        """The exit status, or the negative number of the signal that ended the process. None while
        the process lives."""
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
        Start `command`. Call `ended` on the asyncio loop as soon as the process has ended.

        `output` is the descriptor for stdout and stderr. With None the process writes to the stdout
        and stderr of the agent.
        The process inherits the descriptors in `inherited` under the same numbers.
        Raises OSError when the process cannot be started.
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
        Watch the process `pid`, which another process forked. The process must be a child of the
        agent by now, and must not be reaped yet. `pidfd` is closed when the process has ended.
        """
        child = cls(pid, pidfd, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        child._watch(ended)
        return child

    def _watch(self, ended: Callable[["Child"], None]) -> None:
        _watched.add(self.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end, ended)

    def _on_end(self, ended: Callable[["Child"], None]) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        # kill the rest of the process group before the process is reaped: until then, the kernel
        # gives the number of this group to no other group
        self.end()
        if (guard := _guards.pop(self.pid, None)) is not None:
            guard.close()
        self.code = self._wait()
        _watched.discard(self.pid)
        os.close(self._pidfd)
        self._gone.set()
        # an earlier call of `reap_strangers` may have stopped at this process, which was not reaped
        # yet. So reap the other ended processes now
        reap_strangers()
        ended(self)

    def signal(self, number: int) -> None:
        """
        Send a signal to the main thread of the process, if the process still lives.

        A stopped process handles the signal only after SIGCONT. Its main thread then handles the
        signal before it does anything else.
        """
        if self.code is None:  # the process is not reaped yet, so no other process can have its pid
            signal_main_thread(self.pid, number)

    def end(self) -> None:
        """
        Kill the process and all processes in its process group.
        """
        if self.code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def keep_going(self, continued: Callable[[], None]) -> None:
        """
        Send SIGCONT to the process whenever it has been stopped (SIGSTOP) for too long. Call
        `continued` each time.
        """
        if self.code is None:
            guard = _guards[self.pid] = StopGuard(self.pid, continued)
            guard.look()  # the process may have been stopped before this call

    def stopped(self) -> bool:
        """
        Return whether the process is stopped, as by SIGSTOP.
        """
        return is_stopped(self.pid)

    async def gone(self) -> None:
        """
        Wait until the process has ended.
        """
        await self._gone.wait()


def signal_main_thread(pid: int, number: int) -> None:
    """
    Send a signal to the main thread of a process. The process must not be reaped yet.
    """
    ctypes.CDLL(None).tgkill(pid, pid, number)


def look_at_children() -> None:
    """
    Reap the ended child processes that no `Child` object watches. Then let each guard check whether
    its process is stopped. Call this function on the asyncio loop after SIGCHLD.
    """
    reap_strangers()
    for guard in _guards.values():
        guard.look()


def reap_strangers() -> None:
    """
    Reap the ended child processes that no `Child` object watches, such as adopted orphans. Stop at
    an ended process that a `Child` watches, because the `Child` must get the exit status.
    """
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in _watched:
            return  # a `Child` object reaps this process soon, and then calls `reap_strangers`
        os.waitpid(ended.si_pid, 0)


def note_pid(run_dir: Path, name: str, pid: int) -> None:
    """
    Write the pid file of a process. If that fails, it is logged.
    """
    missed = write_pid(run_dir, name, pid)
    if missed:
        log.warning("pid_not_written", why=missed)
