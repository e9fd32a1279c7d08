"""
The warm processes of a node (option `--warm-ranks`). A warm process has run the user's script up to
the first use of the session, and waits there. When a rank is lost, a warm process becomes the next
incarnation of the rank. It needs no time for imports and for building the model.
"""

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from tft.agent.child import Child
from tft.agent.fork_server import ForkedProcess, ForkServer
from tft.agent.output import Console, Output
from tft.agent.settings import AgentSettings, warm_environment
from tft.forked_task import WAITING, WARM, ForkedTask, give_task

log = structlog.get_logger(__name__)

_PAUSE = 1.0
"""The time in seconds between the end of a warm process that got no rank and the start of the next
warm process. The time doubles with each further warm process that ends without a rank."""
_LONGEST_PAUSE = 600.0
"""The longest pause in seconds: the pause begins with `_PAUSE` and doubles until it has this
length."""
_SCRIPT_LIMIT = 600.0
"""The time in seconds after which a warm process that does not wait for a rank yet is killed. Its
script probably waits for something that only a rank can get."""


@dataclass(eq=False, slots=True, kw_only=True)
class WarmProcess:
    """
    A warm process of this node.
    """

    number: int
    """The number of this warm process. An agent counts its warm processes from 1."""
    ended: Callable[[Child], None]
    """The function to call when the process has ended."""
    channel: socket.socket = field(init=False)
    """The socket through which the process gets its rank."""
    child: Child | None = None
    """The process. None until it is started."""
    limit: asyncio.TimerHandle | None = None
    """The timer that ends the process if its script does not reach the first use of the session."""
    waits: bool = False
    """True if the script has come to the first use of the session, and waits for a rank."""

    def has_ended(self, child: Child) -> None:
        """
        Call the function in `ended`. `begin` replaces that function when the process gets its rank.
        """
        self.ended(child)

    def begin(self, task: ForkedTask, ended: Callable[[Child], None]) -> Child | None:
        """
        Give this warm process its rank, which `task` describes. From now on `ended` is called when
        the process has ended. Return the process, or None if it has already ended.
        """
        with self.channel:
            try:
                give_task(self.channel, task)
            except OSError as error:
                log.warning("warm_process_lost", number=self.number, why=error.strerror, next_in=0)
                return None
        self.ended = ended
        return self.child


