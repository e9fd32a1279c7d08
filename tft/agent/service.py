"""
The agent of a node. The agent carries out the controller's orders, reports the start and the end of
the ranks' processes, and sends the status of the ranks as heartbeats (`Beat`). The agent decides
nothing itself: the controller decides what is done about a lost rank.
"""

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import Callable, Coroutine

import pluggy
import structlog

from tft.agent.child import look_at_children, note_pid
from tft.agent.fork_server import ForkServer
from tft.agent.local_states import LocalStateExchange
from tft.agent.output import Console
from tft.agent.ranks import Ranks
from tft.agent.settings import AgentSettings
from tft.agent.sidecars import ReaperSidecar, StoreSidecar
from tft.bus.base import Bus, Gone, Heard, Malformed, NotLetIn, Present
from tft.bus.zeromq import open_bus
from tft.clock import SystemClock
from tft.core.link.delivery import Outbox
from tft.errors import InternalError, UsageError
from tft.limits import raise_open_files
from tft.parent_death import adopt_orphans
from tft.plugins import call_guarded, load_plugins
from tft.protocol.messages import (
    Beat,
    EndNode,
    Exited,
    Freeze,
    Kill,
    Lead,
    LocalStates,
    LocalStatesKept,
    Message,
    NodeJoined,
    NodeReport,
    Recall,
    Recalled,
    Spawn,
    StoreOpened,
)
from tft.protocol.topics import BEATS, ORDERS, REPORTS, agent
from tft.pulse import Pulse

__all__ = ["AgentSettings", "main"]

log = structlog.get_logger(__name__)

BEAT = 0.1
"""The time in seconds between two heartbeats. At the same interval, the agent sends unacknowledged
reports again, and tells plugins that observe progress which step the ranks have completed."""
DIGESTS = 0.02
"""The time in seconds between two checks whether the pages of the ranks have new digests of slices.
This time holds while ranks post digests fast; otherwise the agent checks every `BEAT` seconds."""
SETTLING = 1.0
"""The time in seconds that the agent waits at its end, at most, until the controller has
acknowledged the last reports of the agent."""
CLEANING = 2.0
"""The time in seconds that the agent waits, at most, until killed processes have ended. Processes
that still exist after this time are killed by the reaper, which outlives the agent."""


def main(settings: AgentSettings) -> int:
    """
    Run the agent of a node until the job ends on the node, and return the exit status. The status
    is 0 if the controller has ordered the end (`EndNode`), and 128 + the signal number after
    SIGTERM or SIGINT. Before the function returns, it ends all processes that the agent has
    started.

    Raises `UsageError` when the job cannot run on this node with its settings. Raises `PeerError`
    when another program starts the ranks and that program has ended.
    """
    raise_open_files(f"the agent of node {settings.node}")
    return asyncio.run(_serve(settings))


async def _serve(settings: AgentSettings) -> int:
    for name in ("logs", "pids"):
        (settings.job.run_dir / name).mkdir(parents=True, exist_ok=True)
    note_pid(settings.job.run_dir, f"agent-{settings.node}", os.getpid())
    # every agent numbers its reports from 1. A second agent of this node must have another name, so
    # that the controller does not take its first reports for repeated ones.
    sender = f"node.{settings.node}/{secrets.token_hex(4)}"
    async with open_bus(
        settings.job.broker, job=settings.job.job, sender=sender,
        topics=[ORDERS, agent(settings.node)], curve=settings.job.curve,
    ) as bus:  # fmt: skip
        return await Agent(settings, bus, sender).run()


