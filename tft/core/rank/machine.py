"""
Own the rank machine: it decides what one rank's process does with the orders that it receives.
Pure, like the job machine.

The control thread is the shell of this machine. The training thread is either in the user's loop,
or out of the loop, where it carries out one order after another; the event `Left` reports that it
is out. The training thread may also stand still inside the loop, at the edge of an update window:
the event `Standing` reports that.

A newer round of an incident makes all older orders void: what is under way is aborted, and what is
queued is dropped. A check is not aborted, since an abort would shut the process groups that a pause
is to keep. A check that has not begun is withdrawn. A check that has begun runs to its end, unless
the rank is to leave the loop.
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
    Lock,
    Locked,
    Ordered,
    RankCommand,
    RankEvent,
    Standing,
    Unlock,
    Unlocked,
    Withdraw,
    Withdrawn,
    Woken,
)
from tft.core.rank.transitions import REACTIONS, Reaction, Stage
from tft.protocol.messages import Answered, Hold, OrderName, Stop

AGAIN = 0.05
"""Seconds between two aborts. An abort that comes just before the training thread enters a
collective, or begins to form a process group, finds nothing to abort."""


@dataclass(slots=True)
class _Requested:
    """
    The orders that are answered when the training thread has come to the place that they ask for,
    each with the time at which it was received.
    """

    freeze_at: float | None = None
    hold: Hold | None = None
    hold_at: float = 0.0
    release_at: float | None = None
    stop: Stop | None = None
    stop_at: float = 0.0


@dataclass(slots=True)
class RankMachine:
    """
    One process of one rank. It starts out of the loop, with nothing to do.
    """

    rank: int
    incarnation: int
    epoch: int = 0
    key: tuple[int, int] = (-1, 0)
    """The incident and the round whose orders are obeyed."""
    inside: bool = False
    """True if the training thread is in the loop or on its way into the loop."""
    doing: OrderName | None = None
    """The order that the training thread is carrying out. None: no order."""
    standing: bool = False
    """True if the training thread stands still in the loop, because of a `Hold`."""
    _requested: _Requested = field(default_factory=_Requested)
    _queue: list[Execute] = field(default_factory=list)
    _wake: float | None = None
    _heard: set[OrderName] = field(default_factory=set)
    _answers: dict[OrderName, Answered] = field(default_factory=dict)

    @property
    def stage(self) -> Stage:
        """
        Where the training thread is, and whether it carries out an order there.
        """
        checks = self.doing == "check"
        if self.inside:
            held = Stage.CHECKING_HELD if checks else Stage.HELD
            return held if self.standing or checks else Stage.LOOP
        if checks:
            return Stage.CHECKING
        return Stage.IDLE if self.doing is None else Stage.BUSY

    def handle(self, event: RankEvent) -> list[RankCommand]:
        """
        Handle an event and return the commands for the shell. Every input of the machine goes
        through this method.
        """
        match event:
            case Ordered():
                return self._ordered(event)
            case Locked():
                return self._locked(event)
            case Standing():
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
                return self._free()
            case Woken():
                if self._wake is None or event.at < self._wake:
                    return []
                return self._abort(event.at)
            case _:
                assert_never(event)

    def next_deadline(self) -> float | None:
        """
        Return the time at which `Woken` is due. None: no such time.
        """
        return self._wake

    def _abort(self, at: float) -> list[RankCommand]:
        self._wake = at + AGAIN
        return [Abort()]

    def _ordered(self, event: Ordered) -> list[RankCommand]:
        order = event.order
        key = (order.incident, order.round)
        if order.epoch < self.epoch or key < self.key:
            return []  # from a controller or a round that is over
        if order.incarnations.get(self.rank, 0) != self.incarnation:
            return []  # the order is not for this incarnation of the rank
        self.epoch = order.epoch
        if key == self.key and event.name in self._heard:
            answer = self._answers.get(event.name)
            return [] if answer is None else [Answer(answer=answer)]
        commands: list[RankCommand] = []
        if key > self.key:
            commands += self._begin(key, event.at)
        self._heard.add(event.name)
        return [*commands, *self._react(REACTIONS[event.name][self.stage], event)]

    def _react(self, reaction: Reaction, event: Ordered) -> list[RankCommand]:
        """
        Do what the table says of an order. `Stop` and `Hold` are kept as requests until the
        training thread has come to the place that they ask for.
        """
        order, requested = event.order, self._requested
        match order:
            case Stop():
                requested.stop, requested.stop_at = order, event.at
            case Hold():
                requested.hold, requested.hold_at = order, event.at
            case _:
                pass
        match reaction:
            case Reaction.LOCK:
                requested.freeze_at = event.at
                return [Lock()]
            case Reaction.HOLD if isinstance(order, Hold):
                return [HoldAfter(step=order.step)]
            case Reaction.UNLOCK:
                requested.hold, requested.release_at = None, event.at
                self.standing = False
                return [Unlock()]
            case Reaction.LEAVE if isinstance(order, Stop):
                return [LeaveAfter(step=order.finish)]
            case Reaction.GRACE if isinstance(order, Stop):
                self._wake = event.at + order.grace
                return []
            case Reaction.STOP:
                return self._next()
            case Reaction.ABORT:
                # the job is over for this rank: it leaves the loop at the next window edge
                self._queue.append(Execute(name=event.name, order=order))
                leave: list[RankCommand] = [LeaveAfter(step=0)] if self.inside else []
                return [*leave, *self._abort(event.at)]
            case _:
                self._queue.append(Execute(name=event.name, order=order))
                return self._next()

    def _begin(self, key: tuple[int, int], at: float) -> list[RankCommand]:
        self.key = key
        self._heard, self._answers, self._queue = set(), {}, []
        self._requested.stop = self._wake = None
        self._requested.hold = self._requested.release_at = None
        self.standing = False
        if self.doing == "check":
            return [Withdraw()]
        return [] if self.doing is None else self._abort(at)

    def _locked(self, event: Locked) -> list[RankCommand]:
        if self._requested.freeze_at is None:
            return []
        answer = self._answer(
            "freeze",
            position=event.position,
            held=event.held,
            backups=event.backups,
            began=self._requested.freeze_at,
            at=event.at,
            waiting=event.waiting or not self.inside,
        )
        self._requested.freeze_at = None
        return [answer]

    def _stands(self, event: Standing) -> list[RankCommand]:
        """
        Answer a hold if the training thread stands still at the step of the hold, or at a later
        one. A rank that is out of the loop answers too, since its training thread does not move;
        the answer is a failure if the rank left before that step.
        """
        hold = self._requested.hold
        reached = hold is not None and event.position.step >= hold.step
        if hold is None or (self.inside and not (event.still and reached)):
            return []
        self._requested.hold = None
        self.standing = self.inside
        failure = None if reached else (
            f"it has left the loop at step {event.position.step}, before the end of {hold.step}"
        )  # fmt: skip
        answer = self._answer(
            "hold",
            failure=failure,
            position=event.position,
            held=event.held,
            backups=event.backups,
            began=self._requested.hold_at,
            at=event.at,
        )
        return [answer, *self._next()]

    def _unlocked(self, event: Unlocked) -> list[RankCommand]:
        if self._requested.release_at is None:
            return []
        answer = self._answer(
            "release",
            position=event.position,
            held=event.held,
            backups=event.backups,
            began=self._requested.release_at,
            at=event.at,
        )
        self._requested.release_at = None
        return [answer]

    def _left(self) -> list[RankCommand]:
        self.inside = self.standing = False
        self._wake = None
        if self._requested.hold is not None:
            return [
                HoldAfter(step=self._requested.hold.step)
            ]  # ask for the position that it left at
        return self._next()

    def _leaving(self, event: Leaving) -> list[RankCommand]:
        if not self.inside or self._requested.stop is None:
            return []
        at = event.position
        there = at.step == self._requested.stop.finish and not (at.tail or at.after)
        ended = at.step > self._requested.stop.finish or there
        if ended and self.doing != "check":
            return self._abort(event.at)  # no rank will finish the step that it computes now
        self._wake = event.at + self._requested.stop.grace
        return []

    def _next(self) -> list[RankCommand]:
        if self.doing is not None:
            return []
        if self.inside:
            return self._errand()
        if self._requested.stop is not None:
            self.doing = "stop"
            stop, self._requested.stop = self._requested.stop, None
            return [Execute(name="stop", order=stop)]
        if not self._queue:
            return []
        execute = self._queue.pop(0)
        self.doing = execute.name
        if execute.name == "resume":
            self.inside = True
        return [execute]

    def _errand(self) -> list[RankCommand]:
        """
        Return the next order that the training thread can carry out while it stands still in the
        loop. Only a check can be.
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
            began = self._requested.stop_at if event.name == "stop" else event.began
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
                    private=event.private,
                    digests=event.digests,
                    compared=event.compared,
                    line=event.line,
                    odd=event.odd,
                    inexact=event.inexact,
                    tails=event.tails,
                    began=began,
                    at=event.at,
                )
            )
        return [*commands, *self._free()]

    def _free(self) -> list[RankCommand]:
        """
        Note that the training thread has nothing under way, and return its next order.
        """
        self.doing = None
        if (
            self._requested.stop is None or not self.inside
        ):  # else `_wake` is the time limit of a stop
            self._wake = None
        return self._next()

    def _answer(self, name: OrderName, **facts: Any) -> Answer:  # Any: the fields' own types
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
