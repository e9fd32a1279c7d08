"""
Processes and nodes that end, or that cannot be ended: what is lost with them, and which fault
that is.
"""

from dataclasses import replace

from tft.core.commands import JobOver
from tft.core.course import Course
from tft.core.job import Job
from tft.core.seats import Process, Seat
from tft.core.table import SETTLED
from tft.protocol.messages import Exited, FaultKind, Kill, NodeLost, Spawn

UNPROTECTED = (
    "every rank has ended, and none has called tft.init: nothing of this run was protected, and a fault "
    "would have ended it"
)
"""Of a run in which tft has started the processes and no more."""


class Ends:
    """
    The ends of one job's processes.
    """

    def __init__(self, job: Job, course: Course) -> None:
        self._job = job
        self._course = course
        self._rounds = course.rounds

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
            return self._course.ending.exit("failed", 4, message.why)
        return self.bereaved(self.emptied(message.node, silent=True), message.why, message.at)

    def emptied(self, node: int, *, silent: bool) -> list[tuple[Seat, int]]:
        """
        Nothing runs on a node any more, or, where it is only `silent`, nothing counts that does: should
        it be heard again, it ends. Those that were somebody, with the step each computed.
        """
        job = self._job
        left = []
        for seat in [*job.seats.values(), *job.successors.values(), *job.retiring]:
            if seat.node != node or seat.process is Process.GONE:
                continue
            job.forget(seat.rank, seat.incarnation, Spawn, Kill)
            step = self._rounds.step_of(seat)
            if job.is_seated(seat.rank, seat.incarnation):
                left.append((seat, step))
            if silent and job.state not in SETTLED:
                job.kill(seat, f"node {node} was given up", last_words=False)
            self._gone(seat)
        return left

    def bereaved(self, left: list[tuple[Seat, int]], why: str, at: float) -> None:
        """
        What that means to the job, once all of them are known to be gone: what can be done is not
        judged by a part of the loss.
        """
        job = self._job
        for seat, step in left if job.state not in SETTLED else ():
            self._rounds.fault("node", seat.rank, step, at, why)
            job.count(seat.rank)
        if left and job.state not in SETTLED:
            self._course.lost(*(seat for seat, _ in left))

    def exited(self, message: Exited) -> None:
        """
        A process has ended; what that means depends on what it was to the job.
        """
        job = self._job
        job.forget(message.rank, message.incarnation, Spawn, Kill)
        seat = job.find(message.rank, message.incarnation)
        if seat is None:
            return None
        if seat.process is Process.GONE:  # it was given up: what it has left counts all the same
            seat.private = message.private or seat.private
            return None
        was, retires = seat.process, seat in job.retiring
        self._gone(seat)
        seat.position = message.position
        seat.private = {**seat.private, **message.private}
        if retires:
            job.seats[seat.rank].private = seat.private
        if job.state in SETTLED:
            return self._left_late(seat, message)
        if not job.is_seated(seat.rank, seat.incarnation):
            return job.tell("rank_gone", rank=seat.rank, code=message.code, outside=True)
        if self._left_in_peace(seat, message):
            return None
        job.tell("rank_gone", rank=seat.rank, code=message.code, incarnation=seat.incarnation)
        self._blame(seat, message, was)
        if seat.repaired:
            job.incident.marked(seat.rank, message.position)
        return self._course.lost(seat)

    def could_not_end(self, seat: Seat) -> None:
        """
        Its agent has not ended a process in time. It is given up without a last word: nobody obeys
        in its place, and none is started for its rank where it may still sit.
        """
        job = self._job
        step = self._rounds.step_of(seat)
        matters = job.is_seated(seat.rank, seat.incarnation)
        self._gone(seat)
        if seat.node is not None:
            job.seats[seat.rank].excluded_nodes |= {seat.node}
        why = f"its process could not be ended within {job.policy.kill:.0f} s"
        job.tell("rank_not_ended", rank=seat.rank, incarnation=seat.incarnation, why=why)
        if matters:
            if not self._blamed(seat):
                self._rounds.fault("process", seat.rank, step, job.now, why)
            self._course.lost(seat)

    def _gone(self, seat: Seat) -> None:
        job, process = self._job, (seat.rank, seat.incarnation)
        job.starting.pop(process, None)
        job.running.discard(process)
        if seat in job.displaced:
            job.displaced.remove(seat)
        seat.process = Process.GONE
        seat.training = False
        seat.held, seat.backups = None, ()
        if seat in job.retiring:
            job.retiring.remove(seat)
        elif not job.holds_seat(seat):
            del job.successors[seat.rank]
        else:
            return
        if seat.node is not None:  # its place is free again
            job.room[seat.node] += 1
        if seat.rank in job.switch and job.state not in SETTLED:
            why = f"the process that was to take over from rank {seat.rank} has ended"
            self._course.call_off(
                f"{why}: {seat.terminating}" if seat.terminating else why, job.switch
            )

    def _blame(self, seat: Seat, message: Exited, was: Process) -> None:
        """
        The fault that the end of a process stands for.
        """
        evidence = message.stack or seat.terminating or _how(message.code)
        if seat.blame == "hang" and message.stopped:
            evidence = f"the process was stopped (SIGSTOP)\n{evidence}"
        step = self._step_of(seat, message)
        kind: FaultKind = "process"
        forced = ""
        if self._blamed(seat):
            return self._update_evidence(seat, evidence, step)
        if was is not Process.READY and message.code >= 0:
            kind = "software"
            forced = _left_early(seat.rank, message.code, was)
        elif message.code == 0:
            kind = "software"
            forced = f"rank {seat.rank} left with code 0 before all ranks had finished"
        self._rounds.fault(kind, seat.rank, step, message.at, evidence)
        if not seat.terminating:
            self._job.count(seat.rank)
        if forced:
            self._rounds.force(forced)
        return None

    def _step_of(self, seat: Seat, message: Exited) -> int:
        """
        The step that was being computed; for a process that had not come so far, the one that
        the others wait to compute.
        """
        if message.incarnation == 0 or seat.repaired:
            return message.position.step + 1
        return self._job.incident.step or self._job.incident.furthest + 1

    def _left_late(self, seat: Seat, message: Exited) -> None:
        """
        What a script does after `Session.run` is its own; that it failed is still told.
        """
        outcome = self._job.outcome
        if outcome is not None and outcome.result == "completed" and message.code:
            why = f"all steps are done, but then rank {seat.rank} {_how(message.code)}"
            self._job.outcome = JobOver(result="failed", code=4, why=why)

    def _left_in_peace(self, seat: Seat, message: Exited) -> bool:
        """
        A script that never calls `tft.init` ends as its ranks end.
        """
        if self._job.anyone_joined():
            return False
        if message.code:
            why = f"rank {seat.rank} {_how(message.code)} before any rank had joined the job"
            self._course.ending.exit("failed", 4, why)
        elif all(s.process is Process.GONE for s in self._job.seats.values()):
            self._course.ending.exit("completed", 0, UNPROTECTED)
        return True

    def _blamed(self, seat: Seat) -> bool:
        return any(
            fault.rank == seat.rank and fault.kind == seat.blame
            for fault in self._job.incident.faults
        )

    def _update_evidence(self, seat: Seat, evidence: str, step: int) -> None:
        """
        What a process left behind says more than what was known when it was told to end.
        """
        self._job.incident.faults = [
            replace(fault, evidence=f"{fault.evidence}\n{evidence}", step=step)
            if (fault.rank, fault.kind) == (seat.rank, seat.blame)
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
