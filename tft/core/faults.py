"""
Faults that somebody says: the rank itself, by the exception that left its loop, or whoever sees it
from outside.
"""

from typing import assert_never

from tft.core.course import Course
from tft.core.job import Job
from tft.core.seats import Process, Seat
from tft.core.table import State
from tft.protocol.messages import CheckpointFailed, Faulted, FaultKind, Noticed

S = State


class Faults:
    """
    The faults that one job is told of.
    """

    def __init__(self, job: Job, course: Course) -> None:
        self._job = job
        self._course = course
        self._rounds = course.rounds

    def faulted(self, seat: Seat, message: Faulted) -> None:
        """
        An exception has left the loop of a rank.
        """
        job = self._job
        seat.training = False
        seat.position = message.position
        if not job.is_seated(seat.rank, seat.incarnation):
            return
        stopping = job.state in (S.FREEZING, S.CLEARING)
        symptom = message.kind == "network" and stopping and not message.context_lost
        if symptom:
            return
        if not self._known(message):
            self._learn(seat, message)
        if message.context_lost:
            self._rounds.terminate(seat, message.summary, message.kind)
        self._course.replan()

    def _learn(self, seat: Seat, message: Faulted) -> None:
        self._job.tell(
            "rank_faulted",
            rank=seat.rank,
            kind=message.kind,
            step=message.step,
            summary=message.summary,
            traceback=message.traceback,
        )
        evidence = message.traceback or message.summary
        self._rounds.fault(message.kind, seat.rank, message.step, message.at, evidence)
        self._distrust(seat, message)
        if message.kind == "software":
            self._rounds.force("a user's own bug is not retried")

    def _known(self, message: Faulted) -> bool:
        """
        The same exception on all ranks is one fault.
        """
        return message.kind == "software" and any(
            fault.kind == "software"
            and fault.step == message.step
            and message.traceback.splitlines()[-1:] == fault.evidence.splitlines()[-1:]
            for fault in self._job.incident.faults
        )

    def noticed(self, message: Noticed) -> None:
        """
        What was seen from outside is taken as if the rank had said it itself.
        """
        job = self._job
        seat = job.seats.get(message.rank)
        why_not = self._why_not(seat, message.kind)
        if seat is None or why_not:
            return job.tell(
                "notice_not_taken",
                rank=message.rank,
                kind=message.kind,
                evidence=message.evidence,
                why_not=why_not,
            )
        step = self._rounds.step_of(seat)
        match message.kind:
            case "straggler":
                return self._course.straggles(message)
            case "process" | "hang":
                if message.kind == "process":  # whoever is ended for a hang is named for it there
                    self._rounds.fault("process", seat.rank, step, message.at, message.evidence)
                self._rounds.terminate(seat, message.evidence, message.kind)
                job.count(seat.rank)
            case "node":
                self._rounds.isolate(seat, message.evidence)
            case "memory" | "numeric" | "corruption" | "network" | "software":
                self._rounds.fault(message.kind, seat.rank, step, message.at, message.evidence)
                self._distrust(seat, message)
                if message.kind == "software":
                    self._rounds.force(message.evidence)
            case _:
                assert_never(message.kind)
        return self._course.replan()

    def differ(self, message: CheckpointFailed) -> None:
        """
        The copies of which a checkpoint was to be made are not equal. Whose are wrong is judged when all have left
        their loops. What all have been brought to since has been compared already.
        """
        job = self._job
        if message.step <= job.compared:
            return
        for rank in message.wrong or (None,):
            self._rounds.fault("corruption", rank, message.step + 1, message.at, message.why)
        self._course.replan()

    def _why_not(self, seat: Seat | None, kind: FaultKind) -> str:
        """
        Why nothing can be done about what was seen of a rank; empty: something can.
        """
        if seat is None or seat.rank not in self._job.members:
            return "the rank does not take part"
        if seat.process in (Process.ABSENT, Process.GONE):
            return "the rank has no process"
        if seat.terminating:
            return f"its process is being ended: {seat.terminating}"
        if not seat.ready and kind != "node":
            return "its process is starting, and has nothing yet that could be wrong"
        return ""

    def _distrust(self, seat: Seat, message: Faulted | Noticed) -> None:
        """
        What a fault makes of the copies: of this rank's own, and, where what is wrong may have
        spread with the last update, or is known to be older, of everybody's since then.
        """
        if message.kind in ("memory", "numeric", "corruption"):
            seat.trusted = False
        if message.kind in ("memory", "corruption"):
            seat.damaged = True
        if message.polluted:
            self._rounds.pollute(seat)
        limit = message.not_after
        if limit is not None and self._rounds.may_be_later(seat, limit):
            self._job.incident.lower(limit)
