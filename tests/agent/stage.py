"""
A test environment with a real agent process and a real broker. The test acts as the controller.

The module also installs the packages that the agent discovers: an adaptor and a plugin. They are
installed as other projects would install them, with entry points.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from tft.agent.reaper import marked
from tft.bus.base import Bus, Heard, Present
from tft.bus.zeromq import open_bus
from tft.core.link.delivery import Inbox
from tft.protocol.messages import Beat, Lead, Order, Pulse, Report, Spawn
from tft.protocol.topics import BEATS, ORDERS, REPORTS, presence

ROOT = Path(__file__).parents[2]

R = TypeVar("R", bound=Report)

BROKER = """
from tft.bus.broker import main
main("127.0.0.1", 0, opened=lambda port: print(port, flush=True))
"""

AGENT = """
import json, sys
from pathlib import Path
from tft.agent.service import AgentSettings, main
from tft.config import JobSettings
from tft.errors import UsageError
from tft.logs import configure_logs

configure_logs()
told = json.loads(sys.argv[1])
job = told.pop("job")
job["run_dir"] = Path(job["run_dir"])
told["arguments"] = tuple(told["arguments"])
try:
    sys.exit(main(AgentSettings(job=JobSettings(**job), **told)))
except UsageError as refused:
    sys.exit(f"refused: {refused}")
"""

ADAPTOR = """
import os, signal, socket, sys
from tft.spi import hookimpl

preloaded = 0

@hookimpl
def tft_preload():
    global preloaded
    preloaded += 1

@hookimpl
def tft_store(host, port, opened):
    if "NO_STORE" in os.environ:
        sys.exit("the door is locked")
    with socket.create_server((host, port)) as server:
        opened(server.getsockname()[1])
        signal.pause()
"""

PLUGIN = """
from tft.spi import hookimpl

@hookimpl
def tft_progressed(run_dir, node, step):
    with open(run_dir / f"progress-{node}", "a") as progress:
        progress.write(f"{step}\\n")
    raise RuntimeError("an observer may fail")
"""

PAGE = """
import os, signal, subprocess, sys, time
from tft.page import Page

page = Page.open(int(os.environ["TFT_PAGE"]))
def say(step):
    page.move(step, False, time.monotonic())
