"""
What the leading job machine was told and has said in a run, kept apart from the machine itself: who
was asked what, who has answered, who was named as the cause of something.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tft.core.machine import Machine
from tft.protocol.messages import (
    ORDER_NAMES,
    Advised,
    Answered,
    Checkpointed,
    Exited,
    Faulted,
    Kill,
    Load,
    NodeJoined,
    NodeLost,
    Noticed,
    OrderName,
    RankOrder,
    Ready,
    Rebuild,
    Reload,
    Report,
    Spawn,
    SwitchRequested,
)

if TYPE_CHECKING:
    from tft.testing.cluster.stage import Stage

Key = tuple[int, int]
"""Incident and round."""
LIMITS: dict[OrderName, str] = {
    "freeze": "freeze", "stop": "stop", "compare": "repair", "load": "repair", "fetch": "repair", "restore": "repair",
    "reload": "repair", "regroup": "regroup", "rebuild": "rebuild", "rollback": "repair", "resume": "regroup",
    "hold": "hold", "check": "check", "release": "freeze", "save": "save", "commit": "save",
    "complete": "join", "end": "leave",
}  # fmt: skip
"""Which limit of the policy an order's answer has to keep."""
DOUBTFUL = ("memory", "corruption", "numeric")
"""Faults after which what a rank holds is not trusted, be it right or not."""


@dataclass(slots=True)
class Told:
    """
    What a rank's process has said last of what it holds.
    """

    incarnation: int
    held: int | None
    backups: tuple[int, ...]


