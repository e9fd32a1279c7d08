"""
The two helper processes of an agent: the reaper and the rendezvous store. The agent restarts each
of these two processes whenever that process ends.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import structlog

from tft.agent.child import Child, note_pid
from tft.agent.fork_server import ForkServer
from tft.agent.settings import AgentSettings, child_environment
from tft.errors import UsageError
from tft.forked_task import ForkedTask
from tft.pulse import BYTE, PulseWatch

log = structlog.get_logger(__name__)

_PAUSE = 0.1
"""The time in seconds before the reaper or the rendezvous store is started again. Without this
pause, a process that always ends at once would keep the CPU busy."""
_ATTEMPTS = 3
"""The number of rendezvous stores in a row that may end before they have opened a port. Then the
agent gives up, because another store would probably fail too."""


class ReaperSidecar:
    """
    Starts and restarts the reaper (`tft.agent.reaper`). This object holds one end of a pipe open.
    When the agent ends, the kernel closes this end, and so the reaper notices the end of the agent.
    """

    def __init__(self, settings: AgentSettings, *, marker: str) -> None:
        self._settings = settings
        self._marker = marker
        self._pipe = -1
        self._child: Child | None = None
        self._dismissed = False

    def start(self) -> None:
        """
        Start the reaper. Whenever the reaper ends, it is started again, until `dismiss` is called.
        """
        if self._dismissed:
            return
        reading, self._pipe = os.pipe()
        try:
            self._child = Child.start(
                [sys.executable, "-P", "-m", "tft.agent.reaper", self._marker],
                environment=self._settings.environment,
                stdin=reading,
                ended=self._ended,
            )
        finally:
            os.close(reading)

    async def dismiss(self) -> None:
        """
        Close the pipe, so that the reaper acts as if the agent had ended. Wait until the reaper has
        killed all processes whose environment has the agent's marker, and has ended itself.
        """
        self._dismissed = True
        if self._child is not None and self._child.code is None:
            os.close(self._pipe)
            await self._child.gone()

    def _ended(self, child: Child) -> None:
        if not self._dismissed:
            log.warning("reaper_ended", pid=child.pid, code=child.code)
            os.close(self._pipe)
            asyncio.get_running_loop().call_later(_PAUSE, self.start)


class StoreSidecar:
    """
    Starts and restarts the rendezvous store (`tft.worker.store`). If possible, the store is a
    process that the fork server has forked. Such a process has imported PyTorch (or another
    framework) already, which otherwise takes seconds.

    `opened` is called with the port of the store whenever a store has opened. `lost` is called when
    an open store has ended. `failed` is called with an error when no store can be opened.
    """

    def __init__(
        self,
        settings: AgentSettings,
        *,
        marker: str,
        fork_server: ForkServer,
        opened: Callable[[int], None],
        lost: Callable[[], None],
        failed: Callable[[UsageError], None],
    ) -> None:
        self._settings = settings
        self._marker = marker
        self._fork_server = fork_server
        self._due = False
        """True if a store must be started, and its start waits until the fork server delivers a
        forked process. Without a fork server, the store is started at once."""
        self._opened = opened
        self._lost = lost
        self._failed = failed
        self._child: Child | None = None
        self._port = 0
        self._reading = -1
        self._pulse: PulseWatch | None = None
        self._failures = 0
        self._dismissed = False
        self._record: Path = settings.job.run_dir / "logs" / f"store-{settings.node}.log"

    def start(self) -> None:
        """
        Start the store. Whenever the store ends, it is started again, until `stop` is called.
        """
        if self._dismissed:
            return
        self._due = True
        self.start_due()

    def start_due(self) -> None:
        """
        Start the store if its start is due. While a fork server is starting or running, the start
        waits until a forked process has arrived.
        """
        if not self._due or self._dismissed:
            return
        if (forked := self._fork_server.take()) is None and self._fork_server.hopeful:
            self._fork_server.want(1)
            return
        self._due = False
        self._port = 0
        self._reading, writing = os.pipe()
        settings = self._settings
        with self._record.open("ab") as record:
            task = ForkedTask(
                work="store",
                arguments=(settings.job.adaptor, settings.host),
                environment=child_environment(settings, self._marker),
                output=record.fileno(),
                descriptors=(writing,),
            )
            try:
                self._child = (forked and forked.begin(task, self._ended)) or self._execute(task)
            finally:
                os.close(writing)
        self._child.keep_going(partial(log.warning, "store_continued", pid=self._child.pid))
        note_pid(settings.job.run_dir, f"store-{settings.node}", self._child.pid)
        asyncio.get_running_loop().add_reader(self._reading, self._read_port)

    def _execute(self, task: ForkedTask) -> Child:
        (writing,) = task.descriptors
        return Child.start(
            [sys.executable, "-P", "-m", "tft.worker.store", *task.arguments, str(writing)],
            environment=task.environment,
            output=task.output,
            inherited=task.descriptors,
            ended=self._ended,
        )

    async def stop(self) -> None:
        """
        Kill the store and wait for its end. The store is not started again.
        """
        self._dismissed = True
        if self._child is not None:
            self._child.end()
            await self._child.gone()

    def _read_port(self) -> None:
        told = os.read(self._reading, 16)
        if not told:  # the store ended before it had opened its port
            self._close()
            return
        self._port = int(told.partition(BYTE)[0])
        self._failures = 0
        asyncio.get_running_loop().remove_reader(self._reading)
        reading, self._reading = self._reading, -1
        self._pulse = PulseWatch(reading, self._hangs)
        log.info("store_opened", port=self._port)
        self._opened(self._port)

    def _hangs(self) -> None:
        if self._child is not None:
            log.warning("store_hangs", pid=self._child.pid)
            self._child.end()

    def _close(self) -> None:
        if self._reading >= 0:
            asyncio.get_running_loop().remove_reader(self._reading)
            os.close(self._reading)
            self._reading = -1
        if self._pulse is not None:
            self._pulse.close()
            self._pulse = None

    def _ended(self, child: Child) -> None:
        self._close()  # stop waiting for the port number of this store
        if self._dismissed:
            return
        log.warning("store_ended", pid=child.pid, code=child.code, port=self._port)
        if self._port:
            self._lost()
            self.start()
            return
        self._failures += 1
        if self._failures < _ATTEMPTS:
            asyncio.get_running_loop().call_later(_PAUSE, self.start)
            return
        said = self._record.read_text(errors="replace").strip().rpartition("\n")[2]
        self._failed(
            UsageError(
                f"the rendezvous store of adaptor {self._settings.job.adaptor!r} cannot be opened "
                f"at {self._settings.host}; it said: {said or 'nothing'} (see {self._record})"
            )
        )
