"""
One process of one rank: the real rank machine on its control thread, and a training thread that is
in the loop, or out of it and carrying out orders, as a session's is.
"""

from typing import TYPE_CHECKING, Literal, assert_never

from tft.core.rank import RankMachine
from tft.core.rank_protocol import (
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
from tft.testing.cluster import hands, loop
from tft.testing.cluster.hands import Work
from tft.testing.cluster.mail import Mail

if TYPE_CHECKING:
    from tft.testing.cluster.group import Group
    from tft.testing.cluster.node import Node, Page
    from tft.testing.cluster.schedule import Mishap
    from tft.testing.cluster.stage import Content, Stage

NOTHING = Work()
Phase = Literal[
    "starting", "idle", "working", "forward", "sums", "gate", "window", "tail", "average", "leaving", "gone"
]  # fmt: skip

NEVER = 1 << 60
TAKEN = 1
"""The exit status of a process whose rank another one holds: `RankTaken` ends the script."""


class Process:
    """
    From its start to its end.
    """

    def __init__(
        self, stage: "Stage", node: "Node", rank: int, incarnation: int, page: "Page"
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
        """Not even the control thread runs."""
        self.held_until = 0.0
        """The kernel does not end it before."""
        self.stuck = False
        """The training thread does not go on from where it is."""
        self.joined: Joined | None = None
        self._accepted = False
        self.phase: Phase = "starting"
        self.completed = 0
        self.window_open = self.torn = self.announce = False
        self.tail = False
        """The update window of step `completed` has closed, and the step has not ended."""
        self.line = ""
        """How far it has come in the tail."""
        self.lock = self.leave_after = NEVER
        self._pending: Execute | None = None
        self.task: Execute | None = None
        """What the training thread is carrying out."""
        self._timer: float | None = None
        self.group: Group | None = None
        self.cut = True
        """Its end of the group is shut."""
        self.summed = False
        """The all-reduces it waits for are complete, and on their way."""
        self.context_lost = False
        """Its device takes no more work from it."""
        self.poison = False
        """It will contribute what it should not."""
        self.spoilt = False
        """They hold what somebody should not have contributed."""
        self.content: dict[str, Content] = {
            name: stage.truth.value(0, name) for name in stage.schedule.shards(rank)
        }
        self.unsaid = False
        """A corruption that nobody is told of has touched what it holds since it has said digests of it."""
        self.miscopies: Mishap | None = None
        """Such a corruption touches what it is fetching."""
        self.copies: dict[int, dict[str, Content]] = {}
        """Of earlier steps' content."""
        self.errand = False
        """It carries out an order from where it stands in the loop."""
        self.data = 0
        """How many batches were drawn."""
        self.interrupted = (-1, 0)
        """The step in whose middle the loop was left, and the incident for which."""
        self.interrupted_data = 0
        """The data position then."""

    # ---------------------------------------------------------------- what others look at

    def position(self) -> Position:
        """
        Where the training thread stands.
        """
        return Position(step=self.completed, window=self.window_open, tail=self.tail)

    def held(self) -> int | None:
        """
        The step whose whole state is in memory.
        """
        return None if self.window_open or self.torn else self.completed

    def backups(self) -> tuple[int, ...]:
        """
        The steps of which a whole copy is kept.
        """
        return tuple(step for step in self.copies if step <= self.completed)

    def waiting(self) -> bool:
        """
        Whether the training thread may be waiting for other ranks.
        """
        return self.phase not in ("forward", "window", "tail")

    def standing(self) -> Standing:
        """
        Where the training thread stands, and whether it waits there to be let into a window.
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
        The script calls `tft.init`.
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
        The controller has heard this process.
        """
        heard = self.mail.heard(lead)
        if heard and not self._accepted and not self.stopped:
            self._accepted = True
            self.stage.clock.after(self.stage.takes(0.02, 0.2), self._ready)

    def hear_refusal(self, refused: Refused) -> None:
        """
        Another process holds this rank.
        """
        if refused.pid == self.pid and not self._accepted and self.alive:
            self.node.ended(self, TAKEN)

    def _ready(self) -> None:
        """
        The script calls `Session.run`.
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
        An order for this rank came in.
        """
        if not self.alive or self.stopped or self.joined is None:
            return
        if order.epoch >= self.rank_machine.epoch:
            self.stage.invariants.one_leader_obeyed(order.epoch, leader)
        self.handle(Ordered(at=self.node.now, name=ORDER_NAMES[type(order)], order=order))

    def handle(self, event: RankEvent) -> None:
        """
        Hands an event to the rank machine, and does what that says.
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
            moment = deadline - self.node.offset + 1e-6  # not a rounding too early
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
        Nobody who waits at the next update window has to wait on.
        """
        return self.completed + 1 <= self.lock or self.completed + 1 > self.leave_after

    def look_at_gate(self) -> None:
        """
        Whoever waits at its update window may be let into it, or has to leave the loop.
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
        if self.phase in ("sums", "average"):
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
        The training thread has carried out an order, or failed to.
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
        What the training thread waits for will not come.
        """
        self.done(self.task, f"ConnectionError: {why}")

    def tell_done(self, task: Execute, failure: str | None, work: Work = NOTHING) -> None:
        """
        Says how an order went.
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
        The training thread has left the loop and waits for orders.
        """
        self.phase = "idle"
        self.handle(Left(at=self.node.now))

    # ---------------------------------------------------------------- ending

    def hang(self, *, wholly: bool) -> None:
        """
        The training thread stops where it is; `wholly`: the control thread does too.
        """
        self.stuck = True
        self.stopped = self.stopped or wholly
        if self.stopped:
            self.mail.closed = True

    def end(self) -> None:
        """
        The process is gone, whatever it was doing.
        """
        self.alive = False
        self.phase = "gone"
        self.mail.closed = True
        self.stage.groups.leave(self)
        if self.group is not None:
            self.group.leave(self, loud=True)