@dataclass(slots=True)
class Ledger:
    """
    Read by `Auditor`.
    """

    stage: "Stage"
    key: Key = (0, 0)
    """Of the machine before the event that is judged now."""
    asked: dict[OrderName, dict[int, tuple[Key, int, float]]] = field(default_factory=dict)
    """By order and rank: the last round, whom in it, and when."""
    answers: dict[OrderName, dict[int, Answered]] = field(default_factory=dict)
    """The last that counted."""
    told: dict[int, Told] = field(default_factory=dict)
    agents: dict[int, int] = field(default_factory=dict)
    """By node, the agent that was heard of last: its pid."""
    sites: dict[tuple[int, int], int] = field(default_factory=dict)
    """Where each rank and incarnation was started: one that is to take over is somewhere else than the
    one that still trains, and what is said of the one says nothing of the other's node."""
    started: dict[int, float] = field(default_factory=dict)
    """By rank: when a process was started for it last."""
    ready: set[tuple[int, int]] = field(default_factory=set)
    """Rank and incarnation of those that take orders, or did."""
    ended: set[tuple[int, int]] = field(default_factory=set)
    """Of those that are gone, or are to be."""
    vanished: set[tuple[int, int]] = field(default_factory=set)
    """Of those whose node was not heard of any more: they may live, and take no part."""
    named: set[int] = field(default_factory=set)
    """The ranks that something was reported of in this incident."""
    hurt: set[int] = field(default_factory=set)
    """The nodes on which they had their place, and those that were given up."""
    lost: set[int] = field(default_factory=set)
    """The nodes that were given up in this run."""
    slow: set[int] = field(default_factory=set)
    """The ranks that were said to hold the others up, or are to be switched."""
    doubted: set[int] = field(default_factory=set)
    """The ranks of whose copies anything was ever said, be it true or not."""
    searching: set[int] = field(default_factory=set)
    """The ranks that were told to load a checkpoint, or to find one themselves, until all have done so."""
    moved: bool = False
    """Some rank has another node than it began on, or other pages: what it had of its own may be out of
    reach."""
    checkpoints: dict[int, str] = field(default_factory=dict)

    # ---------------------------------------------------------------- what is told

    def hears(self, machine: Machine, report: Report) -> None:
        """
        A report is about to be judged.
        """
        match report:
            case Answered():
                self._answered(machine, report)
            case Ready():
                self.ready.add((report.rank, report.incarnation))
            case Exited():
                self.ended.add((report.rank, report.incarnation))
                self.name(report.rank, report.incarnation)
            case Faulted():
                self.name(report.rank, report.incarnation)
                self._doubt(report)
            case Noticed(kind="straggler"):
                self.slow.add(report.rank)
            case SwitchRequested():
                self.slow.update(report.ranks)
            case Noticed():
                rank_state = report.rank, machine.incarnation(report.rank)
                self.name(*rank_state)
                self._doubt(report)
                if report.kind == "node" and rank_state in self.sites:
                    self.lost.add(self.sites[rank_state])
                    self.moved = True
            case NodeLost():
                self.lost.add(report.node)
                self.vanished |= {each for each, node in self.sites.items() if node == report.node}
                self.moved = True
            case NodeJoined():
                self._joined(report)
            case Advised():
                for rank in report.replace:
                    self.name(rank, machine.incarnation(rank))
            case Checkpointed() if report.incarnation == machine.incarnation(report.rank):
                self.checkpoints[report.step] = report.directory
            case _:
                pass

    def _joined(self, report: NodeJoined) -> None:
        """
        Another agent than before: what ran on the node went with the one before it, and the pages.
        """
        before = self.agents.get(report.node)
        self.agents[report.node] = report.pid
        if before is None or before == report.pid:
            return
        self.moved = True
        gone = {process for process, node in self.sites.items() if node == report.node}
        self.ended |= gone
        for rank, incarnation in gone:
            self.name(rank, incarnation)

    def _answered(self, machine: Machine, answer: Answered) -> None:
        if (answer.incident, answer.round) != self.key:
            return
        if answer.incarnation != machine.incarnation(answer.rank):
            return
        if self.has_answered(answer.order, answer.rank, self.key, answer.incarnation):
            return  # said again
        self.told[answer.rank] = Told(answer.incarnation, answer.held, answer.backups)
        if answer.failure is None:
            self.answers.setdefault(answer.order, {})[answer.rank] = answer
        else:
            self.name(answer.rank, answer.incarnation)
            if answer.order in ("restore", "save", "commit") or answer.context_lost:
                self.doubted.add(answer.rank)
            if answer.order == "load":
                self.checkpoints.pop((machine.incident.step or 1) - 1, None)
        if answer.verdict == "isolate":
            self.lost.add(self.sites[answer.rank, answer.incarnation])
            self.moved = True

    def name(self, rank: int, incarnation: int) -> None:
        """
        Something is reported of this process of a rank.
        """
        self.named.add(rank)
        if (rank, incarnation) in self.sites:
            self.hurt.add(self.sites[rank, incarnation])

    def _doubt(self, report: Faulted | Noticed) -> None:
        if report.kind in DOUBTFUL or (isinstance(report, Faulted) and report.context_lost):
            self.doubted.add(report.rank)

    def over(self) -> None:
        """
        The incident is over: what was reported in it explains nothing any more.
        """
        self.named.clear()
        self.hurt.clear()

    # ---------------------------------------------------------------- what is said

    def says(self, order: RankOrder, at: float) -> None:
        """
        An order to ranks goes out.
        """
        book = self.asked.setdefault(ORDER_NAMES[type(order)], {})
        key, rank_states = (order.incident, order.round), order.incarnations
        if isinstance(order, Reload | Load):
            self.searching.update(order.to)
        elif isinstance(order, Rebuild):
            self.searching.clear()
        for rank in order.to:
            book[rank] = (key, rank_states.get(rank, 0), at)

    def spawns(self, order: Spawn, at: float) -> None:
        """
        A process is started for a rank.
        """
        if self.sites.get((order.rank, order.incarnation - 1), order.node) != order.node:
            self.moved = True
        self.sites[order.rank, order.incarnation] = order.node
        self.searching.discard(order.rank)
        self.started[order.rank] = at

    def kills(self, order: Kill) -> None:
        """
        The process of a rank is to be ended.
        """
        self.ended.add((order.rank, order.incarnation))

    # ---------------------------------------------------------------- what follows from it

    def place(self, machine: Machine, rank: int) -> int:
        """
        The node of the process that holds a rank; -1: none was asked for yet.
        """
        return self.sites.get((rank, machine.incarnation(rank)), -1)

    def has_answered(self, order: OrderName, rank: int, key: Key, incarnation: int) -> bool:
        """
        This very process has carried out this very order.
        """
        answer = self.answers.get(order, {}).get(rank)
        return (
            answer is not None
            and (answer.incident, answer.round) == key
            and answer.incarnation == incarnation
        )

    def is_late(self, rank: int, at: float) -> bool:
        """
        It owes an answer, or its start, for longer than the policy allows.
        """
        policy = self.stage.schedule.policy
        for name, book in self.asked.items():
            key, incarnation, since = book.get(rank, ((-1, 0), 0, at))
            owes = key == self.key and not self.has_answered(name, rank, key, incarnation)
            if owes and at - since >= getattr(policy, LIMITS[name]) - 1e-6:
                return True
        return at - self.started.get(rank, at) >= policy.join - 1e-6

    def late(self, at: float) -> set[int]:
        """
        All of those.
        """
        return {rank for rank in self.started if self.is_late(rank, at)}

    def there(self, machine: Machine, ranks: Iterable[int]) -> list[int]:
        """
        Those of these ranks whose processes take orders, and are to go on doing so.
        """
        rank_states = [(rank, machine.incarnation(rank)) for rank in ranks]
        return [
            rank_state[0]
            for rank_state in rank_states
            if rank_state in self.ready and rank_state not in self.ended
        ]
