"""
Handles processes and nodes that have ended, and processes that cannot be ended. Decides what the
job has lost, and which fault is recorded.
"""

from dataclasses import replace

from tft.core.job.commands import JobOver
from tft.core.job.rank_process import ProcessStage
from tft.core.job.rank_state import RankState
from tft.core.job.recalls import Recalls
from tft.core.job.recovery import Recovery
from tft.core.job.shutdown import UNSAVED
from tft.core.job.state import Job
from tft.core.job.transitions import SETTLED, State
from tft.protocol.messages import Exited, FaultKind, Kill, NodeLost, Spawn

UNPROTECTED = (
    "every rank has ended, and no rank has called tft.init: this run was not protected, and a "
    "fault would have ended it"
)
"""The reason that the report gives for a completed run in which no rank has called `tft.init`. In
such a run tft has only started the processes."""

_OPEN = "only files that the script left open may lack their end"


class ProcessExits:
    """
    Handles the ends of the processes of one job.
    """

    def __init__(self, job: Job, recovery: Recovery) -> None:
        self._job = job
        self._recovery = recovery
        self._attempts = recovery.attempts
        self.recalls = Recalls(job)

    def node_lost(self, message: NodeLost) -> None:
        """
        Give up a node whose agent has ended or is silent, and all processes on this node. If the
        node never joined the job and some ranks still have no node, end the job as failed.
        """
        job = self._job
        agent = job.nodes.agents.get(message.node)
        stranger = message.pid and agent is not None and agent.pid != message.pid
        if stranger and message.at <= job.nodes.came[message.node]:
            return None  # the report is about an earlier agent: the node has joined again since
        # a node that is in `lost` already may have been given up on purpose, so do not add it to
        # `silent`
        if message.node not in job.nodes.lost:
            job.nodes.silent.add(message.node)
        job.nodes.lost.add(message.node)
        if (
            message.node not in job.nodes.ranks
            and job.ranks.placeless()
            and job.state not in SETTLED
        ):
            return self._recovery.shutdown.exit("failed", 4, message.why)
        left = self.emptied(message.node, silent=True)
        return self.bereaved(left, message.why, message.at, message.step)

    def emptied(self, node: int, *, silent: bool) -> list[tuple[RankState, int]]:
        """
        Mark all processes of a node as ended, because the node or its agent is lost. Also order the
        node that keeps a copy of their rank-local state to report that state. If `silent` is True,
        some of the processes may still run on the node. So order the agent to end them, in case the
        node can be reached again. Return the ranks that took part in training and have lost their
        process, each with the step that the rank was computing (0: not known).
        """
        job = self._job
        if job.state not in SETTLED:
            self.recalls.lose(node, {s.rank: s.incarnation for s in job.ranks.states.values()})
        left = []
        for rank_state in [
            *job.ranks.states.values(),
            *job.succession.successors.values(),
            *job.processes.retiring,
        ]:
            if rank_state.node != node or rank_state.process.stage is ProcessStage.GONE:
                continue
            job.nodes.forget(rank_state.rank, rank_state.incarnation, Spawn, Kill)
            step = self._attempts.step_of(rank_state)
            if job.ranks.is_current(rank_state.rank, rank_state.incarnation):
                left.append((rank_state, step))
            if silent and job.state not in SETTLED:
                job.kill(rank_state, f"node {node} was given up", last_words=False)
            self._gone(rank_state)
        return left

    def bereaved(
        self, left: list[tuple[RankState, int]], why: str, at: float, reached: int
    ) -> None:
        """
        Handle the loss of the ranks in `left`, which the method `emptied` has returned. `why` is
        the reason, `at` the time of the loss, and `reached` the highest step that any rank had
        completed, as heartbeats have told (0: not known). Record the faults of all these ranks
        before a recovery strategy is chosen, because the choice must take all lost ranks into
        account.

        If the process of a rank was to be ended because the rank seemed to hang, remove its fault
        `hang`: the rank did not answer because its node was lost.
        """
        job = self._job
        if not left:
            return
        if job.state in SETTLED:
            ranks = [rank_state.rank for rank_state, _ in left]
            return self._not_completed(f"ranks {ranks} were lost with their node: {why}")
        for rank_state, _ in left:
            if rank_state.process.blame == "hang":
                job.incident.forgive(rank_state.rank)
        for rank_state, step in left:
            self._attempts.fault("node", rank_state.rank, step, at, why)
            job.count(rank_state.rank)
        job.incident.progress.told = max(job.incident.progress.told, reached)
        job.incident.decision.excuse()
        self._recovery.lost(*(rank_state for rank_state, _ in left))

    def exited(self, message: Exited) -> None:
        """
        Handle the end of a process. The end is a fault if the process held a rank that takes part
        in training. It is no fault if the process was a successor (a second process for a rank) or
        if a successor has taken its rank over.
        """
        job = self._job
        job.nodes.forget(message.rank, message.incarnation, Spawn, Kill)
        # if this process could not be ended in time before, its node was excluded for other
        # processes of the rank. The process has ended now, so the node may be used again
        job.ranks.states[message.rank].excluded_nodes.pop(message.incarnation, None)
        rank_state = job.find(message.rank, message.incarnation)
        if rank_state is None:
            return None
        # if the process was given up before, its loss is handled already. Only the rank-local state
        # in this report is still useful
        if rank_state.process.stage is ProcessStage.GONE:
            rank_state.local_state.reported = message.local_state or rank_state.local_state.reported
            return None
        was, retires = rank_state.process.stage, rank_state in job.processes.retiring
        self._gone(rank_state)
        rank_state.position = message.position
        rank_state.local_state.reported = {**rank_state.local_state.reported, **message.local_state}
        rank_state.local_state.early -= message.local_state.keys()
        if retires:
            job.ranks.states[rank_state.rank].local_state.reported = rank_state.local_state.reported
        if job.state in SETTLED:
            return self._left_late(rank_state, message)
        if not job.ranks.is_current(rank_state.rank, rank_state.incarnation):
            return self._left_outside(rank_state, message)
        if self._left_in_peace(rank_state, message):
            return None
        job.tell(
            "rank_gone", rank=rank_state.rank, code=message.code, incarnation=rank_state.incarnation
        )
        self._blame(rank_state, message, was)
        if rank_state.repaired:
            job.incident.exactness.marked(rank_state.rank, message.position)
        return self._recovery.lost(rank_state)

    def _left_outside(self, rank_state: RankState, message: Exited) -> None:
        """
        Handle the end of a process that takes no part in training. If its rank has left the job
        (strategy `scale_in`) and was to come back, start another process for the rank, unless the
        processes of the rank end again and again.
        """
        job, rank = self._job, rank_state.rank
        job.tell("rank_gone", rank=rank, code=message.code, outside=True)
        if rank in job.ranks.members or not job.ranks.holds_rank(rank_state):
            return
        if not rank_state.process.terminating:
            job.history.troubles.setdefault(rank, []).append(job.timing.now)
        if not job.incident.is_open:  # when an incident closes, `recall` is called anyway
            self._recovery.takeover.recall()

    def could_not_end(self, rank_state: RankState) -> None:
        """
        Handle a process whose agent was ordered to end it and has not reported the end in time.
        From now on the process counts as ended. If it still runs, it obeys no further order,
        because orders name the incarnation of each rank. Until its end is reported, start no other
        process of this rank on the same node.
        """
        job = self._job
        step = self._attempts.step_of(rank_state)
        matters = job.ranks.is_current(rank_state.rank, rank_state.incarnation)
        self._gone(rank_state)
        if rank_state.node is not None:
            excluded = job.ranks.states[rank_state.rank].excluded_nodes
            excluded[rank_state.incarnation] = rank_state.node
        why = f"its process could not be ended within {job.policy.kill:.0f} s"
        job.tell(
            "rank_not_ended", rank=rank_state.rank, incarnation=rank_state.incarnation, why=why
        )
        if not matters:
            return None
        if job.state in SETTLED:
            return self._not_completed(f"rank {rank_state.rank} did not leave, and {why}")
        if not self._blamed(rank_state):
            self._attempts.fault("process", rank_state.rank, step, job.timing.now, why)
        return self._recovery.lost(rank_state)

    def _gone(self, rank_state: RankState) -> None:
        job, process = self._job, (rank_state.rank, rank_state.incarnation)
        job.processes.starting.pop(process, None)
        job.processes.running.discard(process)
        if rank_state in job.processes.displaced:
            job.processes.displaced.remove(rank_state)
        rank_state.process.stage = ProcessStage.GONE
        rank_state.training = False
        rank_state.holdings.lost()
        if rank_state in job.processes.retiring:
            job.processes.retiring.remove(rank_state)
        elif not job.ranks.holds_rank(rank_state):
            del job.succession.successors[rank_state.rank]
        else:
            return
        if rank_state.node is not None:  # the ended process has left a free place on its node
            job.nodes.room[rank_state.node] += 1
        if rank_state.rank in job.succession.switch and job.state not in SETTLED:
            why = f"the process that was to take over from rank {rank_state.rank} has ended"
            self._recovery.takeover.call_off(
                f"{why}: {rank_state.process.terminating}"
                if rank_state.process.terminating
                else why,
                job.succession.switch,
            )

    def _blame(self, rank_state: RankState, message: Exited, was: ProcessStage) -> None:
        """
        Add a fault for the end of a process. If the incident already has the fault because of which
        the process was ended, only add to the evidence of that fault. If the process has left by
        itself too early, end the job, with a last checkpoint if possible, because another process
        would leave in the same way.
        """
        evidence = message.stack or rank_state.process.terminating or _how(message.code)
        if rank_state.process.blame == "hang" and message.stopped:
            evidence = f"the process was stopped (SIGSTOP)\n{evidence}"
        step = self._step_of(rank_state, message)
        kind: FaultKind = "process"
        forced = ""
        if self._blamed(rank_state):
            return self._update_evidence(rank_state, evidence, step)
        if was is not ProcessStage.READY and message.code >= 0:
            kind = "software"
            forced = _left_early(rank_state.rank, message.code, was)
        elif message.code == 0:
            kind = "software"
            forced = f"rank {rank_state.rank} left with code 0 before all ranks had finished"
        self._attempts.fault(kind, rank_state.rank, step, message.at, evidence)
        if not rank_state.process.terminating:
            self._job.count(rank_state.rank)
            self._job.incident.decision.excuse()
        if forced:
            self._attempts.force(forced)
        return None

    def _step_of(self, rank_state: RankState, message: Exited) -> int:
        """
        Return the step that the process was computing when the process ended. If the process was a
        replacement that had not entered the loop yet, return the step that the other ranks wait to
        compute.
        """
        if message.incarnation == 0 or rank_state.repaired:
            return message.position.step + 1
        return self._job.incident.progress.step or self._job.incident.progress.furthest + 1

    def _left_late(self, rank_state: RankState, message: Exited) -> None:
        """
        Handle a process that ended after the outcome of the job was decided.

        If the outcome is `completed`, but the script of the rank has failed after `Session.run` or
        was ended by a signal, change the outcome to `failed`. If a signal ended the process after
        the script had ended, only add a sentence to the reason. Do not change an outcome that was
        announced, because the report is written already. Ignore processes that do not hold a rank
        that takes part in training, because their agents end them.
        """
        if not message.code or not self._job.ranks.is_current(
            rank_state.rank, rank_state.incarnation
        ):
            return
        why = f"rank {rank_state.rank} {_how(message.code)}"
        if message.code > 0:
            self._not_completed(why)
        elif message.script_ended:
            self._noted(f"{why} after its script had ended: {_OPEN}")
        else:
            self._not_completed(f"{why} before its script had ended: {UNSAVED}")

    def _noted(self, what: str) -> None:
        """
        If the job is to end as `completed`, append the sentence `what` to the reason that the
        report gives, unless the outcome was announced already.
        """
        end, state = self._job.end, self._job.state
        if state is State.EXITING and end.outcome and end.outcome.result == "completed":
            end.outcome = replace(end.outcome, why=f"{end.outcome.why}; {what}")

    def _not_completed(self, why: str) -> None:
        """
        Change the outcome from `completed` to `failed` for the reason `why`, unless the outcome was
        announced already.
        """
        job = self._job
        if job.state is State.EXITING and job.end.outcome and job.end.outcome.result == "completed":
            why = f"all steps are done, but then {why}"
            result, code = self._recovery.shutdown.failed(4)
            job.end.outcome = JobOver(result=result, code=code, why=why)
            # limit the time that the other ranks have to leave, because their scripts may wait
            # forever for the lost rank
            job.timing.shorten(job.policy.join)

    def _left_in_peace(self, rank_state: RankState, message: Exited) -> bool:
        """
        Handle the end of a process in a job in which no rank has called `tft.init` so far. The job
        ends as failed when the first process fails, or as completed when all processes have ended.
        Return True. If some rank has called `tft.init`, do nothing and return False.
        """
        if self._job.processes.joined:
            return False
        if message.code:
            why = f"rank {rank_state.rank} {_how(message.code)} before any rank had joined the job"
            self._recovery.shutdown.exit("failed", 4, why)
        elif all(s.process.stage is ProcessStage.GONE for s in self._job.ranks.states.values()):
            self._recovery.shutdown.exit("completed", 0, UNPROTECTED)
        return True

    def _blamed(self, rank_state: RankState) -> bool:
        return any(
            fault.rank == rank_state.rank and fault.kind == rank_state.process.blame
            for fault in self._job.incident.faults
        )

    def _update_evidence(self, rank_state: RankState, evidence: str, step: int) -> None:
        """
        Append `evidence`, which was reported with the end of a process, to the evidence of the
        fault because of which the process was ended. Set the step of that fault to `step`.
        """
        self._job.incident.faults = [
            replace(fault, evidence=f"{fault.evidence}\n{evidence}", step=step)
            if (fault.rank, fault.kind) == (rank_state.rank, rank_state.process.blame)
            else fault
            for fault in self._job.incident.faults
        ]


def _left_early(rank: int, code: int, was: ProcessStage) -> str:
    """
    Return a sentence that says why no other process is started for a rank whose process has left by
    itself before it could carry out orders. `code` is the exit code of that process, `was` the
    stage that the process had reached.
    """
    if code:
        return f"rank {rank} left with code {code} before it called session.run: its log says why"
    missed = "it did not call tft.init"
    if was is ProcessStage.JOINED:
        missed = "it called tft.init and did not come to session.run"
    return f"rank {rank} left with code 0 and has not begun to train: {missed}"


def _how(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"left with code {code}"
