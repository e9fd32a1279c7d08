"""
Leads a job through an incident: freeze, stop, choose a strategy, repair, rebuild, roll back,
resume. Each move, from one state of the job to the next, is made as soon as its conditions are met.
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
"""The strategies in which a new process is started for a lost rank."""


class Recovery:
    """
    Makes the moves of one job from state to state, in its incidents and while it trains.
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

    # ---------------------------------------------------------------- the moves

    def advance(self) -> bool:
        """
        Make the next move of the job if its conditions are met. Return True if a further move may
        be possible at once, so that the caller must call this again.
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
                # the choice was put off until processes had ended and lost nodes' state was known
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
        Close the incident or the pause when every member has trained one more step.
        """
        job = self._job
        if job.training.trained.issuperset(job.ranks.members):
            return self._close()
        self._await_the_last()
        return False

    def _await_the_last(self) -> None:
        """
        When the first rank has finished training, set a deadline for the others. They should finish
        soon; without a deadline the job would wait forever for a rank that sends no reports.
        """
        job = self._job
        if job.training.finished and job.timing.deadline is None:
            # ranks may still run functions after the last step, such as an evaluation: add the
            # longest time that a rank has announced for such functions
            job.timing.stay(
                job.policy.tail
                + max(rank_state.declared.after for rank_state in job.ranks.member_states())
            )

    def _healthy(self) -> None:
        """
        Look for something to do while the job is healthy. End the job if all members have finished.
        Otherwise begin a pause that was requested earlier, or let successors take over, or let
        ranks come back.
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
        End the job, because all members have finished. If copies were compared slice by slice,
        first compare the whole copies, because the slices that were not digested in the last steps
        may differ.
        """
        job = self._job
        holders = self.comparison.sharing() if job.training.sliced else ()
        if not holders:
            return self.shutdown.complete()
        job.incident.round += 1  # ranks do not compare twice in the same round
        return job.step_to(S.CONFIRMING, Compare(**job.key(), to=holders))

    def _confirm(self) -> None:
        """
        End the job if the copies of all members are equal. Otherwise open an incident, which
        decides which copies are right.
        """
        differ = self.comparison.at_the_end()
        for seen in differ:
            self.comparison.differ(seen)
        if not differ:
            self.shutdown.complete(self.comparison.doubt())

    def _take_opportunity(self) -> None:
        """
        Stop the job to let successors take over, or to let ranks come back, if they are ready. This
        is tried once for each process, because an attempt that failed would fail again. It is not
        tried if the job has reached `policy.max_incidents`, because the next incident would end the
        job.

        Successors take over when all members wait at the same step boundary, so no step is
        interrupted.
        """
        job = self._job
        # `warm` does not return successors that could not take over before: these are being ended
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
        Open an incident in which the successors in `warm` take over their ranks. Call this when all
        members wait at a step boundary.
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
            # a rank has completed a step, so the ranks have trained. The events that showed this
            # may be among the lost ones
            job.training.untrained = False
        for rank in incident.faulty() - self._only_switched():
            job.count(rank)
        # the step that all ranks finish before they leave their loops. A rank that has begun its
        # update has completed all its all-reduces, so every other rank can complete them too
        finish = incident.progress.reached
        if incident.suspicion and not incident.faults:
            self.attempts.fault("network", None, finish + 1, job.timing.now, incident.suspicion)
        incident.suspicion = ""
        job.move(S.CLEARING)
        to = tuple(rank_state.rank for rank_state in job.ranks.member_states() if rank_state.ready)
        if to:
            grace, longer = job.policy.grace, 0.0
            if {fault.kind for fault in incident.faults} == {"straggler"}:
                # no rank is lost, so collectives that were begun will complete: give them more time
                grace, longer = job.policy.stop, job.policy.grace
            job.issue(Stop(**job.key(), to=to, finish=finish, grace=grace), longer=longer)
            # each rank digests its copies as soon as it has left its loop, while others still leave
            holders = self.comparison.will_hold(to, finish)
            if holders:
                job.issue(Compare(**job.key(), to=holders), longer=inf)
        return True

    def _compare(self) -> bool:
        """
        When all ranks have left their loops and digested their copies of the shards, judge the
        copies and begin the choice of a strategy. Return True if the choice has begun.
        """
        job = self._job
        task = job.incident.tasks.get("compare")
        if task is not None and task.waiting:
            # some ranks leave their loops late, such as those that evaluate: the time in which the
            # ranks must have digested their copies begins when the last one has left its loop
            job.limit("compare")
            return False
        if job.unsettled():
            return False
        holders = self.comparison.holders()
        asked = {rank for order in task.orders for rank in order.to} if task else set()
        if not asked.issuperset(holders):
            # a rank came to hold a copy after the others were asked. The others answer again,
            # without digesting their copies again
            job.issue(Compare(**job.key(), to=holders))
            return False
        self.comparison.judge()
        if asked:  # copies were compared, so the initial states need no comparison of their own
            job.training.began = True
        self.choice.consider()
        return True

    def _only_switched(self) -> frozenset[int]:
        """
        Return the ranks that are in this incident only because of a request to switch them to other
        processes. The incident is not counted against them, because they have not failed.
        """
        job = self._job
        others = {fault.rank for fault in job.incident.roots() if fault.kind != "straggler"}
        return job.succession.switch - others

    def _terminate_suspects(self) -> None:
        """
        End the suspects: if no rank makes progress, the ranks that do not wait for other ranks are
        suspected to hang. If all ranks are suspected, end none of them, because then it is not
        known which rank hangs.
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
                self.attempts.terminate(rank_state, "it hangs while the others wait for it", "hang")
            else:
                rank_state.process.blame = ""

    # ---------------------------------------------------------------- losses

    def lost(self, *rank_states: RankState) -> None:
        """
        Handle ranks that have lost their processes. If a rank has a successor, the successor takes
        over. Otherwise another process is started at once, before a strategy is chosen, because
        the start of a process is the longest part of an incident.
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
        Return True if the adaptors of all ranks that still have a process support one of the
        strategies that need a new process. Otherwise starting one would be useless.
        """
        left = [rank_state for rank_state in self._job.ranks.member_states() if rank_state.ready]
        return any(
            all(way in rank_state.declared.strategies for rank_state in left)
            for way in WITH_NEW_PROCESSES
        )

    def _replace_node(self, rank_state: RankState, node: int | None) -> None:
        """
        End all other processes on the node of a lost rank, so that they are replaced as well
        (`policy.replace` is `node`). Keep them if the last sound copy of some shard would be lost.
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
                # this rank has not failed, so this incident must not be counted against it
                self._job.incident.turnover.counted.add(other.rank)
                self.attempts.terminate(other, f"its node is replaced with rank {rank_state.rank}")

    def replan(self) -> None:
        """
        Choose the strategy again, because a fault has joined the incident. Do nothing in states
        other than CHOOSING, AWAITING and DUMPING: no choice has begun, or a new round begins.
        """
        if self._job.fault_reaction is not Reaction.REPLAN:
            return
        if self._job.state is S.DUMPING:
            self.shutdown.replan()
        else:
            # judge the copies again, because a rank whose copy decided the comparison may be lost
            self.comparison.judge()
            self.choice.consider()

    def _blame_device(self) -> None:
        """
        For each refused update whose cause is the device of a single rank, name that rank in the
        fault, and count the incident against it.
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
            return True  # a pause has ended: the last incident was closed before
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
            )
        self.takeover.dismiss()
        self.takeover.recall()
        return True
