"""
`tft run`: starts the processes of a job on this node (agent, broker, controller).

It restarts the broker and the controller when they die. It reports to the controller what no other
process can see: the end of an agent, and a signal that asks for the end of the job. It leaves no
process behind.
"""

import asyncio
import signal
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import click

from tft.bus.base import Bus, Heard, NotLetIn
from tft.bus.zeromq import open_bus
from tft.checkpoint import CheckpointStore, checkpoint_store_of, give_up, manifest_of, newest
from tft.clock import SystemClock
from tft.core.job.policy import Policy
from tft.core.job.shutdown import FINISHED
from tft.core.link.delivery import Outbox
from tft.files import write_whole
from tft.launcher.children import Children, LaunchedProcess
from tft.launcher.exit_codes import (
    COMPLETED,
    DUMPED,
    FAILED,
    REFUSED,
    RESULTS,
    Restarts,
    ended,
    exit_code,
)
from tft.launcher.plan import Plan, named
from tft.launcher.run_directory import (
    FreshReport,
    known_unfit,
    last_line,
    log_file,
    passed_over,
    pid_file,
    resumable,
    run_dir_of,
    unfit,
    write_job,
)
from tft.launcher.summary import summary
from tft.limits import raise_open_files
from tft.protocol.messages import Envelope, Lead, NodeLost, Report, StopRequested
from tft.protocol.topics import ORDERS, REPORTS
from tft.stopped import LIMIT

_REPEAT = 0.1  # seconds after which an unacknowledged report is sent again
# seconds that an agent gets to end after the controller told it to: its ranks must leave first
_TOLD_GRACE = 15.0
# seconds to wait for the end of the job after a signal: the time limits of the controller for
# stopping the ranks and for saving a last checkpoint
_STOP_LIMIT = Policy().stop + Policy().save
# seconds to wait until a controller on another node acknowledges a report: that node may be lost
_NEWS_LIMIT = 10.0
# seconds after which a node gives up if the broker refuses it: the broker of an earlier job may
# still listen at the address until the broker of this job starts
_SHUT_OUT_LIMIT = 10.0
# seconds without a controller after which the operator is told what this node waits for
_UNHEARD = 10.0
# seconds for the reaper to end the processes that a killed agent has left behind
_ORPHANS_LIMIT = 5.0


def launch(plan: Plan, environment: Mapping[str, str]) -> int:
    """
    Carry out a checked plan until the job is over, and return the exit code of `tft run`.

    `environment` is added to the environment of every process of the job.
    """
    raise_open_files("tft run")
    with run_dir_of(plan.settings, plan.node, leads=plan.leads, goes_on=plan.goes_on):
        plan = named(plan)
        settings = plan.settings
        if plan.leads:
            write_job(settings, plan.command)
        report = FreshReport(settings.run_dir)
        if plan.leads and plan.may_begin and not plan.goes_on:
            _turn_back(checkpoint_store_of(settings))
        # another launcher may start one `tft run` for each rank: only the leading one prints this
        if plan.leads or plan.placed is None:
            say(f"the records of this run are in {settings.run_dir}{_beginning(plan)}")
        if plan.leads and settings.resume and not plan.goes_on:
            store = checkpoint_store_of(settings)
            for sentence in passed_over(store, newest(store)):
                say(sentence)
        code = asyncio.run(_run(plan, environment, report))
        if plan.leads and plan.report is not None:
            text = report.text()
            if text is None:
                say("the job ended without a report")
            else:
                write_whole(plan.report, text)
    if plan.leads:
        for line in summary(report.incidents(), report.missed()):
            say(line)
        if code not in (COMPLETED, DUMPED):
            why = report.why() or f"no report was written; see {settings.run_dir / 'logs'}"
            say(f"the job did not complete: {why}")
            checkpoint = newest(checkpoint_store_of(settings))
            if checkpoint is not None:
                promise = f"{checkpoint} is the newest checkpoint: {plan.again} from it"
                say(known_unfit(checkpoint_store_of(settings), checkpoint) or promise)
        if code == COMPLETED and (report.steps() == 0 or report.why() != FINISHED):
            say(report.why())
    if code == DUMPED and (plan.leads or plan.placed is None):
        say(_last_checkpoint(plan))
    return code


