"""
The auditor of a simulated run. It checks each decision of the job machine (the state machine in the
leading controller). Every decision must follow from a report that the machine was given. Each
decision is also compared with the real state of the simulated cluster, which the machine cannot
see.
"""

from collections.abc import Mapping, Sequence

from tft.core.job.commands import Command, Consult, Tell
from tft.core.job.events import (
    CorruptionTraced,
    DeadlinePassed,
    Event,
    Led,
    Received,
    SlicesAgreed,
    SlicesDiffered,
)
from tft.core.job.machine import Machine
from tft.core.job.transitions import SETTLED, State
from tft.protocol.messages import (
    ORDER_NAMES,
    Advised,
    Answered,
    Exited,
    Faulted,
    Fetch,
    Freeze,
    Kill,
    Load,
    NodeJoined,
    NodeLost,
    Noticed,
    OrderName,
    RankOrder,
    Ready,
    Refused,
    Regroup,
    Release,
    Resume,
    ResumeRequested,
    Rollback,
    Save,
    Spawn,
    StopRequested,
)
from tft.simulation.chances import Chances
from tft.simulation.copies import Copies
from tft.simulation.invariants import Broken
from tft.simulation.ledger import Ledger
from tft.simulation.slices import Slices
from tft.simulation.stage import ProcessPart, Stage
from tft.simulation.truth import Content

S = State
HARMLESS = ("resume", "come", "advise")
"""The kinds of mishaps (injected faults and requests) to which the job need not react."""
NEEDS: dict[OrderName, tuple[OrderName, ...]] = {
    "stop": ("freeze",),
    "compare": ("freeze",),
    "hold": ("freeze",),
    "check": ("hold",),
    "regroup": ("freeze",),
    "load": ("stop", "compare"),
    "fetch": ("stop", "compare"),
    "restore": ("stop", "compare"),
    "reload": ("stop", "compare", "regroup"),
    "rebuild": ("stop", "compare", "load", "fetch", "restore", "regroup", "reload"),
    "rollback": ("rebuild",),
    "resume": ("rollback",),
    "save": ("stop", "compare", "restore"),
    "commit": ("save",),
}
"""By order: the earlier orders of the same round (one attempt to handle an incident) that each rank
must have carried out before this order may be sent."""


