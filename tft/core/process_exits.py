"""
Processes and nodes that end, or that cannot be ended: what is lost with them, and which fault
that is.
"""

from dataclasses import replace

from tft.core.commands import JobOver
from tft.core.job import Job
from tft.core.rank_state import Process, RankState
from tft.core.recovery import Recovery
from tft.core.table import SETTLED
from tft.protocol.messages import Exited, FaultKind, Kill, NodeLost, Spawn

UNPROTECTED = (
    "every rank has ended, and none has called tft.init: nothing of this run was protected, and a fault "
    "would have ended it"
)
"""Of a run in which tft has started the processes and no more."""


class ProcessExits:
    """
    The ends of one job's processes.
    """

    def __init__(self, job: Job, recovery: Recovery) -> None:
        self._job = job
        self._recovery = recovery
        self._attempts = recovery.attempts

    def node_lost(self, message: NodeLost) -> None:
        """
        An agent is gone or not heard any more, and its node is given up with all that ran there.
        """
        job = self._job
        agent = job.agents.get(message.node)
        stranger = message.pid and agent is not None and agent[1] != message.pid
        if stranger and message.at <= job.came[message.node]:
            return None  # another one has come up since then
        job.lost_nodes.add(message.node)
        if message.node not in job.nodes and job.placeless() and job.state not in SETTLED:
            return self._recovery.ending.exit("failed", 4, message.why)
        return self.bereaved(self.emptied(message.node, silent=True), message.why, message.at)

    def emptied(self, node: int, *, silent: bool) -> list[tuple[RankState, int]]:
        """
        Nothing runs on a node any more, or, where it is only `silent`, nothing counts that does: should
        it be heard again, it ends. Those that were somebody, with the step each computed.
        """
        job = self._job
        left = []
        for rank_state in [*job.rank_states.values(), *job.successors.values(), *job.retiring]:
            if rank_state.node != node or rank_state.process is Process.GONE:
                continue
            job.forget(rank_state.rank, rank_state.incarnation, Spawn, Kill)
            step = self._attempts.step_of(rank_state)
            if job.is_current(rank_state.rank, rank_state.incarnation):
                left.append((rank_state, step))
            if silent and job.state not in SETTLED:
                job.kill(rank_state, f"node {node} was given up", last_words=False)
            self._gone(rank_state)
        return left

    def bereaved(self, left: list[tuple[RankState, int]], why: str, at: float) -> None:
        """
        What that means to the job, once all of them are known to be gone: what can be done is not
        judged by a part of the loss.
        """
        job = self._job
        for rank_state, step in left if job.state not in SETTLED else ():
            self._attempts.fault("node", rank_state.rank, step, at, why)
            job.count(rank_state.rank)
        if left and job.state not in SETTLED:
            self._recovery.lost(*(rank_state for rank_state, _ in left))

    def exited(self, message: Exited) -> None:
        """
        A process has ended; what that means depends on what it was to the job.
        """
        job = self._job
        job.forget(message.rank, message.incarnation, Spawn, Kill)
        rank_state = job.find(message.rank, message.incarnation)
        if rank_state is None:
            return None
        if (
            rank_state.process is Process.GONE
        ):  # it was given up: what it has left counts all the same
            rank_state.private = message.private or rank_state.private
            return None
        was, retires = rank_state.process, rank_state in job.retiring
        self._gone(rank_state)
        rank_state.position = message.position
        rank_state.private = {**rank_state.private, **message.private}
        if retires:
            job.rank_states[rank_state.rank].private = rank_state.private
        if job.state in SETTLED:
            return self._left_late(rank_state, message)
        if not job.is_current(rank_state.rank, rank_state.incarnation):
            return job.tell("rank_gone", rank=rank_state.rank, code=message.code, outside=True)
        if self._left_in_peace(rank_state, message):
            return None
        job.tell(
            "rank_gone", rank=rank_state.rank, code=message.code, incarnation=rank_state.incarnation
        )
        self._blame(rank_state, message, was)
        if rank_state.repaired:
            job.incident.marked(rank_state.rank, message.position)
        return self._recovery.lost(rank_state)

    def could_not_end(self, rank_state: RankState) -> None:
        """
        Its agent has not ended a process in time. It is given up without a last word: nobody obeys
        in its place, and none is started for its rank where it may still sit.
        """
        job = self._job
        step = self._attempts.step_of(rank_state)
        matters = job.is_current(rank_state.rank, rank_state.incarnation)
        self._gone(rank_state)
        if rank_state.node is not None:
            job.rank_states[rank_state.rank].excluded_nodes |= {rank_state.node}
        why = f"its process could not be ended within {job.policy.kill:.0f} s"
        job.tell(
            "rank_not_ended", rank=rank_state.rank, incarnation=rank_state.incarnation, why=why
        )
        if matters:
            if not self._blamed(rank_state):
                self._attempts.fault("process", rank_state.rank, step, job.now, why)
            self._recovery.lost(rank_state)

    def _gone(self, rank_state: RankState) -> None:
        job, process = self._job, (rank_state.rank, rank_state.incarnation)
        job.starting.pop(process, None)
        job.running.discard(process)
        if rank_state in job.displaced:
            job.displaced.remove(rank_state)
        rank_state.process = Process.GONE
        rank_state.training = False
        rank_state.held, rank_state.backups = None, ()
        if rank_state in job.retiring:
            job.retiring.remove(rank_state)
        elif not job.holds_rank(rank_state):
            del job.successors[rank_state.rank]
        else:
            return
        if rank_state.node is not None:  # its place is free again
            job.room[rank_state.node] += 1
        if rank_state.rank in job.switch and job.state not in SETTLED:
            why = f"the process that was to take over from rank {rank_state.rank} has ended"
            self._recovery.call_off(
                f"{why}: {rank_state.terminating}" if rank_state.terminating else why, job.switch
            )

    def _blame(self, rank_state: RankState, message: Exited, was: Process) -> None:
        """
        The fault that the end of a process stands for.
        """
        evidence = message.stack or rank_state.terminating or _how(message.code)
        if rank_state.blame == "hang" and message.stopped:
            evidence = f"the process was stopped (SIGSTOP)\n{evidence}"
        step = self._step_of(rank_state, message)
        kind: FaultKind = "process"
        forced = ""
        if self._blamed(rank_state):
            return self._update_evidence(rank_state, evidence, step)
        if was is not Process.READY and message.code >= 0:
            kind = "software"
            forced = _left_early(rank_state.rank, message.code, was)
        elif message.code == 0:
            kind = "software"
            forced = f"rank {rank_state.rank} left with code 0 before all ranks had finished"
        self._attempts.fault(kind, rank_state.rank, step, message.at, evidence)
        if not rank_state.terminating:
            self._job.count(rank_state.rank)
        if forced:
            self._attempts.force(forced)
        return None

    def _step_of(self, rank_state: RankState, message: Exited) -> int:
        """
        The step that was being computed; for a process that had not come so far, the one that
        the others wait to compute.
        """
        if message.incarnation == 0 or rank_state.repaired:
            return message.position.step + 1
        return self._job.incident.step or self._job.incident.furthest + 1

    def _left_late(self, rank_state: RankState, message: Exited) -> None:
        """
        What a script does after `Session.run` is its own; that it failed is still told.
        """
        outcome = self._job.outcome
        if outcome is not None and outcome.result == "completed" and message.code:
            why = f"all steps are done, but then rank {rank_state.rank} {_how(message.code)}"
            self._job.outcome = JobOver(result="failed", code=4, why=why)

    def _left_in_peace(self, rank_state: RankState, message: Exited) -> bool:
        """
        A script that never calls `tft.init` ends as its ranks end.
        """
        if self._job.anyone_joined():
            return False
        if message.code:
            why = f"rank {rank_state.rank} {_how(message.code)} before any rank had joined the job"
            self._recovery.ending.exit("failed", 4, why)
        elif all(s.process is Process.GONE for s in self._job.rank_states.values()):
            self._recovery.ending.exit("completed", 0, UNPROTECTED)
        return True

    def _blamed(self, rank_state: RankState) -> bool:
        return any(
            fault.rank == rank_state.rank and fault.kind == rank_state.blame
            for fault in self._job.incident.faults
        )

    def _update_evidence(self, rank_state: RankState, evidence: str, step: int) -> None:
        """
        What a process left behind says more than what was known when it was told to end.
        """
        self._job.incident.faults = [
            replace(fault, evidence=f"{fault.evidence}\n{evidence}", step=step)
            if (fault.rank, fault.kind) == (rank_state.rank, rank_state.blame)
            else fault
            for fault in self._job.incident.faults
        ]


def _left_early(rank: int, code: int, was: Process) -> str:
    """
    Why a process that has left by itself before it was ready is not started again.
    """
    if code:
        return f"rank {rank} left with code {code} before it took any order: its log says why"
    missed = "it did not call tft.init"
    if was is Process.JOINED:
        missed = "it called tft.init and did not come to session.run"
    return f"rank {rank} left with code 0 and has not begun to train: {missed}"


def _how(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"left with code {code}"