def _last_checkpoint(plan: Plan) -> str:
    """
    Return the sentence for the operator about the last checkpoint.

    The sentence offers `--resume` only if `--resume` will accept the checkpoint.
    """
    store = checkpoint_store_of(plan.settings)
    last = newest(store)
    why = "" if last is None else known_unfit(store, last)
    if why:
        return f"the job ended with a last checkpoint that --resume does not accept: {why}"
    return f"the job ended with a last checkpoint: {plan.again} it"


def _turn_back(store: CheckpointStore) -> None:
    """
    Rename the checkpoints that are newer than the newest usable one, so that they no longer count.

    A job that is restarted automatically then resumes from the usable checkpoint. If no checkpoint
    is usable, nothing is renamed.
    """
    last, directory = newest(store), resumable(store)
    if last is None or directory is None or last == directory:
        return
    say(f"{unfit(store, last)}; it is set aside")
    give_up(store, manifest_of(directory).step)


def _beginning(plan: Plan) -> str:
    """
    Return the end of the first line for the operator, which says from which checkpoint the run
    continues. Empty: the run is new.
    """
    settings = plan.settings
    if plan.goes_on:
        return "; its nodes train on, and this controller leads them again"
    if not settings.resume:
        return ""
    checkpoint = newest(checkpoint_store_of(settings))
    if checkpoint is None:
        return "; an earlier job left no checkpoint there, so the job begins again"
    return f"; it goes on from {checkpoint.name}"


async def _run(plan: Plan, environment: Mapping[str, str], report: FreshReport) -> int:
    settings = plan.settings
    with Children() as children:
        async with open_bus(
            settings.broker, job=settings.job, sender=plan.sender, topics=[ORDERS],
            curve=settings.curve,
        ) as bus:  # fmt: skip
            return await NodeLauncher(plan, environment, children, bus, report).run()


def say(sentence: str) -> None:
    """
    Print a line for the operator on stderr, because stdout belongs to the ranks.

    If nobody reads stderr any more, the error is ignored: the job continues without its terminal.
    """
    with suppress(OSError):
        click.echo(f"tft: {sentence}", err=True)


