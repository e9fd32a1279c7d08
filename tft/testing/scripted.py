"""
A scripted job: the real job machine, with ranks and agents that do as they are told, at once.

No process, no socket, no time passes that a test does not let pass. A test says what goes wrong
(`kill`, `fault`, `mute`, `fail`) and looks at the orders, the states and the report.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tft.core.commands import Command, Consult, JobOver, Tell
from tft.core.events import DeadlinePassed, Led, Received, Stalled
from tft.core.incident import Fault
from tft.core.incident_report import incident_report
from tft.core.machine import Machine
from tft.core.policy import Policy
from tft.core.table import State
from tft.protocol.messages import (
    ORDER_NAMES,
    Advised,
    Checkpointed,
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
    NodeJoined,
    NodeLost,
    Noticed,
    Order,
    OrderName,
    PauseRequested,
    RankOrder,
    RankReport,
    Ready,
    Refused,
    Report,
    ResumeRequested,
    ShardCopies,
    Spawn,
    Spawned,
    StopRequested,
    StoreOpened,
    SwitchRequested,
    Trained,
    Verdict,
)
from tft.testing.obedient import ScriptedRank

Kind = TypeVar("Kind", bound=Order)


@dataclass(slots=True)
class ScriptedJob:
    """
    One node by default; `placement` says which ranks each node starts.
    """

    world: int
    policy: Policy = field(default_factory=Policy)
    resume: tuple[str, int] | None = None
    older: tuple[tuple[str, int], ...] = ()
    """Further checkpoints that there are, of earlier steps."""
    checkpoint_name: str = "step-{step:08d}"
    placement: dict[int, tuple[int, ...]] = field(default_factory=dict)
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    spare: Mapping[int, int] = field(default_factory=dict)
    """By node: for how many more ranks it has room."""
    derives: bool = True
    """The adaptor can make private state anew."""
    columns: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By rank: who leaves and comes back with it."""
    strategies: tuple[str, ...] = ("retry", "recover", "dump")
    """What the adaptor can take part in."""
    settled: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """By rank: what that is when it is ready, where it is not the same."""
    keeps: int = 0
    """Of how many earlier steps each rank keeps a copy."""
    finds: dict[int, int] | None = None
    """By rank: the step of the newest checkpoint that it keeps itself; None: none keeps any."""
    after: float = 0.0
    """Seconds that the functions which ranks call after a step may take."""
    promises: bool = False
    """What a rank fetches comes when all rebuild."""
    now: float = 100.0
    machine: Machine = field(init=False)
    ranks: dict[int, ScriptedRank] = field(init=False)
    """Which process holds each rank, as far as the ranks were told."""
    successors: dict[int, ScriptedRank] = field(init=False, default_factory=dict)
    """Further processes, which are to take over."""
    former: list[ScriptedRank] = field(init=False, default_factory=list)
    """Processes that somebody has taken over from."""
    slow: set[int] = field(init=False, default_factory=set)
    """Ranks whose new processes get no further than starting, until `arrive`."""
    verdicts: dict[int, tuple[Verdict, str]] = field(init=False, default_factory=dict)
    """What the next check finds on a rank; everywhere else it passes."""
    gone: set[int] = field(init=False, default_factory=set)
    """Nodes without an agent."""
    said: list[Order] = field(init=False, default_factory=list)
    over: JobOver | None = field(init=False, default=None)
    tells: list[Tell] = field(init=False, default_factory=list)
    consulted: list[Consult] = field(init=False, default_factory=list)
    failures: dict[tuple[int, OrderName], list[str]] = field(init=False, default_factory=dict)
    """Why an order fails on a rank, the first times it comes."""
    deaf: set[int] = field(init=False, default_factory=set)
    """Nodes whose agents end nobody, whatever they are told."""
    miscopied: dict[int, int] = field(init=False, default_factory=dict)
    """How often what a rank fetches is not what it was given."""
    muted: set[tuple[int, OrderName]] = field(init=False, default_factory=set)
    """Orders that a rank never answers."""
    stuck: set[int] = field(init=False, default_factory=set)
    """Ranks whose all-reduces were cut off: they cannot finish the step the others finish."""
    _queue: deque[Order] = field(init=False, default_factory=deque)
    _number: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.placement = dict(self.placement) or {0: tuple(range(self.world))}
        self.groups = self.groups or {"dense": tuple(range(self.world))}
        homes = {rank: node for node, ranks in self.placement.items() for rank in ranks}
        self.ranks = {rank: ScriptedRank(rank, node=homes[rank]) for rank in range(self.world)}
        self.machine = Machine(
            self.world, self.policy, job="job", checkpoints="/run/checkpoints",
            checkpoint_name=self.checkpoint_name, at=self.now, resume=self.resume, older=self.older, first_incident=1,
        )  # fmt: skip

    # ---------------------------------------------------------------- what a test does

    def start(self) -> "ScriptedJob":
        """
        Agents, store and ranks come up; everyone trains.
        """
        self.lead(1)
        for node in self.placement:
            self.come(node)
        self.report(StoreOpened(node=0, host="h", port=1, at=self.now))
        self.settle()
        return self

    def report(self, message: Report, *, sender: str = "") -> None:
        """
        A report comes in; what follows is queued, not yet done. Who speaks for a rank is its
        process, if nothing else is said.
        """
        self.now += 0.001
        self._number += 1
        event = Received(
            at=self.now, sender=sender or _sender(message), number=self._number, message=message
        )
        self._take(self.machine.handle(event))
        self.machine.check()

    def settle(self) -> None:
        """
        Everyone does what they were told, until nothing is left to do.
        """
        while self._queue:
            self._obey(self._queue.popleft())

    def obey_next(self) -> None:
        """
        The next order is carried out, and no other.
        """
        self._obey(self._queue.popleft())

    def train(self, steps: int = 1) -> None:
        """
        Every rank that is in the loop trains so many steps, in lockstep.
        """
        for _ in range(steps):
            for rank in self.ranks.values():
                if rank.training and not rank.hung and rank.step < rank.limit:
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
        one.complete()
        self._announce(one)

    def _announce(self, one: ScriptedRank) -> None:
        if one.announce:
            one.announce = False
            self.report(
                Trained(rank=one.rank, incarnation=one.incarnation, step=one.step, at=self.now)
            )

    def kill(self, rank: int, code: int = -9, *, stack: str = "") -> None:
        """
        The process of a rank ends; its agent says so.
        """
        self._ends(self.ranks[rank], code, stack=stack)

    def kill_successor(self, rank: int) -> None:
        """
        The process that is to take over from a rank ends.
        """
        self._ends(self.successors.pop(rank), -9)

    def _ends(self, one: ScriptedRank, code: int, *, stack: str = "") -> None:
        one.alive = one.training = one.hung = False
        self.report(
            Exited(
                node=one.node,
                rank=one.rank,
                incarnation=one.incarnation,
                code=code,
                position=one.position,
                stack=stack,
                stopped=one.stopped,
                private={one.step: "00", one.step + 1: "01"},
                at=self.now,
            )
        )

    def fault(
        self,
        rank: int,
        kind: FaultKind,
        text: str = "Boom: it broke",
        *,
        polluted: bool = False,
        not_after: int | None = None,
        context_lost: bool = False,
    ) -> None:
        """
        An exception leaves the loop of a rank.
        """
        one = self.ranks[rank]
        one.training, one.context_lost = False, context_lost
        self._spoil(one, kind, polluted=polluted, not_after=not_after)
        self.report(
            Faulted(
                rank=rank,
                incarnation=one.incarnation,
                kind=kind,
                step=one.step + 1,
                summary=text,
                traceback=f"Traceback\n{text}",
                position=one.position,
                polluted=polluted,
                not_after=not_after,
                context_lost=context_lost,
                at=self.now,
            )
        )

    def notice(
        self, rank: int, kind: FaultKind, evidence: str = "seen from outside", *,
        polluted: bool = False, not_after: int | None = None,
    ) -> None:  # fmt: skip
        """
        Somebody outside sees a fault of a rank.
        """
        self._spoil(self.ranks[rank], kind, polluted=polluted, not_after=not_after)
        self.report(
            Noticed(
                rank=rank, kind=kind, evidence=evidence, polluted=polluted, not_after=not_after,
                at=self.now,
            )
        )  # fmt: skip

    def _spoil(
        self, one: ScriptedRank, kind: FaultKind, *, polluted: bool, not_after: int | None = None
    ) -> None:
        """
        What a fault really does to what the ranks hold.
        """
        if kind in ("memory", "corruption"):
            one.spoiled, one.bad_copies = True, frozenset(one.backups)
        for other in self.ranks.values():
            spread = polluted and other.step >= one.step
            older = not_after is not None and other.step > not_after
            other.spoiled = other.spoiled or spread or older

    def finish(self, *ranks: int) -> None:
        """
        `train` returns, on every rank that trains or on these.
        """
        for one in self.ranks.values():
            if one.training and (not ranks or one.rank in ranks):
                one.training, one.done = False, True
                self.report(
                    Finished(rank=one.rank, incarnation=one.incarnation, step=one.step, at=self.now)
                )
        self.settle()

    def pause(self, check: str = "") -> None:
        """
        Somebody asks for a pause.
        """
        self.report(PauseRequested(why="a switch is replaced", check=check, at=self.now))

    def go_on(self) -> None:
        """
        Somebody asks for the pause to end.
        """
        self.report(ResumeRequested(why="it is replaced", at=self.now))

    def switch(self, *ranks: int) -> None:
        """
        Somebody asks for these ranks to go to other processes; none: for what was asked to be called off.
        """
        self.report(SwitchRequested(ranks=ranks, why="its pod is switched", at=self.now))

    def checkpointed(self, step: int) -> None:
        """
        A periodic checkpoint of the job is complete.
        """
        self.report(
            Checkpointed(
                rank=0,
                incarnation=self.ranks[0].incarnation,
                directory=f"/periodic/{step}",
                step=step,
                at=self.now,
            )
        )

    def advise(self, **said: Any) -> None:  # Any: the fields of Advised, of several types
        """
        A recovery plugin answers what it was asked last.
        """
        asked = self.consulted[-1]
        facts = {"incident": asked.incident, "round": asked.round, "why": "the scheduler says so"}
        self.report(Advised(**{**facts, **said}, at=self.now))

    def stall(self, silence: float = 5.0) -> None:
        """
        The watch says that nobody moves.
        """
        self.now += silence
        self._take(self.machine.handle(Stalled(at=self.now, silence=silence, limit=3.0)))
        self.machine.check()

    def lead(self, epoch: int) -> None:
        """
        A controller takes over.
        """
        self._take(self.machine.handle(Led(at=self.now, epoch=epoch)))
        self.machine.check()

    def stop(self, signal: int = 15, *, node: int | None = None) -> None:
        """
        The launcher asks for the end, that of all or of a node.
        """
        why = "SIGTERM came" if signal else "an operator asks for it"
        self.report(StopRequested(why=why, signal=signal, node=node, at=self.now))

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
        self.gone.add(node)
        for one in (*self.ranks.values(), *self.successors.values(), *self.former):
            if one.node == node:
                one.alive = one.training = False
        self.successors = {
            rank: successor for rank, successor in self.successors.items() if successor.alive
        }
        self.report(NodeLost(node=node, why="its agent has ended", at=self.now))

    def come(self, node: int) -> None:
        """
        An agent is up, for the first time or again.
        """
        self.gone.discard(node)
        self.report(
            NodeJoined(
                node=node,
                host="h",
                pid=1,
                ranks=self.placement.setdefault(node, ()),
                spare=self.spare.get(node, 0),
                at=self.now,
            )
        )

    def wait(self) -> None:
        """
        Time passes until the machine's next deadline.
        """
        deadline = self.machine.next_deadline()
        assert deadline is not None, "nothing is waited for"
        self.now = max(self.now, deadline)
        self.let_pass(0.0)

    def let_pass(self, seconds: float) -> None:
        """
        So much time passes, and the machine is told, whether that is what it waits for or not.
        """
        self.now += seconds
        self._take(self.machine.handle(DeadlinePassed(at=self.now)))
        self.machine.check()

    # ---------------------------------------------------------------- what a test looks at

    @property
    def state(self) -> State:
        """
        The machine's state.
        """
        return self.machine.state

    @property
    def doing(self) -> str:
        """
        The machine's state, as a word.
        """
        return str(self.machine.state)

    def orders(self, kind: type[Kind]) -> list[Kind]:
        """
        The orders of one kind, as they were first said.
        """
        return [order for order in self.said if isinstance(order, kind)]

    def facts(self, event: str) -> list[dict[str, object]]:
        """
        What was told of one kind of event.
        """
        return [tell.facts for tell in self.tells if tell.event == event]

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
                one = self._process(order.rank, order.incarnation)
                if one is not None and one.alive and order.node not in self.deaf:
                    self.successors = {
                        r: successor
                        for r, successor in self.successors.items()
                        if successor is not one
                    }
                    self._ends(one, -9, stack="File stuck.py" if order.last_words else "")
            case EndNode() | Refused():
                pass
            case _:
                for rank in order.to:
                    self._hand_over(rank, order)
                    for process in self._processes(rank):
                        self._carry_out(process, order)

    def _processes(self, rank: int) -> list[ScriptedRank]:
        """
        Everyone who hears the orders for a rank.
        """
        successor = [self.successors[rank]] if rank in self.successors else []
        return [self.ranks[rank], *successor, *(one for one in self.former if one.rank == rank)]

    def _process(self, rank: int, incarnation: int) -> ScriptedRank | None:
        matching = (one for one in self._processes(rank) if one.incarnation == incarnation)
        return next(matching, None)

    def _hand_over(self, rank: int, order: RankOrder) -> None:
        """
        Orders name who holds the rank: from the first one that names the successor, it does.
        """
        successor = self.successors.get(rank)
        if successor is not None and order.incarnations.get(rank, 0) == successor.incarnation:
            self.former.append(self.ranks[rank])
            self.ranks[rank] = self.successors.pop(rank)

    def _spawn(self, order: Spawn) -> None:
        if order.node in self.gone:
            return
        one = ScriptedRank(
            order.rank, order.incarnation, node=order.node, alive=True, keeps=self.keeps
        )
        if self.ranks[order.rank].alive:
            self.successors[order.rank] = one
        else:
            self.ranks[order.rank] = one
        self.report(
            Spawned(
                node=order.node,
                rank=order.rank,
                incarnation=order.incarnation,
                pid=1000 * (order.incarnation + 1) + order.rank,
                at=self.now,
            )
        )
        if order.rank not in self.slow:
            self.join(one)
            self.ready(one)

    def arrive(self, rank: int) -> None:
        """
        The newest process of a slow rank comes as far as `Session.run`.
        """
        self.slow.discard(rank)
        one = self.successors.get(rank, self.ranks[rank])
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
                strategies=self.strategies,
                derives=self.derives,
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
        one.shards = tuple(each.shard for each in shards)
        self.report(
            Ready(
                rank=one.rank,
                incarnation=one.incarnation,
                shards=shards,
                column=self.columns.get(one.rank, ()),
                strategies=self.settled.get(one.rank, ()),
                reloads=self.finds is not None and one.rank in self.finds,
                after=self.after,
                at=self.now,
            )
        )

    def _carry_out(self, one: ScriptedRank, order: RankOrder) -> None:
        name = ORDER_NAMES[type(order)]
        muted = (one.rank, name) in self.muted or (name == "hold" and one.rank in self.stuck)
        if muted or not one.hears(order, name):
            return
        failures = self.failures.get((one.rank, name), [])
        failure = failures.pop(0) if failures else None
        if failure is not None and name in ("load", "fetch", "restore", "reload"):
            one.torn = True  # what it had is overwritten in part
        one.finds, one.promises = (self.finds or {}).get(one.rank), self.promises
        if failure is None:
            failure = one.obey(order, self._gives, stuck=one.rank in self.stuck)
        if isinstance(order, Fetch) and failure is None:
            self._copy(one, order)
        found: tuple[Verdict, str] = ("pass", "")
        if name == "check":
            found = self.verdicts.pop(one.rank, found)
        self.report(one.answer(order, name, failure, found=found, at=self.now))
        if isinstance(order, Complete | End):
            self._ends(one, 0 if isinstance(order, Complete) else order.code)

    def _copy(self, one: ScriptedRank, order: Fetch) -> None:
        for transfer in order.transfers:
            source = self.ranks[transfer.sources[0].rank]
            one.content, one.settings = source.content, source.settings
        if self.miscopied.get(one.rank):
            self.miscopied[one.rank] -= 1
            one.content = "damaged"

    def _gives(self, rank: int) -> frozenset[int]:
        return self.ranks[rank].sound_steps()


def _sender(message: Report) -> str:
    if isinstance(message, RankReport):
        return f"rank.{message.rank}/{message.incarnation}"
    return "outside"


def _nobody_knows(fault: Fault) -> float | None:
    return None
