"""
Leads a job through an incident. The ranks freeze and leave their loops, a recovery strategy is
chosen, lost state is repaired, wrappers such as DDP are rebuilt, and the ranks roll back and train
again. Each move from one state of the job to the next is made as soon as its conditions are met.
"""

from dataclasses import replace
from math import inf

from tft.core.job.attempts import Attempts
from tft.core.job.comparison import Comparison
from tft.core.job.pause import Pausing
from tft.core.job.rank_process import ProcessStage
from tft.core.job.rank_state import RankState
from tft.core.job.restart import Restart
from tft.core.job.shutdown import Shutdown
from tft.core.job.state import Job
from tft.core.job.strategy import StrategyChoice
from tft.core.job.takeover import Takeover
from tft.core.job.transitions import Reaction, State
from tft.protocol.messages import (
    Compare,
    Stop,
)

S = State

WITH_NEW_PROCESSES = ("recover", "scale_out")
"""The recovery strategies in which a new process is started for a lost rank."""


class Recovery:
    """
    Moves one job from each state to the next, in incidents and while the job trains.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.attempts = Attempts(job)
        self.comparison = Comparison(job, self.attempts)
        self.shutdown = Shutdown(job)
        self.choice = StrategyChoice(job, self.attempts, self.shutdown, self.comparison)
        self.pausing = Pausing(job, self.attempts)
        self.restart = Restart(job, self.attempts, self.comparison, self.choice)
        self.takeover = Takeover(job, self.attempts, self.replan)

    # ---------------------------------------------------------------- moves to the next state

    def advance(self) -> bool:
        """
        Move the job to its next state if the conditions for this are met. Return True if a further
        move may be possible at once, so that the caller must call `advance` again.
        """
        job = self._job
        match job.state:
            case S.AWAITING:
                return self.restart.start()
            case S.FREEZING if job.answered_all("freeze"):
                return self._after_freeze()
            case S.CLEARING if job.answered_all("stop"):
                return self._compare()
            case S.CHOOSING if job.timing.deadline is None and not job.unsettled():
                # the choice of a strategy had to wait until processes had ended and the rank-local
                # state of lost nodes was reported
                self.choice.consider()
                return True
            case S.CHOOSING if job.timing.expired and not job.unsettled():
                self.choice.time_is_up()
                return True
            case S.REPAIRING if not any(t.waiting for t in job.incident.tasks.values()):
                self.restart.repaired()
            case S.REBUILDING if job.answered_all("rebuild", "compare"):
                self.restart.rebuilt()
            case S.ROLLING_BACK if job.answered_all("rollback"):
                self.restart.resume()
            case S.RESUMING if job.answered_all("resume", "release"):
                return self._resuming()
            case S.HEALTHY:
                self._healthy()
            case S.CONFIRMING if job.answered_all("compare"):
                self._confirm()
            case S.PAUSING | S.PAUSED:
                self.pausing.advance()
                if self.pausing.gathered:
                    self._stop_for(job.succession.warm())
            case S.DUMPING:
                self.shutdown.advance_dump()
            case S.EXITING if job.all_left():
                self.shutdown.end()
        return False

    def _resuming(self) -> bool:
        """
        Close the incident or the pause when every rank that takes part has trained one more step.
        """
        job = self._job
        if job.training.trained.issuperset(job.ranks.members):
            return self._close()
        self._await_the_last()
        return False

    def _await_the_last(self) -> None:
        """
        When the first rank has finished training, set a deadline for the other ranks, which should
        finish soon. Without this deadline the job would wait forever for a rank that sends no
        reports.
        """
        job = self._job
        if job.training.finished and job.timing.deadline is None:
            # ranks may still run functions after the last step, such as an evaluation. So add the
            # longest time that any rank has announced for such functions
            job.timing.stay(
                job.policy.tail
                + max(rank_state.declared.after for rank_state in job.ranks.member_states())
            )

    def _healthy(self) -> None:
        """
        Look for something to do while the job is healthy. If all ranks that take part have finished
        training, end the job. If only some have finished, set a deadline for the others. Otherwise
        begin a pause that was requested earlier, let successors take over ranks, or let ranks that
        have left the job come back.
        """
        job = self._job
        if job.training.finished.issuperset(job.ranks.members):
            self._finish()
        elif job.training.finished:
            self._await_the_last()
        elif job.pausing.request is not None:
            self.pausing.begin(job.pausing.request)
        else:
            self.takeover.seek()
            self._take_opportunity()

    def _finish(self) -> None:
        """
        End the job, because all ranks that take part have finished training. If the copies of
        shards were compared slice by slice during training, first compare the whole copies: slices
        that were not compared in the last steps may differ.
        """
        job = self._job
        holders = self.comparison.sharing() if job.training.sliced else ()
        if not holders:
            return self.shutdown.complete()
        # begin a new round, because a rank digests its copies only once in a round
        job.incident.round += 1
        return job.step_to(S.CONFIRMING, Compare(**job.key(), to=holders))

    def _confirm(self) -> None:
        """
        End the job if all copies of each shard are equal when all ranks have finished training.
        Otherwise open an incident, in which the job finds out which copies are right.
        """
        differ = self.comparison.at_the_end()
        for seen in differ:
            self.comparison.differ(seen)
        if not differ:
            self.shutdown.complete(self.comparison.doubt())

    def _take_opportunity(self) -> None:
        """
        Stop training if successors are ready to take over, or if ranks that have left the job are
        ready to come back. Stop only once for each such process, because an attempt that has failed
        would fail again. Do not stop if the job has had `policy.max_incidents` incidents, because
        the next incident would end the job.

        Successors take over while all ranks wait at the same step boundary, so no step is
        interrupted.
        """
        job = self._job
        # the method `warm` leaves out successors that are being ended, after they failed to take
        # over
        warm = job.succession.warm()
        back = [
            job.ranks.states[r]
            for r in sorted(job.returning())
            if not job.ranks.states[r].process.invited
        ]
        if not (warm or back) or job.history.next_number > job.policy.max_incidents:
            return
        if warm:
            ranks = [successor.rank for successor in warm]
            self.pausing.gather(f"other processes are ready to take over from ranks {ranks}")
            return
        for rank_state in back:
            rank_state.process.invited = True
        self.attempts.open()
        self.attempts.freeze(
            f"ranks {[rank_state.rank for rank_state in back]} are ready to come back"
        )

    def _stop_for(self, warm: list[RankState]) -> None:
        """
        Open an incident in which the successors in `warm` (processes that are ready to replace
        others) take over their ranks. Call this when all ranks wait at a step boundary.
        """
        job = self._job
        for successor in warm:
            successor.process.invited = True
            rank_state = job.ranks.states[successor.rank]
            step = self.attempts.step_of(rank_state)
            self.attempts.fault(
                "straggler", successor.rank, step, job.timing.now, rank_state.process.straggles
            )

    # ---------------------------------------------------------------- freeze and stop

    def _after_freeze(self) -> bool:
        job, incident = self._job, self._job.incident
        self._terminate_suspects()
        if job.processes.terminating():
            return False
        for rank_state in job.ranks.member_states():
            job.see(rank_state)
        self.attempts.locate()
        if job.history.lost and incident.progress.furthest:
            # events of the job are lost, perhaps those that showed that the ranks had begun to
            # train. But a rank has completed a step, so they have trained
            job.begin_training()
        for rank in incident.faulty() - self._only_switched():
            job.count(rank)
        # `finish` is the step that all ranks finish before they leave their loops: the highest step
        # whose update any rank has begun. That rank has completed all all-reduces of the step, so
        # every other rank can complete them too
        finish = incident.progress.reached
        if incident.suspicion and not incident.faults:
            self.attempts.fault("network", None, finish + 1, job.timing.now, incident.suspicion)
        incident.suspicion = ""
        job.move(S.CLEARING)
        to = tuple(rank_state.rank for rank_state in job.ranks.member_states() if rank_state.ready)
        if to:
            grace, longer = job.policy.grace, 0.0
            if {fault.kind for fault in incident.faults} == {"straggler"}:
                # all faults are slow ranks (stragglers). No rank is lost, so collectives that were
                # begun will complete: give them more time
                grace, longer = job.policy.stop, job.policy.grace
            if incident.progress.digesting:
                longer = max(longer, job.policy.repair)
            job.issue(Stop(**job.key(), to=to, finish=finish, grace=grace), longer=longer)
            # order the comparison of copies already now. So each rank digests its copies as soon as
            # it has left its loop, while other ranks are still leaving theirs
            holders = self.comparison.will_hold(to, finish)
            if holders:
                job.issue(Compare(**job.key(), to=holders), longer=inf)
            self.restart.form_groups_early(to, finish)
        return True

    def _compare(self) -> bool:
        """
        When all ranks have left their loops and digested their copies of the shards, compare the
        copies and begin the choice of a recovery strategy. Return True if the choice has begun.
        """
        job = self._job
        job.incident.progress.digesting = False  # all have stopped, so none digests now
        for rank_state in job.ranks.member_states():
            job.see(rank_state)  # the rank may have completed a step since it was frozen
        task = job.incident.tasks.get("compare")
        if task is not None and task.waiting:
            # all ranks have left their loops, and some still digest their copies. The time limit
            # for digesting begins only now, because ranks that evaluate leave their loops late
            job.limit("compare")
            return False
        if not self._groups_can_be_formed():
            return False
        if job.unsettled():
            return False
        holders = self.comparison.holders()
        asked = {rank for order in task.orders for rank in order.to} if task else set()
        if not asked.issuperset(holders):
            # after the first ranks were asked to digest their copies, another rank has turned out
            # to be a holder. Ask all holders. Those that were asked before send their digests again
            job.issue(Compare(**job.key(), to=holders))
            return False
        self.comparison.judge()
        if asked:  # copies were compared, so do not compare the initial states separately later
            job.training.start.compared = True
        self.choice.consider()
        return True

    def _groups_can_be_formed(self) -> bool:
        """
        If ranks are forming process groups that can never be formed, begin a new round and return
        False. Otherwise return True. Call this only when all ranks have digested their
        copies: a rank that digests cannot stop for a new round, and would soon count as hanging.
        """
        job, incident = self._job, self._job.incident
        if "regroup" not in incident.tasks:
            return True
        if incident.progress.groups_failed:
            self.attempts.again(incident.progress.groups_failed)
            return False
        if job.forms_groups_in_vain():
            # the ranks wait for a lost rank, and can carry out no other order meanwhile
            self.attempts.freeze()
            return False
        job.limit("regroup")
        return True

    def _only_switched(self) -> frozenset[int]:
        """
        Return the ranks that are named in this incident only because an operator or a program has
        asked to move them to other processes. The incident is not counted against these ranks,
        because they have not failed.
        """
        job = self._job
        others = {fault.rank for fault in job.incident.roots() if fault.kind != "straggler"}
        return job.succession.switch - others

    def _terminate_suspects(self) -> None:
        """
        End the processes of the ranks that are suspected to hang. If no rank makes progress, these
        are the ranks that do not wait for other ranks. If all ranks are suspected, end none of
        their processes, because then it is not known which rank hangs.
        """
        job = self._job
        suspects = [
            s
            for s in job.ranks.member_states()
            if s.process.blame == "hang" and not s.process.terminating
        ]
        ready = [s for s in job.ranks.member_states() if s.ready and not s.process.terminating]
        for rank_state in suspects:
            if len(suspects) < len(ready):
                self.attempts.terminate(
                    rank_state, "the rank hangs while other ranks wait for it", "hang"
                )
            else:
                rank_state.process.blame = ""

    # ---------------------------------------------------------------- ranks without a process

    def lost(self, *rank_states: RankState) -> None:
        """
        Handle ranks that have lost their processes. If a successor (a second process) runs for a
        rank, the successor takes over. Otherwise start another process if that may help. Start it
        at once, before a recovery strategy is chosen, because the start of a process is the longest
        part of an incident.
        """
        job = self._job
        before = [
            (rank_state, bool(rank_state.process.terminating), rank_state.node)
            for rank_state in rank_states
        ]
        for rank_state in rank_states:
            job.see(rank_state)
            job.excuse(rank_state.rank)
        for rank_state in rank_states:
            successor = job.succession.successors.get(rank_state.rank)
            if successor is not None and not successor.process.terminating:
                job.incident.turnover.given_another(rank_state.rank)
                self.choice.take_over(rank_state.rank)
            elif self._may_respawn(rank_state):
                job.respawn(rank_state)
        for rank_state, ours, node in before:
            if job.policy.replace == "node" and not job.incident.decision.forced and not ours:
                self._replace_node(rank_state, node)
        decided = job.incident.decision.plan is not None
        ordered = all(
            ours and rank_state.process.stage is ProcessStage.ORDERED
            for rank_state, ours, _ in before
        )
        if not (decided and ordered):
            self.replan()

    def _may_respawn(self, rank_state: RankState) -> bool:
        enabled = "recover" in self._job.policy.enable
        return enabled and self._is_awaited() and not self.choice.unplaceable(rank_state)

    def _is_awaited(self) -> bool:
        """
        Return True if there is a strategy with new processes that the adaptors of all remaining
        ranks support. If there is no such strategy, it is useless to start another process for a
        lost rank.
        """
        left = [rank_state for rank_state in self._job.ranks.member_states() if rank_state.ready]
        return any(
            all(way in rank_state.declared.strategies for rank_state in left)
            for way in WITH_NEW_PROCESSES
        )

    def _replace_node(self, rank_state: RankState, node: int | None) -> None:
        """
        End all other processes on the node of a lost rank, so that they are replaced as well. Call
        this if `policy.replace` is `node`. Do not end the processes if the last trusted copy of a
        shard would be lost with them.
        """
        if "recover" not in self._job.policy.enable:
            return
        others = [
            other for other in self._job.ranks.member_states() if other.node == node and other.ready
        ]
        alone = self._job.ranks.only_on(other.rank for other in others)
        if alone:
            self._job.tell("node_kept", node=node, why=f"no other rank has shard {alone[0]!r}")
        else:
            for other in others:
                # the rank `other` has not failed, so do not count this incident against it
                self._job.incident.turnover.counted.add(other.rank)
                why = f"node {node} is replaced, because it has lost rank {rank_state.rank}"
                self.attempts.terminate(other, why)

    def replan(self) -> None:
        """
        Choose the recovery strategy again, because a fault was added to the incident. In the state
        DUMPING, plan the last checkpoint again if needed. In states other than CHOOSING, AWAITING
        and DUMPING do nothing, because the choice has not begun yet or a new round begins.
        """
        if self._job.fault_reaction is not Reaction.REPLAN:
            return
        if self._job.state is S.DUMPING:
            self.shutdown.replan()
        else:
            # compare the copies again, because a rank whose copy decided the last comparison may
            # be lost now
            self.comparison.judge()
            self.choice.consider()

    def _blame_device(self) -> None:
        """
        Find the updates that ranks have refused in this incident because the device of a single
        rank computed wrong numbers. Name that rank in the fault, and count the incident against
        the rank.
        """
        job, incident = self._job, self._job.incident
        job.training.refusals.over()
        for record in incident.exactness.refused:
            if record.cause != "device" or len(record.ranks) != 1:
                continue
            (rank,) = record.ranks
            incident.faults = [
                replace(fault, rank=rank) if fault.refused and fault.step == record.step else fault
                for fault in incident.faults
            ]
            job.count(rank)

    def _close(self) -> bool:
        job, incident = self._job, self._job.incident
        incident.tasks = {}
        job.move(S.HEALTHY)
        if incident.closed is not None:
            self.takeover.dismiss()
            return True  # a pause has ended, and there is no open incident to close
        for rank_state in job.ranks.states.values():
            began = incident.turnover.began_with.get(rank_state.rank)
            if began is not None:
                incident.turnover.kept[rank_state.rank] = began == (
                    rank_state.process.pid,
                    rank_state.process.started,
                )
        incident.closed = max(phase.end for phase in incident.phases if phase.name == "resume")
        self._blame_device()
        if incident.number:
            job.history.incidents.append(incident)
            job.tell(
                "incident_closed",
                incident=incident.number,
                strategy=incident.decision.strategy,
                step=incident.progress.step,
                seconds=incident.closed - incident.opened,
                steps_lost=incident.progress.steps_lost,
                processes_started=incident.turnover.started,
            )
        self.takeover.dismiss()
        self.takeover.recall()
        return True
