"""
The rank machine: it decides what the process of one rank does with the orders that it receives.
The machine is pure: it reads no clock and does no I/O.

The control thread of the process runs this machine. The training thread is either in the user's
training loop, or out of the loop, where it carries out one order after another. Only the order
`compare` is carried out by another thread, so that the training thread can form process groups
meanwhile. The event `Left` reports that the training thread has left the loop. The training thread
may also stand still inside the loop, just before an update window (`with session.update():`). The
event `Located` reports this.

When an order of a newer round arrives, all older orders are cancelled: the running order is
aborted, and the queued orders are dropped. Only a check of links and devices is not aborted,
because an abort would close the process groups, which must stay open during a pause. A check that
has not begun is withdrawn. A check that has begun runs to its end, unless the rank must leave the
loop.
"""

from dataclasses import dataclass, field
from typing import Any, assert_never

from tft.core.rank.protocol import (
    Abort,
    Answer,
    Done,
    Execute,
    HoldAfter,
    LeaveAfter,
    Leaving,
    Left,
    Located,
    Lock,
    Locked,
    Ordered,
    RankCommand,
    RankEvent,
    Unlock,
    Unlocked,
    Withdraw,
    Withdrawn,
    Woken,
)
from tft.core.rank.transitions import REACTIONS, Reaction, Stage
from tft.protocol.messages import Answered, Hold, OrderName, Stop

AGAIN = 0.05
"""The time in seconds between two attempts to interrupt the training thread. The attempts are
repeated, because an abort interrupts nothing if it comes just before the thread enters a collective
or begins to form a process group."""


