"""
The command `tft run`: starts the processes of a job on this node. These are the agent and, on the
node that leads, the broker and the controller.

`tft run` restarts the broker and the controller when they die. It reports to the controller when
the agent has ended, and when a signal asks for the end of the job. Before `tft run` ends, it ends
all processes that it has started.
"""

import asyncio
import signal
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from tft import pulse, stopped
from tft.bus.base import Bus, Heard, NotLetIn
from tft.bus.zeromq import open_bus
from tft.checkpoint import CheckpointStore, checkpoint_store_of, give_up, manifest_of, newest
from tft.clock import SystemClock
from tft.core.job.policy import Policy
from tft.core.link.delivery import Outbox
from tft.ending_signals import heeded
from tft.files import room_lacks, write_pid, write_whole
from tft.last_words import forget_words, last_words
from tft.launcher.advice import advice
from tft.launcher.children import Children, LaunchedProcess
from tft.launcher.console import LiveConsole, PlainConsole, Speech, has_terminal
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
from tft.launcher.news import NewsPrinter
from tft.launcher.plan import Plan, named
from tft.launcher.progress import show_progress
from tft.launcher.run_directory import (
    REPORT,
    FreshReport,
    JobThere,
    RoomWatch,
    known_unfit,
    last_line,
    log_file,
    passed_over,
    resumable,
    run_dir_of,
    unfit,
    write_job,
)
from tft.launcher.summary import asked_to_end, reasons, remaining, summary, to_go_on
from tft.limits import raise_open_files
from tft.protocol.messages import Envelope, Lead, News, NodeLost, Report, StopRequested
from tft.protocol.topics import NEWS, ORDERS, REPORTS

Console = LiveConsole | PlainConsole

FINISHED = "every rank has finished"
"""The reason that the report gives for a completed job, from `tft.core.job.shutdown`. It is not
imported from there, because that imports the whole job machine, which the launcher does not need."""

_REPEAT = 0.1  # seconds after which an unacknowledged report is sent again
# seconds that the agent gets to end by itself after the controller has ordered its end: its ranks
# must end first
_TOLD_GRACE = 15.0
# seconds to wait for the end of the job after a signal: as long as the controller may take to stop
# the ranks and to save a last checkpoint
_STOP_LIMIT = Policy().stop + Policy().save
# seconds to wait until a controller on another node acknowledges a report; the limit is needed
# because that node may be lost
_NEWS_LIMIT = 10.0
# seconds after which a node gives up if the broker refuses it; not at once, because the broker of
# an earlier job may still listen at the address until the broker of this job starts
_SHUT_OUT_LIMIT = 10.0
# seconds between two checks whether a message of a controller has arrived
_LOOK = 1.0
# seconds without a message of a controller after which the operator is told that this node waits
# for a controller
_UNHEARD = 10.0
# seconds without a message of a controller after which a node gives up, if it has heard one before.
# A controller that is started again is back within seconds, and one that hangs is killed after
# `pulse.LIMIT`. If node 0 still trains and only the network to it is broken, its controller has
# given this node up long before
_LONELY = 120.0
# seconds after which a node that is led by `tft lead` says again that it hears no controller
_REMINDED = 600.0
# seconds within which the broker or the controller may be killed five times because it hangs. If it
# hangs a sixth time within these seconds, the job ends: the next process would probably hang too
_HUNG_WITHIN = 600.0
# seconds to wait, after an agent was killed, until its reaper has ended the processes left behind
_ORPHANS_LIMIT = 5.0


