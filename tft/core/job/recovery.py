"""
Leads a job through an incident: freeze, stop, choose, repair, rebuild, roll back, resume. The job
makes the next move as soon as the conditions of that move are met.
"""

from dataclasses import replace

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
    Makes the moves of one job, in its incidents and while it trains.
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
        Make one move if its conditions are met. Return True if another move may be possible at
        once.
        """
        job = self._job
        match job.state:
            case S.AWAITING:
                return self.restart.start()
            case S.FREEZING if job.answered_all("freeze"):
                return self._after_freeze()
            case S.CLEARING if job.answered_all("stop", "compare") and not job.unsettled():
                return self._compare()
            case S.CHOOSING if job.timing.deadline is None and not job.unsettled():
                self.choice.consider()  # the choice has waited for what is left
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
        When the first rank has finished training, set a deadline for the other ranks. They should
        finish soon, unless the controller cannot hear them.
        """
        job = self._job
        if job.training.finished and job.timing.deadline is None:
            # the functions after the last step may take the time that the ranks have announced for
            # them
            job.timing.stay(
                job.policy.tail
                + max(rank_state.declared.after for rank_state in job.ranks.member_states())
            )

    def _healthy(self) -> None:
        """
        End the job if all members have finished. Otherwise begin a pause that was requested
        earlier, or change the processes or ranks that take part.
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
        End the job, since all members have finished. If they compare slices of their copies,
        compare the whole copies first: not every slice had its turn since the last steps.
        """
        job = self._job
        holders = self.comparison.sharing() if job.training.sliced else ()
        if not holders:
            return self.shutdown.complete()
        job.incident.round += 1  # ranks carry out an order once in a round
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
        Invite the successors that are ready to take over, or the ranks that are ready to come back.
        Each is invited once, because an attempt that failed would fail again. Nothing is invited
        when the job has had as many incidents as it may have: the next incident would end it.

        A successor takes over at a step boundary that all members have reached. No rank is lost
        there, so no step is interrupted.
        """
        job = self._job
        # successors that were invited before and could not take over are being ended
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
        Stop the job so that these successors take over. First all members must wait at a step
        boundary.
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
            job.training.untrained = False  # the events that said so may be lost
        for rank in incident.faulty() - self._only_switched():
            job.count(rank)
        # A rank that has begun the update of a step had completed all all-reduces of the step. So
        # every other rank has completed them too, or is about to.
        finish = incident.progress.reached
        if incident.suspicion and not incident.faults:
            self.attempts.fault("network", None, finish + 1, job.timing.now, incident.suspicion)
        incident.suspicion = ""
        job.move(S.CLEARING)
        to = tuple(rank_state.rank for rank_state in job.ranks.member_states() if rank_state.ready)
        if to:
            grace, longer = job.policy.grace, 0.0
            if {fault.kind for fault in incident.faults} == {"straggler"}:
                # a straggler is not lost, so collectives that were begun can complete: give them
                # more time
                grace, longer = job.policy.stop, job.policy.grace
            job.issue(Stop(**job.key(), to=to, finish=finish, grace=grace), longer=longer)
        return True

    def _compare(self) -> bool:
        """
        Once all ranks have left the loop, compare the copies of the shards and act on the result.
        Then begin the choice of a strategy.
        """
        job = self._job
        holders = self.comparison.holders()
        if holders and "compare" not in job.incident.tasks:
            job.issue(Compare(**job.key(), to=holders))
            return False
        self.comparison.judge()
        if holders:  # the copies are compared only once in a round
            job.training.began = True
        self.choice.consider()
        return True

    def _only_switched(self) -> frozenset[int]:
        """
        Return the ranks whose only fault is a request to switch them to other processes. Such a
        request does not mean that a rank is unreliable.
        """
        job = self._job
        others = {fault.rank for fault in job.incident.roots() if fault.kind != "straggler"}
        return job.succession.switch - others

    def _terminate_suspects(self) -> None:
        """
        If no rank makes progress, end the ranks that do not wait for other ranks, because such a
        rank hangs. If all ranks are suspected, end none of them: the cause cannot be located.
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
        over. Otherwise another process is started at once, because its start takes longer than
        anything else.
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
        Return True if the adaptors of all remaining ranks support some strategy with new processes.
        """
        left = [rank_state for rank_state in self._job.ranks.member_states() if rank_state.ready]
        return any(
            all(way in rank_state.declared.strategies for rank_state in left)
            for way in WITH_NEW_PROCESSES
        )

    def _replace_node(self, rank_state: RankState, node: int | None) -> None:
        """
        End the other processes of the node of a lost rank too, so that all of them are replaced. If
        no other sound rank holds some shard of these processes, keep them.
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
                # do not count this incident against the other rank
                self._job.incident.turnover.counted.add(other.rank)
                self.attempts.terminate(other, f"its node is replaced with rank {rank_state.rank}")

    def replan(self) -> None:
        """
        Choose the strategy again after a fault has joined the incident. This applies only in the
        states CHOOSING, AWAITING and DUMPING, in which a choice was made or is being made.
        """
        if self._job.fault_reaction is not Reaction.REPLAN:
            return
        if self._job.state is S.DUMPING:
            self.shutdown.replan()
        else:
            self.comparison.judge()  # the rank with the right copy may be lost now
            self.choice.consider()

    def _blame_device(self) -> None:
        """
        Name the rank whose device is the cause of a refused update, if it is one rank alone.
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
            return True  # what has ended is a pause, not an incident
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