@dataclass(slots=True)
class RankMachine:
    """
    The state machine of one process of one rank. At the start, the training thread is outside the
    loop and no order is known.
    """

    rank: int
    incarnation: int
    epoch: int = 0
    key: tuple[int, int] = (0, 0)
    """The incident and the round of the newest order that was received. Orders of an earlier
    incident or round are ignored."""
    inside: bool = False
    """True if the training thread is in the user's training loop, or on its way into the loop."""
    doing: OrderName | None = None
    """The order that the training thread is carrying out. None: the thread carries out no order."""
    comparing: bool = False
    """True while another thread digests the state of this rank, for the order `compare`. Until this
    thread has ended, the state must not change, so the rank carries out no other order than
    `regroup`."""
    standing: bool = False
    """True if the training thread stands still in the loop because of a `Hold` order."""
    _hold: Hold | None = None
    """The `Hold` order (pause after a step) that is not answered yet, because the training thread
    does not stand still at the end of that step yet. None: there is no such order."""
    _stop: Stop | None = None
    """The `Stop` order (leave the loop) that is not carried out yet, because the training thread is
    still in the loop or busy. None: there is no such order."""
    _queue: list[Execute] = field(default_factory=list)
    _wake: float | None = None
    _heard: dict[OrderName, float] = field(default_factory=dict)
    """By order of this round: the time at which the order was first received."""
    _answers: dict[OrderName, Answered] = field(default_factory=dict)

    @property
    def stage(self) -> Stage:
        """
        The stage of the training thread: whether it is in the training loop, and whether it carries
        out an order.
        """
        checks = self.doing == "check"
        if self.inside:
            held = Stage.CHECKING_HELD if checks else Stage.HELD
            return held if self.standing or checks else Stage.LOOP
        if checks:
            return Stage.CHECKING
        return Stage.BUSY if self._busy else Stage.IDLE

    @property
    def _busy(self) -> bool:
        return self.comparing or self.doing is not None

    def handle(self, event: RankEvent) -> list[RankCommand]:
        """
        Handle one event. Return the commands that the process of the rank must carry out. Every
        input of the machine goes through this method.
        """
        match event:
            case Ordered():
                return self._ordered(event)
            case Locked():
                return self._locked(event)
            case Located():
                return self._stands(event)
            case Unlocked():
                return self._unlocked(event)
            case Leaving():
                return self._leaving(event)
            case Left():
                return self._left()
            case Done():
                return self._done(event)
            case Withdrawn():
                self.doing = None
                return self._free()
            case Woken():
                if self._wake is None or event.at < self._wake:
                    return []
                return self._abort(event.at)
            case _:
                assert_never(event)

    def heard(self, order: OrderName) -> bool:
        """
        Return True if an order with this name has arrived in the present round.
        """
        return order in self._heard

    def answered(self, order: OrderName) -> bool:
        """
        Return True if the order with this name was answered in the present round.
        """
        return order in self._answers

    def next_deadline(self) -> float | None:
        """
        Return the time at which the rank machine must get the event `Woken`, or None if no time is
        set.
        """
        return self._wake

    def _abort(self, at: float) -> list[RankCommand]:
        self._wake = at + AGAIN
        return [Abort()]

    def _ordered(self, event: Ordered) -> list[RankCommand]:
        order = event.order
        key = (order.incident, order.round)
        if order.epoch < self.epoch or key < self.key:
            return []  # the order comes from an earlier controller or round, so it is void
        if order.incarnations.get(self.rank, 0) != self.incarnation:
            return []  # the order is for another process of the same rank
        self.epoch = order.epoch
        if key == self.key and event.name in self._heard:
            answer = self._answers.get(event.name)
            return [] if answer is None else [Answer(answer=answer)]
        commands: list[RankCommand] = []
        if key > self.key:
            commands += self._begin(key, event.at)
        self._heard[event.name] = event.at
        return [*commands, *self._react(REACTIONS[event.name][self.stage], event)]

    def _react(self, reaction: Reaction, event: Ordered) -> list[RankCommand]:
        """
        React to an order as the table `REACTIONS` says, and return the commands for this reaction.
        A `Stop` or a `Hold` order is stored until the training thread has reached the end of the
        step that the order names.
        """
        match reaction, event.order:
            case Reaction.LOCK, _:
                return [Lock()]
            case Reaction.HOLD, Hold() as hold:
                self._hold = hold
                return [HoldAfter(step=hold.step)]
            case Reaction.UNLOCK, _:
                self._hold = None
                self.standing = False
                return [Unlock()]
            case Reaction.LEAVE, Stop() as stop:
                self._stop = stop
                return [LeaveAfter(step=stop.finish)]
            case Reaction.GRACE, Stop() as stop:
                self._stop = stop
                self._wake = event.at + stop.grace
                return []
            case Reaction.STOP, Stop() as stop:
                self._stop = stop
                return self._next()
            case Reaction.ABORT, order:
                # the order is `End` or `Complete`: the job is over for this rank. With step 0 the
                # training thread leaves the loop before it enters another update window
                self._queue.append(Execute(name=event.name, order=order))
                leave: list[RankCommand] = [LeaveAfter(step=0)] if self.inside else []
                return [*leave, *self._abort(event.at)]
            case _, order:
                execute = Execute(name=event.name, order=order)
                # `Compare` must come before `Regroup`: the training thread begins both orders, and
                # may wait long for other ranks while it forms groups. `Compare` can arrive after
                # `Regroup` if it was lost and sent again
                if event.name == "compare" and self._queue and self._queue[0].name == "regroup":
                    self._queue.insert(0, execute)
                else:
                    self._queue.append(execute)
                return self._next()

    def _begin(self, key: tuple[int, int], at: float) -> list[RankCommand]:
        self.key = key
        self._heard, self._answers, self._queue = {}, {}, []
        self._hold = self._stop = self._wake = None
        self.standing = False
        if self.doing == "check":
            return [Withdraw()]
        return self._abort(at) if self._busy else []

    def _locked(self, event: Locked) -> list[RankCommand]:
        answer = self._answer(
            "freeze",
            position=event.position,
            held=event.held,
            backups=event.backups,
            began=self._heard["freeze"],
            at=event.at,
            waiting=event.waiting or not self.inside,
        )
        return [answer]

    def _stands(self, event: Located) -> list[RankCommand]:
        """
        Answer the waiting `Hold` order if the training thread stands still at the end of the
        ordered step or of a later step. A rank that is out of the loop answers too, because its
        training thread does not move. If that thread has left the loop before the end of the
        ordered step, the answer reports a failure.
        """
        hold = self._hold
        reached = hold is not None and event.position.step >= hold.step
        if hold is None or (self.inside and not (event.still and reached)):
            return []
        self._hold = None
        self.standing = self.inside
        failure = None if reached else (
            f"it has left the loop after step {event.position.step}, before step {hold.step} ended"
        )  # fmt: skip
        answer = self._answer(
            "hold",
            failure=failure,
            position=event.position,
            held=event.held,
            backups=event.backups,
            began=self._heard["hold"],
            at=event.at,
        )
        return [answer, *self._next()]

    def _unlocked(self, event: Unlocked) -> list[RankCommand]:
        answer = self._answer(
            "release",
            position=event.position,
            held=event.held,
            backups=event.backups,
            began=self._heard["release"],
            at=event.at,
        )
        return [answer]

    def _left(self) -> list[RankCommand]:
        self.inside = self.standing = False
        self._wake = None
        if self._hold is not None:
            # a `Hold` order still waits for an answer: ask for the position at which the training
            # thread left the loop
            return [HoldAfter(step=self._hold.step)]
        return self._next()

    def _leaving(self, event: Leaving) -> list[RankCommand]:
        if self._stop is None:
            return []  # the rank leaves the loop because the job ends, or has left it already
        at, finish = event.position, self._stop.finish
        ended = at.step > finish or (at.step == finish and not (at.tail or at.after))
        if ended and self.doing != "check":
            # this rank computes a step after `finish`, the last step that all ranks complete. The
            # other ranks will not take part in the collectives of that step, so do not wait for the
            # grace time
            return self._abort(event.at)
        self._wake = event.at + self._stop.grace
        return []

    def _next(self) -> list[RankCommand]:
        if self.doing is not None:
            return []
        if self.inside:
            return self._errand()
        if self._stop is not None:
            if self.comparing:
                return []
            self.doing = "stop"
            stop, self._stop = self._stop, None
            return [Execute(name="stop", order=stop)]
        if not self._queue or self._must_wait(self._queue[0].name):
            return []
        execute = self._queue.pop(0)
        if execute.name == "compare":
            self.comparing = True
            return [execute, *self._next()]
        self.doing = execute.name
        if execute.name == "resume":
            self.inside = True
        return [execute]

    def _must_wait(self, order: OrderName) -> bool:
        """
        Return True if the next order cannot be carried out yet. While a thread digests the state,
        only `regroup` can be carried out, because it does not change the state.

        The orders `compare` and `regroup` also wait until the rank has carried out the `Stop` order
        of this round, if the round began with a `Freeze` order. The controller sends these orders
        together, and the `Stop` may be lost or may fail. Only the `Stop` undoes an unfinished step
        and drops the old groups.
        """
        if self.comparing and order != "regroup":
            return True
        after_stop = order in {"compare", "regroup"} and self.heard("freeze")
        stopped = self._answers.get("stop")
        return after_stop and (stopped is None or stopped.failure is not None)

    def _errand(self) -> list[RankCommand]:
        """
        Return the command for the next order if the training thread can carry out this order while
        the thread stands still in the loop. Only a check of links and devices can be carried out
        there. For other orders return no command.
        """
        if not self.standing or not self._queue or self._queue[0].name != "check":
            return []
        self.doing = "check"
        return [self._queue.pop(0)]

    def _done(self, event: Done) -> list[RankCommand]:
        if event.name == "resume" and event.failure is not None:
            self.inside = False
        commands: list[RankCommand] = []
        if (event.order.incident, event.order.round) == self.key:
            began = self._heard["stop"] if event.name == "stop" else event.began
            commands.append(
                self._answer(
                    event.name,
                    failure=event.failure,
                    context_lost=event.context_lost,
                    position=event.position,
                    held=event.held,
                    backups=event.backups,
                    files=event.files,
                    verdict=event.verdict,
                    finding=event.finding,
                    local_state=event.local_state,
                    digests=event.digests,
                    compared=event.compared,
                    line=event.line,
                    odd=event.odd,
                    lost=event.lost,
                    inexact=event.inexact,
                    tails=event.tails,
                    began=began,
                    at=event.at,
                )
            )
        if event.name == "compare":
            self.comparing = False
        else:
            self.doing = None
        return [*commands, *self._free()]

    def _free(self) -> list[RankCommand]:
        """
        Return the command for the next order, after the rank has ended an order.
        """
        # stop repeating aborts. But while a `Stop` order waits for the rank to leave the loop,
        # `_wake` is the end of the grace time of that order and must be kept
        if not self._busy and (self._stop is None or not self.inside):
            self._wake = None
        return self._next()

    # `Any`, because the fields of an answer have different types
    def _answer(self, name: OrderName, **facts: Any) -> Answer:
        answer = Answered(
            rank=self.rank,
            incarnation=self.incarnation,
            incident=self.key[0],
            round=self.key[1],
            order=name,
            **facts,
        )
        self._answers[name] = answer
        return Answer(answer=answer)
