"""
Starts and reaps the child processes of the launcher (`tft run`). It also reaps orphans, which are
descendants of the launcher whose own parent has ended.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tft.config import inherited_environment
from tft.parent_death import adopt_orphans, parent_death_tie
from tft.pulse import PulseWatch
from tft.stopped import StopGuard


class LaunchedProcess:
    """
    One child process of the launcher.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        continued: Callable[[], None],
        pulse: PulseWatch | None,
    ) -> None:
        self.process = process
        self.guard = StopGuard(process.pid, continued)
        self._pulse = pulse
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def ended(self) -> int:
        """
        Wait for the end of the process. Returns the exit status of the process, or the negative
        number of the signal that killed the process.
        """
        return await asyncio.shield(self._ended)

    def reap(self) -> None:
        """
        Reap the process, and give its exit status to the callers of `ended`.

        Call this method only when the process has ended, because the method would otherwise block.
        """
        self.guard.close()
        if self._pulse is not None:
            self._pulse.close()
        self._ended.set_result(self.process.wait())

    def send(self, number: signal.Signals) -> None:
        """
        Send a signal to the process, unless it has ended.
        """
        if not self._ended.done():
            self.process.send_signal(number)

    async def end(self, *, grace: float, patience: float = 2.0) -> None:
        """
        Wait `grace` seconds for the process to end by itself. If the process still runs then, send
        SIGTERM. If it still runs `patience` seconds later, send SIGKILL.
        """
        for number, limit in ((signal.SIGTERM, grace), (signal.SIGKILL, patience)):
            done, _ = await asyncio.wait([self._ended], timeout=limit)
            if done:
                return
            self.send(number)
        await self.ended()


class _Pipe:
    """
    The pipe through which a child is to send its signs of life (`tft.pulse`). Without `hangs` there
    is no pipe.
    """

    def __init__(self, hangs: Callable[[], None] | None) -> None:
        self._hangs = hangs
        self._reading, self._writing = (-1, -1) if hangs is None else os.pipe()
        self.inherited = () if hangs is None else (self._writing,)
        """The descriptors that the child must inherit."""
        self.words = () if hangs is None else ("--pulse", str(self._writing))
        """The option with which the child finds the pipe."""

    def __enter__(self) -> Self:
        return self

    def watch(self) -> PulseWatch | None:
        """
        Return an object that reads what the child writes. Called once, when the child has started.
        """
        if self._hangs is None:
            return None
        reading, self._reading = self._reading, -1
        return PulseWatch(reading, self._hangs)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for each in (self._reading, self._writing):
            if each >= 0:
                os.close(each)


class Children:
    """
    Starts and reaps the child processes of the launcher.

    This object is a context manager. Inside its `with` block, descendants whose own parent has
    ended become children of the launcher. So `gone` can tell whether any descendant still runs.
    """

    def __init__(self) -> None:
        self._known: dict[int, LaunchedProcess] = {}
        self._none_left = asyncio.Event()
        self._earlier = _children()  # `gone` does not wait for children that existed before

    def __enter__(self) -> Self:
        adopt_orphans(yes=True)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        for child in self._known.values():
            child.process.kill()
            child.process.wait()
        adopt_orphans(yes=False)

    def start(
        self,
        arguments: Sequence[str],
        *,
        added: Mapping[str, str],
        log: Path,
        inherited: Sequence[int] = (),
        continued: Callable[[], None] = lambda: None,
        hangs: Callable[[], None] | None = None,
    ) -> LaunchedProcess:
        """
        Run the command `tft` with `arguments` as a child process of the launcher.

        The kernel kills the child when the launcher ends. The child gets a session of its own
        (`setsid`), so that signals from the terminal, such as Ctrl-C, reach only the launcher.
        The standard error of the child is appended to the file `log`. Its standard output is that
        of the launcher. The variables in `added` are added to its environment. `inherited` are file
        descriptors that the child keeps under the same numbers. If the child is stopped (SIGSTOP)
        for too long, the launcher sends SIGCONT and calls `continued`. With `hangs`, the child gets
        the option `--pulse`, and the launcher calls `hangs` if the child hangs (`tft.pulse`).
        """
        environment = inherited_environment() | dict(added) | parent_death_tie()
        with log.open("ab") as stderr, _Pipe(hangs) as pulse:
            process = subprocess.Popen(
                # -P: import nothing from the working directory, where a module could hide a module
                # of tft
                [sys.executable, "-P", "-m", "tft", *arguments[:1], *pulse.words, *arguments[1:]],
                env=environment,
                stdin=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=(*inherited, *pulse.inherited),
                start_new_session=True,
            )
            child = LaunchedProcess(process, continued, pulse.watch())
        self._known[process.pid] = child
        self._none_left.clear()
        return child

    async def gone(self, limit: float) -> bool:
        """
        Wait until all children and orphans have ended. Children that existed before this object are
        not waited for.

        Waits at most `limit` seconds. Returns False if some process is left then, otherwise True.
        """
        self._reap()
        try:
            async with asyncio.timeout(limit):
                await self._none_left.wait()
        except TimeoutError:
            return False
        return True

    def _look(self) -> None:
        """
        Reap the children that have ended, and let the guards check which children are stopped. The
        event loop calls this method after SIGCHLD.
        """
        self._reap()
        for child in self._known.values():
            child.guard.look()

    def _reap(self) -> None:
        while True:
            try:
                # WNOWAIT: `waitid` must only find an ended child and not reap it, because the
                # `Popen` object of the child must get the exit status
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                self._none_left.set()
                return
            if found is None:
                if not _children() - self._earlier:
                    self._none_left.set()
                return
            child = self._known.pop(found.si_pid, None)
            if child is None:
                os.waitpid(found.si_pid, 0)
            else:
                child.reap()


def _children() -> set[int]:
    tasks = Path("/proc/self/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}
