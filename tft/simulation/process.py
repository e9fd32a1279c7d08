"""
One process of one rank: the real rank machine (the state machine that handles orders) on its
control thread, and a simulated training thread. The training thread trains in the training loop. It
carries out orders outside of the loop, or while it waits in the loop at the step gate (where orders
hold a rank before an update).
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
from tft.protocol.messages import (
    ORDER_NAMES,
    Freeze,
    Joined,
    Lead,
    RankOrder,
    Ready,
    Refused,
    ShardCopies,
)
from tft.simulation import hands, loop
from tft.simulation.mail import Mail
from tft.simulation.page import Page
from tft.simulation.process_state import NEVER, Collectives, Life, Memory, Steps, TrainingThread
from tft.simulation.stage import GroupPart, NodePart, Stage
from tft.simulation.work import NOTHING, Work

TAKEN = 1
"""The exit status of a process that the controller refuses because another process holds its rank.
In a real process, the exception `RankTaken` ends the script."""


class Process:
    """
    One simulated process of a rank, from its start to its end.
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
        self.mail = Mail(stage, f"rank.{rank}/{incarnation}.{self.pid}", node.connection.link)
        self.rank_machine = RankMachine(rank=rank, incarnation=incarnation)
        self.life = Life()
        self.steps = Steps()
        self.thread = TrainingThread()
        self.memory = Memory(
            {name: stage.truth.value(0, name) for name in stage.schedule.shards(rank)}
        )
        self.collectives = Collectives()
        self.group: GroupPart | None = None
        self._timer: float | None = None

    # ---------------------------------------------------------------- state that others read

    def held(self) -> int | None:
        """
        Return the step whose whole state is in memory. Return None when an update window is open or
        the state is incomplete.
        """
        return None if self.steps.window_open or self.memory.torn else self.steps.completed

    def backups(self) -> tuple[int, ...]:
        """
        Return the steps of which the rank keeps a whole copy.
        """
        return tuple(step for step in self.memory.copies if step <= self.steps.completed)

    def waiting(self) -> bool:
        """
        Return whether the training thread may be waiting for other ranks.
        """
        return self.thread.phase not in ("forward", "window", "tail")

    def standing(self) -> Located:
        """
        Return the position of the training thread, and whether it waits at the step gate (where
        orders hold a rank before an update).
        """
        gate = self.thread.phase == "gate" or self.thread.errand
        still = gate and not self.steps.lets_go()
        return Located(
            at=self.node.now, position=self.steps.position(), backups=self.backups(), still=still,
            held=self.steps.completed if still and not self.memory.torn else self.held(),
        )  # fmt: skip

    # ---------------------------------------------------------------- the start of the process

    def join(self) -> None:
        """
        Send the report `Joined`, as a script does when it calls `tft.init`.
        """
        if not self.life.alive or self.life.stopped:
            return
        stage = self.stage
        self.life.joined = Joined(
            rank=self.rank, incarnation=self.incarnation, world=stage.schedule.world,
            pid=self.pid, started=self.pid, host=f"node{self.node.number}",
            address=f"node{self.node.number}:{self.pid}", adaptor="simulated",
            strategies=stage.schedule.strategies, derives=stage.schedule.derives,
            at=self.node.now,
        )  # fmt: skip
        self.page.move(self.steps.position(), self.node.now)
        self.page.training = False
        self.mail.post(self.life.joined)

    def hear_lead(self, lead: Lead) -> None:
        """
        Handle a `Lead` message, with which the leading controller acknowledges reports. When such a
        message acknowledges this process for the first time, the process gets ready.
        """
        heard = self.mail.heard(lead)
        if heard and not self.life.accepted and not self.life.stopped:
            self.life.accepted = True
            self.stage.clock.after(self.stage.takes(0.02, 0.2), self._ready)

    def hear_refusal(self, refused: Refused) -> None:
        """
        Exit with the status `TAKEN` when the controller refuses this process, since another process
        holds its rank.
        """
        if refused.pid == self.pid and not self.life.accepted and self.life.alive:
            self.node.ended(self, TAKEN)

    def _ready(self) -> None:
        """
        Send the report `Ready`, as a script does when it calls `Session.run`. If an order waits for
        the training thread, begin it.
        """
        if not self.life.alive or self.life.stopped or self.thread.stuck:
            return
        groups = self.stage.schedule.groups()
        shards = tuple(ShardCopies(shard=name, ranks=groups[name]) for name in self.memory.content)
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
        self.thread.phase = "idle"
        self._begin_pending()

    # ---------------------------------------------------------------- the control thread

    def hear(self, order: RankOrder, leader: int) -> None:
        """
        Handle an order for this rank that has arrived.
        """
        if not self.life.alive or self.life.stopped or self.life.joined is None:
            return
        if order.epoch >= self.rank_machine.epoch:
            self.stage.checks.invariants.one_leader_obeyed(order.epoch, leader)
        # at a freeze order, the agent of the node also sends a heartbeat with its ranks' status
        if isinstance(order, Freeze):
            self.node.say_status()
        self.handle(Ordered(at=self.node.now, name=ORDER_NAMES[type(order)], order=order))

    def handle(self, event: RankEvent) -> None:
        """
        Give an event to the rank machine (the state machine that handles the orders of a rank), and
        carry out the commands that the rank machine returns.
        """
        if not self.life.alive or self.life.stopped:
            return
        before = self.rank_machine.epoch, self.rank_machine.key
        commands = self.rank_machine.handle(event)
        if commands and isinstance(event, Ordered):
            self.stage.checks.invariants.heeded(self, event.order, *before)
        for command in commands:
            self._do(command)
        deadline = self.rank_machine.next_deadline()
        if deadline is not None and (self._timer is None or deadline < self._timer):
            self._timer = deadline
            # wake the rank machine 1 µs after its deadline: with a rounding error, an exact wake-up
            # could come before the deadline
            moment = deadline - self.node.offset + 1e-6
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
                self.steps.lock = self.steps.completed
                self.handle(
                    Locked(
                        at=self.node.now, position=self.steps.position(), held=self.held(),
                        backups=self.backups(), waiting=self.waiting(),
                    )
                )  # fmt: skip
            case HoldAfter(step=step):
                self.stage.mishaps.begins(self, "hold")
                self.steps.lock = step
                self.look_at_gate()
                self.handle(self.standing())
            case Unlock():
                self.stage.mishaps.begins(self, "release")
                standing = self.standing()
                self.steps.announce = self.rank_machine.inside
                self.steps.lock = NEVER
                self.look_at_gate()
                self.handle(
                    Unlocked(
                        at=standing.at, position=standing.position, held=standing.held,
                        backups=standing.backups,
                    )
                )  # fmt: skip
            case LeaveAfter(step=step):
                self.steps.lock = self.steps.leave_after = step
                self.look_at_gate()
                self.handle(Leaving(at=self.node.now, position=self.steps.position()))
            case Abort():
                self._abort()
            case Execute():
                self._execute(command)
            case Withdraw():
                if self.thread.pending:
                    self.thread.pending.clear()
                    self.handle(Withdrawn())
            case Answer(answer=answer):
                self.mail.post(answer)
            case _:
                assert_never(command)

    def _execute(self, execute: Execute) -> None:
        if execute.name == "resume":
            self.steps.lock = self.steps.leave_after = NEVER
        if self.thread.phase in ("idle", "gate") and not self.thread.stuck:
            self._begin(execute)
        else:
            self.thread.pending.append(execute)

    def _begin_pending(self) -> None:
        """
        Begin the orders that have waited for the training thread, until one keeps it busy.
        """
        while self.thread.pending and self.thread.phase in ("idle", "gate"):
            self._begin(self.thread.pending.pop(0))

    def look_at_gate(self) -> None:
        """
        Let a training thread that waits at the step gate (where orders hold a rank before an
        update) go on, if its orders allow this. The thread then enters its update window, or leaves
        the loop.
        """
        if self.thread.phase != "gate" or self.thread.stuck or not self.steps.lets_go():
            return
        if self.steps.completed + 1 <= self.steps.lock:
            assert self.group is not None
            self.thread.phase = "window"
            self.stage.clock.after(0.02, self.group.close, [self], self.steps.completed + 1)
        else:
            self.steps.window_open = False
            self.page.move(self.steps.position(), self.node.now)
            loop.leave(self, None)

    def _abort(self) -> None:
        self.collectives.cut = True
        if self.group is not None:
            self.group.leave(self, loud=True)
        if self.thread.stuck:
            return
        if self.thread.phase in ("all-reduce", "average"):
            loop.fault(self, "network", "the group was shut")
        elif self.thread.phase == "working":
            hands.abandon(self)

    # ---------------------------------------------------------------- the training thread, out of the loop

    def _begin(self, execute: Execute) -> None:
        if execute.name == "resume":
            loop.enter(self, execute)
        elif execute.name == "compare":
            self.thread.aside = execute
            hands.begin(self, execute)
        else:
            self.thread.errand = self.thread.phase == "gate"
            self.thread.phase = "working"
            self.thread.task = execute
            hands.begin(self, execute)

    def done(self, task: Execute | None, failure: str | None, work: Work = NOTHING) -> None:
        """
        Handle the end of an order on the training thread, or of a `compare` order on another
        thread. `failure` is None if the thread has carried out the order; `work` is the result.
        """
        if task is None or not self.at_work(task):
            return
        if task is self.thread.aside:
            self.thread.aside = None
            return self.tell_done(task, failure, work)
        self.thread.task = None
        self.thread.phase = "gate" if self.thread.errand else "idle"
        self.thread.errand = False
        self.stage.checks.invariants.finished(self)
        self.tell_done(task, failure, work)
        self.look_at_gate()

    def at_work(self, task: Execute) -> bool:
        """
        Return whether a thread of this process still carries out the order `task`.
        """
        carried_out = task is self.thread.task or task is self.thread.aside
        return carried_out and self.life.alive and not self.thread.stuck

    def shut_out(self, why: str) -> None:
        """
        Let the current order fail with a `ConnectionError`, because the training thread waits for
        an operation that can no longer complete. `why` is the text of the error.
        """
        self.done(self.thread.task, f"ConnectionError: {why}")

    def tell_done(self, task: Execute, failure: str | None, work: Work = NOTHING) -> None:
        """
        Tell the rank machine (the state machine that handles the orders of a rank) the result of an
        order.
        """
        now = self.node.now
        self.handle(
            Done(
                order=task.order, name=task.name, failure=failure, position=self.steps.position(),
                context_lost=failure is not None and self.collectives.context_lost,
                held=self.held(), backups=self.backups(), files=work.files, verdict=work.verdict,
                finding=work.finding, local_state=work.local_state, digests=work.digests, line=work.line,
                began=now, at=now,
            )
        )  # fmt: skip

    def left(self) -> None:
        """
        Record that the training thread has left the loop and waits for orders.
        """
        self.thread.phase = "idle"
        self.handle(Left(at=self.node.now))

    # ---------------------------------------------------------------- the end of the process

    def hang(self, *, wholly: bool) -> None:
        """
        Stop the training thread where it is, as a hang does. With `wholly`, stop the control thread
        too.
        """
        self.thread.stuck = True
        self.life.stopped = self.life.stopped or wholly
        if self.life.stopped:
            self.mail.closed = True

    def end(self) -> None:
        """
        End the process, whatever it is doing.
        """
        self.life.alive = False
        self.thread.phase = "gone"
        self.mail.closed = True
        self.stage.groups.leave(self)
        if self.group is not None:
            self.group.leave(self, loud=True)
