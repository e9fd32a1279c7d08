"""
The process of the controller. It contains the job machine, the state machine that makes all
decisions about recovery. The process turns messages from the bus into events, and lets the job
machine handle each event. Then the process writes the event to the story (the record of all
events), and publishes the orders that the job machine has returned. A timer tells the job machine
when its next deadline has passed.
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, assert_never, get_args

import structlog

from tft import checkpoint
from tft.bus.base import Arrival, Bus, Gone, Heard, Malformed, NotLetIn, Present
from tft.bus.zeromq import open_bus
from tft.clock import SystemClock
from tft.config import JobSettings
from tft.controller.advisors import Advisors
from tft.controller.inquiry import Inquiry
from tft.controller.progress import PROGRESS, ProgressFile, last_incident
from tft.controller.report_file import ReportFile
from tft.core.job.commands import Command, Consult, JobOver, Tell
from tft.core.job.events import DeadlinePassed, Event, Led, Received, Stalled
from tft.core.job.machine import Machine
from tft.core.job.policy import STRATEGIES, Policy
from tft.core.job.training import CHECKPOINTS_RESUMED, CHECKPOINTS_SUSPENDED
from tft.core.job.transitions import CALM, SETTLED, State
from tft.core.link.connections import Connections
from tft.core.link.delivery import Inbox
from tft.core.link.final_steps import FinalSteps
from tft.core.link.hang_detection import HangDetection
from tft.core.link.protection import Protection
from tft.core.link.slice_comparison import SliceComparison
from tft.core.link.step_times import StepTimes
from tft.errors import StoryCorrupt
from tft.files import NO_ROOM, room_lacks
from tft.limits import raise_open_files
from tft.plugins import load_plugins
from tft.protocol.messages import (
    Beat,
    Envelope,
    Inquire,
    Lead,
    NodeJoined,
    NodeLost,
    Order,
    OutsideReport,
    Report,
    Whereabouts,
)
from tft.protocol.topics import BEATS, NEWS, ORDERS, REPORTS
from tft.pulse import Pulse
from tft.replay.recording import Opened, Story, last_run, salvaged_run
from tft.spi.types import Remark

REPEAT = 0.1
"""The time in seconds after which the controller sends an order again, if the receiver of the order
has not answered."""
LEAD = 1.0
"""The time in seconds between two `Lead` messages (the controller's announcement that it leads)
when there is nothing new to say. The time is long because every rank reads each `Lead`."""
REMEMBERED = 100
"""How many warnings about messages the controller remembers. It does not log a remembered warning
again."""
FAREWELL = 3.0
"""The time in seconds for which the controller waits before it ends. In this time the agents must
learn that the job is over, and disconnect."""
LOOK = 1.0
"""The time in seconds between two checks whether any node is connected."""
DESERTED = 10.0
"""The time in seconds without any connected node after which a message for the operator is
printed."""
ALL_LOST = 300.0
"""The time in seconds without any connected node after which all nodes count as lost. It is long,
because a broken network between the nodes and this controller looks the same as lost nodes. With a
broken network the nodes train on, and should find their controller when the network works again,
for example after the restart of a switch. If the nodes are really lost, the long wait costs
nothing, because only this controller waits."""
ROOM = 0.5
"""The time in seconds between two tries to write the report while the disk has no room for it."""
WATCHED = frozenset({State.HEALTHY, State.RESUMING, State.PAUSING})
"""The states of the job in which ranks are expected to make progress. A standstill in any other
state is not reported."""
REMARKED = frozenset({CHECKPOINTS_SUSPENDED, CHECKPOINTS_RESUMED})
"""The events of the job machine that also become remarks about the job: remarks are kept for the
report and sent to consoles."""
REPORTS_BY_TYPE: tuple[type, ...] = get_args(Report)

log = structlog.get_logger()


def main(settings: JobSettings, pulse: Pulse | None = None) -> int:
    """
    Run the controller of one job until the job is over. Return the exit code of the job, which is
    also the exit code of `tft run`. Through `pulse` the controller shows its launcher that it does
    not hang.
    """
    raise_open_files("the controller")
    with Story(settings.run_dir / "story.jsonl") as story:
        return asyncio.run(Controller(settings, story).run(pulse))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beats:
    """
    The objects that examine the beats (the heartbeats of the nodes). The job machine does not get
    the beats themselves. It gets an event only when one of these objects has found something, such
    as a standstill. The objects read no clock. `inquiry` sends messages, and `progress` writes a file.
    """

    times: StepTimes
    hang_detection: HangDetection
    connections: Connections
    inquiry: Inquiry
    progress: ProgressFile
    slices: SliceComparison = field(default_factory=SliceComparison)
    protection: Protection = field(default_factory=Protection)
    final_steps: FinalSteps = field(default_factory=FinalSteps)


class Controller:
    """
    One controller of one job. If an earlier controller has led this run of the job, this controller
    continues from the story that the earlier one has written.
    """

    def __init__(self, settings: JobSettings, story: Story) -> None:
        self._settings = settings
        self._story = story
        self._clock = SystemClock()
        self._inbox = Inbox()
        plugins = load_plugins()
        self._advisors = Advisors(plugins)
        self._report = ReportFile(settings, plugins)
        self._warnings = Warnings()
        self._lost = 0
        """The number of events that could not be read because the story (the record of all events)
        is damaged."""
        self._machine, opened = self._begin()
        times = StepTimes()
        self._beats = _Beats(
            times=times,
            hang_detection=HangDetection(opened.policy, times),
            connections=Connections(self._machine.node_of),
            inquiry=Inquiry(settings.run_dir, times, self._publish, self._remark),
            progress=ProgressFile(settings.run_dir / PROGRESS, opened),
        )
        # tell the plugins neither the incidents that were closed under an earlier controller, nor
        # the step from which the ranks began: the earlier controller has told both
        self._report.newly_closed(self._machine.incidents)
        self._beats.final_steps.resumed(self._members(), None)
        # ranks that train send digests of slices (parts of shards). Start to compare these digests
        # now, because the ranks may be training already, under an earlier controller
        self._compare_slices()
        self._present: set[str] = set()
        """The names of the participants that are connected to the bus."""
        self._over = asyncio.Event()
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._bus: Bus | None = None

    # ---------------------------------------------------------------- the start of the controller

    def _begin(self) -> tuple[Machine, Opened]:
        path = self._settings.run_dir / "story.jsonl"
        try:
            told = last_run(path, self._settings.job, self._settings.run)
        except StoryCorrupt as damage:
            return self._salvage(path, damage)
        if told is None:
            opened = self._open()
            events: list[Event] = []
            self._story.opened(opened)
        else:
            opened, events = told
        return self._replayed(opened, events), opened

    def _replayed(self, opened: Opened, events: list[Event]) -> Machine:
        machine = opened.machine()
        for event in events:
            if isinstance(event, Received):
                self._inbox.accept(event.sender, event.number)
            machine.handle(event)
        if events:
            log.info("story_read", events=len(events), state=str(machine.state))
        return machine

    def _salvage(self, path: Path, damage: StoryCorrupt) -> tuple[Machine, Opened]:
        """
        Bring the job machine to the state that follows from the readable part of a damaged story,
        so that the ranks can still save a last checkpoint. Raises the exception `damage` if too
        little of the story is readable for that.
        """
        told = salvaged_run(path, self._settings.job, self._settings.run)
        if told is None:
            raise damage
        opened, events, self._lost = told
        self._inbox = Inbox(gaps=True)
        try:
            machine = self._replayed(opened, events)
        # Some events of the story are lost. So an event that can still be read may not fit the state
        # of the job machine, and handling it may raise any exception.
        except Exception as error:
            raise damage from error
        log.error("story_damaged", lost=self._lost, why=str(damage))
        return machine, opened

    def _open(self) -> Opened:
        settings = self._settings
        resume: tuple[str, int] | None = None
        older: list[tuple[str, int]] = []
        store = checkpoint.checkpoint_store_of(settings)
        newest = checkpoint.newest(store) if settings.resume else None
        if newest is not None:
            manifest = checkpoint.verify(newest)
            resume, older = (str(newest), manifest.step), checkpoint.older(store, manifest)
        earlier = [int(str(incident["id"])) for incident in self._report.earlier("incidents")]
        if settings.resume:
            earlier.append(last_incident(settings.run_dir / PROGRESS))
        return Opened(
            job=settings.job,
            run=settings.run,
            world=settings.world,
            policy=Policy(
                enable=frozenset(settings.enable or STRATEGIES),
                max_incidents=settings.max_incidents,
                flaps=settings.max_rank_faults,
                replace="node" if settings.replace_nodes else "process",
                spread_savers=settings.spread_savers,
                save_copies=settings.save_copies == "all",
                skip_batch=settings.skip_batch,
                corruption=settings.on_corruption,  # type: ignore[arg-type]  # checked at the start
                checkpoint_every=settings.checkpoint_every,
                keep_checkpoints=settings.keep_checkpoints,
                advised=self._advisors.present(),
            ),
            checkpoints=str(settings.checkpoints),
            checkpoint_name=settings.checkpoint_name,
            resume=resume,
            older=tuple(older),
            first_incident=max(earlier, default=0) + 1,
            at=self._clock.now(),
        )

    # ---------------------------------------------------------------- hearing and sending messages

    async def run(self, pulse: Pulse | None = None) -> int:
        """
        Lead the job until it is over. Return the exit code of the job's outcome, or 4 if there is
        no outcome.
        """
        # the epoch is the number of this controller, and must be higher than the epoch of every
        # earlier controller. Each unreadable event of the story may have been the start of a
        # controller with an epoch of its own, so the number of unreadable events is added.
        epoch = self._machine.epoch + 1 + self._lost
        sender = f"controller/{epoch}"
        topics = (REPORTS, BEATS)
        settings = self._settings
        async with open_bus(
            settings.broker, job=settings.job, sender=sender, topics=topics, curve=settings.curve
        ) as bus:
            self._bus = bus
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(_give_up)
            if pulse is not None:
                pulse.beat_in_loop()
            await self._await_room(bus)
            self._beats.progress.leads(epoch, self._clock.now())
            self._feed(Led(at=self._clock.now(), epoch=epoch, lost=self._lost))
            # tell the plugins the nodes that joined under an earlier controller, because these
            # nodes do not join again
            self._tell(
                "leads",
                nodes=sorted(self._machine.nodes),
                job=settings.job,
                run=settings.run,
                run_dir=str(settings.run_dir.absolute()),
                ranks=settings.world,
                state=str(self._machine.state),
                incident=self._machine.incident.number,
            )
            self._advisors.led(lambda message: _soon(loop, partial(self._own, message)))
            # a node may have been lost while no controller led, so measure from now on for how long
            # each node is silent
            for node in self._machine.nodes:
                self._beats.hang_detection.expect(node, self._clock.now())
            self._repeat(bus)
            tasks = [
                asyncio.create_task(self._listen(bus)),
                asyncio.create_task(self._say_again(bus)),
                asyncio.create_task(self._lead(bus)),
                asyncio.create_task(self._watch_for_nodes()),
            ]
            over = asyncio.create_task(self._over.wait())
            done, _ = await asyncio.wait([*tasks, over], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {over}:
                task.result()
            await self._farewell(bus)
            for task in tasks:
                task.cancel()
            if pulse is not None:
                pulse.close()
        outcome = self._machine.outcome
        return 4 if outcome is None else outcome.code

    async def _await_room(self, bus: Bus) -> None:
        """
        Wait until the disk has room for the story. Meanwhile this controller decides nothing and
        sends no orders. It repeats the last `Lead` of the controller before it, because nodes that
        hear no `Lead` for long end themselves. It drops all reports: the senders repeat them until
        a `Lead` acknowledges them.
        """
        lacks, told = room_lacks(self._settings.run_dir), False
        if not lacks:
            return
        listening = asyncio.create_task(self._overhear(bus))
        while lacks and not listening.done():
            if not told:
                log.error("waits_for_room", why=lacks)
                told = True
            if self._machine.epoch:
                bus.publish(ORDERS, self._lead_now())
            await asyncio.wait([listening], timeout=LEAD)
            lacks = room_lacks(self._settings.run_dir)
        if not listening.cancel():
            listening.result()  # raise the exception that ended the task
        log.info("room_again")

    async def _overhear(self, bus: Bus) -> None:
        """
        Record which participants connect to the bus and leave it, and drop all messages.
        """
        while True:
            arrival = await bus.receive()
            if isinstance(arrival, Present | Gone):
                self._hear(arrival)

    async def _listen(self, bus: Bus) -> None:
        while True:
            self._hear(await bus.receive())

    def _hear(self, arrival: Arrival) -> None:
        match arrival:
            case Heard(envelope=envelope):
                message = envelope.message
                if isinstance(message, Beat):
                    self._beat(message)
                elif isinstance(message, Whereabouts):
                    self._beats.inquiry.answered(message, self._clock.now())
                elif isinstance(message, REPORTS_BY_TYPE):
                    if not self._must_wait(envelope) and self._inbox.accept(
                        envelope.sender, envelope.number
                    ):
                        if isinstance(message, NodeJoined):
                            self._beats.hang_detection.expect(message.node, self._clock.now())
                            message = replace(message, step=self._beats.times.furthest)
                        if isinstance(message, NodeLost):
                            message = self._node_lost(message)
                        self._feed(
                            Received(
                                at=self._clock.now(),
                                sender=envelope.sender,
                                number=envelope.number,
                                message=message,  # type: ignore[arg-type] # narrowed by REPORTS_BY_TYPE
                            )
                        )
                        if isinstance(message, NodeJoined):
                            self._tell("node_joined", node=message.node, ranks=[*message.ranks])
                    self._news.set()
            case Malformed(why=why):
                self._warnings.once("malformed_message", why)
            case NotLetIn(why=why):
                log.warning("not_let_in", why=why)
            case Present(sender=sender):
                self._beats.connections.present(sender)
                self._present.add(sender)
                if sender.startswith("ask."):
                    # a command of the operator, such as `tft pause`, has connected: send a `Lead`
                    # message at once, because the command first waits for it
                    self._news.set()
            case Gone(sender=sender):
                self._beats.connections.gone(sender, self._clock.now())
                self._present.discard(sender)
                self._news.set()
            case _:
                assert_never(arrival)

    def _must_wait(self, envelope: Envelope) -> bool:
        """
        Return True if the report comes from a second agent of a node whose first agent is still
        connected, for example because two launchers were given the same node. The report must wait
        until the node is lost or the first agent has disconnected. If the first agent was killed,
        the bus notices this within 2 s.
        """
        match envelope.message:
            case NodeJoined(node=node) if node in self._machine.nodes:
                agents = {name for name in self._present if name.startswith(f"node.{node}/")}
                if agents - {envelope.sender}:
                    self._warnings.once(
                        "node_taken",
                        f"{envelope.sender} waits: another agent of node {node} is connected",
                    )
                    return True
        return False

    def _beat(self, beat: Beat) -> None:
        now = self._clock.now()
        moves = self._beats.times.heard(beat)
        silence = self._beats.hang_detection.heard(beat, moves, now)
        if silence is not None and self._machine.state in WATCHED:
            watch = self._beats.hang_detection
            self._feed(Stalled(at=now, silence=silence, limit=watch.limit(), out=watch.out))
            self._beats.hang_detection.resumed(now)
        self._beats.slices.heard(beat)
        self._beats.protection.heard(beat)
        if self._advisors.heed_final and self._machine.state in CALM:
            self._advisors.final(self._beats.final_steps.heard(beat, now))
        self._beats.progress.beat(beat, now)
        self._beats.connections.heard(beat.node, now)
        if self._machine.state is State.HEALTHY:
            self._beats.inquiry.heard(beat, moves, now, self._machine.epoch)
        while self._machine.state not in SETTLED and (
            verdict := self._beats.slices.verdict(now, calm=self._machine.state in CALM)
        ):
            self._feed(verdict)
            # Send a `Lead` message at once. The message contains the newest step at whose end all
            # copies of every shard were equal. Ranks that keep copies in host memory need this step.
            self._news.set()
        for remark in self._advisors.beat(beat):
            self._remark(remark.event, **remark.facts)
        for node in self._beats.connections.lost(now, self._machine.replaces):
            if node in self._machine.nodes:
                why = f"all connections of node {node} to the bus have ended"
                self._own(self._node_lost(NodeLost(node=node, why=why, at=now)))
        for node in self._beats.hang_detection.silent(now):
            why = f"node {node} has sent no heartbeat for {self._beats.hang_detection.node_silence:.0f} s"
            self._own(self._node_lost(NodeLost(node=node, why=why, at=now)))

    def _node_lost(self, message: NodeLost) -> NodeLost:
        """
        Forget the heartbeats of a lost node. Return the report `message`, completed with the
        highest step that any rank has reached.
        """
        self._beats.hang_detection.forget(message.node)
        return replace(message, step=self._beats.times.furthest)

    async def _watch_for_nodes(self) -> None:
        """
        Tell the operator when no node is connected any more, and declare all nodes lost if none
        comes back within `ALL_LOST` seconds. `_beat` cannot do this: it looks for lost nodes only
        when a heartbeat of another node arrives.

        The time is counted in checks, not read from the clock. So if this process was stopped, or
        its machine has slept, waiting messages are read before any node is declared lost. The time
        does not count while not even this controller's launcher is connected: then the broker is
        lost, and the nodes may be well.
        """
        deserted = 0.0
        while True:
            await asyncio.sleep(LOOK)
            nodes = sorted(self._machine.nodes)
            settled = self._machine.state in SETTLED  # the job ends, so nodes leave as ordered
            if (
                settled
                or not nodes
                or not self._present
                or self._beats.connections.nodes() & {*nodes}
            ):
                deserted = 0.0
                continue
            before, deserted = deserted, deserted + LOOK
            if before < DESERTED <= deserted:
                self._remark("no_node_heard", nodes=nodes, seconds=deserted, limit=ALL_LOST)
            if before < ALL_LOST <= deserted:
                why = f"no node has been connected to the bus for {deserted:.0f} s"
                for node in nodes:
                    lost = NodeLost(node=node, why=why, at=self._clock.now())
                    self._own(self._node_lost(lost))

    async def _say_again(self, bus: Bus) -> None:
        while True:
            await asyncio.sleep(REPEAT)
            self._repeat(bus)

    def _repeat(self, bus: Bus) -> None:
        for order in self._machine.outstanding():
            bus.publish(ORDERS, order)

    async def _lead(self, bus: Bus) -> None:
        while True:
            bus.publish(ORDERS, self._lead_now())
            news = self._report.notices.news(self._machine.epoch)
            if news is not None:
                bus.publish(NEWS, news)
            self._news.clear()
            try:
                async with asyncio.timeout(LEAD):
                    await self._news.wait()
            except TimeoutError:
                pass

    def _lead_now(self) -> Lead:
        # acknowledge only reports of processes that are still connected. After many incidents the
        # processes that have left are far more, and every process of the job reads this message
        heard, wanted = self._inbox.heard(), self._present - set(self._machine.refused)
        return Lead(
            epoch=self._machine.epoch,
            heard={sender: heard[sender] for sender in wanted if sender in heard},
            state=str(self._machine.state),
            incident=self._machine.incident.number,
            check=self._machine.checked,
            compared=self._machine.certified,
            kept_by=dict(self._machine.kept_by),
            run=self._settings.run,
            silent=tuple(self._machine.silent),
        )

    async def _farewell(self, bus: Bus) -> None:
        """
        Wait until every agent has disconnected from the bus, for `FAREWELL` seconds at most.
        Meanwhile other tasks of this process repeat the last orders, because each agent must
        receive the order to end.
        """
        try:
            async with asyncio.timeout(FAREWELL):
                while self._agents():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            log.warning("agents_still_present", nodes=self._agents())

    def _agents(self) -> list[str]:
        return sorted(sender for sender in self._present if sender.startswith("node."))

    # ---------------------------------------------------------------- events of the job machine

    def _feed(self, event: Event) -> None:
        before = self._machine.state
        for command in self._judge(event):
            self._do(command)
        newly_closed = self._report.newly_closed(self._machine.incidents)
        for closed in newly_closed:
            self._report.tell(closed)
            self._news.set()
        state = self._machine.state
        incident, outcome = self._machine.incident, self._machine.outcome
        self._beats.progress.state(
            state,
            incident.number if incident.is_open else 0,
            "" if outcome is None else outcome.result,
            event.at,
        )
        if state is not before:
            self._tell("state", state=str(state), incident=self._machine.incident.number)
            self._news.set()
            if state is State.HEALTHY:
                self._beats.inquiry.resumed(event.at)
            if state in (State.RESUMING, State.PAUSING):
                self._beats.hang_detection.resumed(event.at)
            if state is State.RESUMING:
                self._compare_slices()
                self._advisors.final(
                    self._beats.final_steps.resumed(self._members(), self._began_after())
                )
        for closed in newly_closed:
            self._advisors.closed(*self._report.entry(closed))
        self._set_timer()

    def _members(self) -> frozenset[int]:
        """
        Return the ranks that train, or none if no rank has trained yet.
        """
        return frozenset() if self._machine.attempt is None else self._machine.members

    def _began_after(self) -> int | None:
        """
        Return the step after which the ranks now begin to train. Return None if they continue where
        they are, because a pause is over.
        """
        incident = self._machine.incident
        step = incident.progress.step
        return None if incident.closed is not None or step is None else step - 1

    def _compare_slices(self) -> None:
        """
        Start to compare the digests that ranks send while they train. In each step a rank sends the
        digest of one slice of its shard. Digests from before the last incident are ignored.
        """
        machine = self._machine
        if machine.attempt is not None:
            replicas = machine.replicas()
            self._beats.slices.resumed(machine.attempt, machine.compared, replicas)
            self._advisors.resumed(replicas)

    def _judge(self, event: Event) -> list[Command]:
        """
        Let the job machine handle an event, and return the commands of the job machine. Before the
        method returns, the event and a digest of the commands are written to the story.

        If the job machine raises an exception, the event is written to the story too. The failure
        can then be examined with the command `tft replay`.
        """
        before = self._machine.state
        try:
            commands = self._machine.handle(event)
            # check the invariants of the job machine only when its state has changed, because the
            # check takes longer the more ranks the job has
            if self._machine.state is not before:
                self._machine.check()
        except Exception:
            self._story.event(event, None)
            raise
        self._story.event(event, commands)
        return commands

    def _do(self, command: Command) -> None:
        match command:
            case JobOver(result=result, sound=sound):
                machine = self._machine
                if sound is not None:
                    self._give_up_after(sound)
                last = machine.last_step if result == "completed" else machine.checkpointed
                self._advisors.final(self._beats.final_steps.over(last))
                self._write_report(command)
            case Tell(event=event, facts=facts):
                (self._remark if event in REMARKED else self._tell)(event, **facts)
            case Consult():
                self._advisors.consult(command, self._own)
            case _:
                self._publish(command)

    def _write_report(self, outcome: JobOver, *, waits: bool = False) -> None:
        """
        Write the report, and let the controller end. While the disk has no room for the report, the
        controller still leads the job and repeats the attempt: the job is over only when its report
        is written. After any other error the job ends without a report, and the operator is told.
        """
        try:
            self._report.write(outcome, self._machine, self._beats.protection.steps())
        except OSError as error:
            if error.errno in NO_ROOM:
                if not waits:
                    self._remark("report_waits", why=error.strerror)
                again = partial(self._write_report, outcome, waits=True)
                asyncio.get_running_loop().call_later(ROOM, again)
                return
            self._report.lost(error)
        self._over.set()

    def _give_up_after(self, step: int) -> None:
        """
        Set aside the checkpoints of steps later than `step`, because they may contain wrong
        values. When a job returns to an earlier step, its ranks do this. A job that ends returns
        to no step, so the controller does it.
        """
        try:
            found = checkpoint.give_up(checkpoint.checkpoint_store_of(self._settings), step)
        except OSError as error:
            self._tell("checkpoints_not_given_up", after=step, why=str(error))
        else:
            if found:
                self._tell("checkpoints_given_up", after=step)

    def _publish(self, message: Order | Inquire) -> None:
        if self._bus is not None:
            self._bus.publish(ORDERS, message)

    def _remark(self, event: str, **facts: object) -> None:
        """
        Tell operators and plugins about an event on which no decision depends, and keep it for the
        report.
        """
        if self._report.remark(Remark(event=event, facts=facts), self._clock.now()):
            self._news.set()
        self._tell(event, **facts)

    def _tell(self, event: str, **facts: object) -> None:
        """
        Log an event that operators want to know of, and tell the plugins about the event. `facts`
        are the details of the event.
        """
        log.info(event, **facts)
        self._advisors.told(event, facts)

    def _own(self, message: OutsideReport) -> None:
        """
        Handle a report that was made in this process, for example by a plugin. The report needs no
        number, because it does not travel over the bus, where it could be lost or repeated.
        """
        self._feed(Received(at=self._clock.now(), sender="controller", number=0, message=message))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._machine.next_deadline()
        if deadline is not None:
            delay = max(0.01, deadline - self._clock.now())
            self._timer = asyncio.get_running_loop().call_later(delay, self._passed)

    def _passed(self) -> None:
        self._feed(DeadlinePassed(at=self._clock.now()))


class Warnings:
    """
    Logs warnings about messages that are not accepted. The same warning is logged only once. The
    reason: the sender gets no answer to such a message, and so repeats the message forever.
    """

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def once(self, event: str, why: str) -> None:
        """
        Log why a message is not accepted, unless the same reason was logged before. About
        `REMEMBERED` reasons are remembered.
        """
        if why not in self._logged:
            self._logged = {*list(self._logged)[-REMEMBERED:], why}
            log.warning(event, why=why)


def _soon(loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> None:
    """
    Make the event loop `loop` call the function `act` soon. `_soon` may be called on any thread. If
    the loop is closed, as after the end of the job, `act` is not called.
    """
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(act)


# `Any`, because asyncio puts values of several types into `context`
def _give_up(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """
    End the process of the controller at once, with exit code 70, because a callback of the event
    loop has raised an exception. A controller that has failed to handle an event must not go on.
    `tft run` starts another controller, which continues from the story (the recorded events).
    """
    log.critical("controller_failed", what=context["message"], exc_info=context.get("exception"))
    os._exit(70)
