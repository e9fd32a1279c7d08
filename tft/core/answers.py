"""
What ranks answer to orders: that they are carried out, or why not.
"""

from typing import assert_never

from tft.core.course import Course
from tft.core.incident import COMPARED, PHASES, Fault
from tft.core.job import Job
from tft.core.seats import Seat
from tft.core.table import State
from tft.protocol.messages import Answered

S = State

GOING_ON = frozenset(
    {"load", "fetch", "restore", "regroup", "reload", "rebuild", "rollback", "resume"}
)
"""Orders on the way back into the loop."""


class Answers:
    """
    The answers that one job is given.
    """

    def __init__(self, job: Job, course: Course) -> None:
        self._job = job
        self._course = course
        self._rounds = course.rounds

    def answered(self, seat: Seat, message: Answered) -> None:
        """
        A rank has carried out an order, or could not. What does not belong to the order that is
        waited for is absorbed.
        """
        job = self._job
        if message.order == "resume" and message.failure is None:
            seat.repaired = True  # a round that has begun since does not undo that
        task = job.incident.tasks.get(message.order)
        key = (message.incident, message.round)
        if task is None or key != (job.incident.number, job.incident.round):
            return None
        if seat.rank not in task.waiting or not job.holds_seat(seat):
            return None
        seat.position, seat.held, seat.backups = message.position, message.held, message.backups
        if message.order in ("freeze", "stop") and seat.repaired:
            job.incident.marked(seat.rank, message.position)
        if job.resumed and not seat.held:
            seat.held = None  # what a script begins with is not what the checkpoint holds
        compares = message.at - message.compared
        job.phase(PHASES.get(message.order, message.order), seat.rank, message.began, compares)
        if message.compared:
            job.phase("compare", seat.rank, compares, message.at)
        if message.order in COMPARED or message.order in ("stop", "load"):
            seat.digests = message.digests
        if message.order == "stop":
            seat.line = message.line
        seat.inexact = message.inexact or seat.inexact
        job.tails = job.tails or message.tails
        # it cannot write this itself: somebody else does, of whichever step is saved in the end
        seat.private = {**seat.private, **message.private}
        if message.failure is not None:
            return self._failed(seat, message, message.failure)
        task.waiting.discard(seat.rank)
        return self._carried_out(seat, message)

    def _carried_out(self, seat: Seat, message: Answered) -> None:
        match message.order:
            case "freeze":
                # while a stall is looked into, whoever does not wait for others is suspected
                if self._job.incident.suspicion and seat.training and not message.waiting:
                    seat.blame = "hang"
            case "stop":
                seat.training = False
            case "check":
                found = message.finding if message.verdict != "pass" else ""
                seat.verdict, seat.finding = message.verdict, found
            case "save":
                self._job.saved |= {file.name: file for file in message.files}
            case "resume":
                seat.training = True
            case "fetch" | "load":
                if seat.damaged:
                    seat.doubted = message.position.step
                seat.trusted, seat.damaged = True, False
                seat.holds_another(brought=message.order == "fetch")
                if message.order == "load":  # it has what is its own from there, too
                    self._job.captures(seat)
                self._left_out(seat, message)
            case "restore":
                seat.trusted = True
                seat.holds_another()
            case "rollback":
                self._job.captures(seat)
            case _:
                pass

    def _left_out(self, seat: Seat, message: Answered) -> None:
        """
        What was fetched is whole, and came from fewer sources than were asked: each of the others has a fault.
        """
        for source, why in message.odd.items():
            evidence = f"rank {seat.rank} could not fetch from rank {source}: {why}"
            self._job.tell("source_left_out", rank=source, to=seat.rank, why=why)
            self._job.incident.faults.append(
                Fault(
                    kind="network", rank=source, step=message.position.step + 1, seen=message.at,
                    evidence=evidence, certain=True,
                )
            )  # fmt: skip

    def _unreadable(self, step: int) -> None:
        """
        A disk may be away for a moment. What could not be read as often as anything is tried is not
        tried again; where there is something else to go on from, an older checkpoint or what others
        have loaded, twice is enough.
        """
        job = self._job
        job.unread[step] += 1
        older = any(earlier < step for earlier in job.checkpoints)
        loaded = any(seat.held is not None for seat in job.seated())
        often = min(2, job.policy.attempts) if older or loaded else job.policy.attempts
        if job.unread[step] >= often:
            job.checkpoints.pop(step, None)
            if not older:  # then what others have loaded has to do
                job.search(over=True)

    def _replace(self, seat: Seat, why: str) -> None:
        """
        It would fail at everything else, too.
        """
        self._rounds.fault("process", seat.rank, seat.position.step + 1, self._job.now, why)
        self._rounds.terminate(seat, why, "process")

    def _failed(self, seat: Seat, message: Answered, why: str) -> None:
        job, rounds, order = self._job, self._rounds, message.order
        job.tell("order_failed", rank=seat.rank, order=order, why=why)
        if message.context_lost and order in GOING_ON and job.state is not S.DUMPING:
            return self._replace(seat, f"could not {order}: {why}")
        match order:
            case "freeze" | "stop":
                rounds.terminate(seat, f"could not {order}: {why}", "process")
            case "save":
                self._course.ending.save_failed(seat, why)
            case "commit":
                self._course.ending.commit_failed(seat, why)
            case "restore" if job.state is S.DUMPING:
                self._course.ending.restore_failed(seat, why)
            case "restore":
                seat.damaged = True  # its copies are not what they should be: others have some
                rounds.again(f"rank {seat.rank} could not {order}: {why}")
            case "hold":  # nothing is wrong, but there is no pause
                self._course.pausing.give_up(f"rank {seat.rank} could not {order}: {why}")
            case "compare":  # then it is compared with nobody
                job.incident.tasks[order].waiting.discard(seat.rank)
            case "release":  # in a pause nothing is wrong yet: this is what is
                evidence = f"rank {seat.rank} could not {order}: {why}"
                rounds.fault("network", None, seat.position.step + 1, job.now, evidence)
            case "load":
                self._unreadable(job.agreed())
                rounds.again(f"rank {seat.rank} could not load the checkpoint: {why}")
            case "reload":
                rounds.again(f"rank {seat.rank} could not load a checkpoint of its own: {why}")
            case "fetch" | "regroup" | "rebuild" | "rollback" | "resume":
                rounds.again(f"rank {seat.rank} could not {order}: {why}")
            case "check":
                # nobody could run it: that says nothing of the rank, and is no reason to stay
                job.incident.tasks[order].waiting.discard(seat.rank)
                seat.verdict, seat.finding = "pass", f"it could not be run: {why}"
            case "complete" | "end":
                pass
            case _:
                assert_never(order)
