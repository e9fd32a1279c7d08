"""
The network of a simulated cluster. It decides which party can reach which other party, and how long
a message takes. It also decides which messages are lost, doubled or reordered.
"""

from collections.abc import Sequence
from random import Random
from typing import Protocol

from tft.core.link.delivery import Outbox
from tft.protocol.messages import Lead, Report
from tft.simulation.clock import Clock
from tft.simulation.schedule import Trouble

FIRST_REPEAT, LAST_REPEAT = 0.25, 1.0
"""The shortest and the longest interval between repetitions of a report, in seconds. A real process
repeats a report every 0.1 s; growing intervals make the simulation faster. They must be much
shorter than the time limits of the job's policy: no limit may pass because a report was lost
several times. A controller that has just taken over has shorter limits, so all reports are sent to
it at once."""


class Link:
    """
    The connection of one party, such as a node or a controller, to the broker.
    """

    __slots__ = ("deaf", "down", "mute", "up")

    def __init__(self) -> None:
        self.mute = self.deaf = False
        """`mute` is True if no message from this party reaches the broker. `deaf` is True if no
        message from the broker reaches this party."""
        self.up = self.down = 0.0
        """`up`: the moment at which the last message of this party to the broker arrives. `down`:
        the moment at which the last message from the broker to this party arrives. A connection
        keeps the order of its messages, so a later message does not arrive before that moment."""


class Network:
    """
    The broker of the simulated cluster, and the connections of all parties to the broker.
    """

    def __init__(self, trouble: Trouble, rng: Random) -> None:
        self._random = rng.random
        self._delay, self._loss = trouble.delay, trouble.loss
        self._double, self._reorder = trouble.double, trouble.reorder
        self._calm = not (trouble.loss or trouble.double or trouble.reorder)
        self.away = False
        """True while the broker is down."""

    def up(self, now: float, sender: Link, leader: Link) -> tuple[float, ...]:
        """
        Return the times at which a report that is sent now arrives at the controller: none, one or
        two.
        """
        if self.away or sender.mute or leader.deaf:
            return ()
        moment = now + 0.0005 + self._delay * self._random()
        if self._calm or self._random() >= self._reorder:
            moment = sender.up = max(moment, sender.up)
        return (moment,) if self._calm else self._troubled(moment)

    def level(self, now: float, sender: Link, leader: Link) -> tuple[float, ...]:
        """
        Return the times at which a heartbeat that is sent now arrives. Return an empty tuple only
        if no message gets through. Heartbeats are not lost at random, because each simulated
        heartbeat stands for ten real ones, which would not all be lost.
        """
        if self.away or sender.mute or leader.deaf:
            return ()
        return (now + 0.0005 + self._delay * self._random(),)

    def down(self, now: float, leader: Link, receiver: Link) -> tuple[float, ...]:
        """
        Return the times at which an order that is sent now arrives at its receiver: none, one or
        two.
        """
        if self.away or leader.mute or receiver.deaf:
            return ()
        moment = now + 0.0005 + self._delay * self._random()
        if self._calm or self._random() >= self._reorder:
            moment = receiver.down = max(moment, receiver.down)
        return (moment,) if self._calm else self._troubled(moment)

    def across(self, now: float, sender: Link, receiver: Link) -> tuple[float, ...]:
        """
        Return the times at which a message that one node sends to another now arrives: none, one or
        two.
        """
        if self.away or sender.mute or receiver.deaf:
            return ()
        moment = now + 0.0005 + self._delay * self._random()
        return (moment,) if self._calm else self._troubled(moment)

    def _troubled(self, moment: float) -> tuple[float, ...]:
        if self._random() < self._loss:
            return ()
        if self._random() < self._double:
            return (moment, moment + self._delay * self._random())
        return (moment,)


class Hearer(Protocol):
    """
    The part of a controller that code needs in order to send a report to the controller.
    """

    leads: bool
    link: Link

    def hear(self, sender: str, number: int, report: Report) -> None:
        """
        Handle a report that has arrived.
        """


class Hearers(Protocol):
    """
    The controllers that receive reports, as the code that sends reports sees them.
    """

    @property
    def leaders(self) -> Sequence[Hearer]:
        """
        All living controllers, including the standbys.
        """


class Post(Protocol):
    """
    The parts of a simulated run that code needs in order to send reports.
    """

    clock: Clock
    network: Network

    @property
    def cluster(self) -> Hearers:
        """
        The cluster with its controllers.
        """


class Mail:
    """
    The reports of one sender to the controller. Each report is numbered, and repeated until it is
    acknowledged.
    """

    __slots__ = (
        "_due", "_epoch", "_heard", "_outbox", "_period", "_stage", "_timed", "closed", "link",
        "sender",
    )  # fmt: skip

    def __init__(self, stage: Post, sender: str, link: Link) -> None:
        self._stage = stage
        self._outbox = Outbox()
        self._timed = False
        self._due = 0.0
        self._period = FIRST_REPEAT
        self._heard = 0
        self._epoch = 1
        self.sender = sender
        self.link = link
        self.closed = False
        """True when the sender is gone: reports that are not acknowledged by now are lost."""

    def post(self, report: Report) -> None:
        """
        Send a report to the leading controller, and repeat the report until it is acknowledged.
        """
        self._send(self._outbox.add(report), report)
        self._period = FIRST_REPEAT
        if not self._timed:
            self._timed = True
            self._wait(FIRST_REPEAT)

    def post_once(self, report: Report) -> None:
        """
        Send a report, unless an equal report already waits for its acknowledgement.
        """
        if not any(report == waiting for _, waiting in self._outbox.pending()):
            self.post(report)

    def waits(self, kind: type[object]) -> bool:
        """
        Return True if a report of this kind waits for its acknowledgement.
        """
        return any(isinstance(waiting, kind) for _, waiting in self._outbox.pending())

    def connected(self) -> None:
        """
        Send all unacknowledged reports at once, since the broker can be reached again.
        """
        for number, report in () if self.closed else self._outbox.pending():
            self._send(number, report)

    def heard(self, lead: Lead) -> bool:
        """
        Remove the reports that a `Lead` message acknowledges. Return True when the controller has
        received at least one report of this sender.
        """
        number = lead.heard.get(self.sender, 0)
        if number and self._timed:
            self._outbox.acknowledge(number)
            # repeat the remaining reports soon, because the controller answers now
            if number > self._heard:
                self._heard, self._period = number, FIRST_REPEAT
        if lead.epoch > self._epoch:
            self._epoch, self._period = lead.epoch, FIRST_REPEAT
            if self._timed:
                self._wait(0.0)
        return number > 0

    def _wait(self, seconds: float) -> None:
        self._due = self._stage.clock.now + seconds
        self._stage.clock.at(self._due, self._again, self._due)

    def _again(self, due: float) -> None:
        if due != self._due:
            return  # the method `_wait` has requested a later call, which will send the reports
        pending = () if self.closed else self._outbox.pending()
        for number, report in pending:
            self._send(number, report)
        if pending:
            self._wait(self._period)
            self._period = min(2 * self._period, LAST_REPEAT)
        else:
            self._timed = False

    def _send(self, number: int, report: Report) -> None:
        stage = self._stage
        for leader in stage.cluster.leaders:
            if leader.leads:
                self._to(leader, number, report)

    def _to(self, leader: Hearer, number: int, report: Report) -> None:
        stage = self._stage
        for moment in stage.network.up(stage.clock.now, self.link, leader.link):
            stage.clock.at(moment, leader.hear, self.sender, number, report)
