"""
The record of a run from which the auditor judges the leading job machine. It holds the reports that
the machine was given and the orders that it sent: which ranks were asked, which have answered, and
which were named as a cause. The record does not use the machine's own notes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tft.core.job.machine import Machine
from tft.core.job.orders import ORDERS, Failed
from tft.protocol.messages import (
    ORDER_NAMES,
    Advised,
    Answered,
    Checkpointed,
    CheckpointFailed,
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
    Recalled,
    Reload,
    Report,
    Rollback,
    Spawn,
    SwitchRequested,
)
from tft.simulation.stage import Stage

Key = tuple[int, int]
"""The numbers of an incident and of its round."""
LIMITS: dict[OrderName, str] = {
    "freeze": "freeze", "stop": "stop", "compare": "repair", "load": "repair", "fetch": "repair", "restore": "repair",
    "reload": "repair", "regroup": "regroup", "rebuild": "rebuild", "rollback": "repair", "resume": "regroup",
    "hold": "hold", "check": "check", "release": "freeze", "save": "save", "commit": "save",
    "complete": "join", "end": "leave",
}  # fmt: skip
"""By order: the name of the field of `Policy` that holds the time limit (in seconds) for the ranks'
answers to the order."""
DOUBTFUL = ("memory", "corruption", "numeric")
"""The kinds of faults after which the state of a rank is not trusted, even if it is right."""


@dataclass(slots=True)
class ReportedSteps:
    """
    The steps of which a rank's process holds the state, according to the last report of the
    process.
    """

    incarnation: int
    held: int | None
    backups: tuple[int, ...]


@dataclass(slots=True)
class ProcessBook:
    """
    The starts and ends of processes, as the controller has ordered them or as they were reported.
    """

    sites: dict[tuple[int, int], int] = field(default_factory=dict)
    """By rank and incarnation: the node on which the process was started. A process that is to take
    over a rank runs on another node than the process that still trains. Therefore the incarnation
    is a part of the key."""
    started: dict[int, float] = field(default_factory=dict)
    """By rank: the moment at which a process was last started for it."""
    ready: set[tuple[int, int]] = field(default_factory=set)
    """Rank and incarnation of all processes that can receive orders, or could before they ended."""
    ended: set[tuple[int, int]] = field(default_factory=set)
    """Rank and incarnation of all processes that have ended or were ordered to end."""
    vanished: set[tuple[int, int]] = field(default_factory=set)
    """Rank and incarnation of all processes whose node was reported lost. The processes may still
    run, but they take no part in the job."""


@dataclass(slots=True)
class KeptBook:
    """
    The reports of other nodes about the rank-local state of the ranks of a lost node.
    """

    moved: bool = False
    """True when some rank may run on another node than at its start, or with another page (shared
    memory with its rank-local state). The rank-local state of that rank may then be out of
    reach."""
    losses: int = 0
    """The number of nodes in this run that were lost or have got another agent. Checks of kept
    state are made only if it is 1. A node that was given up, or a rank that has moved for another
    reason, adds 2, so that these checks are skipped."""
    holders: dict[int, dict[int, int]] = field(default_factory=dict)
    """By lost node: the incarnation of each rank that had its process there."""
    steps: dict[int, set[int]] = field(default_factory=dict)
    """By rank of a lost node: the steps that were reported in this incident. Steps that a later
    rollback has undone are left out."""
    rollbacks: list[tuple[Key, int]] = field(default_factory=list)
    """All orders to roll back. Each entry has the incident and the round, and the step."""

    def lose(self, node: int, machine: Machine, sites: Mapping[tuple[int, int], int]) -> None:
        """
        Record that a node is lost, and which ranks had their process on this node.
        """
        self.moved = True
        self.losses += 1
        held = {rank: machine.incarnation(rank) for rank, _ in sites}
        self.holders[node] = {
            rank: number for rank, number in held.items() if sites.get((rank, number)) == node
        }

    def hears(self, report: Recalled) -> None:
        """
        Record the steps of which another node has kept the data position of a rank.
        """
        if self.holders.get(report.lost, {}).get(report.rank) != report.incarnation:
            return
        attempt = (report.incident, report.round)
        later = [step for key, step in self.rollbacks if key > attempt]
        self.steps[report.rank] = {
            step for step in report.local_state if all(step <= back for back in later)
        }

    def of_lost(self) -> set[int] | None:
        """
        Return the steps that were reported for all ranks of the only node that was lost. Return
        None if a rank of that node was not reported, or if not exactly one node was lost.
        """
        if self.losses != 1:
            return None
        ((_, ranks),) = self.holders.items()
        if not ranks or not ranks.keys() <= self.steps.keys():
            return None
        return set.intersection(*(self.steps[rank] for rank in ranks))


@dataclass(slots=True)
class Ledger:
    """
    The record of reports and orders by which the auditor judges the job machine.
    """

    stage: Stage
    key: Key = (0, 0)
    """Incident and round of the job machine before the event that is being handled."""
    asked: dict[OrderName, dict[int, tuple[Key, int, float]]] = field(default_factory=dict)
    """By order and rank: incident and round in which the order was sent last, the incarnation to
    which it was sent, and the moment."""
    answers: dict[OrderName, dict[int, Answered]] = field(default_factory=dict)
    """By order and rank: the last answer without a failure, or with a failure that the job excuses.
    Answers of an earlier round or of another incarnation are not recorded."""
    told: dict[int, ReportedSteps] = field(default_factory=dict)
    """By rank: the steps of which the rank holds the state, as its process has reported last."""
    agents: dict[int, int] = field(default_factory=dict)
    """By node: the process id of the agent that reported last."""
    processes: ProcessBook = field(default_factory=ProcessBook)
    named: set[int] = field(default_factory=set)
    """The ranks that a report or the advice of a plugin has named as faulty in this incident."""
    hurt: set[int] = field(default_factory=set)
    """The nodes on which the processes of the ranks in `named` ran."""
    lost: set[int] = field(default_factory=set)
    """The nodes that were given up in this run."""
    slow: set[int] = field(default_factory=set)
    """The ranks that were reported as stragglers, or that a request moves to another node. The
    auditor accepts that their processes are replaced."""
    doubted: set[int] = field(default_factory=set)
    """The ranks whose copies were ever put in doubt by a report, even if the report was false."""
    searching: set[int] = field(default_factory=set)
    """The ranks that were ordered to load a checkpoint, or to find a checkpoint themselves. They
    are removed when the order `rebuild` is sent, because then every rank has done so."""
    kept: "KeptBook" = field(default_factory=lambda: KeptBook())
    checkpoints: dict[int, str] = field(default_factory=dict)
    """By step: the directory of a complete checkpoint. The directory is empty for the checkpoint
    from which the job was started."""

    # ---------------------------------------------------------------- reports of ranks

    def hears(self, machine: Machine, report: Report) -> None:
        """
        Record a report that the job machine is about to handle.
        """
        match report:
            case Answered():
                self._answered(machine, report)
            case Ready():
                self.processes.ready.add((report.rank, report.incarnation))
            case Exited():
                self.processes.ended.add((report.rank, report.incarnation))
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
                if report.kind == "node" and rank_state in self.processes.sites:
                    self.lost.add(self.processes.sites[rank_state])
                    self.moves()
            case Recalled():
                self.kept.hears(report)
            case NodeLost():
                self.kept.lose(report.node, machine, self.processes.sites)
                self.lost.add(report.node)
                self.processes.vanished |= {
                    each for each, node in self.processes.sites.items() if node == report.node
                }
            case NodeJoined():
                self._joined(machine, report)
            case Advised():
                for rank in report.replace:
                    self.name(rank, machine.incarnation(rank))
            case CheckpointFailed():
                for rank in report.wrong:
                    self.name(rank, machine.incarnation(rank))
            case Checkpointed() if report.incarnation == machine.incarnation(report.rank):
                # what a process reports after its node was lost does not count
                if (report.rank, report.incarnation) not in self.processes.vanished:
                    self.checkpoints[report.step] = report.directory
            case _:
                pass

    def _joined(self, machine: Machine, report: NodeJoined) -> None:
        """
        Record that the agent of a node has reported. If this agent is not the one that reported
        before, the processes of the node and the shared memory of its ranks are gone.
        """
        before = self.agents.get(report.node)
        self.agents[report.node] = report.pid
        if before is None or before == report.pid:
            return
        self.kept.lose(report.node, machine, self.processes.sites)
        gone = {process for process, node in self.processes.sites.items() if node == report.node}
        self.processes.ended |= gone
        for rank, incarnation in gone:
            self.name(rank, incarnation)

    def _answered(self, machine: Machine, answer: Answered) -> None:
        if (answer.incident, answer.round) != self.key:
            return
        if answer.incarnation != machine.incarnation(answer.rank):
            return
        if self.has_answered(answer.order, answer.rank, self.key, answer.incarnation):
            return  # the answer was recorded already, and has only arrived once more
        self.told[answer.rank] = ReportedSteps(answer.incarnation, answer.held, answer.backups)
        if answer.failure is None:
            self.answers.setdefault(answer.order, {})[answer.rank] = answer
        else:
            if ORDERS[answer.order].failed is Failed.EXCUSED:
                self.answers.setdefault(answer.order, {})[answer.rank] = answer
            self.name(answer.rank, answer.incarnation)
            if answer.order in ("restore", "save", "commit") or answer.context_lost:
                self.doubted.add(answer.rank)
            if answer.order == "load":
                self.checkpoints.pop((machine.incident.progress.step or 1) - 1, None)
        if answer.verdict == "isolate":
            self.lost.add(self.processes.sites[answer.rank, answer.incarnation])
            self.moves()

    def name(self, rank: int, incarnation: int) -> None:
        """
        Record that a report names this process of a rank as having a fault.
        """
        self.named.add(rank)
        if (rank, incarnation) in self.processes.sites:
            self.hurt.add(self.processes.sites[rank, incarnation])

    def _doubt(self, report: Faulted | Noticed) -> None:
        if report.kind in DOUBTFUL or (isinstance(report, Faulted) and report.context_lost):
            self.doubted.add(report.rank)

    def over(self) -> None:
        """
        Forget the ranks and nodes that were named in the closed incident. They must not justify
        decisions in the next incident.
        """
        self.named.clear()
        self.hurt.clear()
        self.kept.steps.clear()

    # ---------------------------------------------------------------- orders of the controller

    def says(self, order: RankOrder, at: float) -> None:
        """
        Record an order that the job machine sends to ranks.
        """
        book = self.asked.setdefault(ORDER_NAMES[type(order)], {})
        key, rank_states = (order.incident, order.round), order.incarnations
        if isinstance(order, Rollback):
            self.kept.rollbacks.append((key, order.step))
        if isinstance(order, Reload | Load):
            self.searching.update(order.to)
        elif isinstance(order, Rebuild):
            self.searching.clear()
        for rank in order.to:
            book[rank] = (key, rank_states.get(rank, 0), at)

    def spawns(self, order: Spawn, at: float) -> None:
        """
        Record that the job machine orders a process for a rank.
        """
        before = self.processes.sites.get((order.rank, order.incarnation - 1), order.node)
        if before != order.node and self.kept.losses != 1:
            self.moves()
        self.processes.sites[order.rank, order.incarnation] = order.node
        self.searching.discard(order.rank)
        self.processes.started[order.rank] = at

    def kills(self, order: Kill) -> None:
        """
        Record that the job machine orders the end of the process of a rank.
        """
        self.processes.ended.add((order.rank, order.incarnation))

    def moves(self) -> None:
        """
        Record that the rank-local state of a rank may be out of reach for another reason than the
        loss of a node. From now on the auditor skips the checks that depend on such a state.
        """
        self.kept.moved = True
        self.kept.losses += 2

    # ---------------------------------------------------------------- conclusions

    def place(self, machine: Machine, rank: int) -> int:
        """
        Return the node of the process that holds a rank. Return -1 when no process was ordered for
        the rank yet.
        """
        return self.processes.sites.get((rank, machine.incarnation(rank)), -1)

    def has_answered(self, order: OrderName, rank: int, key: Key, incarnation: int) -> bool:
        """
        Return whether a process has carried out an order in a round. `key` has the numbers of the
        incident and the round.
        """
        answer = self.answers.get(order, {}).get(rank)
        return (
            answer is not None
            and (answer.incident, answer.round) == key
            and answer.incarnation == incarnation
        )

    def is_late(self, rank: int, at: float) -> bool:
        """
        Return whether a rank is late at the moment `at`. A rank is late if its answer to an order,
        or its start, takes longer than the policy allows.
        """
        policy = self.stage.schedule.policy
        for name, book in self.asked.items():
            key, incarnation, since = book.get(rank, ((-1, 0), 0, at))
            owes = key == self.key and not self.has_answered(name, rank, key, incarnation)
            if owes and at - since >= getattr(policy, LIMITS[name]) - 1e-6:
                return True
        return at - self.processes.started.get(rank, at) >= policy.join - 1e-6

    def late(self, at: float) -> set[int]:
        """
        Return the ranks that are late with the answer to an order or with their start, at the
        moment `at`.
        """
        return {rank for rank in self.processes.started if self.is_late(rank, at)}

    def there(self, machine: Machine, ranks: Iterable[int]) -> list[int]:
        """
        Return those of the given ranks whose processes can receive orders and were not ordered to
        end.
        """
        rank_states = [(rank, machine.incarnation(rank)) for rank in ranks]
        return [
            rank_state[0]
            for rank_state in rank_states
            if rank_state in self.processes.ready and rank_state not in self.processes.ended
        ]
