"""
A simulated controller around the real job machine. The controller leads the job, or it is a standby
that waits until the leader falls silent.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tft.core.job.commands import Command, Consult, JobOver, Tell
from tft.core.job.events import DeadlinePassed, Event, Led, Received, Stalled
from tft.core.job.transitions import CALM, SETTLED, State
from tft.core.link.delivery import Inbox
from tft.core.link.hang_detection import HangDetection
from tft.core.link.leases import Lease
from tft.core.link.slice_comparison import SliceComparison
from tft.core.link.step_times import StepTimes
from tft.protocol.messages import (
    Advised,
    Beat,
    EndNode,
    Faulted,
    Kill,
    Lead,
    NodeJoined,
    NodeLost,
    Noticed,
    Order,
    Recall,
    Refused,
    Report,
    Spawn,
)
from tft.simulation.mail import Link
from tft.simulation.stage import NodePart, Stage
from tft.simulation.story import opened

WATCHED = (State.HEALTHY, State.RESUMING, State.PAUSING)
"""The states of the job machine in which ranks must make progress. Only in these states a
standstill of all ranks is reported as a stall."""
LEAD = 1.0
"""The time in seconds between two `Lead` messages when there is nothing new to acknowledge. With
these messages the leading controller acknowledges reports, and shows that it still leads."""
NEWS = 0.03
"""The time in seconds in which reports are collected before they are acknowledged together.
Deadlines are checked at the same interval."""
FIRST_REPEAT, LAST_REPEAT = 0.15, 1.5
"""The shortest and the longest interval between repetitions of orders, in seconds. The interval
grows, because this makes the simulation faster."""
PATIENCE = 2.5
"""The basis for the time in seconds without a `Lead` message after which a standby claims the next
epoch. Controller number n waits `PATIENCE * (1 + 0.4 * n)` seconds, so that not all standbys claim
the epoch at once.
"""


def start_controller(stage: Stage, *, stands_by: bool = False) -> None:
    """
    Start a controller that leads from now on. With `stands_by`, start it as a standby.
    """
    if stage.over is not None:
        return
    stage.cluster.controllers += 1
    leader = Leader(stage, stage.cluster.controllers)
    stage.cluster.leaders.append(leader)
    if stands_by or not leader.lead(stage.story.epoch + 1):
        leader.stand_by()


@dataclass(slots=True)
class _Timers:
    """
    The calls of a controller's methods that are scheduled on the virtual clock and were not made
    yet.
    """

    news: bool = False
    """True when a call is scheduled that acknowledges the received reports."""
    looking: bool = False
    """True when a call is scheduled that reads the next deadline of the job machine."""
    repeating: bool = False
    """True when a call is scheduled that repeats the unanswered orders."""
    period: float = FIRST_REPEAT
    """The time in seconds until unanswered orders are repeated next."""
    deadline: float | None = None
    """The deadline of the job machine for which a timer is set. None if no timer is set."""


class Leader:
    """
    One simulated controller, from its start to its end. It may be a standby.
    """

    def __init__(self, stage: Stage, number: int) -> None:
        self._stage = stage
        self.number = number
        self.link = Link()
        self.alive = True
        self.leads = False
        self.epoch = 0
        self.muffled = False
        """True when the standbys cannot hear this controller."""
        self.machine = opened(stage.schedule).machine()
        self._inbox = Inbox()
        self._times = StepTimes()
        self._hang_detection = HangDetection(stage.schedule.policy, self._times)
        self._slices = SliceComparison()
        # each controller waits for a different time, so that not all standbys claim the epoch at
        # once
        patience = PATIENCE * (1 + 0.4 * number)
        self._lease = Lease(patience=patience, at=stage.clock.now)
        self._timers = _Timers()

    # ---------------------------------------------------------------- standby controllers

    def stand_by(self) -> None:
        """
        Wait until the leading controller falls silent, then claim the next epoch of leadership.
        """
        if not self.alive or self.leads:
            return
        now = self._stage.clock.now
        epoch = self._lease.claim(now)
        if epoch is None or not self.lead(epoch):
            self._stage.clock.at(max(self._lease.next_deadline(), now + 0.01), self.stand_by)

    def hear_lead(self, lead: Lead) -> None:
        """
        Handle the message of a controller that leads. If this controller also leads, but in an
        older epoch, end this controller.
        """
        self._lease.heard(lead.epoch, self._stage.clock.now)
        if self.leads and lead.epoch > self.epoch:
            self.die()

    # ---------------------------------------------------------------- the leading controller

    def lead(self, epoch: int) -> bool:
        """
        Claim an epoch, replay all events of the story, and lead the job from there. Return False
        when another controller has claimed the epoch.
        """
        story, now = self._stage.story, self._stage.clock.now
        told = list(story.events)
        if not story.append(Led(at=now, epoch=epoch), epoch):
            self._lease.heard(story.epoch, now)
            return False
        for event in told:
            if isinstance(event, Received):
                self._inbox.accept(event.sender, event.number)
            self.machine.handle(event)
        self.epoch, self.leads = epoch, True
        self._compare_slices()
        self._judge(Led(at=now, epoch=epoch))
        for node in self.machine.nodes:
            self._hang_detection.expect(node, now)
        self._say_lead()
        return True

    def hear(self, sender: str, number: int, report: Report) -> None:
        """
        Handle a report of a rank, an agent or the launcher that has arrived.
        """
        if not self.leads:
            return
        if self._inbox.accept(sender, number):
            at = self._stage.clock.now
            if isinstance(report, NodeJoined):
                self._hang_detection.expect(report.node, at)
            self._feed(Received(at=at, sender=sender, number=number, message=report))
        self._tell_news()

    def _tell_news(self) -> None:
        if not self._timers.news:
            self._timers.news = True
            self._stage.clock.after(NEWS, self._acknowledge)

    def hear_beat(self, beat: Beat) -> None:
        """
        Handle the heartbeat of a node. Report a stall when no rank moves. Also report each node
        that has sent no heartbeat for too long.
        """
        if not self.leads:
            return
        now = self._stage.clock.now
        silence = self._hang_detection.heard(beat, self._times.heard(beat), now)
        if silence is not None and self.machine.state in WATCHED:
            watch = self._hang_detection
            self._feed(Stalled(at=now, silence=silence, limit=watch.limit(), out=watch.out))
            self._hang_detection.resumed(now)
        self._slices.heard(beat)
        while self.machine.state not in SETTLED and (
            verdict := self._slices.verdict(now, calm=self.machine.state in CALM)
        ):
            self._feed(verdict)
            self._tell_news()
        for node in self._hang_detection.silent(now):
            lost = NodeLost(node=node, why=f"node {node} has sent no beat for too long", at=now)
            self._feed(Received(at=now, sender="controller", number=0, message=lost))

    def _feed(self, event: Event) -> None:
        if not self.leads:
            return
        if self._stage.story.append(event, self.epoch):
            self._judge(event)
        else:
            self.die()  # the story refuses the event: another controller has claimed a newer epoch

    def _judge(self, event: Event) -> None:
        stage, machine = self._stage, self.machine
        before = machine.state
        kind = type(event.message) if isinstance(event, Received) else type(event)
        stage.checks.seen[before, kind.__name__] += 1
        stage.checks.auditor.hears(machine, event)
        commands = machine.handle(event)
        stage.story.judged(commands)
        stage.checks.auditor.judges(machine, event, commands)
        for command in commands:
            self._do(command)
        machine.check()
        if isinstance(event, Received) and isinstance(event.message, Faulted | Noticed):
            self._learn(event.message)
        if machine.state is not before:
            self._timers.period = FIRST_REPEAT
            if machine.state in (State.RESUMING, State.PAUSING):
                self._hang_detection.resumed(event.at)
            if machine.state is State.RESUMING:
                self._compare_slices()
            stage.mishaps.entered(machine.state)
        if not self._timers.looking:
            self._timers.looking = True
            stage.clock.after(NEWS, self._look)
        if not self._timers.repeating:
            self._timers.repeating = True
            stage.clock.after(FIRST_REPEAT, self._say_again)

    def _compare_slices(self) -> None:
        """
        Start to compare slices (parts of the shards) for the attempt (incident and round) in which
        the ranks have resumed training.
        """
        machine = self.machine
        if machine.attempt is not None:
            self._slices.resumed(machine.attempt, machine.compared, machine.replicas())

    def _learn(self, report: Faulted | Noticed) -> None:
        """
        Record whether the controller knows by now that a polluted update (an update with wrong
        numbers) has spread. The controller knows when a report has named a latest sound step before
        that update.
        """
        stage, incident = self._stage, self.machine.incident
        if stage.pollution.step is None or stage.pollution.known:
            return
        known = (
            [incident.spread.ceiling] if incident.is_open and not incident.spread.tentative else []
        )
        if isinstance(report, Faulted) and report.polluted and self._speaks(report):
            known.append(report.position.step - 1)
        if isinstance(report, Noticed) and self.machine.state not in SETTLED:
            known.append(report.not_after)
        if any(ceiling is not None and ceiling < stage.pollution.step for ceiling in known):
            stage.pollution.known, stage.pollution.learnt = True, (incident.number, incident.round)

    def _speaks(self, report: Faulted) -> bool:
        machine, rank = self.machine, report.rank
        open_ = machine.state not in SETTLED and rank in machine.members
        return open_ and machine.incarnation(rank) == report.incarnation

    def _do(self, command: Command) -> None:
        match command:
            case JobOver():
                self._stage.checks.invariants.ended_for_a_cause(command, self.machine.members)
                self._stage.over = command
            case Tell():
                pass
            case Consult():
                for delay, advised in self._stage.mishaps.harm.advice(command):
                    self._stage.clock.after(delay, self.advise, advised)
            case _:
                self._say(command)

    def advise(self, advised: Advised) -> None:
        """
        Handle the advice of a recovery plugin.
        """
        at = self._stage.clock.now
        self._feed(Received(at=at, sender="controller", number=0, message=advised))

    # ---------------------------------------------------------------- sending

    def _say(self, order: Order) -> None:
        stage = self._stage
        now = stage.clock.now
        nodes: Iterable[NodePart] = stage.cluster.nodes.values()
        if isinstance(order, Spawn | Kill | Recall):
            nodes = [stage.cluster.nodes[order.node]]
        elif not isinstance(order, EndNode | Refused) and len(order.to) == 1:
            nodes = [node for node in nodes if node.hosts(order.to[0])]
        for node in nodes:
            for moment in stage.network.down(now, self.link, node.connection.link):
                stage.clock.at(moment, node.hear, order, self.number)

    def _say_again(self) -> None:
        self._timers.repeating = False
        if not self.leads:
            return
        orders = self.machine.outstanding()
        for order in orders:
            self._say(order)
        if orders:
            self._timers.repeating = True
            self._stage.clock.after(self._timers.period, self._say_again)
            self._timers.period = min(1.7 * self._timers.period, LAST_REPEAT)

    def _say_lead(self) -> None:
        if not self.leads:
            return
        self._acknowledge()
        self._stage.clock.after(LEAD, self._say_lead)

    def _acknowledge(self) -> None:
        self._timers.news = False
        if not self.leads:
            return
        stage = self._stage
        now = stage.clock.now
        lead = Lead(
            epoch=self.epoch,
            heard={s: n for s, n in self._inbox.heard().items() if s not in self.machine.refused},
            state=str(self.machine.state),
            incident=self.machine.incident.number,
            compared=self.machine.certified,
            kept_by=dict(self.machine.kept_by),
            silent=tuple(self.machine.silent),
        )
        for node in stage.cluster.nodes.values():
            for moment in stage.network.down(now, self.link, node.connection.link):
                stage.clock.at(moment, node.hear_lead, lead)
        for moment in stage.network.down(now, self.link, stage.outside.mail.link):
            stage.clock.at(moment, stage.outside.mail.heard, lead)
        for other in stage.cluster.leaders:
            if other is not self and not self.muffled:
                for moment in stage.network.down(now, self.link, other.link):
                    stage.clock.at(moment, other.hear_lead, lead)

    # ---------------------------------------------------------------- the timer

    def _look(self) -> None:
        """
        Set a timer for the next deadline of the job machine. This method is called `NEWS` seconds
        after an event, since the event may have changed the deadline.
        """
        self._timers.looking = False
        deadline = self.machine.next_deadline() if self.leads else None
        if deadline is not None and (
            self._timers.deadline is None or deadline < self._timers.deadline
        ):
            self._timers.deadline = deadline
            self._stage.clock.at(deadline + 0.001, self._passed, deadline)

    def _passed(self, due: float) -> None:
        if self._timers.deadline != due:
            return
        self._timers.deadline = None
        deadline = self.machine.next_deadline() if self.leads else None
        if deadline is not None and deadline <= self._stage.clock.now:
            self._feed(DeadlinePassed(at=self._stage.clock.now))
        elif deadline is not None:
            self._look()

    def die(self) -> None:
        """
        Stop leading, and end the process of this controller.
        """
        self.leads = False
        if self.alive:
            self.alive = False
            self._stage.cluster.leaders.remove(self)