"""
"""The beginning of scripts whose progress a test waits for. `say(n)` reports step `n` in the
heartbeats."""

THREADED = (
    "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
)
"""A module that starts a thread, so that a process that has imported it cannot be forked."""


def package(directory: Path, name: str, source: str, group: str) -> None:
    """
    Write a Python package `name` with one entry point of the same name in the entry point group
    `group`.
    """
    (directory / f"{name}.py").write_text(source)
    info = directory / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {name}\n")


class Stage:
    """
    One job with a single node. The directory `tmp` contains the script and the run directory.
    """

    def __init__(self, tmp: Path, broker: str, bus: Bus) -> None:
        self.run_dir = tmp / "run"
        self.run_dir.mkdir()
        self.tmp = tmp
        self.mark = f"TFT_TEST={uuid.uuid4().hex}"
        """An environment variable of the agent and of all processes that descend from it."""
        self.epoch = 1
        self.run = ""
        self.acknowledging = True
        self.kept_by: dict[int, int] = {}
        """What the next `Lead` says about the nodes that keep rank-local state."""
        self.silent: tuple[int, ...] = ()
        """The nodes that count as lost because they were silent."""
        self.arguments: tuple[str, ...] = ()
        """The arguments of the script, unless `agent` gets some."""
        self.reports: list[Report] = []
        """Each received report once, in order."""
        self.numbers: list[int] = []
        """The numbers of all received reports, also of repeated ones."""
        self._broker = broker
        self._bus = bus
        self._inbox = Inbox()
        self._agents: list[subprocess.Popen[bytes]] = []

    # ------------------------------------------------------------ the agent

    async def agent(
        self,
        script: str,
        *arguments: str,
        nproc: int = 1,
        adaptor: str = "staged",
        stdout: int | None = None,
        backup_every: int = 0,
        skip_batch: bool = False,
        warm_ranks: int = 0,
        nnodes: int = 1,
        node: int = 0,
        spare: int = 0,
        **environment: str,
    ) -> "subprocess.Popen[bytes]":
        """
        Write the script and start an agent for it. Return when the agent can receive orders.
        """
        (self.tmp / "script.py").write_text(script)
        name, _, value = self.mark.partition("=")
        path = [str(ROOT), str(ROOT / "adaptors"), str(self.tmp / "packages")]
        told = {
            "job": {
                "job": "job",
                "run_dir": str(self.run_dir),
                "broker": self._broker,
                "adaptor": adaptor,
                "nproc_per_node": nproc,
                "backup_every": backup_every,
                "skip_batch": skip_batch,
                "warm_ranks": warm_ranks,
                "nnodes": nnodes,
            },
            "node": node,
            "spare": spare,
            "script": str(self.tmp / "script.py"),
            "arguments": arguments or self.arguments,
            "host": "127.0.0.1",
            "environment": os.environ | {"PYTHONPATH": ":".join(path), name: value} | environment,
        }
        agent = self._start(told, stdout)
        while not str(await self._next()).startswith(f"node.{node}/"):
            pass
        return agent

    def _start(
        self,
        told: dict[str, Any],  # Any: what JSON can carry
        stdout: int | None,
    ) -> "subprocess.Popen[bytes]":
        with (self.tmp / "out").open("ab") as out, (self.tmp / "err").open("ab") as err:
            agent = subprocess.Popen(
                [sys.executable, "-c", AGENT, json.dumps(told)],
                env=told["environment"],
                stdout=out if stdout is None else stdout,
                stderr=err,
                start_new_session=True,
            )
        self._agents.append(agent)
        return agent

    def kill_agent(self, number: int) -> None:
        """
        Kill the agent that was started as number `number`, and wait until it has ended.
        """
        self._agents[number].kill()
        self._agents[number].wait()

    def close(self) -> None:
        """
        Kill the agents and all other processes of the job.
        """
        for agent in self._agents:
            agent.kill()
            agent.wait()
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def alive(self) -> list[int]:
        """
        Return the process ids of the job's processes that are still alive.
        """
        return list(marked(self.mark.encode()))

    # ------------------------------------------------------------ the controller

    def order(self, order: Order | Lead) -> None:
        """
        Send an order to the agent and the ranks, once.
        """
        self._bus.publish(ORDERS, order)

    def lead(self) -> None:
        """
        Acknowledge all reports, and tell which node keeps the rank-local state of which, and which
        nodes count as lost.
        """
        self.order(
            Lead(
                epoch=self.epoch,
                heard=self._inbox.heard(),
                kept_by=self.kept_by,
                run=self.run,
                silent=self.silent,
            )
        )

    async def start(self, rank: int = 0, incarnation: int = 0) -> None:
        """
        Order the agent to start the process of a rank.
        """
        self.order(
            Spawn(epoch=self.epoch, node=0, rank=rank, incarnation=incarnation, cause="test")
        )

    async def report(self, kind: type[R], *, since: int = 0, **facts: object) -> R:
        """
        Wait for the first report of this kind whose fields equal `facts`, and return the report.

        The first `since` reports are ignored. The report may have arrived before this call.
        """
        while True:
            for report in self.reports[since:]:
                if isinstance(report, kind) and all(
                    getattr(report, name) == fact for name, fact in facts.items()
                ):
                    return report
            since = len(self.reports)
            while len(self.reports) == since:
                await self._next()

    async def beat(self) -> Beat:
        """
        Wait for the next heartbeat of the agent and return it.
        """
        while True:
            arrival = await self._next()
            if isinstance(arrival, Beat):
                return arrival

    async def pulse(self, where: Callable[[Pulse], bool]) -> Pulse:
        """
        Wait for the next pulse for which `where` is true, and return the pulse.

        A pulse is the part of a heartbeat that describes one rank.
        """
        while True:
            for pulse in (await self.beat()).pulses:
                if where(pulse):
                    return pulse

    async def said(self, step: int, rank: int = 0) -> None:
        """
        Wait until a pulse of the rank shows that its script is at `step`.
        """
        await self.pulse(lambda p: p.rank == rank and p.position.step == step)

    async def _next(self) -> Beat | str | None:
        """
        Wait for one message from the bus, and note it if it is a report.

        Return a heartbeat, the sender of a presence message, or None for any other message.
        """
        match await self._bus.receive():
            case Heard(envelope=envelope):
                if isinstance(envelope.message, Beat):
                    return envelope.message
                self.numbers.append(envelope.number)
                if self._inbox.accept(envelope.sender, envelope.number):
                    assert isinstance(envelope.message, Report)
                    self.reports.append(envelope.message)
                if self.acknowledging:
                    self.lead()
            case Present(sender=sender):
                return sender
            case _:
                pass
        return None


@asynccontextmanager
async def staged(tmp: Path) -> AsyncIterator[Stage]:
    """
    Start the broker, install the packages, and yield the `Stage`.

    At the end, stop everything.
    """
    (tmp / "packages").mkdir()
    package(tmp / "packages", "staged", ADAPTOR, "tft.adaptors")
    async with AsyncExitStack() as opened:
        address = opened.enter_context(_broker())
        bus = await opened.enter_async_context(
            open_bus(address, job="job", sender="controller/1", topics=[REPORTS, BEATS])
        )
        await bus.listened(presence("job", "controller/1"))
        stage = Stage(tmp, address, bus)
        opened.callback(stage.close)
        yield stage


@contextmanager
def _broker() -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, "-c", BROKER], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as broker:
        try:
            assert broker.stdout is not None
            yield f"127.0.0.1:{broker.stdout.readline().strip()}"
        finally:
            broker.kill()


def command_line(pid: int) -> bytes:
    """
    Return the command line with which a process was started, with a zero byte after each word.
    """
    return Path(f"/proc/{pid}/cmdline").read_bytes()


async def gone(pid: int) -> None:
    """
    Wait until the process `pid` has ended.
    """
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(process, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(process)
        os.close(process)