class NodeLauncher:
    """
    Runs the processes of one node, from the start of the first to the end of the last.
    """

    def __init__(
        self,
        plan: Plan,
        environment: Mapping[str, str],
        children: Children,
        bus: Bus,
        report: FreshReport,
    ) -> None:
        self._plan = plan
        self._commands = plan.commands()
        self._environment = environment
        self._children = children
        self._bus = bus
        self._report = report
        self._parts: dict[str, LaunchedProcess] = {}
        self._clock = SystemClock()
        self._outbox = Outbox()
        self._grace = 0.0
        self._led = asyncio.Event()
        self._shut_out: asyncio.TimerHandle | None = None
        loop = asyncio.get_running_loop()
        self._stop: asyncio.Future[signal.Signals] = loop.create_future()
        self._over: asyncio.Future[int] = loop.create_future()

    async def run(self) -> int:
        """
        Start all processes, supervise them until the job is over, and end those that are left.

        Returns the exit code of `tft run`.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled, number)
        async with asyncio.TaskGroup() as tasks:
            duties = [self._listen(), self._stop_when_asked()]
            if self._plan.trains:
                duties.append(self._watch_agent())
            if self._plan.leads:
                duties += [self._keep("broker"), self._keep("controller")]
            else:
                duties.append(self._say_what_is_awaited())
            running = [tasks.create_task(duty) for duty in duties]
            code = await asyncio.shield(self._over)
            for task in running:
                task.cancel()
            await self._end()
        return code

    # ------------------------------------------------------------ the processes of this launcher

    async def _keep(self, name: str) -> None:
        """
        Run the broker or the controller until the job is over, and restart it when it dies.

        The job ends if this process dies too often, or refuses to start.
        """
        restarts = Restarts()
        refusable = True
        while True:
            code = await self._start(name).ended()
            if self._over.done():
                return
            if name == "controller" and code in RESULTS:
                self._finish(exit_code(code, self._stopped_by), grace=_TOLD_GRACE)
                return
            if code == REFUSED and (refusable or name == "controller"):
                # A restarted broker may find its port in use for a moment, so it is started again
                # if it refuses. A controller that refuses a damaged story will always refuse it, so
                # the job ends.
                self._refused(name, REFUSED if refusable else FAILED)
                return
            if not restarts.again(self._clock.now()):
                say(
                    f"the {name} {ended(code)}, after {restarts.limit} restarts within "
                    f"{restarts.within:.0f} s: giving up; see the end of {self._log_of(name)}"
                )
                self._finish(FAILED)
                return
            say(f"the {name} {ended(code)}; it is started again")
            refusable = False

    async def _watch_agent(self) -> None:
        """
        Run the agent. The agent is not restarted, because its ranks die with it.
        """
        name = self._plan.agent
        agent = self._start(name)
        code = await agent.ended()
        if code == REFUSED:
            self._refused(name, REFUSED)
            return
        if code == COMPLETED:
            # The agent was told to end. On the node that runs the controller, the exit code of the
            # controller decides.
            if not self._plan.leads:
                self._finish(self._reported())
            return
        why = f"the agent of node {self._plan.node} {ended(code)}"
        say(f"{why}; see the end of {self._log_of(name)}")
        node, pid = self._plan.node, agent.process.pid
        lost = NodeLost(node=node, pid=pid, why=why, at=self._clock.now())
        if self._plan.leads:
            await self._tell(lost)
            return  # the controller decides whether the job can go on
        with suppress(TimeoutError):
            async with asyncio.timeout(_NEWS_LIMIT):
                await self._tell(lost)
        self._finish(exit_code(FAILED, self._stopped_by))

    def _start(self, name: str) -> LaunchedProcess:
        log = self._log_of(name)
        child = self._children.start(
            self._commands[name],
            added=self._environment,
            log=log,
            inherited=self._plan.inherited(name),
            continued=partial(
                say, f"the {name} was stopped (SIGSTOP) for {LIMIT:.0f} s: continued"
            ),
        )
        self._parts[name] = child
        write_whole(pid_file(self._plan.settings.run_dir, name), f"{child.process.pid}\n")
        return child

    def _log_of(self, name: str) -> Path:
        return log_file(self._plan.settings.run_dir, name)

    async def _end(self) -> None:
        """
        End all processes of this launcher. The broker is ended last, because the other processes
        send their last messages through it.
        """
        if self._plan.trains:
            await self._parts[self._plan.agent].end(grace=self._grace)
        for name in ("controller", "broker"):
            if name in self._parts:
                await self._parts[name].end(grace=0.0)
        if not await self._children.gone(_ORPHANS_LIMIT):
            say(
                f"processes of this job still run on this node after {_ORPHANS_LIMIT:.0f} s: end "
                "them before another job starts here"
            )

    # ------------------------------------------------------------ the end of the job

    def _finish(self, code: int, *, grace: float = 0.0) -> None:
        """
        Mark the job as over, with the exit code `code`.

        `grace` is the time in seconds that the agent gets to end by itself. It is 0 if no
        controller has told the agent to end.
        """
        if not self._over.done():
            self._grace = grace
            self._over.set_result(code)

    def _reported(self) -> int:
        """
        Return the exit code of the job from the report, on a node that does not run the controller.

        The controller writes the report before it tells the agents that the job is over. So a
        missing report means that this node has another run directory; the result is then `FAILED`.
        """
        code = self._report.exit_code()
        if code is None:
            run_dir = self._plan.settings.run_dir
            say(f"the job is over, and no report of it is in {run_dir}: do all nodes share it?")
            return FAILED
        return code

    def _refused(self, name: str, code: int) -> None:
        log = self._log_of(name)
        say(f"the {name} refused to start; the reason is the last line of {log}:")
        click.echo(last_line(log), err=True)
        self._finish(code)

    def _signalled(self, number: signal.Signals) -> None:
        """
        Ask for a last checkpoint at the first signal; kill all processes at the next one.

        If another launcher has placed this rank, the next signals are ignored.
        """
        if not self._stop.done() and not self._over.done():
            self._stop.set_result(number)
            return
        if self._plan.placed is not None:
            # another launcher may send the signal twice, and kills this process when its own time
            # limit is over
            return
        say(f"{number.name}: all processes are killed")
        for part in self._parts.values():
            part.send(signal.SIGKILL)
        self._finish(exit_code(FAILED, self._stopped_by))

    async def _stop_when_asked(self) -> None:
        number = await asyncio.shield(self._stop)
        if not self._led.is_set() and not self._plan.leads:
            say(f"{number.name}: no controller has been heard yet, and nothing has started here")
            self._finish(exit_code(FAILED, number))
            return
        if self._plan.placed is None:
            say(f"{number.name}: the job ends after a last checkpoint; a second signal kills it")
        elif self._plan.leads:
            say(f"{number.name}: the job is to end after a last checkpoint")
        why = f"{number.name} was sent to `tft run` on node {self._plan.node}"
        # no limit if this launcher runs the controller: it restarts a dead controller, which then
        # receives the request
        limit = None if self._plan.leads else _NEWS_LIMIT
        try:
            async with asyncio.timeout(limit):
                node = None if self._plan.leads else self._plan.node
                asked = StopRequested(why=why, signal=number, node=node, at=self._clock.now())
                await self._tell(asked)
        except TimeoutError:
            say(
                f"no controller has acknowledged the request for {_NEWS_LIMIT:.0f} s, so this node "
                "ends without a last checkpoint"
            )
        else:
            await asyncio.wait([self._over], timeout=_STOP_LIMIT)
        self._finish(exit_code(FAILED, number))

    @property
    def _stopped_by(self) -> signal.Signals | None:
        return self._stop.result() if self._stop.done() else None

    # ------------------------------------------------------------ the bus

    async def _tell(self, report: Report) -> None:
        """
        Send the report repeatedly until the controller acknowledges it, or the job is over.
        """
        number = self._outbox.add(report)
        while not self._over.done() and number in dict(self._outbox.pending()):
            for earlier, unheard in self._outbox.pending():
                self._bus.publish(REPORTS, unheard, number=earlier)
            await asyncio.wait([self._over], timeout=_REPEAT)

    async def _listen(self) -> None:
        while True:
            match await self._bus.receive():
                case Heard(envelope=Envelope(message=Lead(heard=heard))):
                    self._led.set()
                    self._outbox.acknowledge(heard.get(self._plan.sender, 0))
                    if self._shut_out is not None:
                        self._shut_out.cancel()
                        self._shut_out = None
                case NotLetIn(why=why):
                    self._not_let_in(why)
                case _:
                    pass  # all other messages are orders to ranks and agents

    async def _say_what_is_awaited(self) -> None:
        """
        Print once what this node waits for, when it has not heard a controller for `_UNHEARD`
        seconds.

        A node waits without limit for the node that leads. If that node failed to start, its
        terminal says why.
        """
        try:
            async with asyncio.timeout(_UNHEARD):
                await self._led.wait()
        except TimeoutError:
            say(
                f"no controller has been heard at {self._plan.settings.broker} for {_UNHEARD:.0f} "
                "s, still waiting: is `tft run` on node 0 (or `tft lead`) running? Its terminal "
                "says why if not"
            )

    def _not_let_in(self, why: str) -> None:
        """
        Give up if the broker has refused this node for `_SHUT_OUT_LIMIT` seconds and never accepted
        it.

        With wrong keys the node would otherwise wait forever. A node that was accepted before tries
        to reach its broker until the job is over.
        """
        say(why)
        if not self._led.is_set() and not self._plan.leads and self._shut_out is None:
            loop = asyncio.get_running_loop()
            self._shut_out = loop.call_later(_SHUT_OUT_LIMIT, self._finish, REFUSED)
