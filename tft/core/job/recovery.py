"""
Leads a job through an incident: freeze, stop, choose, repair, rebuild, roll back, resume. The job
makes one move at a time. A move is made when everything that it needs is there.
"""

from tft.core.job.attempts import Attempts
from tft.core.job.comparison import Comparison, forget_tails, note_habits, note_tails
from tft.core.job.facts import lacks_local_state, note_capture, standings_of, terms_of
from tft.core.job.pause import Pausing
from tft.core.job.rank_process import ProcessStage
from tft.core.job.rank_state import RankState
from tft.core.job.shutdown import Shutdown
from tft.core.job.state import Job
from tft.core.job.strategy import StrategyChoice
from tft.core.job.transitions import Reaction, State
from tft.core.plan import planner
from tft.core.plan.planner import Repair
from tft.protocol.messages import (
    Compare,
    Fetch,
    Load,
    Noticed,
    Rebuild,
    Regroup,
    Reload,
    Restore,
    Resume,
    Rollback,
    Stop,
    SwitchRequested,
)

S = State

WITH_NEW_PROCESSES = ("recover", "scale_out")
"""The strategies in which a lost rank gets another process."""


class Recovery:
    """
    Makes the moves of one job through its incidents, and while it trains.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.attempts = Attempts(job)
        self.comparison = Comparison(job, self.attempts)
        self.ending = Shutdown(job)
        self.choice = StrategyChoice(job, self.attempts, self.ending, self.comparison)
        self.pausing = Pausing(job, self.attempts)

    # ---------------------------------------------------------------- one move

    def advance(self) -> bool:
        """
        Make one move if everything that it needs is there. True means that another move may be
        possible at once.
        """
        job = self._job
        match job.state:
            case S.AWAITING:
                return self._start_repair()
            case S.FREEZING if job.answered_all("freeze"):
                return self._after_freeze()
            case S.CLEARING if (
                job.answered_all("stop", "compare") and not job.processes.terminating()
            ):
                return self._compare()
            case S.CHOOSING if job.timing.expired and not job.processes.terminating():
                self.choice.time_is_up()
                return True
            case S.REPAIRING if not any(t.waiting for t in job.incident.tasks.values()):
                return self._repaired()
            case S.REBUILDING if job.answered_all("rebuild", "compare"):
                self._rebuilt()
            case S.ROLLING_BACK if job.answered_all("rollback"):
                self._resume_training()
            case S.RESUMING if job.answered_all("resume", "release"):
                return self._resuming()
            case S.HEALTHY:
                self._healthy()
            case S.PAUSING | S.PAUSED:
                self.pausing.advance()
                if self.pausing.gathered:
                    self._stop_for(job.succession.warm())
            case S.DUMPING:
                self.ending.advance_dump()
            case S.EXITING if job.all_left():
                self.ending.end()
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
        Set a deadline for the other ranks as soon as the first rank has finished training. The
        other ranks should finish soon, unless the controller cannot hear them.
        """
        job = self._job
        if job.training.finished and job.timing.deadline is None:
            # functions called after the last step may take the seconds that the ranks announced
            job.timing.stay(
                job.policy.tail
                + max(rank_state.declared.after for rank_state in job.ranks.member_states())
            )

    def _healthy(self) -> None:
        """
        End the job if all members have finished. Otherwise begin a pause that was kept for later,
        or change the processes or ranks that take part.
        """
        job = self._job
        if job.training.finished.issuperset(job.ranks.members):
            self.ending.complete()
        elif job.training.finished:
            self._await_the_last()
        elif job.pausing.request is not None:
            self.pausing.begin(job.pausing.request)
        else:
            self._seek_successors()
            self._take_opportunity()

    def _take_opportunity(self) -> None:
        """
        Invite the successors that are ready to take over, or the ranks that are ready to come back.
        Each is invited once: an attempt that failed would fail again. Nothing is invited if the
        incident limit of the job is reached: the next incident would end the job.

        A successor takes over at a step boundary that all members have reached. No rank is lost
        there, so no step is interrupted.
        """
        job = self._job
        warm = [successor for successor in job.succession.warm() if not successor.process.invited]
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
        Stop the job so that these successors take over. All members wait at the step boundary for
        that.
        """
        job = self._job
        for successor in warm:
            successor.process.invited = True
        self.attempts.open()
        for successor in warm:
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
        for rank in incident.faulty():
            job.count(rank)
        # A rank that has begun the update of a step had completed all all-reduces of the step. So
        # every other rank has completed them too, or will.
        finish = incident.progress.reached
        if incident.suspicion and not incident.faults:
            self.attempts.fault("network", None, finish + 1, job.timing.now, incident.suspicion)
        incident.suspicion = ""
        job.move(S.CLEARING)
        to = tuple(rank_state.rank for rank_state in job.ranks.member_states() if rank_state.ready)
        if to:
            grace, longer = job.policy.grace, 0.0
            if {fault.kind for fault in incident.faults} == {"straggler"}:
                # no rank is lost: collectives that were begun can be finished
                grace, longer = job.policy.stop, job.policy.grace
            job.issue(Stop(**job.key(), to=to, finish=finish, grace=grace), longer=longer)
        return True

    def _compare(self) -> bool:
        """
        Compare the copies of the holders, once all ranks have left the loop, and judge the result.
        Then begin the choice of a strategy.
        """
        job = self._job
        holders = self.comparison.holders()
        if holders and "compare" not in job.incident.tasks:
            job.issue(Compare(**job.key(), to=holders))
            return False
        self.comparison.judge()
        if holders:  # a second comparison in this round would give the same answers
            job.training.began = True
        self.choice.consider()
        return True

    def _terminate_suspects(self) -> None:
        """
        End the ranks that do not wait for others while no rank moves: such a rank hangs. If all
        ranks are suspected, end none of them: then no rank can be singled out.
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
        Handle ranks that have lost their process and answer no order any more. The successor of a
        rank takes over. Without a successor another process is started at once, since the start
        takes longest.
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
        decided = job.incident.decision.strategy != ""
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
        Return whether all ranks that are left can take part in some strategy with new processes.
        """
        left = [rank_state for rank_state in self._job.ranks.member_states() if rank_state.ready]
        return any(
            all(way in rank_state.declared.strategies for rank_state in left)
            for way in WITH_NEW_PROCESSES
        )

    def _replace_node(self, rank_state: RankState, node: int | None) -> None:
        """
        End the other processes of the node of a lost rank too, so that all of them are replaced.
        Keep them if they hold a shard that no other sound rank holds.
        """
        if "recover" not in self._job.policy.enable:
            return
        others = [
            other for other in self._job.ranks.member_states() if other.node == node and other.ready
        ]
        alone = self._job.ranks.only_on(other.rank for other in others)
        if alone:
            self._job.tell("node_kept", node=node, why=f"nobody else has shard {alone[0]!r}")
        else:
            for other in others:
                self._job.incident.turnover.counted.add(other.rank)  # this rank is not to blame
                self.attempts.terminate(
                    other, f"its node is replaced with rank {rank_state.rank}", "process"
                )

    def replan(self) -> None:
        """
        Decide again after a fault has joined, with the larger set of faults. Only the states
        CHOOSING, AWAITING and DUMPING have a decision to repeat.
        """
        if self._job.fault_reaction is not Reaction.REPLAN:
            return
        if self._job.state is S.DUMPING:
            self.ending.replan()
        else:
            self.comparison.judge()  # the rank whose copy counted may be lost
            self.choice.consider()

    def straggles(self, message: Noticed) -> None:
        """
        Start a successor for a rank that holds the others up. Log why not, if none can be started.
        """
        job = self._job
        rank_state = job.ranks.states[message.rank]
        why_not = self._why_no_successor(rank_state)
        node = None if why_not else job.elsewhere(rank_state, job.nodes.room)
        if node is None:
            why_not = why_not or "no other node has room"
        job.tell("rank_straggles", rank=rank_state.rank, why=message.evidence, why_not=why_not)
        if node is not None:
            cause = f"rank {rank_state.rank} holds the others up: {message.evidence}"
            self._bring_up(rank_state, node, message.evidence, cause)

    def _bring_up(self, rank_state: RankState, node: int, why: str, cause: str) -> None:
        """
        Start a successor for a rank on this node, while the present process of the rank trains on.
        `why` is the evidence against the rank, `cause` the reason that the agent is given.
        """
        successor = RankState(rank=rank_state.rank)
        rank_state.process.straggles = why
        self._job.succession.successors[rank_state.rank] = successor
        self._job.spawn(successor, node, cause)

    def _why_no_successor(self, rank_state: RankState) -> str:
        """
        Return why no successor is started for a rank, or "" if one can be. Room on other nodes is
        not considered here.
        """
        job = self._job
        if job.fault_reaction is not Reaction.FREEZE:
            return "everyone stands still already"
        known = (
            "another process is on its way" if rank_state.rank in job.succession.successors else ""
        )
        return self._why_no_migration() or known

    def _why_no_migration(self) -> str:
        """
        Return why no rank at all can get a successor, or "" if ranks can.
        """
        job = self._job
        unable = [
            s.rank for s in job.ranks.member_states() if "migrate" not in s.declared.strategies
        ]
        if "migrate" not in job.policy.enable:
            return "migrate is not enabled"
        return f"the adaptor of ranks {unable} cannot take part" if unable else ""

    # ---------------------------------------------------------------- what is switched on request

    def switch(self, message: SwitchRequested) -> None:
        """
        Switch these ranks to other processes as soon as possible. Ranks of an earlier request that
        are not named again keep their processes.
        """
        job, wanted = self._job, frozenset(message.ranks)
        why_not = self._why_no_switch(wanted)
        if why_not:
            job.tell("switch_called_off", ranks=sorted(wanted), why=why_not)
            return
        kept = job.succession.switch & wanted
        self.call_off(message.why, job.succession.switch - wanted)
        job.succession.switch, job.succession.why = wanted, message.why
        if wanted - kept:
            job.tell("switch_asked", ranks=sorted(wanted), why=message.why)

    def _why_no_switch(self, ranks: frozenset[int]) -> str:
        job = self._job
        outside = sorted(ranks - job.ranks.members)
        if outside:
            return f"ranks {outside} do not take part"
        absent = any(
            s.process.stage not in (ProcessStage.JOINED, ProcessStage.READY)
            for s in job.ranks.member_states()
        )
        # a process says when it joins which strategies it can take part in: nothing rules a switch
        # out before all members have joined
        return self._why_no_migration() if ranks and not absent else ""

    def is_left(self, node: int) -> bool:
        """
        Return whether the job can go on without a node: the node has joined and is not lost, and
        every member with its place on the node is to be switched. A node without members qualifies.
        """
        job = self._job
        there = {
            rank_state.rank for rank_state in job.ranks.member_states() if rank_state.node == node
        }
        known = node in job.nodes.ranks and node not in job.nodes.lost
        return known and there <= job.succession.switch

    def leave(self, node: int, why: str) -> None:
        """
        Give up a node: end all processes on it. They get time to report what they leave behind.
        """
        job = self._job
        there = [rank_state for rank_state in job.ranks.member_states() if rank_state.node == node]
        job.nodes.lost.add(node)
        job.tell("node_left", node=node, ranks=[rank_state.rank for rank_state in there], why=why)
        for rank_state in there:
            self.attempts.fault(
                "node", rank_state.rank, self.attempts.step_of(rank_state), job.timing.now, why
            )
        successors = [
            successor for successor in job.succession.successors.values() if successor.node == node
        ]
        self.attempts.terminate_all([*there, *successors], why, "node")

    def call_off(self, why: str, ranks: frozenset[int]) -> None:
        """
        Cancel the switch of these ranks: they keep their processes, and their successors are ended.
        """
        job = self._job
        if not ranks:
            return
        job.succession.switch -= ranks
        job.tell("switch_called_off", ranks=sorted(ranks), why=why)
        successors = [
            successor for rank, successor in job.succession.successors.items() if rank in ranks
        ]
        self.attempts.terminate_all(successors, why, "process")
        if job.state is S.CHOOSING and any(successor.process.invited for successor in successors):
            self.replan()  # the offers that name these successors are void

    def _seek_successors(self) -> None:
        """
        Start a successor for each rank that is to be switched, as far as there is room on nodes
        that no such rank is to leave.
        """
        job = self._job
        going = {job.ranks.states[rank].node for rank in job.succession.switch}
        for rank in sorted(job.succession.switch - job.succession.successors.keys()):
            rank_state = job.ranks.states[rank]
            room = {node: left for node, left in job.nodes.room.items() if node not in going}
            node = job.elsewhere(rank_state, room)
            if node is not None:
                self._bring_up(
                    rank_state,
                    node,
                    job.succession.why,
                    f"rank {rank} is to be switched: {job.succession.why}",
                )

    def recall(self) -> None:
        """
        Start another process for each rank outside the job that has lost its process, if a node has
        room and the rank has not failed too often.
        """
        job = self._job
        if job.ranks.whole or "scale_out" not in job.policy.enable:
            return
        for rank_state in job.ranks.states.values():
            outside = (
                rank_state.rank not in job.ranks.members
                and rank_state.process.stage is ProcessStage.GONE
            )
            node = job.home(rank_state)
            if outside and node is not None and not job.flapping(rank_state.rank):
                job.spawn(rank_state, node, f"rank {rank_state.rank} is to come back")

    def _dismiss(self) -> None:
        """
        End the successors that were invited to take over and could not.
        """
        for successor in self._job.succession.successors.values():
            if successor.process.invited:
                self.attempts.terminate(successor, "it could not take over", "process")

    # ---------------------------------------------------------------- repair

    def _start_repair(self) -> bool:
        """
        Plan the repair when every member takes orders, and begin it: form the process groups and
        copy the state that ranks lack. First choose a strategy, if none is followed.
        """
        job, incident, store = self._job, self._job.incident, self._job.nodes.store
        if incident.decision.strategy == "" and not job.processes.terminating():
            self.choice.consider()
            return True
        if store is not None and self._all_there():
            plan = planner.repair(
                job.ranks.topology(),
                standings_of(job, self.choice.unplaceable),
                job.ranks.members,
                terms_of(job),
            )
            if isinstance(plan, str):
                incident.decision.failed[incident.decision.base] = plan
                incident.decision.strategy = ""  # the next move chooses again
                return True
            self._repair(plan, *store)
        return False

    def _all_there(self) -> bool:
        """
        Return whether every member takes orders, every process that was told to end has ended, and
        the backoff before another attempt is over.
        """
        job = self._job
        if job.waits_for_starters():  # this check is cheaper than the check of every member
            return False
        waits = job.timing.deadline is not None and job.timing.deadline > job.timing.now
        return (
            job.ranks.every(lambda rank_state: rank_state.ready)
            and not waits
            and not job.processes.terminating()
        )

    def _repair(self, plan: Repair, host: str, port: int) -> None:
        job, incident, step = self._job, self._job.incident, plan.step
        incident.progress.step, incident.store = None if step is None else step + 1, (host, port)
        job.move(S.REPAIRING)
        name = f"{job.name}/{incident.number}.{incident.round}"
        without = tuple(rank for rank in job.ranks.states if rank not in job.ranks.members)
        regroup = job.to_all(
            Regroup,
            step=incident.progress.step or 0,
            name=name,
            host=host,
            port=port,
            without=without,
        )
        job.issue(regroup)
        if step is None:
            return  # the search for a checkpoint comes later, since it may need the new groups
        if plan.load:
            forget_tails(job, step)
            job.search()
            job.issue(job.to_all(Load, directory=plan.load, step=step))
        else:
            note_tails(
                job,
                step,
                {
                    rank_state.rank: rank_state.standing("")
                    for rank_state in job.ranks.states.values()
                },
            )
        if plan.restore:
            job.issue(Restore(**job.key(), to=plan.restore, step=step))
        fetches = [
            Fetch(**job.key(), to=(rank,), step=step, transfers=transfers)
            for rank, transfers in plan.transfers.items()
        ]
        if fetches:
            job.issue(*fetches)

    def _repaired(self) -> bool:
        """
        Rebuild, once every member holds the planned state. If the plan names no step, first let the
        ranks find and load a checkpoint of their own.
        """
        job, incident = self._job, self._job.incident
        if incident.progress.step is None and "reload" not in incident.tasks:
            self._reload()
            return False
        why_not = self._found() if incident.progress.step is None else ""
        if why_not:
            # another search would find the same checkpoint
            incident.decision.failed |= dict.fromkeys(planner.RELOADING, why_not)
            self.attempts.freeze()
            return True
        job.search(over=True)
        if not self.comparison.confirms():
            return True
        longer = 0.0
        if any(rank_state.holdings.held is None for rank_state in job.ranks.member_states()):
            # a rank that holds no state gets it in the rebuild, and the state may be large
            longer = max(0.0, job.policy.repair - job.policy.rebuild)
        job.step_to(S.REBUILDING, job.to_all(Rebuild), longer=longer)
        return False

    def _reload(self) -> None:
        """
        Order every member to find and load the newest checkpoint that it keeps itself.
        """
        job = self._job
        job.search()
        job.issue(job.to_all(Reload, not_after=job.incident.spread.ceiling))

    def _found(self) -> str:
        """
        Accept the checkpoint that the members have found and loaded themselves as the state to go
        on from. Return "", or the sentence why the checkpoint cannot be used.
        """
        job, incident = self._job, self._job.incident
        found = {
            s.rank: -1 if s.holdings.held is None else s.holdings.held
            for s in job.ranks.member_states()
        }
        low, step = min(found, key=found.__getitem__), max(found.values())
        if found[low] < 0:
            return f"rank {low} has not said of which step the checkpoint is that it has found"
        if found[low] < step:
            high = max(found, key=found.__getitem__)
            return (
                f"rank {low} has found a checkpoint of step {found[low]}, rank {high} one of step "
                f"{step}: nobody can go on from both"
            )
        if (
            incident.spread.ceiling is not None
            and step > incident.spread.ceiling
            and not incident.spread.tentative
        ):
            return (
                f"the ranks have found a checkpoint of step {step}, and what is wrong may be in "
                f"everything after step {incident.spread.ceiling}"
            )
        # if all members have lost their processes, maybe with their nodes, no rank is left to say
        # how far the run had come
        if (
            incident.progress.begun < step
            and not job.ranks.members <= incident.turnover.respawns.keys()
        ):
            return (
                f"the ranks have found a checkpoint of step {step}, and none of them had come further "
                f"than step {incident.progress.begun}: it is not of this run"
            )
        incident.progress.step = step + 1
        for rank_state in job.ranks.member_states():
            rank_state.holdings.reloaded(step)
            note_capture(job, rank_state)
        forget_tails(job, step)
        job.tell("checkpoint_found", incident=incident.number, step=step)
        return ""

    def _rebuilt(self) -> None:
        """
        Go on to the rollback when every member has built its wrapper. The wrapper may have made the
        initial states of the ranks equal, so they are compared first, once in a job.
        """
        job = self._job
        job.training.untrained = False
        holders = () if job.training.began else self.comparison.holders()
        if holders and "compare" not in job.incident.tasks:
            job.issue(Compare(**job.key(), to=holders))
            return
        if holders:
            self.comparison.tell_begins()
        job.training.began = True
        self._roll_back()

    def _roll_back(self) -> None:
        job = self._job
        step = job.incident.progress.agreed
        job.incident.exactness.returns_to(step)
        note_habits(job, step)
        skip = self._skip(step)
        # checkpoints of later steps belong to a past that is given up: training may go another way
        job.checkpoints.drop_later(step)
        self._leave_behind(step)
        rollback = job.to_all(
            Rollback,
            step=step,
            skip=skip,
            private={
                s.rank: s.local_state.reported[step]
                for s in job.ranks.member_states()
                if step in s.local_state.reported
            },
            derive=self._deriving(step),
        )
        job.step_to(S.ROLLING_BACK, rollback)

    def _leave_behind(self, step: int) -> None:
        """
        Invalidate the copies of non-members that are newer than `step`, the step that the members
        go on from. Later steps belong to a past that is given up.
        """
        job = self._job
        for rank_state in job.ranks.states.values():
            kept = (
                () if rank_state.rank in job.ranks.members else rank_state.standing("").copies(None)
            )
            if any(copy > step for copy in kept):
                rank_state.holdings.distrust()

    def _skip(self, step: int) -> int:
        """
        Return how many batches to leave out after `step`: the advised number or, with
        `policy.skip_batch`, the number up to the last numeric fault if that is larger. A second
        rollback to the same step gets the same number.
        """
        incident = self._job.incident
        if incident.exactness.skip_at is None:
            if self._job.policy.skip_batch and incident.spread.ceiling is not None:
                incident.exactness.skip = max(
                    incident.exactness.skip, incident.numeric_step() - step
                )
            if incident.exactness.skip:
                incident.exactness.skip_at = step
        return incident.exactness.skip if step == incident.exactness.skip_at else 0

    def _deriving(self, step: int) -> tuple[int, ...]:
        """
        Return the ranks that have to make their rank-local state anew, from `step` alone. The event
        is logged and added to the reservations, since training is not bit for bit the same then.
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
            job.tell("private_derived", ranks=list(ranks), step=step)
            why = f"RNG and data position of ranks {list(ranks)} at the end of step {step} were made anew"
            job.incident.exactness.reservations.append((step, why))
        return ranks

    def _resume_training(self) -> None:
        job = self._job
        job.training.trained = set()
        self._note_compared()
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
        job.step_to(S.RESUMING, resume)

    def _note_compared(self) -> None:
        """
        Note that all copies were equal at the end of the agreed step, unless a member that shares a
        shard could not read its state: then its copy was compared with no other.
        """
        job, step = self._job, self._job.incident.progress.agreed
        shared = {
            rank
            for ranks in job.ranks.topology().groups.values()
            if len(job.ranks.members.intersection(ranks)) > 1
            for rank in ranks
        }
        unread = [
            s.rank
            for s in job.ranks.member_states()
            if s.rank in shared and s.holdings.digests == {}
        ]
        if not unread or step == 0:
            job.training.compared = step
            return
        why = (
            f"the copies of ranks {unread} could not be read, so they were compared with no others"
        )
        job.tell("copies_not_compared", ranks=unread, step=step, why=why)
        job.incident.exactness.reservations.append((step, why))

    def _called_again(self) -> bool:
        """
        Return whether the functions that are called after the agreed step have to be called again,
        since some rank, alive or lost, may not have been through them. That is unknown for a rank
        that was lost with its node, and for the ranks of an earlier run: then the functions are
        called again.
        """
        job, incident, step = self._job, self._job.incident, self._job.incident.progress.agreed
        if step == 0 or not any(
            rank_state.declared.after for rank_state in job.ranks.member_states()
        ):
            return False
        if job.checkpoints.resumed and step == job.training.first:
            return True
        lost = incident.turnover.respawns.keys() - incident.exactness.marks.keys()
        return bool(lost & job.ranks.members) or any(
            incident.exactness.marks.get(rank, step) < step for rank in job.ranks.members
        )

    def _close(self) -> bool:
        job, incident = self._job, self._job.incident
        incident.tasks = {}
        job.move(S.HEALTHY)
        if incident.closed is not None:
            self._dismiss()
            return True  # a pause has ended, not an incident
        for rank_state in job.ranks.states.values():
            began = incident.turnover.began_with.get(rank_state.rank)
            if began is not None:
                incident.turnover.kept[rank_state.rank] = began == (
                    rank_state.process.pid,
                    rank_state.process.started,
                )
        incident.closed = max(phase.end for phase in incident.phases if phase.name == "resume")
        if incident.number:
            job.history.incidents.append(incident)
            job.tell(
                "incident_closed",
                incident=incident.number,
                strategy=incident.decision.strategy,
                step=incident.progress.step,
                seconds=incident.closed - incident.opened,
            )
        self._dismiss()
        self.recall()
        return True