def launch(plan: Plan, environment: Mapping[str, str]) -> int:
    """
    Run the processes of a checked plan until the job is over. Return the exit code of `tft run`.

    The variables in `environment` are added to the environment of every process of the job.
    """
    raise_open_files("tft run")
    with run_dir_of(plan.settings, plan.node, leads=plan.leads, goes_on=plan.goes_on):
        plan = named(plan)
        settings = plan.settings
        if plan.leads:
            write_job(settings, plan.command)
            forget_words(settings.run_dir)
        report = FreshReport(settings.run_dir)
        if plan.leads and plan.may_begin and not plan.goes_on:
            _turn_back(checkpoint_store_of(settings))
        # Another launcher may have started one `tft run` for each rank. Then only the `tft run`
        # that leads the job prints this line.
        if plan.leads or plan.placed is None:
            say(f"the records of this run are in {settings.run_dir}{_beginning(plan)}")
        if plan.leads and settings.resume and not plan.goes_on:
            store = checkpoint_store_of(settings)
            for sentence in passed_over(store, newest(store)):
                say(sentence)
        clock = SystemClock()
        began = clock.now()
        with _console(plan) as console, Speech() as speech:
            news = NewsPrinter(speech.say)
            told = Told(report=report, news=news, console=console, speech=speech)
            code = asyncio.run(_run(plan, environment, told))
        took = clock.now() - began
        if plan.leads and plan.report is not None:
            _copy(report, plan.report, settings.run_dir)
    if plan.leads:
        _say_how_it_went(plan, report, news, took)
        if code not in (COMPLETED, DUMPED):
            why = report.why() or f"no report was written; see {settings.run_dir / 'logs'}"
            say(f"the job did not complete: {why}")
            if sentence := _newest_checkpoint(plan, report.incidents()):
                say(sentence)
        written = report.text() is not None
        if code == COMPLETED and not written:
            say("the job has completed, but its report could not be written")
        elif code == COMPLETED and (report.steps() == 0 or report.why() != FINISHED):
            say(report.why())
        if report.steps() == 0 and (written or code != COMPLETED):
            for sentence in advice(Path(plan.script)):
                say(sentence)
    if code == DUMPED and (plan.leads or plan.placed is None):
        say(_last_checkpoint(plan, report.incidents()))
    return code


def _console(plan: Plan) -> AbstractContextManager[Console | None]:
    """
    Return the console that shows the progress of the job; None if another launcher shows it, or if
    the user wants none.
    """
    if not plan.leads or plan.progress == 0:
        return nullcontext()
    # draw no live line under another launcher: processes that this launcher has not started may
    # write to the terminal too
    if plan.progress is None and not plan.launched and has_terminal():
        return LiveConsole(plan.settings.run_dir)
    return PlainConsole(plan.settings.run_dir)


def _copy(report: FreshReport, path: Path, run_dir: Path) -> None:
    """
    Write a copy of the report to `path`. If there is no report, or if the copy cannot be written,
    say so and go on, because the exit code must say how the job ended.
    """
    text = report.text()
    if text is None:
        say("the job ended without a report")
        return
    try:
        write_whole(path, text)
    except OSError as error:
        say(
            f"the copy of the report cannot be written to {path} ({error.strerror or error}): read "
            f"{run_dir / REPORT}"
        )


def _say_how_it_went(plan: Plan, report: FreshReport, news: NewsPrinter, took: float) -> None:
    """
    Print the summary of the run, and why the job has ended if an incident has ended it.
    """
    incidents, run_dir = report.incidents(), plan.settings.run_dir
    for line in (
        *news.rest(incidents),
        *remaining(report.missed(), report.begins_unlike()),
        *last_words(run_dir),
        *(summary(report.steps(), incidents, took, run_dir) if report.text() else ()),
        *reasons(incidents),
    ):
        say(line)


def _last_checkpoint(plan: Plan, incidents: Sequence[dict[str, Any]]) -> str:  # Any: JSON
    """
    Return the sentence that tells the operator that the job ended with a last checkpoint.

    The sentence says how to continue with `--resume`, or why `--resume` would not accept the
    checkpoint.
    """
    store = checkpoint_store_of(plan.settings)
    last = newest(store)
    why = "" if last is None else known_unfit(store, last)
    if why:
        return f"the job ended with a last checkpoint that --resume does not accept: {why}"
    return f"the job ended with a last checkpoint: {to_go_on(incidents, f'{plan.again} it')}"


