"""
The job machine: told what happened, it answers with what is to be done. This file takes events
in; `course.py` leads through an incident, `job.py` holds what is known and the table of states.

    handle(event) -> commands     the one door; a late, doubled or foreign report is absorbed
    outstanding() -> orders       what has not been answered yet, to be said again
    next_deadline()               when it wants to be told that time has passed
    check()                       invariants; a broken one is our bug

`docs/machine.md` tells the same as a story.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

from tft.core.commands import Command, JobOver
from tft.core.course import Course
from tft.core.events import DeadlinePassed, Event, Led, Received, Stalled
from tft.core.incident import PHASES, Incident
from tft.core.job import SETTLED, Job, State
from tft.core.policy import Policy
from tft.core.seats import Process, Seat
from tft.errors import InternalError
from tft.protocol.messages import (
    Answered,
    Exited,
    Faulted,
    Finished,
    Joined,
    Kill,
    NodeJoined,
    NodeLost,
    Order,
    OrderName,
    Position,
    Ready,
    Refused,
    Report,
    Spawn,
    Spawned,
    StopRequested,
    StoreOpened,
    Trained,
)

S = State


class Machine:
    """
    One job of `world` ranks, from its start to its end.
    """

    def __init__(
        self,
        world: int,
        policy: Policy,
        *,
        job: str,
        checkpoints: str,
        at: float,
        resume: tuple[str, int] | None = None,
        first_incident: int = 1,
    ) -> None:
        """
        `checkpoints` is the directory for last checkpoints; `resume` a checkpoint to start from
        and the step whose end it holds; `first_incident` the number the next incident gets.
        """
        self._job = Job(
            world, policy, name=job, checkpoints=checkpoints, at=at, resume=resume,
            first_incident=first_incident,
        )  # fmt: skip
        self._course = Course(self._job)

    @property
    def state(self) -> State:
        """
        What the job as a whole is doing.
        """
        return self._job.state

    @property
    def epoch(self) -> int:
        """
        Of the controller that leads.
        """
        return self._job.epoch

    @property
    def incident(self) -> Incident:
        """
        The incident that is open, or was last.
        """
        return self._job.incident

    @property
    def incidents(self) -> Sequence[Incident]:
        """
        The incidents that are over.
        """
        return self._job.incidents

    @property
    def outcome(self) -> JobOver | None:
        """
        How the job ends, once that is decided.
        """
        return self._job.outcome

    @property
    def last_step(self) -> int:
        """
        The highest step that is done.
        """
        return self._job.last_step

    # ---------------------------------------------------------------- the door

    def handle(self, event: Event) -> list[Command]:
        """
        Takes what happened; returns what is to be done, each order for the first time.
        """
        self._job.said = []
        self._job.now = event.at
        match event:
            case Received():
                self._received(event.message)
            case DeadlinePassed():
                self._expire()
            case Stalled():
                self._stalled(event)
            case Led():
                self._led(event)
            case _:
                assert_never(event)
        while self._course.advance():
            pass
        return self._job.said

    def _led(self, event: Led) -> None:
        """
        While nobody led, nobody could answer: every limit begins anew.
        """
        job = self._job
        job.epoch, job.led = event.epoch, event.at
        for task in job.incident.tasks.values():
            task.deadline = event.at + task.limit
        if job.deadline is not None:
            job.deadline = event.at + 3 * job.policy.leave
        if job.state is S.ENDED and job.outcome is not None:
            job.said = [*job.ending, job.outcome]  # whoever led before may not have said it

    def outstanding(self) -> list[Order]:
        """
        Every order that has not been answered, narrowed to those who owe the answer.
        """
        orders: list[Order] = [o for parts in self._job.node_orders.values() for o in parts]
        for task in self._job.incident.tasks.values():
            for order in task.orders:
                to = tuple(rank for rank in order.to if rank in task.waiting)
                if to:
                    orders.append(replace(order, to=to))
        return [replace(order, epoch=self._job.epoch) for order in (*orders, *self._job.ending)]

    def next_deadline(self) -> float | None:
        """
        When `DeadlinePassed` is due, or None.
        """
        moments = [t.deadline for t in self._job.incident.tasks.values() if t.waiting]
        if self._job.state not in SETTLED:
            moments += [
                max(seat.spawned, self._job.led) + self._job.policy.join
                for seat in self._job.seats.values()
                if seat.process in (Process.ORDERED, Process.SPAWNED, Process.JOINED)
            ]
        if self._job.deadline is not None and self._job.state is S.EXITING:
            moments.append(self._job.deadline)
        return min(moments, default=None)

    def check(self) -> None:
        """
        Raises `InternalError` when a promise is broken.
        """
        training = [s.rank for s in self._job.seats.values() if s.training]
        if self._job.state in (S.REPAIRING, S.REBUILDING, S.ROLLING_BACK, S.DUMPING) and training:
            raise InternalError(f"ranks {training} train while the job is {self._job.state}")
        if self._job.state is S.HEALTHY and self._job.incident.tasks:
            raise InternalError("the job is healthy with orders unanswered")
        if self._job.state is S.ENDED and self._job.outcome is None:
            raise InternalError("the job has ended without an outcome")

    def _received(self, message: Report) -> None:
        match message:
            case NodeJoined():
                self._node_joined(message)
            case Spawned():
                self._spawned(message)
            case Exited():
                self._exited(message)
            case StoreOpened():
                self._store_opened(message)
            case NodeLost():
                self._node_lost(message)
            case StopRequested():
                self._stop_requested(message)
            case Joined():
                self._joined(message)
            case Ready() | Faulted() | Answered() | Trained() | Finished():
                seat = self._job.seats.get(message.rank)
                if seat is None or seat.incarnation != message.incarnation:
                    return  # of a process that has been replaced
                if seat.process is Process.GONE:
                    return
                self._from_seat(seat, message)
            case _:
                assert_never(message)

    def _from_seat(
        self, seat: Seat, message: Ready | Faulted | Answered | Trained | Finished
    ) -> None:
        match message:
            case Ready():
                seat.process = Process.READY
                seat.shards = {copies.shard: copies.ranks for copies in message.shards}
                seat.held = 0 if self._job.virgin and self._job.resume is None else None
            case Faulted():
                self._faulted(seat, message)
            case Answered():
                self._answered(seat, message)
            case Trained():
                seat.position = Position(step=message.step, window=False)
                self._job.last_step = max(self._job.last_step, message.step)
                if self._job.state is S.RESUMING:
                    self._job.phase("resume", seat.rank, self._job.issued("resume"), message.at)
                    self._job.trained.add(seat.rank)
            case Finished():
                seat.finished = True
                seat.training = False
                seat.position = Position(step=message.step, window=False)
                seat.held = message.step
                self._job.last_step = max(self._job.last_step, message.step)
                self._job.trained.add(seat.rank)
            case _:
                assert_never(message)

    def _node_joined(self, message: NodeJoined) -> None:
        if message.node in self._job.nodes:
            return
        self._job.nodes[message.node] = message.ranks
        for rank in message.ranks:
            if rank in self._job.seats:
                self._job.seats[rank].node = message.node
                self._job.spawn(self._job.seats[rank], "the job starts")

    def _spawned(self, message: Spawned) -> None:
        seat = self._job.seats[message.rank]
        if seat.incarnation == message.incarnation and seat.process is Process.ORDERED:
            seat.process = Process.SPAWNED
            seat.pid = message.pid
            seat.spawned = message.at
            self._job.forget(message.rank, Spawn)

    def _joined(self, message: Joined) -> None:
        seat = self._job.seats.get(message.rank)
        if seat is None or message.world != len(self._job.seats):
            return self._refuse(
                message,
                f"rank {message.rank} of {message.world} has no place in a job of "
                f"{len(self._job.seats)} ranks",
            )
        taken = seat.process in (Process.JOINED, Process.READY)
        if taken and (seat.pid, seat.started) == (message.pid, message.started):
            return None
        if taken or seat.incarnation != message.incarnation or seat.process is Process.GONE:
            return self._refuse(
                message,
                f"rank {message.rank} is held by process {seat.pid} (incarnation "
                f"{seat.incarnation}); process {message.pid} (incarnation "
                f"{message.incarnation}) came without being asked for",
            )
        self._job.forget(message.rank, Spawn)
        seat.join(message)
        if self._job.incident.number or self._job.incident.faults:
            self._job.phase("await", seat.rank, seat.spawned, message.at)
        return None

    def _refuse(self, message: Joined, why: str) -> None:
        self._job.say(
            Refused(
                epoch=self._job.epoch,
                rank=message.rank,
                pid=message.pid,
                started=message.started,
                why=why,
            )
        )
        self._job.tell("claim_refused", rank=message.rank, pid=message.pid, why=why)

    def _store_opened(self, message: StoreOpened) -> None:
        replaced = self._job.store is not None
        self._job.store = (message.host, message.port)
        if replaced and not self._job.answered_all("regroup"):
            self._job.tell("store_replaced", port=message.port)
            self._course.again("the rendezvous store was lost while groups were formed")

    def _stop_requested(self, message: StopRequested) -> None:
        if self._job.stop is not None or self._job.state in SETTLED:
            return
        self._job.stop = message
        if not any(seat.ready for seat in self._job.seats.values()):
            return self._course.exit("cancelled", 128 + message.signal, message.why)
        self._course.force(message.why)
        return None

    def _faulted(self, seat: Seat, message: Faulted) -> None:
        seat.training = False
        seat.position = message.position
        seat.trusted = seat.trusted and message.kind not in ("memory", "numeric")
        if self._job.state in SETTLED:
            return
        symptom = message.kind == "network" and self._job.state in (S.FREEZING, S.CLEARING)
        if symptom or self._known(message):
            return
        self._job.tell(
            "rank_faulted",
            rank=seat.rank,
            kind=message.kind,
            step=message.step,
            summary=message.summary,
            traceback=message.traceback,
        )
        evidence = message.traceback or message.summary
        self._course.fault(message.kind, seat.rank, message.step, message.at, evidence)
        if message.kind == "software":
            self._course.force("a user's own bug is not retried")

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

    def _exited(self, message: Exited) -> None:
        seat = self._job.seats[message.rank]
        if seat.incarnation != message.incarnation or seat.process is Process.GONE:
            return None
        was = seat.process
        self._job.forget(message.rank, Spawn, Kill)
        seat.process = Process.GONE
        seat.training = False
        seat.held = None
        seat.position = message.position
        if message.private:
            seat.private = message.private
        if self._job.state in SETTLED:
            return self._left_late(seat, message)
        if self._left_in_peace(seat, message, was):
            return None
        self._job.tell("rank_gone", rank=seat.rank, code=message.code, incarnation=seat.incarnation)
        evidence = message.stack or seat.doomed or _how(message.code)
        if seat.blame == "hang" and message.stopped:
            evidence = f"the process was stopped (SIGSTOP)\n{evidence}"
        step = self._step_of(message, was)
        if self._blamed(seat):
            self._update_evidence(seat, evidence, step)
        elif was is not Process.READY and message.code >= 0:
            self._course.fault("software", seat.rank, step, message.at, evidence)
            self._course.force(
                f"rank {seat.rank} left with code {message.code} before it took any order: "
                "its log says why"
            )
        elif message.code == 0:
            self._course.fault("software", seat.rank, step, message.at, evidence)
            self._course.force(f"rank {seat.rank} left with code 0 before all ranks had finished")
        else:
            self._course.fault("process", seat.rank, step, message.at, evidence)
        self._course.lost(seat)
        return None

    def _step_of(self, message: Exited, was: Process) -> int:
        """
        The step that was being computed; for a process that had not come so far, the one that
        the others wait to compute.
        """
        repaired = was is Process.READY and self._job.seats[message.rank].repaired
        if message.incarnation == 0 or repaired:
            return message.position.step + 1
        return self._job.incident.step or self._job.incident.furthest + 1

    def _left_late(self, seat: Seat, message: Exited) -> None:
        """
        What a script does after `Session.run` is its own; that it failed is still told.
        """
        if (
            self._job.outcome is not None
            and self._job.outcome.result == "completed"
            and message.code
        ):
            why = f"all steps are done, but then rank {seat.rank} {_how(message.code)}"
            self._job.outcome = JobOver(result="failed", code=4, why=why)

    def _left_in_peace(self, seat: Seat, message: Exited, was: Process) -> bool:
        """
        A script that never calls `tft.init` ends as its ranks end.
        """
        if was not in (Process.ORDERED, Process.SPAWNED) or self._job.anyone_joined():
            return False
        if message.code:
            self._course.exit(
                "failed",
                4,
                f"rank {seat.rank} {_how(message.code)} and no rank has called tft.init",
            )
        elif all(s.process is Process.GONE for s in self._job.seats.values()):
            self._course.exit("completed", 0, "every rank has ended")
        return True

    def _node_lost(self, message: NodeLost) -> None:
        if message.node in self._job.lost_nodes or self._job.state in SETTLED:
            return
        self._job.lost_nodes.add(message.node)
        for rank in self._job.nodes.get(message.node, ()):
            seat = self._job.seats[rank]
            if seat.process is Process.GONE or self._job.state in SETTLED:
                continue
            seat.process = Process.GONE
            seat.training = False
            seat.held = None
            self._job.forget(rank, Spawn, Kill)
            self._course.fault("node", rank, seat.position.step + 1, message.at, message.why)
            self._course.lost(seat)
        if not self._job.nodes:
            self._course.exit("failed", 4, message.why)

    def _stalled(self, event: Stalled) -> None:
        if self._job.state not in (S.HEALTHY, S.RESUMING):
            return
        self._course.open()
        why = (
            f"no rank has moved for {event.silence:.1f} s; the job's own step times allow "
            f"{event.limit:.1f} s"
        )
        self._job.tell("stalled", silence=event.silence, limit=event.limit)
        if self._job.state is S.RESUMING:  # what was done about it last time has not helped
            self._course.again(why)
        else:
            self._course.freeze()
        self._job.incident.suspicion = why

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

    def _answered(self, seat: Seat, message: Answered) -> None:
        task = self._job.incident.tasks.get(message.order)
        key = (message.incident, message.round)
        if task is None or key != (self._job.incident.number, self._job.incident.round):
            return
        if seat.rank not in task.waiting:
            return
        seat.position, seat.held = message.position, message.held
        self._job.phase(
            PHASES.get(message.order, message.order), seat.rank, message.began, message.at
        )
        if message.failure is not None:
            return self._failed(seat, message.order, message.failure)
        task.waiting.discard(seat.rank)
        match message.order:
            case "freeze":
                self._found(seat, waiting=message.waiting)
            case "stop":
                seat.training = False
            case "save":
                self._job.saved |= {file.name: file for file in message.files}
            case "resume":
                seat.training = seat.repaired = True
            case "fetch" | "load":
                seat.trusted = True
            case "rollback":
                seat.private = {}
            case _:
                pass
        return None

    def _found(self, seat: Seat, *, waiting: bool) -> None:
        """
        While a stall is looked into, whoever does not wait for others is suspected.
        """
        if self._job.incident.suspicion and seat.training and not waiting:
            seat.blame = "hang"

    def _failed(self, seat: Seat, order: OrderName, why: str) -> None:
        self._job.tell("order_failed", rank=seat.rank, order=order, why=why)
        match order:
            case "freeze" | "stop":
                self._course.doom(seat, f"could not {order}: {why}", "process")
            case "load":
                self._course.exit(
                    "failed", 4, f"rank {seat.rank} could not load the checkpoint: {why}"
                )
            case "save" | "commit":
                seat.held, seat.unable = None, True  # another holder has to write its part
                self._course.dump()
            case "fetch" | "regroup" | "rebuild" | "rollback" | "resume":
                self._course.again(f"rank {seat.rank} could not {order}: {why}")
            case "complete" | "end":
                pass
            case _:
                assert_never(order)

    def _expire(self) -> None:
        for name, task in list(self._job.incident.tasks.items()):
            if task.waiting and task.deadline <= self._job.now:
                self._overdue(name, sorted(task.waiting))
                return
        for seat in self._job.seats.values():
            starting = seat.process in (Process.ORDERED, Process.SPAWNED, Process.JOINED)
            late = (
                starting
                and max(seat.spawned, self._job.led) + self._job.policy.join <= self._job.now
            )
            if late and self._job.state not in SETTLED and self._job.anyone_joined():
                seat.spawned = self._job.now
                self._course.doom(
                    seat, f"not ready {self._job.policy.join:.0f} s after its start", "process"
                )
        if (
            self._job.state is S.EXITING
            and self._job.deadline is not None
            and self._job.deadline <= self._job.now
        ):
            self._course.end()

    def _overdue(self, order: OrderName, ranks: list[int]) -> None:
        why = f"no answer to {order} in time"
        self._job.tell("order_overdue", order=order, ranks=ranks)
        match order:
            case "regroup" | "rebuild" | "resume":
                # one rank that does not come keeps all of them: who it is shows in the freeze
                self._course.again(f"ranks {ranks}: {why}")
            case "freeze" | "stop" | "load" | "fetch" | "rollback" | "save" | "commit":
                for rank in ranks:
                    self._course.doom(self._job.seats[rank], why, "hang")
            case "complete":
                for rank in ranks:
                    self._course.doom(self._job.seats[rank], why, "process")
            case "end":
                self._job.incident.tasks.pop(order)
            case _:
                assert_never(order)


def _how(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"left with code {code}"