class Agent:
    """
    The agent of one node. All methods run on one asyncio loop.
    """

    def __init__(self, settings: AgentSettings, bus: Bus, sender: str) -> None:
        self._settings = settings
        self._bus = bus
        self._sender = sender
        self._clock = SystemClock()
        self._epoch = 0
        self._run = ""
        """The id of the run that the first controller named in its `Lead` message. This agent ends
        when a controller of another run leads the job. Empty: no `Lead` has come, or none named a
        run."""
        self._outbox = Outbox()
        self._settled = asyncio.Event()
        self._leave: asyncio.Future[tuple[int, float]] = asyncio.Future()
        """The result is the exit status of the agent, and the time in seconds in which the ranks
        may end by themselves. The agent ends when this future has a result or an exception."""
        self._console = Console()
        marker = settings.starter.mark if settings.starter else secrets.token_hex(16)
        self._reaper = ReaperSidecar(settings, marker=marker)
        self._fork_server = ForkServer(
            settings, marker=marker, console=self._console, changed=self._start_due
        )
        self._store = StoreSidecar(
            settings,
            marker=marker,
            fork_server=self._fork_server,
            opened=self._store_opened,
            lost=self._store_lost,
            failed=self._fail,
        )
        self._ranks = Ranks(
            settings,
            marker=marker,
            console=self._console,
            fork_server=self._fork_server,
            clock=self._clock,
            report=self._report,
            lost=self._fail,
        )
        self._local_states = LocalStateExchange(settings.node, self._ranks, bus.publish)

    async def run(self) -> int:
        """
        Run until the job ends on this node, clean up, and return the exit status (see `main`).
        """
        pulse = None if self._settings.pulse is None else Pulse(self._settings.pulse)
        if pulse is not None:
            pulse.beat_in_loop()
        plugins = load_plugins()
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._callback_failed)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_end, number)
        loop.add_signal_handler(signal.SIGCHLD, look_at_children)
        # the processes that the fork server forks must become children of the agent, which reaps
        # them
        adopt_orphans()
        self._reaper.start()
        self._ranks.prepare()
        self._store.start()
        self._join()
        if self._ranks.bell:
            self._local_states.listen(self._ranks.bell[0])
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._obey()),
                group.create_task(self._every(BEAT, self._beat)),
                group.create_task(self._beat_on_digests()),
            ]
            if plugins.hook.tft_progressed.get_hookimpls():
                progress = _Progress(self._settings, self._ranks, plugins)
                tasks.append(group.create_task(self._every(BEAT, progress.look)))
            await asyncio.wait([self._leave])
            await self._clean_up()
            for task in tasks:
                task.cancel()
        if pulse is not None:
            pulse.close()
        code, _ = self._leave.result()
        return code

    # ------------------------------------------------------------ orders

    async def _obey(self) -> None:
        while True:
            match await self._bus.receive():
                case Heard(envelope=envelope):
                    self._hear(envelope.message)
                case Present():
                    # the process that has just connected to the bus may be a new controller, which
                    # has not got the unacknowledged reports yet
                    self._repeat()
                case Malformed(why=why):
                    log.warning("malformed_message", why=why)
                case NotLetIn(why=why):
                    log.warning("not_let_in", why=why)
                case Gone():
                    pass

    def _hear(self, message: Message) -> None:
        match message:
            case Lead(run=run) if run and self._run and run != self._run:
                self._end_of_run()
            case LocalStates() | LocalStatesKept():
                self._local_states.hear(message)
            case Lead() | Spawn() | Kill() | Recall() | EndNode() if message.epoch >= self._epoch:
                self._epoch = message.epoch
                self._carry_out(message)
            case Freeze() if self._ranks.posted():
                # send the newest digests of the ranks at once: the controller must know whether
                # copies of a shard differ before it decides about the incident
                self._bus.publish(BEATS, self._status())
            case _:
                pass  # the message is for other processes, or from an earlier controller

    def _carry_out(self, order: Lead | Spawn | Kill | Recall | EndNode) -> None:
        match order:
            case Lead(heard=heard, run=run):
                self._run = self._run or run
                self._local_states.led(order)
                self._outbox.acknowledge(heard.get(self._sender, 0))
                if not self._outbox.pending():
                    self._settled.set()
                if self._settings.node in order.silent:
                    self._join_again()
            case Spawn() if order.node == self._settings.node:
                self._ranks.spawn(order)
            case Kill() if order.node == self._settings.node:
                self._ranks.kill(order)
            case Recall() if order.node == self._settings.node:
                self._recall(order)
            case EndNode(grace=grace) if not self._leave.done():
                log.info("node_ends", why=order.why)
                self._leave.set_result((0, grace))
            case _:
                pass  # the order is for another node, or a second `EndNode`

    # ------------------------------------------------------------ reports

    def _join(self) -> None:
        self._report(
            NodeJoined(
                node=self._settings.node,
                host=self._settings.host,
                pid=os.getpid(),
                ranks=tuple(self._settings.ranks),
                spare=self._settings.spare,
                at=self._clock.now(),
            )
        )

    def _join_again(self) -> None:
        """
        Join the job again, because the controller counts this node as lost: it was cut off or
        stopped for too long. The job has gone on without the ranks of this node. While one of them
        still has a process, do nothing: a later `Lead` message calls this method again.
        """
        joins = any(isinstance(report, NodeJoined) for _, report in self._outbox.pending())
        if joins or not self._ranks.empty or self._leave.done():
            return
        log.info("node_joins_again", node=self._settings.node)
        self._join()

    def _recall(self, order: Recall) -> None:
        """
        Answer an order for the rank-local state that this node keeps for the ranks of a lost node:
        send one report for each rank. Leave out a rank if an earlier report about this rank is not
        acknowledged yet, because that earlier report is sent again anyway.
        """
        waiting = {
            (report.lost, report.rank)
            for _, report in self._outbox.pending()
            if isinstance(report, Recalled)
        }
        for report in self._local_states.recalled(order, self._clock.now()):
            if (report.lost, report.rank) not in waiting:
                self._report(report)

    def _start_due(self) -> None:
        self._store.start_due()  # start the rendezvous store first, because the ranks need it
        self._ranks.start_due()

    def _store_opened(self, port: int) -> None:
        host = self._settings.host
        self._report(
            StoreOpened(node=self._settings.node, host=host, port=port, at=self._clock.now())
        )
        self._ranks.store_at((host, port))

    def _store_lost(self) -> None:
        self._ranks.store_at(None)

    def _report(self, report: NodeReport) -> None:
        """
        Send a report now, and again until the controller acknowledges it. Does nothing when an
        equal report is still unacknowledged.
        """
        if any(report == waiting for _, waiting in self._outbox.pending()):
            return
        if isinstance(report, Exited):
            # first send the digests that the ended process has posted last: the controller needs
            # them before it handles the loss of the rank
            self._bus.publish(BEATS, self._status())
        number = self._outbox.add(report)
        self._settled.clear()
        self._bus.publish(REPORTS, report, number=number)

    def _status(self) -> Beat:
        return Beat(node=self._settings.node, pulses=self._ranks.pulses(), at=self._clock.now())

    def _beat(self) -> None:
        self._bus.publish(BEATS, self._status())
        self._local_states.repeat()
        self._repeat()
        self._ranks.prepare_next()

    async def _beat_on_digests(self) -> None:
        """
        Send an extra beat soon after the ranks have posted digests of slices. With these digests
        the controller compares the copies of shards. The sooner it finds copies that differ, the
        fewer steps are lost.
        """
        while True:
            await asyncio.sleep(DIGESTS if self._ranks.hurried() else BEAT)
            if self._ranks.urgent():
                self._beat()

    def _repeat(self) -> None:
        for number, report in self._outbox.pending():
            self._bus.publish(REPORTS, report, number=number)

    async def _every(self, seconds: float, act: Callable[[], None]) -> None:
        while True:
            act()
            await asyncio.sleep(seconds)

    # ------------------------------------------------------------ the end of the agent

    def _asked_to_end(self, number: int) -> None:
        log.info("node_ends", why=signal.Signals(number).name)
        if self._leave.done():
            self._ranks.end()  # a second signal while the agent leaves: kill the ranks at once
        else:
            self._leave.set_result((128 + number, 0.0))

    def _end_of_run(self) -> None:
        """
        End this agent and its ranks, because a controller of another run leads the job with this
        name. The run of this agent is over, and its launcher with the controller is lost. Otherwise
        the ranks would obey that controller, and train with the ranks of the other run.
        """
        name, broker = self._settings.job.job, self._settings.job.broker
        self._fail(
            UsageError(
                f"another run of the job {name!r} has begun at {broker}: the run of this node is over"
            )
        )

    def _fail(self, error: Exception) -> None:
        if not self._leave.done():
            self._leave.set_exception(error)

    def _callback_failed(self, _: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        # asyncio itself would only log an error in a callback, and the agent might then never
        # report the end of a rank
        error = context.get("exception")
        log.error("callback_failed", what=context["message"], exc_info=error)
        self._fail(error if isinstance(error, Exception) else InternalError(context["message"]))

    async def _clean_up(self) -> None:
        """
        End the ranks, the rendezvous store, and all processes that ranks and store have started.
        Then write the last output of the ranks.

        The ranks first get a time (`grace`) to end by themselves. Ranks that still run are killed.
        """
        failed = self._leave.exception() is not None
        code, grace = (1, 0.0) if failed else self._leave.result()
        self._ranks.leave()
        await _within(grace, self._ranks.gone())
        self._ranks.end()
        await _within(CLEANING, self._ranks.gone())
        await _within(CLEANING, self._store.stop())
        if code == 0:
            await _within(SETTLING, self._settled.wait())
        await _within(CLEANING, self._reaper.dismiss())
        self._local_states.close()
        self._ranks.close()
        self._console.close()


class _Progress:
    """
    Calls the plugin hook `tft_progressed` whenever the ranks of this node have completed a new
    highest step.
    """

    def __init__(
        self, settings: AgentSettings, ranks: Ranks, plugins: pluggy.PluginManager
    ) -> None:
        self._settings = settings
        self._ranks = ranks
        self._plugins = plugins
        self._step = 0

    def look(self) -> None:
        step = self._ranks.completed()
        if step > self._step:
            self._step = step
            call_guarded(
                self._plugins,
                "tft_progressed",
                run_dir=self._settings.job.run_dir,
                node=self._settings.node,
                step=step,
            )


async def _within(seconds: float, fact: Coroutine[None, None, object]) -> None:
    """
    Wait until the coroutine `fact` has finished, for `seconds` at most. If the time is over,
    cancel `fact` and return without an error.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await fact
