"""
A scripted job: the real job machine with scripted ranks and agents, which carry out orders at once.

There is no process and no socket, and time passes only when a test lets it pass. A test causes the
faults (`kill`, `fault`, `muted`, `failures`), and checks the orders, the states and the report.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pluggy

from tft.controller.advisors import checked, joined, view
from tft.core.job.commands import Command, Consult, JobOver, Tell
from tft.core.job.events import (
    DeadlinePassed,
    Led,
    Received,
    SliceVerdict,
    Stalled,
)
from tft.core.job.incident import Fault
from tft.core.job.incident_report import incident_report
from tft.core.job.machine import Machine
from tft.core.job.origin import Origin
from tft.core.job.policy import Policy
from tft.core.job.transitions import State
from tft.errors import UsageError
from tft.plugins import add
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
    Recall,
    Recalled,
    Refused,
    Report,
    ResumeRequested,
    ShardCopies,
    Spawn,
    Spawned,
    StepNumbers,
    StopRequested,
    StoreOpened,
    SwitchRequested,
    Trained,
    Verdict,
)
from tft.spi.plugin import PluginSpecs
from tft.spi.types import Advice
from tft.testing.obedient import ScriptedRank, ScriptedState

Kind = TypeVar("Kind", bound=Order)


@dataclass(frozen=True, kw_only=True)
class JobShape:
    """
    The size and the parts of a scripted job. `placement` gives, by node, the ranks that the node
    starts. If `placement` is empty, the job has one node.
    """

    world: int = field(kw_only=False)
    policy: Policy = field(default_factory=Policy, kw_only=False)
    resume: tuple[str, int] | None = None
    older: tuple[tuple[str, int], ...] = ()
    """Further checkpoints, of earlier steps, that the job may load: path and step."""
    checkpoint_name: str = "step-{step:08d}"
    placement: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By shard: the ranks that hold a copy of the shard. If `groups` is empty, there is one shard,
    `dense`, which every rank holds."""
    spare: dict[int, int] = field(default_factory=dict)
    """By node: the number of additional ranks for which the node has room."""
    derives: bool = True
    """True if the adaptor can make the rank-local state of a rank from the number of a step."""
    columns: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By rank: the ranks of its model replica, which leave the job and come back to it together."""
    strategies: tuple[str, ...] = ("retry", "recover", "dump")
    """The strategies that the adaptor supports."""
    settled: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """By rank: the strategies that the adaptor supports once the rank is ready, if they differ from
    `strategies`."""
    keeps: int = 0
    """The number of earlier steps of which each rank keeps a copy."""
    finds: dict[int, int] | None = None
    """By rank: the step of the newest checkpoint that the rank writes without tft. None if no rank
    writes checkpoints without tft."""
    after: float = 0.0
    """The time limit, in seconds, for the functions that each rank calls after the end of a step.
    """
    promises: bool = False
    """True if a rank uses a fetched state only after the `Rebuild` order, in which all ranks
    rebuild their wrappers."""

    def __post_init__(self) -> None:
        """
        Check the shape of the job. Raises `UsageError` if `placement` lacks a rank.
        """
        placed = {rank for ranks in self.placement.values() for rank in ranks}
        if self.placement and not placed >= set(range(self.world)):
            raise UsageError(
                f"the placement has only the ranks {sorted(placed)} of a job of {self.world} ranks"
            )

    def copies(self) -> Mapping[str, tuple[int, ...]]:
        """
        Return the ranks that hold a copy of each shard.
        """
        return self.groups or {"dense": tuple(range(self.world))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """
    The rank-local state of a rank that another node has kept for the rank.
    """

    local_state: dict[int, str]
    """By step: the rank-local state, in hexadecimal."""
    incarnation: int = 0
    attempt: tuple[int, int] = (0, 1)
    """Incident and round of the last rollback of the rank."""
    early: tuple[int, ...] = ()


_NOTHING = Kept(local_state={}, incarnation=-1, attempt=(0, 0))


@dataclass(slots=True)
class Script:
    """
    The faults that a test causes in a scripted job.
    """

    gone: set[int] = field(default_factory=set)
    """The nodes that have no agent now, so that they carry out no `Spawn` or `Recall` order."""
    deaf: set[int] = field(default_factory=set)
    """The nodes whose agents do not end any process, even if they are ordered to do so."""
    slow: set[int] = field(default_factory=set)
    """The ranks whose new processes start, but do not call `tft.init` until the test calls the
    method `arrive`."""
    stuck: set[int] = field(default_factory=set)
    """The ranks that were interrupted in their all-reduces, so that they cannot finish the step
    that the other ranks finish."""
    muted: set[tuple[int, OrderName]] = field(default_factory=set)
    """Pairs of a rank and the name of an order. The rank never answers this order."""
    failures: dict[tuple[int, OrderName], list[str]] = field(default_factory=dict)
    """By rank and order: the failure texts of the rank's first answers to the order. After these
    answers the order succeeds."""
    miscopied: dict[int, int] = field(default_factory=dict)
    """By rank: how many more fetches of the rank bring damaged content."""
    verdicts: dict[int, tuple[Verdict, str]] = field(default_factory=dict)
    """By rank: the result of the next check on the rank. A rank that is missing here passes the
    check."""
    kept: dict[int, Kept] = field(default_factory=dict)
    """By rank: the rank-local state that another node has kept for the rank. If a rank is missing
    here, that node reports that it has kept nothing for the rank."""
    forgetful: set[int] = field(default_factory=set)
    """The nodes whose agents do not answer a `Recall` order, which asks for the rank-local state
    that was kept for a lost node."""
    numbers: dict[int, StepNumbers] = field(default_factory=dict)
    """By rank: the digests of the rank's losses and gradients, which its reports contain from now
    on."""


class ScriptedJob(JobShape):
    """
    A job machine with scripted agents and ranks, as a test uses it. The arguments are those of
    `JobShape`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.now = 100.0
        self.nodes = dict(self.placement) or {0: tuple(range(self.world))}
        """By node: the ranks whose processes this node starts."""
        self.script = Script()
        self.successors: dict[int, ScriptedRank] = {}
        """By rank: the successor, a new process that is to take over the rank."""
        self.former: list[ScriptedRank] = []
        """Earlier processes, whose ranks were taken over by successors."""
        self.said: list[Order] = []
        self.over: JobOver | None = None
        self.tells: list[Tell] = []
        self.consulted: list[Consult] = []
        self._queue: deque[Order] = deque()
        self._number = 0
        homes = {rank: node for node, ranks in self.nodes.items() for rank in ranks}
        self.ranks = {rank: ScriptedRank(rank, node=homes[rank]) for rank in range(self.world)}
        """The process that holds each rank, according to the orders that were sent."""
        origin = Origin(
            job="job", checkpoints="/run/checkpoints", checkpoint_name=self.checkpoint_name,
            resume=self.resume, older=self.older,
        )  # fmt: skip
        self.machine = Machine(self.world, self.policy, origin, at=self.now)

    # ---------------------------------------------------------------- actions of a test

    def start(self) -> "ScriptedJob":
        """
        Start the agents, the store and the ranks; all ranks then train. Returns the job itself.
        """
        self.lead(1)
        for node in self.nodes:
            self.come(node)
        self.report(StoreOpened(node=0, host="h", port=1, at=self.now))
        self.settle()
        return self

    def report(self, message: Report, *, sender: str = "") -> None:
        """
        Give a report to the job machine. The commands that follow are queued and not yet carried
        out.

        Without `sender`, the sender of a rank's report is the rank's process. The sender of any
        other report is then `outside`.
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
        Let all agents and ranks carry out their orders until no order is left.
        """
        while self._queue:
            self._obey(self._queue.popleft())

    def obey_next(self) -> None:
        """
        Let the agent or the ranks carry out only the oldest order that is not carried out yet.
        """
        self._obey(self._queue.popleft())

    def train(self, steps: int = 1) -> None:
        """
        Train all ranks that are in the loop for `steps` steps. In each step, train one rank after
        the other.
        """
        for _ in range(steps):
            for rank in self.ranks.values():
                if rank.training and not rank.hung and rank.step < rank.limit:
                    self.window(rank.rank)
                    self.close(rank.rank)
            self.settle()

    def window(self, rank: int) -> None:
        """
        Open the update window of a rank.
        """
        self.ranks[rank].loop.window = True

    def close(self, rank: int) -> None:
        """
        Close the update window of a rank.
        """
        one = self.ranks[rank]
        one.complete()
        self._announce(one)

    def _announce(self, one: ScriptedRank) -> None:
        if one.loop.announce:
            one.loop.announce = False
            self.report(
                Trained(
                    rank=one.rank, incarnation=one.incarnation, step=one.step,
                    numbers=self.script.numbers.get(one.rank), at=self.now,
                )
            )  # fmt: skip

    def kill(
        self, rank: int, code: int = -9, *, stack: str = "", script_ended: bool = False
    ) -> None:
        """
        End the process of a rank, and report the exit to the job machine. `code` is the exit code;
        a negative code is a signal. `script_ended` is True if the script of the rank had ended
        before the process.
        """
        self._ends(self.ranks[rank], code, stack=stack, script_ended=script_ended)

    def kill_successor(self, rank: int) -> None:
        """
        End the process of the successor of a rank.
        """
        self._ends(self.successors.pop(rank), -9)

    def _ends(
        self, one: ScriptedRank, code: int, *, stack: str = "", script_ended: bool = False
    ) -> None:
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
                script_ended=script_ended,
                local_state={one.step: "00", one.step + 1: "01"},
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
        Let an exception leave the training loop of a rank, and report the fault. `polluted` says
        that wrong numbers may have spread. `not_after` is the last step that may be sound.
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

    def refuse(self, *ranks: int) -> None:
        """
        Let ranks refuse the update of their present step. The dictionary `script.numbers` has the
        digests that the ranks report with the refusal.
        """
        for one in (self.ranks[rank] for rank in ranks):
            one.training = False
            self.report(
                Faulted(
                    rank=one.rank,
                    incarnation=one.incarnation,
                    kind="numeric",
                    step=one.step + 1,
                    summary="the loss is nan",
                    traceback="Traceback",
                    position=one.position,
                    refused=self.script.numbers[one.rank],
                    at=self.now,
                )
            )

    def notice(
        self, rank: int, kind: FaultKind, evidence: str = "seen from outside", *,
        polluted: bool = False, not_after: int | None = None,
    ) -> None:  # fmt: skip
        """
        Report a fault that an observer outside the rank has seen. `polluted` says that wrong
        numbers may have spread. `not_after` is the last step that may be sound.
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
        Mark as wrong the states that a fault of the rank `one` really damages: the state of this
        rank, and the states of other ranks if the fault has spread to them.
        """
        if kind in ("memory", "corruption"):
            one.state.spoiled, one.state.bad_copies = True, frozenset(one.state.backups)
        for other in self.ranks.values():
            spread = polluted and other.step >= one.step
            older = not_after is not None and other.step > not_after
            other.state.spoiled = other.state.spoiled or spread or older

    def finish(self, *ranks: int, sliced: bool = False) -> None:
        """
        Let the training function return on the ranks that train: on all of them, or on `ranks`
        only. `sliced` is True if these ranks have compared slices (parts of the shards) in each
        step.
        """
        for one in self.ranks.values():
            if one.training and (not ranks or one.rank in ranks):
                one.training, one.loop.done = False, True
                self.report(
                    Finished(
                        rank=one.rank, incarnation=one.incarnation, step=one.step, sliced=sliced,
                        at=self.now,
                    )
                )  # fmt: skip
        self.settle()

    def pause(self, check: str = "") -> None:
        """
        Request a pause of the job. `check` names the check to run in the pause.
        """
        self.report(PauseRequested(why="a switch is replaced", check=check, at=self.now))

    def go_on(self) -> None:
        """
        Request the end of the pause, as an operator does.
        """
        self.report(ResumeRequested(why="it is replaced", at=self.now))

    def switch(self, *ranks: int) -> None:
        """
        Request that the given ranks move to other processes. Without ranks, withdraw the earlier
        request.
        """
        self.report(SwitchRequested(ranks=ranks, why="its pod is switched", at=self.now))

    def checkpointed(self, step: int, *, compared: bool = False) -> None:
        """
        Report that a periodic checkpoint of the job is complete. `compared` is True if the copies
        of all ranks were compared when the checkpoint was written.
        """
        self.report(
            Checkpointed(
                rank=0,
                incarnation=self.ranks[0].incarnation,
                directory=f"/periodic/{step}",
                step=step,
                compared=compared,
                at=self.now,
            )
        )

    def advise(self, **said: Any) -> None:  # Any: the fields of `Advised` have different types
        """
        Answer as a recovery plugin to the latest consultation. `said` overrides the fields of
        `Advised`.
        """
        asked = self.consulted[-1]
        facts = {"incident": asked.incident, "round": asked.round, "why": "the scheduler says so"}
        self.report(Advised(**{**facts, **said}, at=self.now))

    def ask(self, plugin: object) -> Advice | None:
        """
        Ask a recovery plugin about the open incident, as the controller does, and give its advice
        to the machine. `plugin` is a module or an object with hooks. The job needs
        `Policy(advised=True)`.

        Return the advice of the plugin. Raises every exception of the plugin, and `UsageError` if
        its hooks do not fit the specifications, or if the job does not wait for advice.
        """
        if not self.consulted:
            raise UsageError(
                "the job has not asked for advice: it asks in an incident, when all ranks have left "
                "their loops, and only with Policy(advised=True)"
            )
        plugins = pluggy.PluginManager("tft")
        plugins.add_hookspecs(PluginSpecs)
        add(plugins, plugin, "plugin")
        asked = self.consulted[-1]
        answers: list[Advice] = plugins.hook.tft_advise(incident=view(asked))
        self.report(replace(checked(joined(asked, answers)), at=self.now))
        return next(iter(answers), None)

    def stall(self, silence: float = 5.0, *, out: bool = False) -> None:
        """
        Let the hang detection report that no rank has moved for `silence` seconds. With `out`, all
        ranks have left their training loops.
        """
        self.now += silence
        self._take(self.machine.handle(Stalled(at=self.now, silence=silence, limit=3.0, out=out)))
        self.machine.check()

    def slices(self, verdict: SliceVerdict) -> None:
        """
        Give the job machine a result of the comparison of slices (parts of the shards). The time of
        the result is set to the present time of the job.
        """
        self._take(self.machine.handle(replace(verdict, at=self.now)))
        self.machine.check()

    def lead(self, epoch: int, *, lost: int = 0) -> None:
        """
        Let a controller with this epoch take over. `lost` is the number of events that the
        controller could not read in a damaged story (the record of all events).
        """
        self._take(self.machine.handle(Led(at=self.now, epoch=epoch, lost=lost)))
        self.machine.check()

    def stop(self, signal: int = 15, *, node: int | None = None) -> None:
        """
        Let the launcher request the end of the job. With `node`, the launcher requests only the end
        of that node's ranks. `signal` is the number of the signal that the launcher has received,
        or 0 if it has received none.
        """
        why = "SIGTERM came" if signal else "an operator asks for it"
        self.report(StopRequested(why=why, signal=signal, node=node, at=self.now))

    def reopen_store(self, port: int) -> None:
        """
        Report that the rendezvous store is open again, perhaps at another port.
        """
        self.report(StoreOpened(node=0, host="h", port=port, at=self.now))

    def repeat(self) -> None:
        """
        Send all unanswered orders again.
        """
        self._queue.extend(self.machine.outstanding())

    def lose_node(self, node: int) -> None:
        """
        End an agent and all its ranks, and report the loss of the node.
        """
        self.script.gone.add(node)
        for one in (*self.ranks.values(), *self.successors.values(), *self.former):
            if one.node == node:
                one.alive = one.training = False
        self.successors = {
            rank: successor for rank, successor in self.successors.items() if successor.alive
        }
        self.report(NodeLost(node=node, why="its agent has ended", at=self.now))

    def come(self, node: int) -> None:
        """
        Report that an agent has started on a node, for the first time or again.
        """
        self.script.gone.discard(node)
        self.report(
            NodeJoined(
                node=node,
                host="h",
                pid=1,
                ranks=self.nodes.setdefault(node, ()),
                spare=self.spare.get(node, 0),
                at=self.now,
            )
        )

    def wait(self) -> None:
        """
        Advance the clock of the job to the next deadline of the job machine, and tell the machine
        that the deadline has passed.
        """
        deadline = self.machine.next_deadline()
        assert deadline is not None, "the job machine has no deadline"
        self.now = max(self.now, deadline)
        self.let_pass(0.0)

    def let_pass(self, seconds: float) -> None:
        """
        Advance the clock of the job by `seconds`, and send a `DeadlinePassed` event to the job
        machine, even if no deadline lies in that time.
        """
        self.now += seconds
        self._take(self.machine.handle(DeadlinePassed(at=self.now)))
        self.machine.check()

    # ---------------------------------------------------------------- results for a test

    @property
    def state(self) -> State:
        """
        The present state of the job machine.
        """
        return self.machine.state

    @property
    def doing(self) -> str:
        """
        The name of the job machine's state, as a plain string.
        """
        return str(self.machine.state)

    def orders(self, kind: type[Kind]) -> list[Kind]:
        """
        Return the orders of one kind, in the order in which they were first sent.
        """
        return [order for order in self.said if isinstance(order, kind)]

    def facts(self, event: str) -> list[dict[str, object]]:
        """
        Return the facts of all logged events of the kind `event`.
        """
        return [tell.facts for tell in self.tells if tell.event == event]

    def reports(self) -> list[dict[str, Any]]:  # Any: the parsed JSON of the report
        """
        Return the incidents as the report shows them. No plugin is asked for the times of faults.
        """
        return [incident_report(each, _nobody_knows) for each in self.machine.incidents]

    # ---------------------------------------------------------------- how ranks carry out orders

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
                if one is not None and one.alive and order.node not in self.script.deaf:
                    self.successors = {
                        r: successor
                        for r, successor in self.successors.items()
                        if successor is not one
                    }
                    self._ends(one, -9, stack="File stuck.py" if order.last_words else "")
            case Recall():
                self._recall(order)
            case EndNode() | Refused():
                pass
            case _:
                for rank in order.to:
                    self._hand_over(rank, order)
                    for process in self._processes(rank):
                        self._carry_out(process, order)

    def _recall(self, order: Recall) -> None:
        if order.node in self.script.gone | self.script.forgetful:
            return
        for rank in order.ranks:
            kept = self.script.kept.get(rank, _NOTHING)
            self.report(
                Recalled(
                    node=order.node, lost=order.lost, rank=rank, incarnation=kept.incarnation,
                    incident=kept.attempt[0], round=kept.attempt[1],
                    local_state=kept.local_state, early=kept.early, at=self.now,
                )
            )  # fmt: skip

    def _processes(self, rank: int) -> list[ScriptedRank]:
        """
        Return all processes of a rank: the current process, the successor and former processes.
        Orders go to all of these processes.
        """
        successor = [self.successors[rank]] if rank in self.successors else []
        return [self.ranks[rank], *successor, *(one for one in self.former if one.rank == rank)]

    def _process(self, rank: int, incarnation: int) -> ScriptedRank | None:
        matching = (one for one in self._processes(rank) if one.incarnation == incarnation)
        return next(matching, None)

    def _hand_over(self, rank: int, order: RankOrder) -> None:
        """
        Make the successor the holder of the rank, if `order` names the successor's incarnation for
        the rank.

        Orders name the incarnation of the process that holds each rank.
        """
        successor = self.successors.get(rank)
        if successor is not None and order.incarnations.get(rank, 0) == successor.incarnation:
            self.former.append(self.ranks[rank])
            self.ranks[rank] = self.successors.pop(rank)

    def _spawn(self, order: Spawn) -> None:
        if order.node in self.script.gone:
            return
        one = ScriptedRank(
            order.rank,
            order.incarnation,
            node=order.node,
            alive=True,
            state=ScriptedState(keeps=self.keeps),
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
        if order.rank not in self.script.slow:
            self.join(one)
            self.ready(one)

    def arrive(self, rank: int) -> None:
        """
        Let the newest process of a slow rank reach `Session.run`.
        """
        self.script.slow.discard(rank)
        one = self.successors.get(rank, self.ranks[rank])
        self.join(one)
        self.ready(one)

    def join(self, one: ScriptedRank) -> None:
        """
        Report that the process of a rank has called `tft.init`.
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
        Report that the process of a rank has called `Session.run`.
        """
        shards = tuple(
            ShardCopies(shard=shard, ranks=ranks)
            for shard, ranks in self.copies().items()
            if one.rank in ranks
        )
        one.state.shards = tuple(each.shard for each in shards)
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
        muted = (one.rank, name) in self.script.muted or (
            name == "hold" and one.rank in self.script.stuck
        )
        if muted or one.must_stop_before(order) or not one.hears(order, name):
            return
        failures = self.script.failures.get((one.rank, name), [])
        failure = failures.pop(0) if failures else None
        if failure is not None and name in ("load", "fetch", "restore", "reload"):
            one.state.torn = True  # the failed order has overwritten only a part of the state
        one.state.finds, one.state.promises = (self.finds or {}).get(one.rank), self.promises
        if failure is None:
            failure = one.obey(order, self._gives, stuck=one.rank in self.script.stuck)
        if isinstance(order, Fetch) and failure is None:
            self._copy(one, order)
        found: tuple[Verdict, str] = ("pass", "")
        if name == "check":
            found = self.script.verdicts.pop(one.rank, found)
        self.report(one.answer(order, name, failure, found=found, at=self.now))
        lingers = isinstance(order, Complete) and one.rank in self.script.stuck
        if isinstance(order, Complete | End) and not lingers:
            self._ends(one, 0 if isinstance(order, Complete) else order.code)

    def _copy(self, one: ScriptedRank, order: Fetch) -> None:
        for transfer in order.transfers:
            source = self.ranks[transfer.sources[0].rank]
            one.state.content, one.state.settings = source.state.content, source.state.settings
        if self.script.miscopied.get(one.rank):
            self.script.miscopied[one.rank] -= 1
            one.state.content = "damaged"

    def _gives(self, rank: int) -> frozenset[int]:
        return self.ranks[rank].sound_steps()


def _sender(message: Report) -> str:
    if isinstance(message, RankReport):
        return f"rank.{message.rank}/{message.incarnation}"
    return "outside"


def _nobody_knows(fault: Fault) -> float | None:
    return None