def _newest_checkpoint(plan: Plan, incidents: Sequence[dict[str, Any]]) -> str:  # Any: JSON
    """
    Return the sentence that says how a job that did not complete continues from its newest
    checkpoint, or why it cannot. Return an empty text if there is no checkpoint.
    """
    store = checkpoint_store_of(plan.settings)
    checkpoint = newest(store)
    if checkpoint is None:
        return ""
    promise = (
        f"{checkpoint} is the newest checkpoint: {to_go_on(incidents, f'{plan.again} from it')}"
    )
    return known_unfit(store, checkpoint) or promise


def _turn_back(store: CheckpointStore) -> None:
    """
    Rename all checkpoints that are newer than the newest usable checkpoint. tft then ignores the
    renamed checkpoints.

    So a job that is restarted automatically resumes from the newest usable checkpoint. If no
    checkpoint is usable, nothing is renamed.
    """
    last, directory = newest(store), resumable(store)
    if last is None or directory is None or last == directory:
        return
    say(f"{unfit(store, last)}; it is set aside")
    give_up(store, manifest_of(directory).step)


def _beginning(plan: Plan) -> str:
    """
    Return the end of the first line that `tft run` prints. This end says from which checkpoint the
    run continues. It is empty for a new run.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """
    The objects through which the launcher learns about the job and tells the user about it.
    """

    report: FreshReport
    news: NewsPrinter
    console: Console | None
    speech: Speech


async def _run(plan: Plan, environment: Mapping[str, str], told: Told) -> int:
    settings = plan.settings
    topics = [ORDERS, NEWS] if plan.leads else [ORDERS]
    with Children() as children:
        async with open_bus(
            settings.broker, job=settings.job, sender=plan.sender, topics=topics,
            curve=settings.curve,
        ) as bus:  # fmt: skip
            return await NodeLauncher(plan, environment, children, bus, told).run()


def say(sentence: str) -> None:
    """
    Print a line for the operator on stderr. Only the output of the ranks goes to stdout.

    If stderr cannot be written, for example because the terminal is closed, the error is ignored.
    """
    with suppress(OSError):
        click.echo(f"tft: {sentence}", err=True)


@dataclass(slots=True)
class _Leader:
    """
    What a launcher knows about the controller, from the messages that it has heard.
    """

    led: bool = False
    """True if a controller was ever heard."""
    state: str = ""
    """The state of the job, as the controller has told it last. Empty: no controller was heard."""
    unheard: float = 0.0
    """For how many seconds no controller was heard, counted by `_watch_controller`."""
    shut_out: asyncio.TimerHandle | None = None
    """The timer after which this launcher gives up, because the broker refuses it."""


class NodeLauncher:
    """
    Starts, supervises and ends the processes of one launcher: agent, broker and controller, as far
    as the plan has them.
    """

    def __init__(
        self,
        plan: Plan,
        environment: Mapping[str, str],
        children: Children,
        bus: Bus,
        told: Told,
    ) -> None:
        self._plan = plan
        self._commands = plan.commands()
        self._environment = environment
        self._children = children
        self._bus = bus
        self._told = told
        self._parts: dict[str, LaunchedProcess] = {}
        self._hung = {name: Restarts(limit=5, within=_HUNG_WITHIN) for name in self._commands}
        self._clock = SystemClock()
        self._outbox = Outbox()
        self._grace = 0.0
        self._pids_missed = False
        self._leader = _Leader()
        loop = asyncio.get_running_loop()
        self._stop: asyncio.Future[signal.Signals] = loop.create_future()
        self._over: asyncio.Future[int] = loop.create_future()

    async def run(self) -> int:
        """
        Start all processes of this launcher, and supervise these processes until the job is over.
        Then end the processes that still run.

        Returns the exit code of `tft run`.
        """
        loop = asyncio.get_running_loop()
        for number in heeded():
            loop.add_signal_handler(number, self._signalled, number)
        async with asyncio.TaskGroup() as tasks:
            duties = [self._listen(), self._stop_when_asked()]
            if self._plan.trains:
                duties.append(self._watch_agent())
            if self._plan.leads:
                duties += [self._keep("broker"), self._keep("controller")]
            else:
                duties.append(self._watch_controller())
            if self._told.console is not None:
                duties.append(self._show_progress(self._told.console))
            running = [tasks.create_task(duty) for duty in duties]
            code = await asyncio.shield(self._over)
            for task in running:
                task.cancel()
            await self._end()
        return code

    # ------------------------------------------------------------ the processes of this launcher

    async def _keep(self, name: str) -> None:
        """
        Run the broker or the controller until the job is over, and restart the process when it
        dies. `name` says which of the two processes.

        The job ends if the process dies too often, or refuses its first start. It also ends if a
        restarted controller refuses to start.
        """
        restarts, room = Restarts(), RoomWatch(self._plan.settings.run_dir)
        refusable = True
        while True:
            code = await self._start(name).ended()
            if self._over.done():
                return
            if name == "controller" and code in RESULTS:
                self._finish(exit_code(code, self._stopped_by), grace=_TOLD_GRACE)
                return
            if code == REFUSED and (refusable or name == "controller"):
                # The job ends here. Only a restarted broker that has refused to start is started
                # again below, because it may have found its port in use for a moment. A controller
                # that refuses a damaged story (the record of all events) would always refuse it.
                self._refused(name, REFUSED if refusable else FAILED)
                return
            if not restarts.again(self._clock.now()):
                self._told.speech.say(
                    f"the {name} {ended(code)}, after {restarts.limit} restarts within "
                    f"{restarts.within:.0f} s: giving up; see the end of {self._log_of(name)}"
                )
                self._finish(FAILED)
                return
            self._told.speech.say(f"the {name} {ended(code)}; it is started again")
            if sentence := room.sentence():
                # under another launcher a second signal changes nothing
                at_once = "" if self._plan.placed else "; a second signal kills the job at once"
                self._told.speech.say(f"{sentence}{at_once}")
            refusable = False

    async def _watch_agent(self) -> None:
        """
        Run the agent until it ends. The agent is not restarted, because the ranks of the node die
        with their agent.
        """
        name = self._plan.agent
        agent = self._start(name)
        code = await agent.ended()
        if code == REFUSED:
            self._refused(name, REFUSED)
            return
        if code == COMPLETED:
            # The controller has ordered the end of the agent. If this launcher runs the controller,
            # the exit code of the controller is the result of the job. Otherwise the report has it.
            if not self._plan.leads:
                self._finish(self._reported())
            return
        why = f"the agent of node {self._plan.node} {ended(code)}"
        self._told.speech.say(f"{why}; see the end of {self._log_of(name)}")
        node, pid = self._plan.node, agent.process.pid
        lost = NodeLost(node=node, pid=pid, why=why, at=self._clock.now())
        if self._plan.leads:
            await self._tell(lost)
            return  # the controller of this launcher decides whether the job can go on
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
                self._told.speech.say,
                f"the {name} was stopped (SIGSTOP) for {stopped.LIMIT:.0f} s: continued",
            ),
            hangs=partial(self._hangs, name),
        )
        self._parts[name] = child
        missed = write_pid(self._plan.settings.run_dir, name, child.process.pid)
        if missed and not self._pids_missed:
            self._pids_missed = True
            self._told.speech.say(f"{missed}; the job goes on without it")
        return child

    def _hangs(self, name: str) -> None:
        """
        Kill the broker or the controller, because the process hangs. `_keep` then starts it again.
        If the process hangs too often, the job ends.

        An agent is not killed, because the ranks of the node would die with it.
        """
        silent = f"the {name} has not run for {pulse.LIMIT:.0f} s"
        if name == self._plan.agent:
            self._told.speech.say(f"{silent}: until it does, tft cannot act on this node")
            return
        if not self._hung[name].again(self._clock.now()):
            self._told.speech.say(f"{silent}, as {self._hung[name].limit} times before: giving up")
            self._finish(FAILED)
            return
        self._told.speech.say(f"{silent}: it is killed")
        self._parts[name].send(signal.SIGKILL)

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
            self._told.speech.say(
                f"processes of this job still run on this node after {_ORPHANS_LIMIT:.0f} s: end "
                "them before another job starts here"
            )

    # ------------------------------------------------------------ the end of the job

    def _finish(self, code: int, *, grace: float = 0.0) -> None:
        """
        Mark the job as over. `code` is the exit code of `tft run`. Only the first call counts.

        `grace` is the time in seconds that the agent gets to end by itself, because the controller
        has ordered its end. With 0 the agent is ended at once.
        """
        if not self._over.done():
            self._grace = grace
            self._over.set_result(code)

    def _reported(self) -> int:
        """
        Return the exit code of the job that the report in the run directory contains. A launcher
        that does not run the controller calls this method when its agent has ended.

        The controller writes the report before it orders the agents to end. So if this node finds
        no report, its run directory is another one than that of the controller. The method then
        returns `FAILED`.
        """
        code = self._told.report.exit_code()
        if code is None:
            run_dir = self._plan.settings.run_dir
            self._told.speech.say(
                f"the job is over, and no report of it is in {run_dir}: do all nodes share it?"
            )
            return FAILED
        return code

    def _refused(self, name: str, code: int) -> None:
        log = self._log_of(name)
        said, lacks = last_line(log), room_lacks(self._plan.settings.run_dir)
        if lacks and not said:
            self._told.speech.say(f"the {name} cannot start, and its log has no reason: {lacks}")
        else:
            self._told.speech.say(
                f"the {name} refused to start; the reason is the last line of {log}:"
            )
            self._told.speech.echo(said)
        self._finish(code)

    def _signalled(self, number: signal.Signals) -> None:
        """
        Handle SIGINT, SIGTERM or SIGHUP. After the first signal, the job is asked to end with a last
        checkpoint. After the second signal, all processes are killed.

        A SIGHUP is ignored as a second signal: when a terminal closes, the kernel and the shell
        both send one. If another launcher has placed the rank of this node, a second signal of any
        kind is ignored.
        """
        if not self._stop.done() and not self._over.done():
            self._stop.set_result(number)
            return
        if number == signal.SIGHUP:
            return
        if self._plan.placed is not None:
            # The other launcher, such as torchrun, may send a signal twice. It does not depend on
            # the second signal: it kills this process when its own time limit is over.
            return
        self._told.speech.say(f"{number.name}: all processes are killed")
        for part in self._parts.values():
            part.send(signal.SIGKILL)
        self._finish(exit_code(FAILED, self._stopped_by))

    async def _stop_when_asked(self) -> None:
        number = await asyncio.shield(self._stop)
        if not self._leader.led and not self._plan.leads:
            self._told.speech.say(
                f"{number.name}: no controller has been heard yet, and nothing has started here"
            )
            self._finish(exit_code(FAILED, number))
            return
        if self._plan.placed is None or self._plan.leads:
            what = asked_to_end(self._leader.state, placed=self._plan.placed is not None)
            self._told.speech.say(f"{number.name}: {what}")
        why = f"{number.name} was sent to `tft run` on node {self._plan.node}"
        # Wait without limit for the acknowledgement if this launcher runs the controller. If that
        # controller has died, this launcher restarts it, and it then receives the request.
        limit = None if self._plan.leads else _NEWS_LIMIT
        try:
            async with asyncio.timeout(limit):
                node = None if self._plan.leads else self._plan.node
                asked = StopRequested(why=why, signal=number, node=node, at=self._clock.now())
                await self._tell(asked)
        except TimeoutError:
            self._told.speech.say(
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
        Send a report to the controller, again and again, until the controller acknowledges the
        report or the job is over.
        """
        number = self._outbox.add(report)
        while not self._over.done() and number in dict(self._outbox.pending()):
            for earlier, unheard in self._outbox.pending():
                self._bus.publish(REPORTS, unheard, number=earlier)
            await asyncio.wait([self._over], timeout=_REPEAT)

    async def _listen(self) -> None:
        while True:
            match await self._bus.receive():
                case Heard(envelope=Envelope(message=Lead(heard=heard, state=state))):
                    self._leader.led, self._leader.state = True, state
                    if self._leader.unheard >= _UNHEARD:
                        self._told.speech.say("a controller is heard again")
                    self._leader.unheard = 0.0
                    self._outbox.acknowledge(heard.get(self._plan.sender, 0))
                    if self._leader.shut_out is not None:
                        self._leader.shut_out.cancel()
                        self._leader.shut_out = None
                case Heard(envelope=Envelope(message=News() as news)):
                    self._told.news.heard(news)
                case NotLetIn(why=why):
                    self._not_let_in(why)
                case _:
                    pass  # all other messages are orders to ranks and agents

    async def _show_progress(self, console: Console) -> None:
        """
        Show the progress of the job. If the progress cannot be shown, the job goes on without it.
        """
        settings = self._plan.settings
        there = JobThere(
            job=settings.job,
            broker=settings.broker,
            log=self._log_of("controller"),
            curve=settings.curve,
        )
        try:
            await show_progress(
                there, settings.nnodes, settings.world, console, self._plan.progress
            )
        except Exception as error:  # noqa: BLE001 # whatever fails here must not end the job
            with suppress(Exception):
                console.show(())
            self._told.speech.say(
                f"the progress is not shown any more: {type(error).__name__}: {error}"
            )

    async def _watch_controller(self) -> None:
        """
        Print that no controller is heard, `_UNHEARD` seconds after the start or after the last
        message of a controller. End this node after `_LONELY` seconds without a message.

        A node that has never heard a controller waits without limit for the launcher that runs it.
        If that launcher could not start, only its own terminal says why. A node that is led by
        `tft lead` waits without limit too, because another `tft lead` can lead it again.

        The time is counted in checks, not read from the clock. So if this process was stopped, or
        its machine has slept, waiting messages are read before this node gives up.
        """
        broker = self._plan.settings.broker
        while True:
            await asyncio.sleep(_LOOK)
            before, self._leader.unheard = self._leader.unheard, self._leader.unheard + _LOOK
            unheard = f"no controller has been heard at {broker} for {self._leader.unheard:.0f} s"
            if before < _UNHEARD <= self._leader.unheard:
                self._told.speech.say(f"{unheard}, still waiting: {self._whom_to_ask()}")
            elif not self._leader.led:
                continue
            elif not self._plan.led_elsewhere:
                if self._leader.unheard >= _LONELY:
                    self._give_up(unheard)
            elif self._leader.unheard % _REMINDED < _LOOK:
                self._told.speech.say(f"{unheard}, and this node trains on: {self._whom_to_ask()}")

    def _whom_to_ask(self) -> str:
        if not self._leader.led:
            return "is `tft run` on node 0 (or `tft lead`) running? Its terminal says why if not"
        if self._plan.led_elsewhere:
            return "if `tft lead` does not run, the same `tft lead` leads this node again"
        return f"without one, this node ends {_LONELY - _UNHEARD:.0f} s from now"

    def _give_up(self, why: str) -> None:
        """
        End this node, because the node that leads the job is lost. If the run directory has the
        report of the job, the job is over, and only the order to end has not reached this node.
        """
        code = self._told.report.exit_code()
        if code is None:
            self._told.speech.say(f"{why}: this node ends, without a last checkpoint")
            if sentence := _newest_checkpoint(self._plan, ()):
                self._told.speech.say(sentence)
        self._finish(exit_code(FAILED, self._stopped_by) if code is None else code)

    def _not_let_in(self, why: str) -> None:
        """
        Print why the broker refuses this node. If the node has never heard a controller, and hears
        none within `_SHUT_OUT_LIMIT` seconds, give up.

        A node with wrong keys would otherwise wait forever. A node that has heard a controller
        before does not give up: it tries to reach the broker until the job is over.
        """
        self._told.speech.say(why)
        if not self._leader.led and not self._plan.leads and self._leader.shut_out is None:
            loop = asyncio.get_running_loop()
            self._leader.shut_out = loop.call_later(_SHUT_OUT_LIMIT, self._finish, REFUSED)
