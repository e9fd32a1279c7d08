"""
An independent estimate of whether a simulated job can continue. The class `Chances` computes the
newest step for which every shard has a sound copy. It also finds out whether a job that ends could
have continued instead.
"""

from tft.core.job.machine import Machine
from tft.core.job.transitions import State
from tft.protocol.messages import Load, Regroup, Save
from tft.simulation.copies import Copies
from tft.simulation.invariants import Broken
from tft.simulation.ledger import Ledger
from tft.simulation.stage import Stage

S = State


class Chances:
    """
    Checks the step from which the job machine (the state machine in the leading controller) lets
    all ranks continue, and whether the job may end. The estimate never claims more than the machine
    could know. When it is uncertain whether the content of a shard is sound, the check passes.
    """

    def __init__(self, stage: Stage, ledger: Ledger, copies: Copies) -> None:
        self._stage = stage
        self._ledger = ledger
        self._copies = copies
        self._may_end = ""
        """Why the job may end, even if it could go on. Empty when there is no reason."""

    def may_end(self, why: str) -> None:
        """
        Record why the job may end, even if it could go on. Only the first reason is kept.
        """
        self._may_end = self._may_end or why

    def newest(self, machine: Machine, order: Regroup | Save | Load) -> None:
        """
        Check that the machine has chosen the newest step for which every shard has a sound copy. If
        there is no such step, the machine must choose the step of the newest checkpoint. Raises
        `Broken` otherwise.
        """
        step = order.step - 1 if isinstance(order, Regroup) else order.step
        best = self._newest_held(machine)
        known = self._newest_saved(machine)
        if step < 0 and known is not None:
            raise Broken(
                "the newest step with sound copies must be chosen",
                f"the ranks were told to load any checkpoint that they find, although the checkpoint "
                f"of step {known} is known",
            )
        if best is not None and step < best:
            raise Broken(
                "the newest step with sound copies must be chosen",
                f"step {step} was chosen, although all shards of step {best} have a sound copy",
            )
        if isinstance(order, Load) and known is not None and step < known:
            raise Broken(
                "the newest step with sound copies must be chosen",
                f"the checkpoint of step {step} was chosen, although there is one of step {known}",
            )

    def earlier(self, machine: Machine, ceiling: int, *, held: bool) -> int | None:
        """
        Return the newest step up to `ceiling` that all ranks could go back to. The ranks could use
        the copies that they hold or, if `held` is False, a checkpoint. Return None when no such
        step is known.
        """
        if self._stage.schedule.policy.advised or self._stage.disk.unreadable:
            return None
        saved = None if held else self._newest_saved(machine, ceiling)
        steps = (self._newest_held(machine, ceiling), saved)
        return max((step for step in steps if step is not None), default=None)

    def rolled_back(self, machine: Machine) -> None:
        """
        Forget the checkpoints of steps later than the ceiling of the incident. The ceiling is the
        latest step whose state is not in doubt, so later checkpoints may hold wrong state. Called
        when the ranks are ordered to roll back.
        """
        ceiling = machine.incident.spread.ceiling
        if ceiling is not None:
            for step in [step for step in self._ledger.checkpoints if step > ceiling]:
                del self._ledger.checkpoints[step]

    def none_left(self, machine: Machine) -> None:
        """
        Check that a job ends only when it cannot continue. The job can continue if every shard has
        a sound copy, lost ranks can be replaced, and no limit is reached. Raises `Broken`
        otherwise.
        """
        incident, policy = machine.incident, self._stage.schedule.policy
        if self._may_end or policy.advised:
            return
        if machine.outcome is not None and machine.outcome.result == "completed":
            return
        if incident.decision.forced:
            raise Broken(
                "the job may end only for a cause",
                f"the job ends without a reported cause: {incident.decision.forced}",
            )
        members = machine.members
        if not all(any(r == rank for r, _ in self._ledger.processes.ready) for rank in members):
            return  # a job may end before each of its members has become ready once
        lost = members.difference(self._ledger.there(machine, members))
        strategy = "recover" if lost or incident.turnover.respawns else "retry"
        enabled = strategy in policy.enable and strategy in self._stage.schedule.strategies
        if not enabled or strategy in incident.decision.failed or self._flaps(machine):
            return
        if any(incident.turnover.respawns.get(rank, 0) >= policy.respawns for rank in lost):
            return
        if not all(self._ledger.place(machine, rank) in machine.nodes for rank in lost):
            return
        best = self._newest_held(machine)
        if best is not None:
            raise Broken(
                "the job may end only if no strategy can work",
                f"the job is in state {machine.state}, although the strategy {strategy} could continue "
                f"from step {best}",
            )
        if machine.state is S.DUMPING:
            # do not expect a checkpoint here: while the job saves the state in memory, it does not
            # look for checkpoints that ranks have written without tft
            return
        found = self._to_be_found(machine)
        if found is not None:
            raise Broken(
                "the job may end only if no strategy can work",
                f"the job is in state {machine.state}, although all ranks would find the checkpoint "
                f"of step {found} with the strategy {strategy}",
            )

    def _flaps(self, machine: Machine) -> bool:
        incidents = [*machine.incidents, machine.incident]
        for rank in machine.members:
            times = sum(any(f.rank == rank for f in i.faults) for i in incidents)
            if times > self._stage.schedule.policy.flaps:
                return True
        return False

    def _newest_held(self, machine: Machine, limit: int | None = None) -> int | None:
        ledger, truth = self._ledger, self._stage.truth
        recalled = ledger.kept.of_lost()
        if ledger.kept.moved and recalled is None:
            return None
        ceiling = machine.incident.spread.ceiling if limit is None else limit
        processes = {
            rank: process
            for rank in ledger.there(machine, ledger.told)
            if rank not in ledger.doubted | ledger.searching
            and ledger.told[rank].incarnation == machine.incarnation(rank)
            and (process := self._stage.cluster.nodes[ledger.place(machine, rank)].process(rank))
            is not None
        }
        common: set[int] | None = None
        for shard, ranks in self._stage.schedule.groups().items():
            steps: set[int] = set()
            for rank in ranks:
                if rank not in processes:
                    continue
                told, process = ledger.told[rank], processes[rank]
                if process.steps.tail and rank not in machine.members:
                    # skip a rank that left the job in the tail of a step (the code after the
                    # update): the job machine cannot know whether other ranks came further in that
                    # tail
                    continue
                held = None if rank in self._copies.disputed else told.held
                if held is not None and process.memory.content[shard] == truth.value(held, shard):
                    steps.add(held)
                for step in told.backups:
                    if not self._copies.may_be_used(rank, told.incarnation, step):
                        continue
                    kept = process.memory.copies.get(step, {}).get(shard)
                    if kept == truth.value(step, shard):
                        steps.add(step)
            common = steps if common is None else common & steps
        early = [step for step in common or () if ceiling is None or step <= ceiling]
        if recalled is not None:
            early = [step for step in early if step in recalled]
        return max(early, default=None)

    def _to_be_found(self, machine: Machine) -> int | None:
        """
        Return the step of the newest checkpoint that the ranks have written without tft and that
        all of them could load. Return None if there is no such checkpoint.
        """
        world = self._stage.schedule.world
        if not self._stage.schedule.own or len(machine.members) < world:
            return None
        return self._stage.disk.found(world, machine.incident.spread.ceiling)

    def _newest_saved(self, machine: Machine, limit: int | None = None) -> int | None:
        ceiling = machine.incident.spread.ceiling if limit is None else limit
        early = [s for s in self._ledger.checkpoints if ceiling is None or s <= ceiling]
        return max(early, default=None)
