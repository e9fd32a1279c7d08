"""
The processes that the launcher starts, and those that they leave behind: each one's end is seen.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tft.config import inherited_environment
from tft.parent_death import adopt_orphans, parent_death_tie


class Child:
    """
    One process that was started here.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def ended(self) -> int:
        """
        Wait for its end; its exit status, or minus the signal that killed it.
        """
        return await asyncio.shield(self._ended)

    def reap(self) -> None:
        """
        The kernel has said that it ended: take its exit status.
        """
        self._ended.set_result(self.process.wait())

    def send(self, number: signal.Signals) -> None:
        """
        Send a signal, unless the process has ended.
        """
        if not self._ended.done():
            self.process.send_signal(number)

    async def end(self, *, grace: float, patience: float = 2.0) -> None:
        """
        Wait `grace` seconds for it to leave by itself, ask it to, wait `patience`, and kill it.
        """
        for number, limit in ((signal.SIGTERM, grace), (signal.SIGKILL, patience)):
            done, _ = await asyncio.wait([self._ended], timeout=limit)
            if done:
                return
            self.send(number)
        await self.ended()


class Children:
    """
    Starts processes, and reaps them. Orphans count too: a process whose parent ends while this
    is open becomes a child of this process, so that `gone` knows when really nothing is left.
    """

    def __init__(self) -> None:
        self._known: dict[int, Child] = {}
        self._none_left = asyncio.Event()
        self._earlier = _children()  # not ours to wait for

    def __enter__(self) -> Self:
        adopt_orphans(yes=True)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)
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
    ) -> Child:
        """
        Run `tft` with these arguments in a session of its own, so that what is typed at our
        terminal reaches us alone; it is killed when this process ends. Its standard error is
        appended to `log`; its standard output is ours. `inherited` are further descriptors it gets
        under their numbers here.
        """
        environment = inherited_environment() | dict(added) | parent_death_tie()
        with log.open("ab") as stderr:
            process = subprocess.Popen(
                # -P: a module in the working directory must not stand in for one of ours
                [sys.executable, "-P", "-m", "tft", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=inherited,
                start_new_session=True,
            )
        child = self._known[process.pid] = Child(process)
        self._none_left.clear()
        return child

    async def gone(self, limit: float) -> bool:
        """
        Wait until no child and no orphan is left of those that came since this was made, `limit`
        seconds at most; whether that is so.
        """
        self._reap()
        try:
            async with asyncio.timeout(limit):
                await self._none_left.wait()
        except TimeoutError:
            return False
        return True

    def _reap(self) -> None:
        while True:
            try:
                # Only looked at: the status of a child is for its Popen to take.
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