class WarmRanks:
    """
    Starts and keeps the warm processes of a node.
    """

    def __init__(
        self,
        settings: AgentSettings,
        *,
        marker: str,
        console: Console,
        fork_server: ForkServer,
    ) -> None:
        self._settings = settings
        self._marker = marker
        self._console = console
        self._fork_server = fork_server
        self._wanted = settings.job.warm_ranks
        self._processes: list[WarmProcess] = []
        self._outputs: list[Output] = []
        self._started = 0
        self._failures = 0
        """The number of warm processes in a row that have ended without a rank."""
        self._next = 0.0
        """The time on the clock of the asyncio loop before which no warm process is started."""

    def want(self) -> None:
        """
        Start a warm process if one is missing, unless another one is still starting (it has not yet
        reached the first use of the session in the script). Only one process starts at a time, so
        that the ranks of this node are disturbed little. Call this method while the ranks train.
        """
        self._drop_stopped()
        if (
            len(self._processes) >= self._wanted
            or not all(process.waits for process in self._processes)
            or asyncio.get_running_loop().time() < self._next
        ):
            return
        if (forked := self._fork_server.take()) is None and self._fork_server.hopeful:
            self._fork_server.want(1)  # a later call of `want` takes the forked process
            return
        self._started += 1
        try:
            self._start(self._started, forked)
        except OSError as error:
            self._failed(self._started, f"it cannot be started: {error}")

    def take(self) -> WarmProcess | None:
        """
        Return a warm process that waits for a rank, or None if there is none. The caller calls
        `WarmProcess.begin`.
        """
        self._drop_stopped()
        for process in self._processes:
            if process.waits:
                self._forget(process)
                self._failures = 0
                return process
        return None

    def stop(self) -> None:
        """
        Kill the warm processes, and start no further ones.
        """
        self._wanted = 0
        for process in self._processes:
            assert process.child is not None
            process.child.end()

    def close(self) -> None:
        """
        Copy the last output of the warm processes to their logs.
        """
        for output in self._outputs:
            output.finish()

    def _start(self, number: int, forked: ForkedProcess | None) -> None:
        record = self._record(number)
        output, writing = Output.open(
            record=record, prefix=f"[warm {number}] ", console=self._console
        )
        self._outputs = [kept for kept in self._outputs if not kept.closed] + [output]
        task = ForkedTask(
            work="warm",
            arguments=self._settings.command,
            environment=warm_environment(self._settings, self._marker),
            output=writing,
            descriptors=(),
        )
        process = WarmProcess(number=number, ended=lambda child: self._ended(process, child))
        try:
            if forked is not None:
                process.channel = forked.channel.dup()
                process.child = forked.begin(task, process.has_ended)
                if process.child is None:
                    process.channel.close()
            if process.child is None:
                process.channel, process.child = self._execute(task, process.has_ended)
        finally:
            os.close(writing)
        process.channel.setblocking(False)
        asyncio.get_running_loop().add_reader(process.channel, self._hear, process)
        self._processes.append(process)
        process.limit = asyncio.get_running_loop().call_later(
            _SCRIPT_LIMIT, self._too_late, process
        )
        log.info("warm_process_started", number=number, pid=process.child.pid)

    def _execute(
        self, task: ForkedTask, ended: Callable[[Child], None]
    ) -> tuple[socket.socket, Child]:
        """
        Start a warm process without the fork server. Return the socket to it, and the process.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            child = Child.start(
                [
                    *(sys.executable, "-P", "-m", "tft.worker.launch"),
                    *(WARM, str(theirs.fileno()), self._settings.job.adaptor, *task.arguments),
                ],
                environment=task.environment,
                output=task.output,
                inherited=(theirs.fileno(),),
                ended=ended,
            )
        return ours, child

    def _hear(self, process: WarmProcess) -> None:
        """
        Read from the socket of a warm process, which says there that it waits for a rank.
        """
        assert process.child is not None
        said = b""
        try:
            said = process.channel.recv(4096)
        except BlockingIOError:  # the event loop has called `_hear` although there is no message
            return
        except OSError:  # the process has ended, which `_ended` handles
            pass
        if not said.startswith(WAITING):
            asyncio.get_running_loop().remove_reader(process.channel)
            return
        process.waits = True
        if process.limit is not None:
            process.limit.cancel()
        line = said.removeprefix(WAITING).decode(errors="replace")
        log.info("warm_process_waits", number=process.number, pid=process.child.pid, line=line)

    def _too_late(self, process: WarmProcess) -> None:
        assert process.child is not None
        log.warning("warm_process_slow", number=process.number, seconds=_SCRIPT_LIMIT)
        process.child.end()

    def _drop_stopped(self) -> None:
        for process in self._processes:
            assert process.child is not None
            if process.child.stopped():
                process.child.end()  # a stopped process could not take a rank
                process.waits = False

    def _forget(self, process: WarmProcess) -> None:
        self._processes.remove(process)
        if process.limit is not None:
            process.limit.cancel()
        asyncio.get_running_loop().remove_reader(process.channel)

    def _ended(self, process: WarmProcess, child: Child) -> None:
        """
        Handle the end of a warm process that has got no rank.
        """
        if process in self._processes:
            self._forget(process)
            process.channel.close()
            if self._wanted:
                where = "while it waited" if process.waits else "before the script used the session"
                self._failed(process.number, f"it ended with exit status {child.code} {where}")

    def _failed(self, number: int, why: str) -> None:
        pause = min(_PAUSE * 2**self._failures, _LONGEST_PAUSE)
        self._failures += 1
        self._next = asyncio.get_running_loop().time() + pause
        log.warning(
            "warm_process_lost",
            number=number,
            why=f"{why}; its output is in {self._record(number)}",
            next_in=pause,
        )

    def _record(self, number: int) -> Path:
        logs = self._settings.job.run_dir / "logs"
        return logs / f"warm-{self._settings.node}.{number}.log"
