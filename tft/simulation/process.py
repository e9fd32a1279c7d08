"""
One process of one rank: the real rank machine on its control thread, and a simulated training
thread. As in a real session, the training thread is either in the training loop or outside of it
and carries out orders.
"""

from typing import assert_never

from tft.core.rank.machine import RankMachine
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
from tft.protocol.messages import (
    ORDER_NAMES,
    Joined,
    Lead,
    Position,
    RankOrder,
    Ready,
    Refused,
    ShardCopies,
)
from tft.simulation import hands, loop
from tft.simulation.mail import Mail
from tft.simulation.page import Page
from tft.simulation.schedule import Mishap
from tft.simulation.stage import GroupPart, NodePart, Phase, Stage
from tft.simulation.truth import Content
from tft.simulation.work import NOTHING, Work

NEVER = 1 << 60
TAKEN = 1
"""The exit status of a process whose rank another process holds: `RankTaken` ends the script."""


class Process:
    """
    One process of a rank, from its start to its end.
    """

    def __init__(
        self, stage: Stage, node: NodePart, rank: int, incarnation: int, page: Page
    ) -> None:
        self.stage = stage
        self.node = node
        self.rank = rank
        self.incarnation = incarnation
        self.pid = stage.pid()
        self.page = page
        self.mail = Mail(stage, f"rank.{rank}/{incarnation}.{self.pid}", node.link)
        self.rank_machine = RankMachine(rank=rank, incarnation=incarnation)
        self.alive = True
        self.stopped = False
        """True when the whole process stands still, including the control thread."""
        self.held_until = 0.0
        """The moment before which the kernel does not end the process, in virtual seconds."""
        self.stuck = False
        """True when the training thread no longer moves."""
        self.joined: Joined | None = None
        self._accepted = False
        self.phase: Phase = "starting"
        self.completed = 0
        self.window_open = self.torn = self.announce = False
        self.tail = False
        """True when the update window of step `completed` has closed and the step has not ended."""
        self.line = ""
        """The last source line that the training thread reached, as reported for the tail."""
        self.lock = self.leave_after = NEVER
        self._pending: Execute | None = None
        self.task: Execute | None = None
        """The order that the training thread is carrying out."""
        self._timer: float | None = None
        self.group: GroupPart | None = None
        self.cut = True
        """True when this process has shut its end of the process group."""
        self.summed = False
        """True when the all-reduces for which the rank waits are complete and their results are
        on the way."""
        self.context_lost = False
        """True when the device context is lost: the device takes no more work from this process."""
        self.poison = False
        """True when the rank will contribute wrong data to the next all-reduces."""
        self.spoilt = False
        """True when the last all-reduces contained wrong data from some rank."""
        self.content: dict[str, Content] = {
            name: stage.truth.value(0, name) for name in stage.schedule.shards(rank)
        }
        self.unsaid = False
        """True when a silent corruption has changed the state since the rank last reported
        digests of it."""
        self.miscopies: Mishap | None = None
        """The mishap that will silently corrupt the state that this rank is fetching. None when
        there is none."""
        self.copies: dict[int, dict[str, Content]] = {}
        """By step: copies of the shards at the end of earlier steps."""
        self.errand = False
        """True when the rank carries out an order while it waits at the step gate, inside the
        loop."""
        self.data = 0
        """How many batches were drawn."""
        self.interrupted = (-1, 0)
        """The step in the middle of which the thread left the loop, and the incident for which
        it left. The incident is -1 until a stop order names it."""
        self.interrupted_data = 0
        """The data position at the moment of `interrupted`."""

    # ---------------------------------------------------------------- what others look at

    def position(self) -> Position:
        """
        Return the position of the training thread.
        """
        return Position(step=self.completed, window=self.window_open, tail=self.tail)

    def held(self) -> int | None:
        """
        Return the step whose whole state is in memory. Return None when an update window is open or
        the state is torn.
        """
        return None if self.window_open or self.torn else self.completed

    def backups(self) -> tuple[int, ...]:
        """
        Return the steps of which the rank keeps a whole copy.
        """
        return tuple(step for step in self.copies if step <= self.completed)

    def waiting(self) -> bool:
        """
        Return whether the training thread may be waiting for other ranks.
        """
        return self.phase not in ("forward", "window", "tail")

    def standing(self) -> Standing:
        """
        Return the position of the training thread, and whether it waits at the step gate.
        """
        gate = self.phase == "gate" or self.errand
        still = gate and not self.lets_go()
        return Standing(
            at=self.node.now, position=self.position(), backups=self.backups(), still=still,
            held=self.completed if still and not self.torn else self.held(),
        )  # fmt: skip

    # ---------------------------------------------------------------- beginning

    def join(self) -> None:
        """
        Send `Joined`, as a script does when it calls `tft.init`.
        """
        if not self.alive or self.stopped:
            return
        stage = self.stage
        self.joined = Joined(
            rank=self.rank, incarnation=self.incarnation, world=stage.schedule.world,
            pid=self.pid, started=self.pid, host=f"node{self.node.number}",
            address=f"node{self.node.number}:{self.pid}", adaptor="simulated",
            strategies=stage.schedule.strategies, derives=stage.schedule.derives,
            at=self.node.now,
        )  # fmt: skip
        self.page.move(self.position(), self.node.now)
        self.page.training = False
        self.mail.post(self.joined)

    def hear_lead(self, lead: Lead) -> None:
        """
        Handle a `Lead` of the controller. The first one that acknowledges this process makes it get
        ready.
        """
        heard = self.mail.heard(lead)
        if heard and not self._accepted and not self.stopped:
            self._accepted = True
            self.stage.clock.after(self.stage.takes(0.02, 0.2), self._ready)

    def hear_refusal(self, refused: Refused) -> None:
        """
        Exit with the status `TAKEN` when the controller refuses this process, since another process
        holds its rank.
        """
        if refused.pid == self.pid and not self._accepted and self.alive:
            self.node.ended(self, TAKEN)

    def _ready(self) -> None:
        """
        Send `Ready`, as a script does when it calls `Session.run`, and begin an order that waits.
        """
        if not self.alive or self.stopped or self.stuck:
            return
        groups = self.stage.schedule.groups()
        shards = tuple(ShardCopies(shard=name, ranks=groups[name]) for name in self.content)
        now = self.node.now
        self.mail.post(
            Ready(
                rank=self.rank,
                incarnation=self.incarnation,
                shards=shards,
                column=self.stage.schedule.column(self.rank),
                reloads=self.stage.schedule.own > 0,
                at=now,
            )
        )
        self.phase = "idle"
        if self._pending is not None:
            execute, self._pending = self._pending, None
            self._begin(execute)

    # ---------------------------------------------------------------- the control thread

    def hear(self, order: RankOrder, leader: int) -> None:
        """
        Handle an order for this rank that has arrived.
        """
        if not self.alive or self.stopped or self.joined is None:
            return
        if order.epoch >= self.rank_machine.epoch:
            self.stage.invariants.one_leader_obeyed(order.epoch, leader)
        self.handle(Ordered(at=self.node.now, name=ORDER_NAMES[type(order)], order=order))

    def handle(self, event: RankEvent) -> None:
        """
        Hand an event to the rank machine and carry out its commands.
        """
        if not self.alive or self.stopped:
            return
        before = self.rank_machine.epoch, self.rank_machine.key
        commands = self.rank_machine.handle(event)
        if commands and isinstance(event, Ordered):
            self.stage.invariants.heeded(self, event.order, *before)
        for command in commands:
            self._do(command)
        deadline = self.rank_machine.next_deadline()
        if deadline is not None and (self._timer is None or deadline < self._timer):
            self._timer = deadline
            moment = deadline - self.node.offset + 1e-6  # never too early by rounding
            self.stage.clock.at(moment, self._wake, deadline)

    def _wake(self, due: float) -> None:
        if self._timer != due:
            return
        self._timer = None
        if self.rank_machine.next_deadline() is not None:
            self.handle(Woken(at=self.node.now))

    def _do(self, command: RankCommand) -> None:
        match command:
            case Lock():
                self.stage.mishaps.begins(self, "freeze")
                self.lock = self.completed
                self.handle(
                    Locked(
                        at=self.node.now, position=self.position(), held=self.held(),
                        backups=self.backups(), waiting=self.waiting(),
                    )
                )  # fmt: skip
            case HoldAfter(step=step):
                self.stage.mishaps.begins(self, "hold")
                self.lock = step
                self.look_at_gate()
                self.handle(self.standing())
            case Unlock():
                self.stage.mishaps.begins(self, "release")
                standing = self.standing()
                self.announce = self.rank_machine.inside
                self.lock = NEVER
                self.look_at_gate()
                self.handle(
                    Unlocked(
                        at=standing.at, position=standing.position, held=standing.held,
                        backups=standing.backups,
                    )
                )  # fmt: skip
            case LeaveAfter(step=step):
                self.lock = self.leave_after = step
                self.look_at_gate()
                self.handle(Leaving(at=self.node.now, position=self.position()))
            case Abort():
                self._abort()
            case Execute():
                self._execute(command)
            case Withdraw():
                if self._pending is not None:
                    self._pending = None
                    self.handle(Withdrawn())
            case Answer(answer=answer):
                self.mail.post(answer)
            case _:
                assert_never(command)

    def _execute(self, execute: Execute) -> None:
        if execute.name == "resume":
            self.lock = self.leave_after = NEVER
        if self.phase in ("idle", "gate") and not self.stuck:
            self._begin(execute)
        else:
            self._pending = execute

    def lets_go(self) -> bool:
        """
        Return whether a thread at the next update window need not wait on: the lock allows the next
        step, or the thread has to leave the loop before it.
        """
        return self.completed + 1 <= self.lock or self.completed + 1 > self.leave_after

    def look_at_gate(self) -> None:
        """
        Let a thread that waits at the step gate into its update window, or out of the loop, when
        the lock allows it.
        """
        if self.phase != "gate" or self.stuck or not self.lets_go():
            return
        if self.completed + 1 <= self.lock:
            assert self.group is not None
            self.phase = "window"
            self.stage.clock.after(0.02, self.group.close, [self], self.completed + 1)
        else:
            self.window_open = False
            self.page.move(self.position(), self.node.now)
            loop.leave(self, None)

    def _abort(self) -> None:
        self.cut = True
        if self.group is not None:
            self.group.leave(self, loud=True)
        if self.stuck:
            return
        if self.phase in ("all-reduce", "average"):
            loop.fault(self, "network", "the group was shut")
        elif self.phase == "working":
            hands.abandon(self)

    # ---------------------------------------------------------------- the training thread, out of the loop

    def _begin(self, execute: Execute) -> None:
        if execute.name == "resume":
            loop.enter(self, execute)
        else:
            self.errand = self.phase == "gate"
            self.phase = "working"
            self.task = execute
            hands.begin(self, execute)

    def done(self, task: Execute | None, failure: str | None, work: Work = NOTHING) -> None:
        """
        Report that the training thread has carried out an order, or that it failed to.
        """
        if task is None or self.task is not task or not self.alive or self.stuck:
            return
        self.task = None
        self.phase = "gate" if self.errand else "idle"
        self.errand = False
        self.stage.invariants.finished(self)
        self.tell_done(task, failure, work)
        self.look_at_gate()

    def shut_out(self, why: str) -> None:
        """
        Fail the current order with a `ConnectionError`: the training thread waits for something
        that will not come.
        """
        self.done(self.task, f"ConnectionError: {why}")

    def tell_done(self, task: Execute, failure: str | None, work: Work = NOTHING) -> None:
        """
        Tell the rank machine the result of an order.
        """
        now = self.node.now
        self.handle(
            Done(
                order=task.order, name=task.name, failure=failure, position=self.position(),
                context_lost=failure is not None and self.context_lost,
                held=self.held(), backups=self.backups(), files=work.files, verdict=work.verdict,
                finding=work.finding, private=work.private, digests=work.digests, line=work.line,
                began=now, at=now,
            )
        )  # fmt: skip

    def left(self) -> None:
        """
        Note that the training thread has left the loop and waits for orders.
        """
        self.phase = "idle"
        self.handle(Left(at=self.node.now))

    # ---------------------------------------------------------------- ending

    def hang(self, *, wholly: bool) -> None:
        """
        Stop the training thread where it is. With `wholly`, stop the control thread too.
        """
        self.stuck = True
        self.stopped = self.stopped or wholly
        if self.stopped:
            self.mail.closed = True

    def end(self) -> None:
        """
        End the process, whatever it is doing.
        """
        self.alive = False
        self.phase = "gone"
        self.mail.closed = True
        self.stage.groups.leave(self)
        if self.group is not None:
            self.group.leave(self, loud=True)
