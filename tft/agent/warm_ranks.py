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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from tft.agent.child import Child
from tft.agent.fork_server import ForkedProcess, ForkServer
from tft.agent.output import Console, Output
from tft.agent.settings import AgentSettings, warm_environment
from tft.forked_task import WAITING, WARM, ForkedTask, give_task

log = structlog.get_logger(__name__)

_ATTEMPTS = 3
"""The number of warm processes in a row that may end before they wait for a rank. Then the agent
starts no further warm process: the script probably cannot run without a rank."""


@dataclass(eq=False, slots=True, kw_only=True)
class WarmProcess:
    """
    A warm process of this node.
    """

    number: int
    """Counts the warm processes of this agent, from 1."""
    ended: Callable[[Child], None]
    """Is called when the process has ended."""
    channel: socket.socket = field(init=False)
    """The socket through which the process gets its rank."""
    child: Child | None = None
    """None until the process is started."""
    waits: bool = False
    """True if the script has come to the first use of the session, and waits for a rank."""

    def has_ended(self, child: Child) -> None:
        """
        Call the present function `ended`.
        """
        self.ended(child)

    def begin(self, task: ForkedTask, ended: Callable[[Child], None]) -> Child | None:
        """
        Give the process its rank, and call `ended` when the process has ended. Return the process,
        or None if it has already ended.
        """
        with self.channel:
            try:
                give_task(self.channel, task)
            except OSError as error:
                log.warning("warm_process_lost", number=self.number, why=error.strerror)
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

    def want(self) -> None:
        """
        Start a warm process if one is missing. Only one at a time runs the script, so that the
        ranks of this node are disturbed as little as possible. Call this while the ranks train.
        """
        self._drop_stopped()
        if len(self._processes) >= self._wanted or not all(p.waits for p in self._processes):
            return
        if (forked := self._fork_server.take()) is None and self._fork_server.hopeful:
            self._fork_server.want(1)  # a later call finds the forked process
            return
        self._started += 1
        try:
            self._start(self._started, forked)
        except OSError as error:
            self._failed(self._started, f"it could not be started: {error}")

    def take(self) -> WarmProcess | None:
        """
        Return a warm process that waits for a rank, or None if there is none. The caller calls
        `WarmProcess.begin`.
        """
        self._drop_stopped()
        for process in self._processes:
            if process.waits:
                self._forget(process)
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
                process.channel, process.child = self._execute(task, process.has_ended)
        finally:
            os.close(writing)
        process.channel.setblocking(False)
        asyncio.get_running_loop().add_reader(process.channel, self._hear, process)
        self._processes.append(process)
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
        with suppress(OSError):  # the process has ended, which `_ended` handles
            said = process.channel.recv(len(WAITING))
        if said == WAITING:
            process.waits = True
            self._failures = 0
            log.info("warm_process_waits", number=process.number, pid=process.child.pid)
        else:
            asyncio.get_running_loop().remove_reader(process.channel)

    def _drop_stopped(self) -> None:
        for process in self._processes:
            assert process.child is not None
            if process.child.stopped():
                process.child.end()  # a stopped process could not take a rank
                process.waits = False

    def _forget(self, process: WarmProcess) -> None:
        self._processes.remove(process)
        asyncio.get_running_loop().remove_reader(process.channel)

    def _ended(self, process: WarmProcess, child: Child) -> None:
        """
        Handle the end of a warm process that has got no rank.
        """
        if process in self._processes:
            self._forget(process)
            process.channel.close()
        if self._wanted:
            log.warning("warm_process_ended", number=process.number, code=child.code)
            if not process.waits:
                self._failed(process.number, f"it ended with exit status {child.code}")

    def _failed(self, number: int, why: str) -> None:
        self._failures += 1
        if self._failures == _ATTEMPTS:
            self._wanted = 0
            log.warning(
                "no_warm_processes",
                why=f"{_ATTEMPTS} processes in a row failed before the script used the session; of "
                f"the last one: {why}; its output is in {self._record(number)}",
            )

    def _record(self, number: int) -> Path:
        logs = self._settings.job.run_dir / "logs"
        return logs / f"warm-{self._settings.node}.{number}.log"
