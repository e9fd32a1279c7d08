"""
A scripted job: the real job machine, with ranks and agents that do as they are told, at once.

No process, no socket, no time passes that a test does not let pass. A test says what goes wrong
(`kill`, `fault`, `mute`, `fail`) and looks at the orders, the states and the report.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tft.core.commands import Command, Consult, JobOver, Tell
from tft.core.events import DeadlinePassed, Led, Received, Stalled
from tft.core.incident import Fault
from tft.core.machine import Machine
from tft.core.policy import Policy
from tft.core.report import incident_report
from tft.core.table import State
from tft.protocol.messages import (
    ORDER_NAMES,
    Answered,
    Complete,
    End,
    EndNode,
    Exited,
    Faulted,
    FaultKind,
    Fetch,
    Finished,
    Joined,
    Kill,
    Load,
    NodeJoined,
    NodeLost,
    Order,
    OrderName,
    Position,
    RankOrder,
    Ready,
    Rebuild,
    Refused,
    Report,
    Resume,
    Save,
    SavedFile,
    ShardCopies,
    Spawn,
    Spawned,
    Stop,
    StopRequested,
    StoreOpened,
    Trained,
)


@dataclass(slots=True)
class ScriptedRank:
    """
    A rank that does as it is told.
    """

    rank: int
    incarnation: int = 0
    alive: bool = False
    step: int = 0
    window: bool = False
    torn: bool = True
    training: bool = False
    announce: bool = False
    waiting: bool = True
    key: tuple[int, int] = (-1, 0)
    """The newest round it has heard of; older orders are absorbed, repeated ones too."""
    heard: set[OrderName] = field(default_factory=set)
    hung: bool = False
    """Answers nothing and trains nothing until it is killed."""

    @property
    def held(self) -> int | None:
        """
        As in the session.
        """
        return None if self.window or self.torn else self.step

    @property
    def position(self) -> Position:
        """
        As in the session.
        """
        return Position(step=self.step, window=self.window)


@dataclass(slots=True)
class ScriptedJob:
    """
    One node by default; `placement` says which ranks each node starts.
    """

    world: int
    policy: Policy = field(default_factory=Policy)
    resume: tuple[str, int] | None = None
    placement: dict[int, tuple[int, ...]] = field(default_factory=dict)
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    now: float = 100.0
    machine: Machine = field(init=False)
    ranks: dict[int, ScriptedRank] = field(init=False)
    said: list[Order] = field(init=False, default_factory=list)
    over: JobOver | None = field(init=False, default=None)
    tells: list[Tell] = field(init=False, default_factory=list)
    consulted: list[Consult] = field(init=False, default_factory=list)
    failures: dict[tuple[int, OrderName], list[str]] = field(init=False, default_factory=dict)
    """Why an order fails on a rank, the first times it comes."""
    muted: set[tuple[int, OrderName]] = field(init=False, default_factory=set)
    """Orders that a rank never answers."""
    stuck: set[int] = field(init=False, default_factory=set)
    """Ranks whose sums were cut off: they cannot finish the step the others finish."""
    _queue: deque[Order] = field(init=False, default_factory=deque)
    _number: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.placement = self.placement or {0: tuple(range(self.world))}
        self.groups = self.groups or {"dense": tuple(range(self.world))}
        self.ranks = {rank: ScriptedRank(rank) for rank in range(self.world)}
        self.machine = Machine(
            self.world, self.policy, job="job", checkpoints="/run/checkpoints", at=self.now,
            resume=self.resume,
        )  # fmt: skip

    # ---------------------------------------------------------------- what a test does

    def start(self) -> "ScriptedJob":
        """
        Agents, store and ranks come up; everyone trains.
        """
        self.lead(1)
        for node, ranks in self.placement.items():
            self.report(NodeJoined(node=node, host="h", pid=1, ranks=ranks, at=self.now))
        self.report(StoreOpened(node=0, host="h", port=1, at=self.now))
        self.settle()
        return self

    def report(self, message: Report) -> None:
        """
        A report comes in; what follows is queued, not yet done.
        """
        self.now += 0.001
        self._number += 1
        event = Received(at=self.now, sender="s", number=self._number, message=message)
        self._take(self.machine.handle(event))
        self.machine.check()

    def settle(self) -> None:
        """
        Everyone does what they were told, until nothing is left to do.
        """
        while self._queue:
            self._obey(self._queue.popleft())

    def train(self, steps: int = 1) -> None:
        """
        Every rank that is in the loop trains so many steps, in lockstep.
        """
        for _ in range(steps):
            for rank in self.ranks.values():
                if rank.training and not rank.hung:
                    self.window(rank.rank)
                    self.close(rank.rank)
            self.settle()

    def window(self, rank: int) -> None:
        """
        A rank opens its update window.
        """
        self.ranks[rank].window = True

    def close(self, rank: int) -> None:
        """
        A rank closes its update window.
        """
        one = self.ranks[rank]
        one.step, one.window = one.step + 1, False
        if one.announce:
            one.announce = False
            self.report(Trained(rank=rank, incarnation=one.incarnation, step=one.step, at=self.now))

    def kill(self, rank: int, code: int = -9, *, stack: str = "") -> None:
        """
        The process of a rank ends; its agent says so.
        """
        one = self.ranks[rank]
        one.alive = one.training = one.hung = False
        self.report(
            Exited(
                node=self.node(rank),
                rank=rank,
                incarnation=one.incarnation,
                code=code,
                position=one.position,
                stack=stack,
                private={one.step: "00", one.step + 1: "01"},
                at=self.now,
            )
        )

    def fault(self, rank: int, kind: FaultKind, text: str = "Boom: it broke") -> None:
        """
        An exception leaves the loop of a rank.
        """
        one = self.ranks[rank]
        one.training = False
        self.report(
            Faulted(
                rank=rank,
                incarnation=one.incarnation,
                kind=kind,
                step=one.step + 1,
                summary=text,
                traceback=f"Traceback\n{text}",
                position=one.position,
                at=self.now,
            )
        )

    def finish(self) -> None:
        """
        `train` returns on every rank.
        """
        for one in self.ranks.values():
            one.training = False
            self.report(
                Finished(rank=one.rank, incarnation=one.incarnation, step=one.step, at=self.now)
            )
        self.settle()

    def stall(self, silence: float = 5.0) -> None:
        """
        The watch says that nobody moves.
        """
        self.now += silence
        self._take(self.machine.handle(Stalled(at=self.now, silence=silence, limit=3.0)))

    def lead(self, epoch: int) -> None:
        """
        A controller takes over.
        """
        self._take(self.machine.handle(Led(at=self.now, epoch=epoch)))

    def stop(self, signal: int = 15) -> None:
        """
        The launcher asks for the end.
        """
        self.report(StopRequested(why="SIGTERM came", signal=signal, at=self.now))

    def reopen_store(self, port: int) -> None:
        """
        The rendezvous store comes back, maybe elsewhere.
        """
        self.report(StoreOpened(node=0, host="h", port=port, at=self.now))

    def repeat(self) -> None:
        """
        Everything unanswered is said once more.
        """
        self._queue.extend(self.machine.outstanding())

    def lose_node(self, node: int) -> None:
        """
        An agent and all its ranks are gone.
        """
        for rank in self.placement[node]:
            self.ranks[rank].alive = self.ranks[rank].training = False
        self.report(NodeLost(node=node, why="its agent has ended", at=self.now))

    def wait(self) -> None:
        """
        Time passes until the machine's next deadline.
        """
        deadline = self.machine.next_deadline()
        assert deadline is not None, "nothing is waited for"
        self.now = max(self.now, deadline)
        self._take(self.machine.handle(DeadlinePassed(at=self.now)))

    # ---------------------------------------------------------------- what a test looks at

    @property
    def state(self) -> State:
        """
        The machine's state.
        """
        return self.machine.state

    def node(self, rank: int) -> int:
        """
        Where a rank is placed.
        """
        return next(node for node, ranks in self.placement.items() if rank in ranks)

    def orders(self, kind: type) -> list[Order]:
        """
        The orders of one kind, as they were first said.
        """
        return [order for order in self.said if isinstance(order, kind)]

    def reports(self) -> list[dict[str, Any]]:  # Any: JSON
        """
        The incidents as the report has them, without anybody who knows better when they began.
        """
        return [incident_report(each, _nobody_knows) for each in self.machine.incidents]

    # ---------------------------------------------------------------- the ranks

    def _take(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case JobOver():
                    self.over = command
                case Tell():
                    self.tells.append(command)
                case Consult():
                    self.consulted.append(command)
                case _:
                    self.said.append(command)
                    self._queue.append(command)

    def _obey(self, order: Order) -> None:
        match order:
            case Spawn():
                self._spawn(order)
            case Kill():
                one = self.ranks[order.rank]
                if one.alive and one.incarnation == order.incarnation:
                    self.kill(order.rank, stack="File stuck.py" if order.last_words else "")
            case EndNode() | Refused():
                pass
            case _:
                for rank in order.to:
                    self._carry_out(self.ranks[rank], order)

    def _spawn(self, order: Spawn) -> None:
        one = self.ranks[order.rank] = ScriptedRank(order.rank, order.incarnation, alive=True)
        self.report(
            Spawned(
                node=order.node,
                rank=order.rank,
                incarnation=order.incarnation,
                pid=1000 * (order.incarnation + 1) + order.rank,
                at=self.now,
            )
        )
        self.join(one)
        self.ready(one)

    def join(self, one: ScriptedRank) -> None:
        """
        The process of a rank calls `tft.init`.
        """
        self.report(
            Joined(
                rank=one.rank,
                incarnation=one.incarnation,
                world=self.world,
                pid=1000 * (one.incarnation + 1) + one.rank,
                started=1,
                host="h",
                address=f"h:{one.rank}",
                adaptor="fake",
                strategies=("retry", "recover", "dump"),
                at=self.now,
            )
        )

    def ready(self, one: ScriptedRank) -> None:
        """
        The process of a rank calls `Session.run`.
        """
        shards = tuple(
            ShardCopies(shard=shard, ranks=ranks)
            for shard, ranks in self.groups.items()
            if one.rank in ranks
        )
        self.report(Ready(rank=one.rank, incarnation=one.incarnation, shards=shards, at=self.now))

    def _carry_out(self, one: ScriptedRank, order: RankOrder) -> None:
        name = ORDER_NAMES[type(order)]
        if not one.alive or one.hung or (one.rank, name) in self.muted:
            return
        key = (order.incident, order.round)
        if key < one.key or (key == one.key and name in one.heard):
            return
        one.heard = one.heard | {name} if key == one.key else {name}
        one.key = key
        failures = self.failures.get((one.rank, name), [])
        failure = failures.pop(0) if failures else None
        if failure is None:
            self._effect(one, order)
        files: tuple[SavedFile, ...] = ()
        if isinstance(order, Save):
            names = (*order.shards, *(f"private-{r}" for r in (one.rank, *order.private)))
            files = tuple(SavedFile(name=n, size=1, digest="d") for n in names)
        self.report(
            Answered(
                rank=one.rank,
                incarnation=one.incarnation,
                incident=order.incident,
                round=order.round,
                order=name,
                failure=failure,
                position=one.position,
                held=one.held,
                waiting=one.waiting,
                files=files,
                began=self.now,
                at=self.now,
            )
        )
        if isinstance(order, Complete | End):
            self.kill(one.rank, code=0 if isinstance(order, Complete) else order.code)

    def _effect(self, one: ScriptedRank, order: RankOrder) -> None:
        match order:
            case Stop():
                can = one.training and one.step < order.finish and one.rank not in self.stuck
                if can:
                    one.step, one.window = one.step + 1, False
                one.training = False
            case Fetch() | Load():
                one.step, one.window, one.torn = order.step, False, False
            case Rebuild():
                one.torn = False
            case Resume():
                assert one.held == order.step - 1, f"rank {one.rank} resumes with {one.held}"
                one.training = one.announce = True
            case _:
                pass


def _nobody_knows(fault: Fault) -> float | None:
    return None
