"""
Brings the ranks of a job back to training in an incident: lets them repair their state, form
process groups, rebuild their wrappers (such as DDP), roll back, and enter their loops again.
"""

from dataclasses import replace
from math import inf

from tft.core.job.attempts import Attempts
from tft.core.job.comparison import Comparison, forget_tails, not_compared, note_habits, note_tails
from tft.core.job.facts import (
    lacks_local_state,
    note_capture,
    note_early,
    note_lost_step,
    standings_of,
    terms_of,
)
from tft.core.job.state import Job
from tft.core.job.strategy import StrategyChoice
from tft.core.job.training import CHECKPOINTS_RESUMED, CHECKPOINTS_SUSPENDED
from tft.core.job.transitions import State
from tft.core.plan.offers import RELOADING
from tft.core.plan.repair import Repair, plan_repair
from tft.protocol.messages import (
    Compare,
    Fetch,
    Load,
    RankOrder,
    Rebuild,
    Regroup,
    Reload,
    Restore,
    Resume,
    Rollback,
)

S = State


class Restart:
    """
    Brings the members of one job (the ranks that take part in training) back to training.
    """

    def __init__(
        self, job: Job, attempts: Attempts, comparison: Comparison, choice: StrategyChoice
    ) -> None:
        self._job = job
        self._attempts = attempts
        self._comparison = comparison
        self._choice = choice

    def form_groups_early(self, ranks: tuple[int, ...], step: int) -> None:
        """
        If the recovery strategy will be `retry`, as far as is known now, order the ranks to form
        process groups at once. So they form the groups while they digest their copies of the
        shards. `ranks` are the ranks that leave their loops, `step` is the last step that they
        complete.
        """
        job, incident, store = self._job, self._job.incident, self._job.nodes.store
        if store is not None and set(ranks) == job.ranks.members and self._will_retry():
            incident.store = store
            job.issue(self._regroup(step + 1, *store), longer=inf)

    def _will_retry(self) -> bool:
        """
        Return True if nothing is known yet that could lead to another strategy than `retry`, or to
        an earlier step than the last one that all ranks complete.
        """
        job, incident = self._job, self._job.incident
        if job.policy.advised or job.succession.warm() or job.returning():
            # a plugin may advise another strategy, or `migrate` or `scale_out`, which the job tries
            # before `retry`, may be possible
            return False
        if incident.decision.forced or incident.decision.attempts or incident.turnover.respawns:
            return False
        spread = incident.spread
        if spread.ceiling is not None or spread.equals or spread.suspects or job.training.untrained:
            return False
        return (
            "retry" in job.policy.enable
            and "retry" not in incident.decision.failed
            and all(
                "retry" in rank_state.declared.strategies
                and rank_state.holdings.sound
                and not job.flapping(rank_state.rank)
                for rank_state in job.ranks.member_states()
            )
        )

    def start(self) -> bool:
        """
        When every rank that takes part can carry out orders, plan the repair and begin it: order
        the ranks to form process groups and to copy the state that they lack. If no recovery
        strategy is chosen, begin the choice instead. Return True if another move of the job may be
        possible at once.
        """
        job, decision, store = self._job, self._job.incident.decision, self._job.nodes.store
        if decision.plan is None:
            if job.unsettled():
                return False
            self._choice.consider()
            return True
        if store is not None and self._all_there():
            repair = plan_repair(
                job.ranks.topology(),
                standings_of(job, self._choice.unplaceable),
                job.ranks.members,
                terms_of(job),
            )
            if isinstance(repair, str):
                decision.failed[decision.base] = repair
                decision.plan = None  # the next call of `start` then chooses another strategy
                return True
            decision.plan = replace(decision.plan, step=repair.step, repair=repair)
            note_lost_step(job, repair.step)
            self._repair(repair, *store)
            return True  # groups that were formed early may be all that the repair needs
        return False

    def _all_there(self) -> bool:
        """
        Return True if every rank that takes part can carry out orders, if it is known which
        training state is left in the job, and if the waiting time before another attempt is over.
        """
        job = self._job
        # first see whether any process is still starting. This test is cheap, and the test of every
        # rank below is slow in a large job
        if job.waits_for_starters():
            return False
        waits = job.timing.deadline is not None and job.timing.deadline > job.timing.now
        return (
            job.ranks.every(lambda rank_state: rank_state.ready)
            and not waits
            and not job.unsettled()
        )

    def _repair(self, repair: Repair, host: str, port: int) -> None:
        job, incident, step = self._job, self._job.incident, repair.step
        incident.progress.step, incident.store = None if step is None else step + 1, (host, port)
        job.move(S.REPAIRING)
        self._order_groups(incident.progress.step or 0, host, port)
        if step is None:
            # the ranks will find and load a checkpoint themselves (order `reload`). That order
            # comes when the process groups are formed, because the ranks may need the groups for it
            return
        if repair.load:
            forget_tails(job, step)
            job.search()
            job.issue(job.to_all(Load, directory=repair.load, step=step))
        else:
            note_tails(
                job,
                step,
                {
                    rank_state.rank: rank_state.standing()
                    for rank_state in job.ranks.states.values()
                },
            )
        if repair.restore:
            job.issue(Restore(**job.key(), to=repair.restore, step=step))
        fetches = [
            Fetch(**job.key(), to=(rank,), step=step, transfers=transfers)
            for rank, transfers in repair.transfers.items()
        ]
        if fetches:
            job.issue(*fetches)

    def _order_groups(self, step: int, host: str, port: int) -> None:
        """
        Order the ranks to form process groups, unless they have this order already. If they have
        an order to form other groups, first begin a new round, so that they give up that order.
        """
        job = self._job
        early, regroup = job.incident.tasks.get("regroup"), self._regroup(step, host, port)
        if early is not None:
            if [replace(order, epoch=regroup.epoch) for order in early.orders] == [regroup]:
                return
            job.new_round()
            regroup = self._regroup(step, host, port)
        job.issue(regroup)

    def _regroup(self, step: int, host: str, port: int) -> RankOrder:
        """
        Return the order to form process groups for `step` with the rendezvous store at `host` and
        `port`.
        """
        job, incident = self._job, self._job.incident
        return job.to_all(
            Regroup,
            step=step,
            name=f"{job.name}/{incident.number}.{incident.round}",
            host=host,
            port=port,
            without=tuple(rank for rank in job.ranks.states if rank not in job.ranks.members),
        )

    def repaired(self) -> None:
        """
        When every rank has carried out the repair, order the ranks to build their wrappers, such as
        DDP. If the recovery plan names no step, first order the ranks to find and load a checkpoint
        that they have written without tft. If the copies of a shard are not equal after the repair,
        begin a new round of the incident instead.
        """
        job, incident = self._job, self._job.incident
        if incident.progress.step is None and "reload" not in incident.tasks:
            self._reload()
            return
        why_not = self._found() if incident.progress.step is None else ""
        if why_not:
            # the checkpoint that the ranks have found cannot be used. Rule out the strategies in which
            # ranks find a checkpoint themselves, because they would find the same checkpoint again
            incident.decision.failed |= dict.fromkeys(RELOADING, why_not)
            self._attempts.freeze()
            return
        job.search(over=True)
        if not self._comparison.confirms():
            return
        longer = 0.0
        if any(rank_state.holdings.held is None for rank_state in job.ranks.member_states()):
            # a rank has no training state and gets it while the wrappers are built. Copying a large
            # state takes longer than building wrappers, so allow as much time as for a repair
            longer = max(0.0, job.policy.repair - job.policy.rebuild)
        job.step_to(S.REBUILDING, job.to_all(Rebuild), longer=longer)

    def _reload(self) -> None:
        """
        Order every rank that takes part to find and load the newest of the checkpoints that the
        ranks write without tft.
        """
        job = self._job
        job.search()
        job.issue(job.to_all(Reload, not_after=job.incident.spread.ceiling))

    def _found(self) -> str:
        """
        Check the checkpoint that the ranks have found and loaded by themselves. If the checkpoint
        can be used, record that training continues from its step, and return "". Otherwise return a
        sentence that says why the checkpoint cannot be used.
        """
        job, incident = self._job, self._job.incident
        found: dict[int, int] = {}
        for s in job.ranks.member_states():
            if s.holdings.held is None:
                return (
                    f"rank {s.rank} has not reported the step of the checkpoint that it has found"
                )
            found[s.rank] = s.holdings.held
        low, step = min(found, key=found.__getitem__), max(found.values())
        if found[low] < step:
            high = max(found, key=found.__getitem__)
            return (
                f"rank {low} has found a checkpoint of step {found[low]}, rank {high} one of step "
                f"{step}: the ranks cannot go on from different steps"
            )
        if incident.spread.firm is not None and step > incident.spread.firm:
            return (
                f"the ranks have found a checkpoint of step {step}, and all state after step "
                f"{incident.spread.firm} may be wrong"
            )
        # if no rank had begun the step of the checkpoint, the checkpoint is of another run. Do not
        # check this if all ranks have lost their processes, because then nobody knows how far this
        # run had come
        if (
            incident.progress.begun < step
            and not job.ranks.members <= incident.turnover.respawns.keys()
        ):
            return (
                f"the ranks have found a checkpoint of step {step}, and no rank had completed a "
                f"step after {incident.progress.begun}: the checkpoint is not of this run"
            )
        incident.progress.step = step + 1
        for rank_state in job.ranks.member_states():
            rank_state.holdings.reloaded(step)
            note_capture(job, rank_state)
        forget_tails(job, step)
        job.tell("checkpoint_found", incident=incident.number, step=step)
        return ""

    def rebuilt(self) -> None:
        """
        When every rank has built its wrapper, such as DDP, go on to the rollback. Once in a job,
        first compare the initial states of the ranks. The comparison comes so late because building
        the wrappers may make the initial states equal.
        """
        job = self._job
        job.begin_training()
        holders = () if job.training.start.compared else self._comparison.holders()
        if holders and "compare" not in job.incident.tasks:
            job.issue(Compare(**job.key(), to=holders))
            return
        if holders:
            self._comparison.tell_begins()
        job.training.start.compared = True
        self._roll_back()

    def _roll_back(self) -> None:
        job, progress = self._job, self._job.incident.progress
        step = progress.agreed
        job.incident.exactness.returns_to(step)
        note_habits(job, step)
        skip = self._skip(step)
        # forget checkpoints of later steps: the job computes these steps again, perhaps with
        # another result
        job.checkpoints.drop_later(step)
        self._leave_behind(step)
        note_early(job, step)
        rollback = job.to_all(
            Rollback,
            step=step,
            skip=skip,
            local_state={
                s.rank: s.local_state.reported[step]
                for s in job.ranks.member_states()
                if step in s.local_state.reported
            },
            derive=self._deriving(step),
            goes_back=max(job.training.last_step, progress.furthest, progress.told) > step,
        )
        job.training.rollbacks.went_back((rollback.incident, rollback.round), step)
        job.nodes.overdue = {}
        job.step_to(S.ROLLING_BACK, rollback)

    def _leave_behind(self, step: int) -> None:
        """
        Make sure that later incidents do not use out-of-date state of ranks that do not take part
        in training. The other ranks continue from the end of `step` and compute later steps again.
        So do not use copies and rank-local state of steps after `step`. A rank that does not take
        part may have left its loop in the tail of a step (the code after the update). Do not use
        any copy of such a rank, because other ranks may have come further in that tail.
        """
        job = self._job
        for rank_state in job.ranks.states.values():
            if rank_state.rank in job.ranks.members:
                continue
            rank_state.local_state.leave_behind(step)
            later = any(copy > step for copy in rank_state.standing().copies(None))
            if later or rank_state.position.tail:
                rank_state.holdings.distrust()

    def _skip(self, step: int) -> int:
        """
        Return the number of data batches that all ranks skip after `step`. It is the largest of
        three numbers: the number that a recovery plugin has advised, the number for refused updates
        and, if `policy.skip_batch` is True, the number of steps up to the last numeric fault. If
        the ranks roll back to the same step again in this incident, they skip the same number.
        """
        incident = self._job.incident
        refused = self._job.training.refusals.returns_to(step)
        if incident.exactness.skip_at is None:
            if self._job.policy.skip_batch and incident.spread.ceiling is not None:
                incident.exactness.skip = max(
                    incident.exactness.skip, incident.numeric_step() - step
                )
            if incident.exactness.skip:
                incident.exactness.skip_at = step
        return max(refused, incident.exactness.skip if step == incident.exactness.skip_at else 0)

    def _deriving(self, step: int) -> tuple[int, ...]:
        """
        Return the ranks that must make their rank-local state (generators, data position) anew from
        the number `step` alone, because no usable captured state of this step is left. If there are
        such ranks, log it and add a sentence to the incident report, because training then does not
        continue bit for bit.
        """
        job, joining = self._job, self._job.incident.turnover.joining
        without_local_state = [
            s
            for s in job.ranks.member_states()
            if lacks_local_state(job, s) or step < s.local_state.since
        ]
        ranks = tuple(
            s.rank
            for s in without_local_state
            if s.rank in joining or step not in s.local_state.reported
        )
        if ranks and step > 0:
            job.tell("local_state_derived", ranks=list(ranks), step=step)
            why = f"RNG and data position of ranks {list(ranks)} at the end of step {step} were made anew"
            job.incident.exactness.reservations.append((step, why))
        return ranks

    def resume(self) -> None:
        """
        Order all ranks that take part to enter their training loops at the step after the one to
        which they have returned. Also forget facts that were valid only during the incident.
        """
        job = self._job
        job.training.trained = set()
        job.training.refusals.resumed()
        self._note_compared()
        self._note_leaving()
        self._note_suspended()
        job.incident.spread.lift()
        for rank_state in job.ranks.member_states():
            rank_state.finished = rank_state.holdings.fetched = False
        job.training.finished = set()
        resume = job.to_all(
            Resume,
            step=job.incident.progress.agreed + 1,
            again=self._called_again(),
            tails=job.training.tails,
        )
        job.training.attempt = (resume.incident, resume.round)
        job.step_to(S.RESUMING, resume)

    def _note_compared(self) -> None:
        """
        Record that all copies were equal at the end of the step to which all ranks have returned.

        If a rank could not read a shard that other ranks hold too, its copy was not compared. Then
        only record that no later step counts as compared, and add a reservation (a reason why
        training may not continue exactly) to the incident report.
        """
        job, step = self._job, self._job.incident.progress.agreed
        unread = self._comparison.unread()
        if not job.ranks.whole:
            job.training.start.repaired = True
        if not unread or step == 0:
            job.training.equal.returned(step, judged=self._all_judged())
            job.training.forget_unlike(step)
            return
        job.training.equal.limit(step)
        why = not_compared(unread)
        job.tell("copies_not_compared", ranks=unread, step=step, why=why)
        job.incident.exactness.reservations.append((step, why))

    def _note_leaving(self) -> None:
        """
        Add a reservation to the incident report if ranks leave the job (strategy `scale_in`): the
        steps that follow lack their part of the data.
        """
        job, plan = self._job, self._job.incident.decision.plan
        if plan is not None and plan.leaving:
            step = job.incident.progress.agreed
            why = (
                f"ranks {sorted(plan.leaving)} have left the job: the steps after step {step} lack "
                "their part of the data until they come back"
            )
            job.incident.exactness.reservations.append((step, why))

    def _note_suspended(self) -> None:
        """
        Log when ranks have left the job, so that no periodic checkpoint is completed: it needs the
        part of every rank. Log also when they are back.
        """
        job, absent = self._job, sorted(self._job.ranks.states.keys() - self._job.ranks.members)
        suspended = bool(absent and job.policy.checkpoint_every)
        if suspended == (job.checkpoints.suspended is not None):
            return
        step = job.incident.progress.agreed
        if suspended:
            job.checkpoints.suspended = step
            job.tell(CHECKPOINTS_SUSPENDED, ranks=absent, step=step)
        else:
            job.leave_unfinished(step)
            job.checkpoints.suspended = None
            job.tell(CHECKPOINTS_RESUMED, step=step)

    def _all_judged(self) -> bool:
        """
        Return True if no holder of a shard was lost before its copy was compared in the incident,
        or if the incident has found wrong copies.
        """
        job = self._job
        fetched = any(job.ranks.states[r].holdings.fetched for r in self._comparison.sharing())
        return not fetched or any(fault.kind == "corruption" for fault in job.incident.faults)

    def _called_again(self) -> bool:
        """
        Return True if all ranks must once more call the functions that the script has registered to
        be called after a step, such as an evaluation. The step is the one to which all ranks have
        returned.

        The functions must be called again if any rank, alive or lost, may not have completed them
        or may have called them with a wrong copy of the state. If this is not known, they are
        called again, too. It is not known for a rank that was lost with its node, and at the step
        of the checkpoint from which the job was started.
        """
        job, incident, step = self._job, self._job.incident, self._job.incident.progress.agreed
        if step == 0 or not any(
            rank_state.declared.after for rank_state in job.ranks.member_states()
        ):
            return False
        # at the step of the checkpoint from which the job started, it is unknown whether the
        # earlier run has called the functions that follow a step. After a `corruption` fault, ranks
        # may have called these functions with a wrong copy of the state
        if step == job.training.first or any(f.kind == "corruption" for f in incident.faults):
            return True
        lost = incident.turnover.respawns.keys() - incident.exactness.marks.keys()
        return bool(lost & job.ranks.members) or any(
            incident.exactness.marks.get(rank, step) < step for rank in job.ranks.members
        )