class Auditor:
    """
    Checks the decisions of the leading job machine. Call `hears` with every event before the
    machine handles it, and `judges` with the commands of the machine after that.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._ledger = Ledger(stage)
        if stage.schedule.resume:
            self._ledger.checkpoints[stage.schedule.resume] = ""
        self._copies = Copies(stage, self._ledger)
        self._slices = Slices(stage, self._ledger)
        self._chances = Chances(stage, self._ledger, self._copies)
        self._ceiling: int | None = None
        """The ceiling of the machine's incident (the last step whose state can be sound) before the
        event that is being checked."""
        self._state = S.AWAITING
        self._number = 0
        self._rank_states: dict[int, int] = {}
        self._late: set[int] = set()
        self._consult: Consult | None = None
        self._vetoed: set[str] = set()
        self._isolated: set[int] = set()
        self._to_end = ""
        """Why the job has to end. Empty when the job does not have to end."""
        self._unread = 0
        """The number of orders to load a checkpoint that have failed."""

    def hears(self, machine: Machine, event: Event) -> None:
        """
        Record an event that the job machine (the state machine of the leading controller) is about
        to handle, and the state of the job machine before this event.
        """
        self._state = machine.state
        incident = machine.incident
        self._ceiling = incident.spread.ceiling
        self._ledger.key = (incident.number, incident.round)
        if isinstance(event, DeadlinePassed):
            self._late = self._ledger.late(event.at)
        if isinstance(event, Received):
            message = event.message
            if isinstance(message, Exited | Faulted | Noticed):
                rank_state = machine.incarnation(message.rank)
                self._rank_states[message.rank] = (
                    -1 if (message.rank, rank_state) in self._ledger.processes.ended else rank_state
                )
            if isinstance(message, Ready | NodeJoined | NodeLost):
                # forget the strategies that the machine has offered to the recovery plugins: after
                # this report the offered strategies may be impossible
                self._consult = None
            if not (isinstance(message, Answered) and self._is_impostor(machine, event)):
                self._ledger.hears(machine, message)
            self._copies.hears(message)
        elif isinstance(event, Led):
            self._slices.leads()
        else:
            self._slices.hears(machine, event)

    def _is_impostor(self, machine: Machine, event: Received) -> bool:
        """
        Return True if the sender of a report is an impostor: a second process of the reported
        rank, which no order has started.
        """
        rank = getattr(event.message, "rank", -1)
        process = self._process(machine, rank)
        return process is not None and event.sender != process.mail.sender

    def judges(self, machine: Machine, event: Event, commands: Sequence[Command]) -> None:
        """
        Check the commands and the state of the job machine after an event. Raises `Broken` when an
        invariant does not hold.
        """
        if isinstance(event, Received):
            self._heard(machine, event)
            self._copies.judged(machine, event.message)
        if isinstance(event, SlicesAgreed | SlicesDiffered):
            self._compared(machine, event)
        if machine.incident.number != self._number:
            self._opened(machine, event)
        if self._state is S.CLEARING and machine.state not in (S.CLEARING, S.FREEZING):
            self._copies.stopped(self._ceiling)
        if self._state is S.PAUSED and machine.state not in (S.PAUSED, S.RESUMING):
            self._take_out()
        for command in commands:
            self._says(machine, event, command)
        if machine.state is not self._state:
            self._entered(machine)

    def _compared(self, machine: Machine, event: SlicesAgreed | SlicesDiffered) -> None:
        """
        Record the result of a comparison of slices (in each step, the ranks compare digests of one
        part of each shard).
        """
        self._slices.judged(machine, event)
        if isinstance(event, SlicesAgreed):
            self._copies.were_equal(event.step)
            return
        self._copies.were_equal(event.sound)
        for rank in event.wrong if event.right else ():
            self._ledger.name(rank, machine.incarnation(rank))
            self._ledger.doubted.add(rank)
            self._copies.suspect(rank)

    # ---------------------------------------------------------------- received reports

    def _heard(self, machine: Machine, event: Received) -> None:
        match event.message:
            case Exited() | Faulted() | Noticed():
                self._not_forgotten(machine, event.message)
                self._ends(machine, event.message)
            case Advised():
                self._followed(machine, event.message)
            case Answered(order="load", failure=str()):
                # Count the failed `load` orders, because the job may end after the second failure:
                # no other rank can supply the rank-local state that a rank could not read.
                self._unread += 1
                if self._unread > 1:
                    self._chances.may_end("a checkpoint could not be read twice")
            case StopRequested():
                if self._state not in SETTLED:
                    self._to_end = "the end was requested"
                    self._chances.may_end(self._to_end)
            case _:
                pass

    def _ends(self, machine: Machine, report: Exited | Faulted | Noticed) -> None:
        if isinstance(report, Exited):
            if report.code >= 0:
                self._chances.may_end("a script has left")
        elif report.kind == "software":
            self._has_to_end(machine, "a bug of the script")
        elif report.kind == "node":
            self._chances.may_end("a node is given up")

    def _has_to_end(self, machine: Machine, why: str) -> None:
        if self._state not in SETTLED:
            self._chances.may_end(why)
        if machine.incident.decision.forced:
            self._to_end = self._to_end or why

    def _not_forgotten(self, machine: Machine, report: Exited | Faulted | Noticed) -> None:
        """
        Check that a reported fault of a member belongs to the open incident. Faults of the kinds
        `network`, `software` and `straggler` are not checked. Raises `Broken` when the fault is in
        no incident.
        """
        rank = report.rank
        if self._state in SETTLED or machine.outcome is not None or rank not in machine.members:
            return
        if not isinstance(report, Noticed) and self._rank_states[rank] != report.incarnation:
            return
        kind = "process"
        if isinstance(report, Faulted):
            kind = report.kind
        elif isinstance(report, Noticed):
            if (rank, self._rank_states[rank]) not in self._ledger.processes.ready:
                return
            kind = report.kind
        if kind in ("network", "software", "straggler"):
            return  # the controller may blame another rank, or no rank, for a fault of these kinds
        for fault in machine.incident.faults:
            if fault.rank == rank and (fault.kind == kind or isinstance(report, Exited)):
                return
        raise Broken(
            "each fault must belong to an incident",
            f"a fault of kind {kind} at rank {rank} is in no incident",
        )

    def _followed(self, machine: Machine, advised: Advised) -> None:
        """
        Check that the machine follows the advice of the recovery plugins, if the machine had
        offered the advised strategy to the plugins. Remember the strategies that the advice rules
        out. Raises `Broken` when the machine chose another strategy.
        """
        incident, consult = machine.incident, self._consult
        if self._state is not S.CHOOSING or consult is None:
            return
        if self._ledger.key != (advised.incident, advised.round) or consult.round != advised.round:
            return
        self._vetoed.update(advised.veto)
        name = advised.base or advised.strategy
        offered = [o.strategy for o in consult.offers if o.why_not is None]
        if advised.wait or advised.replace or advised.not_after is not None:
            return
        done = incident.decision.strategy in (advised.strategy, name)
        if name in offered and name not in self._vetoed and not done:
            raise Broken(
                "advice must be followed",
                f"{advised.strategy} was advised, but {incident.decision.strategy} was chosen",
            )

    def _opened(self, machine: Machine, event: Event) -> None:
        """
        Check that a new incident has a cause. Raises `Broken` when the simulation has injected no
        fault or request so far that can cause an incident (see `HARMLESS`).
        """
        self._number = machine.incident.number
        self._vetoed.clear()
        if self._number > self._stage.schedule.policy.max_incidents:
            self._chances.may_end("the number of incidents has reached its limit")
            self._to_end = "too many incidents"
        happened = [m.what for m in self._stage.mishaps.happened if m.what not in HARMLESS]
        if not happened:
            raise Broken(
                "an incident must begin with a fault",
                f"{event} opens an incident without a cause",
            )

    # ---------------------------------------------------------------- issued orders

    def _says(self, machine: Machine, event: Event, command: Command) -> None:
        if isinstance(command, Tell):
            self._slices.tells(machine, command)
        match command:
            case Tell(event="incident_closed"):
                self._closed(machine)
            case Tell(event="copies_differ"):
                stopped = self._state is S.CLEARING
                self._copies.differ(machine, command.facts, stopped=stopped)
            case Tell(event="begins_unlike"):
                self._copies.begin_unlike(command.facts)
            case Tell(event="strategy_chosen"):
                self._not_ruled_out(machine)
            case Tell(event="rank_not_ended"):
                self._chances.may_end(
                    "no other process can be started where a process could not be ended"
                )
                self._stage.checks.invariants.given_up.add(int(str(command.facts["rank"])))
            case Tell(event="fault", facts={"kind": "node", "rank": int(rank)}):
                self._gives_up(machine, event, rank)
            case Tell(event="paused"):
                self._stand(machine)
            case Tell():
                pass
            case Spawn():
                self._spawned(command)
                self._ledger.spawns(command, event.at)
            case Kill():
                self._killed(machine, event, command)
                self._ledger.kills(command)
            case Refused():
                self._refused(machine, command)
            case Consult():
                self._consult = command
            case _:
                if type(command) in ORDER_NAMES:
                    self._ordered(machine, event, command)  # type: ignore[arg-type] # all others are orders to ranks

    def _gives_up(self, machine: Machine, event: Event, rank: int) -> None:
        """
        Check the controller's decision to give up the node of a rank. Raises `Broken` when a
        comparison of copies has led to the decision, although no rank on the node has had wrong
        copies of its state twice.
        """
        node = self._ledger.place(machine, rank)
        if node in self._ledger.lost:
            return
        if node in self._slices.left:
            self._ledger.lost.add(node)
            self._ledger.moves()
            self._isolated.add(node)
            self._chances.may_end("a node is given up")
        elif isinstance(event, SlicesDiffered | CorruptionTraced):
            raise Broken(
                "a node may be given up only after a second corruption",
                f"node {node} is given up, although copies of rank {rank} were not wrong twice",
            )

    def _ordered(self, machine: Machine, event: Event, order: RankOrder) -> None:
        self._answered_by_all(order)
        self._ledger.says(order, event.at)
        self._copies.ordered(machine, order)
        match order:
            case Freeze():
                self._slices.freezes()
            case Fetch():
                self._sources_hold(order)
            case Regroup() | Save() | Load():
                self._chances.newest(machine, order)
                self._goes_back(machine, order)
            case Rollback():
                self._not_made_anew(machine, order)
                self._slices.goes_on(machine, self._members(machine), order.step)
                self._chances.rolled_back(machine)
            case Release():
                self._verdicts(event)
            case Resume():
                self._copies.resumed(order.step - 1)
                self._slices.resumes(order, self._members(machine))
            case _:
                pass

    def _not_made_anew(self, machine: Machine, order: Rollback) -> None:
        """
        Check that no rank is told to recompute its rank-local state if another node has kept and
        reported that state. Only runs in which exactly one node was lost are checked. Raises
        `Broken` otherwise.
        """
        kept = self._ledger.kept
        again = [
            rank
            for rank in order.derive
            if order.step in kept.steps.get(rank, ()) and kept.losses == 1
            if rank not in machine.incident.turnover.joining
        ]
        if again:
            raise Broken(
                "rank-local state that a node has kept must not be recomputed",
                f"ranks {again} are told to recompute their rank-local state of step {order.step}, "
                "which another node has kept",
            )

    def _goes_back(self, machine: Machine, order: Regroup | Save | Load) -> None:
        """
        Check that a regroup, save or load order names an allowed step, if a comparison of slices
        (parts of the shards) has found that copies differ.
        """
        step = order.step - 1 if isinstance(order, Regroup) else order.step
        found = self._slices.found
        if found is not None and step >= 0:
            # a save order can write only state that is in memory, so checkpoints do not count then
            saves = isinstance(order, Save)
            earlier = self._chances.earlier(machine, found.sound, held=saves)
            self._slices.goes_back(machine, step, earlier)

    def _answered_by_all(self, order: RankOrder) -> None:
        """
        Check that every rank has carried out the orders that must precede `order` in the same round
        (see `NEEDS`). Raises `Broken` when an answer is missing.
        """
        ledger, key = self._ledger, (order.incident, order.round)
        name = ORDER_NAMES[type(order)]
        for need in NEEDS.get(name, ()):
            book = ledger.asked.get(need)
            if book is None:
                continue
            for rank, (asked, incarnation, _) in book.items():
                if asked != key or (rank, incarnation) in ledger.processes.ended:
                    continue
                if not ledger.has_answered(need, rank, key, incarnation):
                    raise Broken(
                        "an order must wait for the answers to earlier orders",
                        f"the order {name} was sent before rank {rank} had answered the order "
                        f"{need}",
                    )

    def _sources_hold(self, order: Fetch) -> None:
        """
        Check that every rank that a fetch order names as a source of a shard holds that shard at
        the step of the order. Raises `Broken` when a source does not.
        """
        for transfer in order.transfers:
            for source in transfer.sources:
                giver = self._stage.serving(source.address)
                if giver is None or giver.life.stopped:
                    continue
                holds = giver.held() == order.step or order.step in giver.backups()
                if not holds or transfer.shard not in giver.memory.content:
                    raise Broken(
                        "shards may be fetched only from sound copies",
                        f"rank {giver.rank} holds the state of step {giver.held()} and is named as "
                        f"a source of shard {transfer.shard!r} of step {order.step}",
                    )

    def _verdicts(self, event: Event) -> None:
        """
        Check that a paused job does not resume after a health check of the current round has found
        a rank bad. A request to resume overrules the verdict. Raises `Broken` when the job resumes
        without such a request.
        """
        if isinstance(event, Received) and isinstance(event.message, ResumeRequested):
            return
        for rank, answer in self._ledger.answers.get("check", {}).items():
            if (answer.incident, answer.round) == self._ledger.key and answer.verdict != "pass":
                raise Broken(
                    "an isolated node must get no process",
                    f"the check of rank {rank} said {answer.verdict}, but the job resumes",
                )

    def digested(self, process: ProcessPart, step: int) -> None:
        """
        Record the real content of a rank at the end of `step`, when the rank has posted the digests
        of a slice (a part of each of its shards).
        """
        self._slices.digested(process, step)

    def not_put_back(
        self,
        process: ProcessPart,
        shard: str,
        step: int,
        had: Mapping[str, Content],
        got: Content,
    ) -> None:
        """
        Check a fetched shard of a rank that had already ended `step` with sound content. The rank
        must not receive content that other ranks had in the tail of that step (between its update
        window and its end). `had` holds the shards of the rank before the fetch, `got` is the
        fetched content. Raises `Broken` when the fetched content is from the tail.
        """
        stages = self._stage.truth.stages(step, shard)
        if self._copies.suspects(process.rank) or had.get(shard) != stages[-1]:
            return
        if got in stages[:-1]:
            raise Broken(
                "state from the end of a step must not be replaced by state from its tail",
                f"rank {process.rank} had ended step {step}, and gets shard {shard!r} of its tail",
            )

    # ---------------------------------------------------------------- starts and ends of processes

    def _spawned(self, order: Spawn) -> None:
        """
        Check that no rank gets a second process while its first process is ready and not to be
        replaced. Check that no process starts on an isolated node. Raises `Broken` otherwise.
        """
        rank, before = order.rank, order.incarnation - 1
        ledger = self._ledger
        wanted = (rank, before) in ledger.processes.ready and (
            rank,
            before,
        ) not in ledger.processes.ended
        if (
            wanted
            and rank not in ledger.slow
            and ledger.processes.sites[rank, before] not in ledger.lost
        ):
            raise Broken(
                "a rank must have only one process", f"rank {rank} has a process and gets another"
            )
        if order.node in self._isolated:
            raise Broken(
                "an isolated node must get no process",
                f"rank {rank} is started on isolated node {order.node}",
            )

    def _killed(self, machine: Machine, event: Event, order: Kill) -> None:
        """
        Check that a process is ended only for a reason given by a report, a limit, the policy or
        advice. Raises `Broken` when there is no reason.
        """
        ledger, rank = self._ledger, order.rank
        process = self._stage.cluster.nodes[order.node].process(rank)
        if process is None or process.thread.stuck or process.life.stopped:
            return
        late = isinstance(event, DeadlinePassed) and rank in self._late
        whole_nodes = self._stage.schedule.policy.replace == "node"
        if (
            late
            or rank in ledger.named
            or rank in ledger.slow
            or order.node in ledger.lost
            # copies of a rank were wrong twice on this node, so the node may be given up
            or order.node in self._slices.left
            or (whole_nodes and order.node in ledger.hurt)
        ):
            return
        raise Broken(
            "a process may be ended only for a reported reason",
            f"in incident {machine.incident.number}, the process of rank {rank} is to be ended "
            f"without a reason that was reported: {order.cause}",
        )

    def _refused(self, machine: Machine, refused: Refused) -> None:
        """
        Check that the controller refuses no process that rightly holds its rank. Raises `Broken`
        otherwise.
        """
        process = self._process(machine, refused.rank)
        if process is None or process.pid != refused.pid:
            return
        ledger, rank_state = self._ledger, (refused.rank, process.incarnation)
        if rank_state not in ledger.processes.ended and process.node.number not in ledger.lost:
            raise Broken(
                "the process that holds a rank must not be refused",
                f"the process that holds rank {refused.rank} is refused: {refused.why}",
            )

    # ---------------------------------------------------------------- reached states

    def _entered(self, machine: Machine) -> None:
        state = machine.state
        if state is S.HEALTHY:
            self._everyone_trained(machine)
            self._ledger.over()
        ends = state in (S.DUMPING, S.EXITING)
        if ends and self._state not in (S.DUMPING, S.EXITING):
            self._chances.none_left(machine)
        over = machine.outcome
        if self._to_end and over is not None and over.result == "completed":
            raise Broken(
                "the job must end if its end was requested",
                f"the job has to end ({self._to_end}), but has completed all steps",
            )
        if over is not None and over.result == "completed" and state is S.EXITING:
            compared = self._state is S.CONFIRMING
            self._slices.completes(self._members(machine), compared=compared)

    def _take_out(self) -> None:
        """
        Record the effects of the verdicts of a check, such as isolated nodes. The verdicts count
        even if a fault has interrupted the check before all ranks had answered.
        """
        ledger = self._ledger
        for rank, answer in ledger.answers.get("check", {}).items():
            if (answer.incident, answer.round) != ledger.key:
                continue
            if answer.verdict == "isolate":
                self._isolated.add(ledger.processes.sites[rank, answer.incarnation])
                self._chances.may_end("a check has found a node bad")
            elif answer.verdict == "end":
                self._to_end = "a check ends the job"
                self._chances.may_end(self._to_end)

    def _closed(self, machine: Machine) -> None:
        self._everyone_trained(machine)
        self._copies.closed(machine)
        self._slices.closed(machine)
        self._stage.checks.invariants.lost_told(machine.incident)
        if self._to_end:
            raise Broken(
                "the job must end if its end was requested",
                f"the job has to end ({self._to_end}), but goes on",
            )

    def _not_ruled_out(self, machine: Machine) -> None:
        if machine.incident.decision.base in self._vetoed - {"exit"}:
            raise Broken(
                "advice must be followed",
                f"the strategy {machine.incident.decision.base} was chosen, although the advice "
                "has ruled it out",
            )

    def _everyone_trained(self, machine: Machine) -> None:
        """
        Check that every rank of the job has trained one more step before success is announced.
        Raises `Broken` otherwise.
        """
        for rank in machine.members:
            process = self._process(machine, rank)
            if process is None or not process.steps.announce:
                continue
            if process.steps.completed < self._stage.schedule.steps:
                raise Broken(
                    "a recovery may count as a success only after one more step",
                    f"rank {rank} has trained no step after step {process.steps.completed}",
                )

    def _stand(self, machine: Machine) -> None:
        """
        Check that all ranks of the job wait at the same step boundary when the job is paused.
        Raises `Broken` otherwise.
        """
        there = [self._process(machine, rank) for rank in machine.members]
        processes = [
            process for process in there if process is not None and not process.thread.stuck
        ]
        moving = [p.rank for p in processes if p.thread.phase not in ("gate", "idle", "gone")]
        steps = {process.steps.completed for process in processes}
        if moving or len(steps) > 1:
            raise Broken(
                "no rank may train in a pause",
                f"the job is paused, but ranks {moving} train, or the ranks have done different "
                f"steps: {sorted(steps)}",
            )

    def _members(self, machine: Machine) -> dict[int, ProcessPart]:
        """
        Return the living processes of all ranks that take part in the job, by rank.
        """
        there = {rank: self._process(machine, rank) for rank in machine.members}
        return {rank: process for rank, process in there.items() if process is not None}

    def _process(self, machine: Machine, rank: int) -> ProcessPart | None:
        node = self._stage.cluster.nodes.get(self._ledger.place(machine, rank))
        process = None if node is None else node.process(rank)
        if process is None or process.incarnation != machine.incarnation(rank):
            return None
        return process if process.life.alive else None
