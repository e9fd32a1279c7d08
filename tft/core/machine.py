"""
The job machine: everything that decides what a job does about its faults lives in this file and
in the pure modules it names. It is told what happened and answers with what is to be done.

    handle(event) -> commands     the one door; a late, doubled or foreign report is absorbed
    outstanding() -> orders       what has not been answered yet, to be said again
    next_deadline()               when it wants to be told that time has passed
    check()                       invariants; a broken one is our bug

A move that is not in `TRANSITIONS` is our bug too. `docs/machine.md` tells the same as a story.
"""

from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from typing import assert_never

from tft.core import planner
from tft.core.commands import Command, JobOver, Tell
from tft.core.events import DeadlinePassed, Event, Led, Received, Stalled
from tft.core.incident import PHASES, Fault, Incident, Phase, Task
from tft.core.policy import STRATEGIES, Policy
from tft.core.seats import Process, Seat
from tft.errors import InternalError
from tft.protocol.messages import (
    Answered,
    Commit,
    Complete,
    End,
    EndNode,
    Exited,
    Faulted,
    FaultKind,
    Fetch,
    Finished,
    Freeze,
    Joined,
    Kill,
    Load,
    NodeJoined,
    NodeLost,
    Order,
    OrderName,
    Position,
    RankOrder,
    Ready,
    Rebuild,
    Refused,
    Regroup,
    Report,
    Resume,
    Rollback,
    Save,
    SavedFile,
    Spawn,
    Spawned,
    Stop,
    StopRequested,
    StoreOpened,
    Trained,
)


class State(StrEnum):
    """
    What the job as a whole is doing.
    """

    AWAITING = "awaiting"
    """Processes are starting; everyone else is parked."""
    REPAIRING = "repairing"
    """Lost state is being copied, groups are being formed."""
    REBUILDING = "rebuilding"
    """Wrappers are being built round the repaired state."""
    ROLLING_BACK = "rolling back"
    """RNG and data positions are being set to the agreed step."""
    RESUMING = "resuming"
    """Training again; success is announced after one more step of every rank."""
    HEALTHY = "healthy"
    FREEZING = "freezing"
    """Every rank is asked where it stands, and held back from its next update."""
    CLEARING = "clearing"
    """The training threads leave the loop and drop the broken groups."""
    DUMPING = "dumping"
    """The survivors write a last checkpoint."""
    EXITING = "exiting"
    """The ranks are leaving."""
    ENDED = "ended"


S = State
TRANSITIONS: dict[State, frozenset[State]] = {
    S.AWAITING: frozenset({S.AWAITING, S.REPAIRING, S.FREEZING, S.DUMPING, S.EXITING}),
    S.REPAIRING: frozenset({S.REBUILDING, S.FREEZING, S.EXITING}),
    S.REBUILDING: frozenset({S.ROLLING_BACK, S.FREEZING, S.EXITING}),
    S.ROLLING_BACK: frozenset({S.RESUMING, S.FREEZING, S.EXITING}),
    S.RESUMING: frozenset({S.HEALTHY, S.FREEZING, S.EXITING}),
    S.HEALTHY: frozenset({S.FREEZING, S.EXITING}),
    S.FREEZING: frozenset({S.CLEARING, S.FREEZING, S.EXITING}),
    S.CLEARING: frozenset({S.AWAITING, S.FREEZING, S.DUMPING, S.EXITING}),
    S.DUMPING: frozenset({S.DUMPING, S.EXITING}),
    S.EXITING: frozenset({S.ENDED}),
    S.ENDED: frozenset(),
}
"""From each state, where it may go. A fault in any state before DUMPING leads to FREEZING again."""

PARKED = frozenset({S.AWAITING, S.DUMPING})
"""Nobody is in the loop or forming a group: a further loss changes the plan, not the others."""
SETTLED = frozenset({S.EXITING, S.ENDED})
"""The outcome is decided."""
RUNNING = frozenset({Process.SPAWNED, Process.JOINED, Process.READY})


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
        self.policy = policy
        self.state = State.AWAITING
        self.epoch = 0
        self.seats = {rank: Seat(rank=rank) for rank in range(world)}
        self.incident = Incident(number=0, opened=at, strategy="start")
        self.incidents: list[Incident] = []
        self.outcome: JobOver | None = None
        self.last_step = 0 if resume is None else resume[1]
        self._job = job
        self._checkpoints = checkpoints
        self._resume = resume
        self._loaded = False
        self._virgin = True  # no rank has built its wrapper yet: every fresh state is as good
        self._next_number = first_incident
        self._store: tuple[str, int] | None = None
        self._nodes: dict[int, tuple[int, ...]] = {}
        self._lost_nodes: set[int] = set()
        self._orphans: dict[int, list[Order]] = {}  # Spawn and Kill, by rank, until answered
        self._ending: list[Order] = []
        self._stop: StopRequested | None = None
        self._saved: dict[str, SavedFile] = {}
        self._trained: set[int] = set()
        self._deadline: float | None = None  # of EXITING
        self._now = at
        self._said: list[Command] = []

    # ---------------------------------------------------------------- the door

    def handle(self, event: Event) -> list[Command]:
        """
        Takes what happened; returns what is to be done, each order for the first time.
        """
        self._said = []
        self._now = event.at
        match event:
            case Received():
                self._received(event.message)
            case DeadlinePassed():
                self._expire()
            case Stalled():
                self._stalled(event)
            case Led():
                self.epoch = event.epoch
            case _:
                assert_never(event)
        while self._advance():
            pass
        return self._said

    def outstanding(self) -> list[Order]:
        """
        Every order that has not been answered, narrowed to those who owe the answer.
        """
        orders: list[Order] = [o for parts in self._orphans.values() for o in parts]
        for task in self.incident.tasks.values():
            for order in task.orders:
                to = tuple(rank for rank in order.to if rank in task.waiting)
                if to:
                    orders.append(replace(order, to=to))
        return [replace(order, epoch=self.epoch) for order in (*orders, *self._ending)]

    def next_deadline(self) -> float | None:
        """
        When `DeadlinePassed` is due, or None.
        """
        moments = [t.deadline for t in self.incident.tasks.values() if t.waiting]
        if self.state not in SETTLED:
            moments += [
                seat.spawned + self.policy.join
                for seat in self.seats.values()
                if seat.process in (Process.ORDERED, Process.SPAWNED, Process.JOINED)
            ]
        if self._deadline is not None and self.state is S.EXITING:
            moments.append(self._deadline)
        return min(moments, default=None)

    def check(self) -> None:
        """
        Raises `InternalError` when a promise is broken.
        """
        training = [s.rank for s in self.seats.values() if s.training]
        if self.state in (S.REPAIRING, S.REBUILDING, S.ROLLING_BACK, S.DUMPING) and training:
            raise InternalError(f"ranks {training} train while the job is {self.state}")
        if self.state is S.HEALTHY and self.incident.tasks:
            raise InternalError("the job is healthy with orders unanswered")
        if self.state is S.ENDED and self.outcome is None:
            raise InternalError("the job has ended without an outcome")

    # ---------------------------------------------------------------- reports

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
                seat = self.seats.get(message.rank)
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
                seat.held = 0 if self._virgin and self._resume is None else None
            case Faulted():
                self._faulted(seat, message)
            case Answered():
                self._answered(seat, message)
            case Trained():
                seat.position = Position(step=message.step, window=False)
                self.last_step = max(self.last_step, message.step)
                if self.state is S.RESUMING:
                    self._phase("resume", seat.rank, self._issued("resume"), message.at)
                    self._trained.add(seat.rank)
            case Finished():
                seat.finished = True
                seat.training = False
                seat.position = Position(step=message.step, window=False)
                seat.held = message.step
                self.last_step = max(self.last_step, message.step)
                self._trained.add(seat.rank)
            case _:
                assert_never(message)

    def _node_joined(self, message: NodeJoined) -> None:
        if message.node in self._nodes:
            return
        self._nodes[message.node] = message.ranks
        for rank in message.ranks:
            if rank in self.seats:
                self.seats[rank].node = message.node
                self._spawn(self.seats[rank], "the job starts")

    def _spawned(self, message: Spawned) -> None:
        seat = self.seats[message.rank]
        if seat.incarnation == message.incarnation and seat.process is Process.ORDERED:
            seat.process = Process.SPAWNED
            seat.pid = message.pid
            seat.spawned = message.at
            self._forget(message.rank, Spawn)

    def _joined(self, message: Joined) -> None:
        seat = self.seats.get(message.rank)
        if seat is None or message.world != len(self.seats):
            return self._refuse(
                message,
                f"rank {message.rank} of {message.world} has no place in a job of "
                f"{len(self.seats)} ranks",
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
        self._forget(message.rank, Spawn)
        seat.join(message)
        if self.incident.number or self.incident.faults:
            self._phase("await", seat.rank, seat.spawned, message.at)
        return None

    def _refuse(self, message: Joined, why: str) -> None:
        self._say(
            Refused(
                epoch=self.epoch,
                rank=message.rank,
                pid=message.pid,
                started=message.started,
                why=why,
            )
        )
        self._tell("claim_refused", rank=message.rank, pid=message.pid, why=why)

    def _store_opened(self, message: StoreOpened) -> None:
        replaced = self._store is not None
        self._store = (message.host, message.port)
        if replaced and not self._answered_all("regroup"):
            self._tell("store_replaced", port=message.port)
            self._again("the rendezvous store was lost while groups were formed")

    def _stop_requested(self, message: StopRequested) -> None:
        if self._stop is not None or self.state in SETTLED:
            return
        self._stop = message
        if not any(seat.ready for seat in self.seats.values()):
            return self._exit("cancelled", 128 + message.signal, message.why)
        self._force(message.why)
        return None

    # ---------------------------------------------------------------- faults

    def _faulted(self, seat: Seat, message: Faulted) -> None:
        seat.training = False
        seat.position = message.position
        seat.trusted = seat.trusted and message.kind not in ("memory", "numeric")
        if self.state in SETTLED:
            return
        symptom = message.kind == "network" and self.state in (S.FREEZING, S.CLEARING)
        if symptom or self._known(message):
            return
        self._tell(
            "rank_faulted",
            rank=seat.rank,
            kind=message.kind,
            step=message.step,
            summary=message.summary,
            traceback=message.traceback,
        )
        evidence = message.traceback or message.summary
        self._fault(message.kind, seat.rank, message.step, message.at, evidence)
        if message.kind == "software":
            self._force(f"a user's own bug is not retried: {message.summary}")

    def _known(self, message: Faulted) -> bool:
        """
        The same exception on all ranks is one fault.
        """
        return message.kind == "software" and any(
            fault.kind == "software"
            and fault.step == message.step
            and message.traceback.splitlines()[-1:] == fault.evidence.splitlines()[-1:]
            for fault in self.incident.faults
        )

    def _exited(self, message: Exited) -> None:
        seat = self.seats[message.rank]
        if seat.incarnation != message.incarnation or seat.process is Process.GONE:
            return None
        was = seat.process
        self._forget(message.rank, Spawn, Kill)
        seat.process = Process.GONE
        seat.training = False
        seat.held = None
        seat.position = message.position
        if message.private:
            seat.private = message.private
        if self.state in SETTLED:
            return self._left_late(seat, message)
        if self._left_in_peace(seat, message, was):
            return None
        self._tell("rank_gone", rank=seat.rank, code=message.code, incarnation=seat.incarnation)
        evidence = message.stack or seat.doomed or _how(message.code)
        if seat.blame == "hang" and message.stopped:
            evidence = f"the process was stopped (SIGSTOP)\n{evidence}"
        step = message.position.step + 1
        if self._blamed(seat):
            self._update_evidence(seat, evidence)
        elif was is not Process.READY and message.code >= 0:
            self._fault("software", seat.rank, step, message.at, evidence)
            self._force(
                f"rank {seat.rank} left with code {message.code} before it took any order: "
                "its log says why"
            )
        elif message.code == 0:
            self._fault("software", seat.rank, step, message.at, evidence)
            self._force(f"rank {seat.rank} left with code 0 before all ranks had finished")
        else:
            self._fault("process", seat.rank, step, message.at, evidence)
        self._lost(seat)
        return None

    def _left_late(self, seat: Seat, message: Exited) -> None:
        """
        What a script does after `Session.run` is its own; that it failed is still told.
        """
        if self.outcome is not None and self.outcome.result == "completed" and message.code:
            why = f"all steps are done, but then rank {seat.rank} {_how(message.code)}"
            self.outcome = JobOver(result="failed", code=4, why=why)

    def _left_in_peace(self, seat: Seat, message: Exited, was: Process) -> bool:
        """
        A script that never calls `tft.init` ends as its ranks end.
        """
        if was not in (Process.ORDERED, Process.SPAWNED) or self._anyone_joined():
            return False
        if message.code:
            self._exit(
                "failed",
                4,
                f"rank {seat.rank} {_how(message.code)} and no rank has called tft.init",
            )
        elif all(s.process is Process.GONE for s in self.seats.values()):
            self._exit("completed", 0, "every rank has ended")
        return True

    def _anyone_joined(self) -> bool:
        return any(s.process in (Process.JOINED, Process.READY) for s in self.seats.values())

    def _node_lost(self, message: NodeLost) -> None:
        if message.node in self._lost_nodes or self.state in SETTLED:
            return
        self._lost_nodes.add(message.node)
        for rank in self._nodes.get(message.node, ()):
            seat = self.seats[rank]
            if seat.process is Process.GONE:
                continue
            seat.process = Process.GONE
            seat.training = False
            seat.held = None
            self._forget(rank, Spawn, Kill)
            self._fault("node", rank, seat.position.step + 1, message.at, message.why)
            self._lost(seat)
        if not self._nodes:
            self._exit("failed", 4, message.why)

    def _stalled(self, event: Stalled) -> None:
        if self.state not in (S.HEALTHY, S.RESUMING):
            return
        self._open()
        self.incident.suspicion = (
            f"no rank has moved for {event.silence:.1f} s; the job's own step times allow "
            f"{event.limit:.1f} s"
        )
        self._tell("stalled", silence=event.silence, limit=event.limit)
        self._freeze()

    def _fault(
        self, kind: FaultKind, rank: int | None, step: int, seen: float, evidence: str
    ) -> None:
        """
        A new fault opens an incident or joins the one that is open.
        """
        self._open()
        incident = self.incident
        again = any((f.kind, f.rank, f.step) == (kind, rank, step) for f in incident.faults)
        if again and self.state is S.RESUMING and kind not in ("process", "node", "hang"):
            incident.failed[incident.strategy] = f"the {kind} fault at step {step} came back"
        incident.faults.append(Fault(kind=kind, rank=rank, step=step, seen=seen, evidence=evidence))
        if self.state not in (S.FREEZING, S.CLEARING, *PARKED):
            incident.attempts = 0
            self._freeze()

    def _force(self, why: str) -> None:
        """
        Nothing but a last checkpoint comes into question from here on.
        """
        if self.state is S.DUMPING:
            return
        self._open()
        self.incident.forced = self.incident.forced or why
        if self.state not in (S.FREEZING, S.CLEARING, S.AWAITING):
            self._freeze()
        elif self.state is S.AWAITING:
            self._choose()

    def _open(self) -> None:
        if self.state is S.HEALTHY:
            self.incident = Incident(number=self._next_number, opened=self._now)
        elif self.incident.number == 0:  # the start itself has become an incident
            self.incident.number, self.incident.opened = self._next_number, self._now
        else:
            return
        self._next_number += 1
        self.incident.processes = {
            s.rank: (s.pid, s.started) for s in self.seats.values() if s.ready
        }
        if self.incident.number > self.policy.max_incidents:
            self.incident.forced = (
                f"the job has had {self.policy.max_incidents} incidents, which is its limit"
            )

    def _lost(self, seat: Seat) -> None:
        """
        A rank without a process: it answers nothing more, and another process is started.
        """
        self.incident.saw(seat.position)
        for task in self.incident.tasks.values():
            task.waiting.discard(seat.rank)
        if self._why_not_respawn(seat) is None:
            self.incident.respawns[seat.rank] = self.incident.respawns.get(seat.rank, 0) + 1
            self._spawn(seat, f"rank {seat.rank} has lost its process")
        if self.state is S.AWAITING:
            self._choose()
        elif self.state is S.DUMPING:
            self._dump()

    def _why_not_respawn(self, seat: Seat) -> str | None:
        if self.incident.forced:
            return self.incident.forced
        if "recover" not in self.policy.enable:
            return "recover is not enabled"
        if seat.node in self._lost_nodes:
            return f"node {seat.node} is gone, and its ranks have no other place"
        if self.incident.respawns.get(seat.rank, 0) >= self.policy.respawns:
            return f"rank {seat.rank} has died {self.policy.respawns + 1} times in this incident"
        if self.state is S.DUMPING:
            return "a last checkpoint is being written"
        return None

    def _blamed(self, seat: Seat) -> bool:
        return any(
            fault.rank == seat.rank and fault.kind == seat.blame for fault in self.incident.faults
        )

    def _update_evidence(self, seat: Seat, evidence: str) -> None:
        self.incident.faults = [
            replace(fault, evidence=f"{fault.evidence}\n{evidence}")
            if (fault.rank, fault.kind) == (seat.rank, seat.blame)
            else fault
            for fault in self.incident.faults
        ]

    # ---------------------------------------------------------------- answers and limits

    def _answered(self, seat: Seat, message: Answered) -> None:
        task = self.incident.tasks.get(message.order)
        key = (message.incident, message.round)
        if task is None or key != (self.incident.number, self.incident.round):
            return
        if seat.rank not in task.waiting:
            return
        seat.position, seat.held = message.position, message.held
        self._phase(PHASES.get(message.order, message.order), seat.rank, message.began, message.at)
        if message.failure is not None:
            return self._failed(seat, message.order, message.failure)
        task.waiting.discard(seat.rank)
        match message.order:
            case "freeze":
                self._found(seat, waiting=message.waiting)
            case "stop":
                seat.training = False
            case "save":
                self._saved |= {file.name: file for file in message.files}
            case "resume":
                seat.training = True
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
        if self.incident.suspicion and seat.training and not waiting:
            seat.blame = "hang"

    def _failed(self, seat: Seat, order: OrderName, why: str) -> None:
        self._tell("order_failed", rank=seat.rank, order=order, why=why)
        match order:
            case "freeze" | "stop":
                self._doom(seat, f"could not {order}: {why}", "process")
            case "load":
                self._exit("failed", 4, f"rank {seat.rank} could not load the checkpoint: {why}")
            case "save" | "commit":
                seat.held = None  # its copy cannot be written: another holder has to
                self._dump()
            case "fetch" | "regroup" | "rebuild" | "rollback" | "resume":
                self._again(f"rank {seat.rank} could not {order}: {why}")
            case "complete" | "end":
                pass
            case _:
                assert_never(order)

    def _again(self, why: str) -> None:
        """
        A strategy is begun anew, a few times; then it has failed.
        """
        self.incident.attempts += 1
        if self.incident.attempts >= self.policy.attempts:
            self.incident.failed[self.incident.strategy] = why
            self.incident.attempts = 0
        self._freeze()

    def _expire(self) -> None:
        for name, task in list(self.incident.tasks.items()):
            if task.waiting and task.deadline <= self._now:
                self._overdue(name, sorted(task.waiting))
                return
        for seat in self.seats.values():
            starting = seat.process in (Process.ORDERED, Process.SPAWNED, Process.JOINED)
            late = starting and seat.spawned + self.policy.join <= self._now
            if late and self.state not in SETTLED and self._anyone_joined():
                seat.spawned = self._now
                self._doom(seat, f"not ready {self.policy.join:.0f} s after its start", "process")
        if self.state is S.EXITING and self._deadline is not None and self._deadline <= self._now:
            self._end()

    def _overdue(self, order: OrderName, ranks: list[int]) -> None:
        why = f"no answer to {order} in time"
        self._tell("order_overdue", order=order, ranks=ranks)
        match order:
            case "regroup" | "rebuild" | "resume":
                # one rank that does not come keeps all of them: who it is shows in the freeze
                self._again(f"ranks {ranks}: {why}")
            case "freeze" | "stop" | "load" | "fetch" | "rollback" | "save" | "commit":
                for rank in ranks:
                    self._doom(self.seats[rank], why, "hang")
            case "complete" | "end":
                self.incident.tasks.pop(order)
            case _:
                assert_never(order)

    def _doom(self, seat: Seat, why: str, blame: FaultKind) -> None:
        """
        The process of a rank is to be ended; its end will come in as `Exited`.
        """
        if seat.doomed or seat.node is None:
            return
        seat.doomed, seat.blame = why, blame
        for task in self.incident.tasks.values():
            task.waiting.discard(seat.rank)
        if blame == "hang":
            evidence = self.incident.suspicion or why
            step = seat.position.step + 1
            self._fault("hang", seat.rank, step, self._now, evidence)
        self._orphan(
            Kill(
                epoch=self.epoch,
                node=seat.node,
                rank=seat.rank,
                incarnation=seat.incarnation,
                last_words=blame == "hang",
                cause=why,
            )
        )

    # ---------------------------------------------------------------- the way through an incident

    def _advance(self) -> bool:
        """
        One move, if everything it needs is there.
        """
        tasks = self.incident.tasks
        match self.state:
            case S.AWAITING if self._everyone(lambda s: s.ready) and self._store is not None:
                return self._repair()
            case S.FREEZING if self._answered_all("freeze"):
                return self._after_freeze()
            case S.CLEARING if self._answered_all("stop"):
                return self._choose()
            case S.REPAIRING if not any(task.waiting for task in tasks.values()):
                return self._step_to(S.REBUILDING, self._all(Rebuild), self.policy.repair)
            case S.REBUILDING if self._answered_all("rebuild"):
                self._virgin = False
                return self._roll_back()
            case S.ROLLING_BACK if self._answered_all("rollback"):
                return self._resume_training()
            case S.RESUMING if self._answered_all("resume") and self._success():
                self._close()
                return True
            case S.HEALTHY if self._everyone(lambda s: s.finished):
                return self._complete()
            case S.DUMPING if self._answered_all("save") and "commit" not in tasks:
                return self._commit()
            case S.DUMPING if "commit" in tasks and self._answered_all("commit"):
                return self._dumped()
            case S.EXITING if self._everyone(lambda s: s.process not in RUNNING):
                self._end()
                return True
            case _:
                return False

    def _freeze(self) -> None:
        """
        A new round: whatever was under way is given up, and everyone says where they stand.
        """
        self.incident.round += 1
        self.incident.tasks = {}
        self.incident.strategy = ""
        self._trained = set()
        self._move(S.FREEZING)
        to = tuple(s.rank for s in self.seats.values() if s.ready and not s.doomed)
        causes = [f"{f.kind} at rank {f.rank}" for f in self.incident.roots()]
        cause = ", ".join(causes) or self.incident.suspicion or self.incident.forced
        limit = self.policy.freeze
        if to:
            self._issue(Freeze(**self._key(), to=to, cause=cause), limit=limit)

    def _after_freeze(self) -> bool:
        suspects = [s for s in self.seats.values() if s.blame == "hang" and not s.doomed]
        ready = [s for s in self.seats.values() if s.ready and not s.doomed]
        if self.incident.suspicion and suspects and len(suspects) < len(ready):
            for seat in suspects:
                self._doom(seat, "it hangs while the others wait for it", "hang")
        for seat in suspects:
            seat.blame = seat.blame if seat.doomed else ""
        if self._dying():
            return False
        for seat in self.seats.values():
            self.incident.saw(seat.position)
        # Whoever has begun this update had all its sums complete: so has everyone else, or will.
        finish = self.incident.reached
        if self.incident.suspicion and not self.incident.faults:
            self._fault("network", None, finish + 1, self._now, self.incident.suspicion)
        self._move(S.CLEARING)
        to = tuple(s.rank for s in self.seats.values() if s.ready)
        if to:
            grace = self.policy.grace
            stop = Stop(**self._key(), to=to, finish=finish, grace=grace)
            self._issue(stop, limit=self.policy.stop)
        return True

    def _choose(self) -> bool:
        """
        The first strategy that can work, and for each one before it the reason why it cannot.
        """
        if self._dying():
            return False
        self.incident.tried = []
        for strategy in STRATEGIES:
            why_not = self.incident.failed.get(strategy) or self._why_not(strategy)
            if why_not is None:
                return self._follow(strategy)
            self.incident.tried.append((strategy, why_not))
        reasons = "; ".join(f"{name}: {why}" for name, why in self.incident.tried)
        self.incident.strategy = "exit"
        self._exit("failed", 4, f"nothing is left to be done ({reasons})")
        return True

    def _why_not(self, strategy: str) -> str | None:
        unable = [s.rank for s in self.seats.values() if s.ready and strategy not in s.strategies]
        lost = [s for s in self.seats.values() if s.process is Process.GONE]
        agreed = self._agreed()
        if strategy not in self.policy.enable:
            return f"{strategy} is not enabled"
        if unable:
            return f"the adaptor of ranks {unable} cannot take part"
        if strategy == "dump":
            return self._why_no_dump(agreed)
        if self.incident.forced:
            return self.incident.forced
        if strategy == "retry" and (self.incident.respawns or lost):
            ranks = sorted({*self.incident.respawns, *(s.rank for s in lost)})
            return f"ranks {ranks} have lost their process"
        if lost:
            return self._why_not_respawn(lost[0])
        if isinstance(agreed, str) and not self._fresh():
            return agreed
        if strategy == "recover" and not self.incident.respawns and not self._replaceable():
            return "no rank can be named whose process should be replaced"
        return None

    def _why_no_dump(self, agreed: int | str) -> str | None:
        if isinstance(agreed, str):
            return agreed
        if self._virgin:
            return "no step has been trained yet"
        return None

    def _fresh(self) -> bool:
        """
        Nothing has been trained or loaded: every rank's own initial state will do.
        """
        return self._virgin and (self._resume is None or not self._loaded)

    def _replaceable(self) -> list[Seat]:
        return [self.seats[r] for r in self.incident.faulty() if self.seats[r].ready]

    def _follow(self, strategy: str) -> bool:
        self.incident.strategy = strategy
        self._tell("strategy_chosen", incident=self.incident.number, strategy=strategy)
        if strategy == "dump":
            self._dump()
            return True
        self._move(S.AWAITING)
        if strategy == "recover" and not self.incident.respawns:
            for seat in self._replaceable():
                self._doom(seat, "a retry did not help", "process")
        return True

    def _dying(self) -> bool:
        """
        Someone was told to be ended and its end has not come in: what it left is not known.
        """
        return any(s.doomed and s.process is not Process.GONE for s in self.seats.values())

    def _agreed(self) -> int | str:
        return planner.agreed_step(self._groups(), self._holders())

    def _repair(self) -> bool:
        """
        Everyone is there: form the groups, and copy what has to be copied.
        """
        if self._dying():
            return False
        if self.incident.strategy == "":
            return self._choose()
        step = self._agreed()
        if self._fresh():
            step = 0 if self._resume is None else self._resume[1]
        if isinstance(step, str):
            return self._choose()
        self.incident.step = step + 1
        self._move(S.REPAIRING)
        self.incident.tasks = {}
        host, port = self._store or ("", 0)
        name = f"{self._job}/{self.incident.number}.{self.incident.round}"
        regroup = Regroup(**self._key(), to=tuple(self.seats), name=name, host=host, port=port)
        self._issue(regroup, limit=self.policy.regroup)
        if self._fresh() and self._resume is not None:
            directory = self._resume[0]
            load = Load(**self._key(), to=tuple(self.seats), directory=directory, step=step)
            self._issue(load, limit=self.policy.repair)
        elif not self._fresh():
            parts = planner.transfers(self._groups(), self._holders(), step)
            fetches = [
                Fetch(**self._key(), to=(rank,), step=step, transfers=transfers)
                for rank, transfers in parts.items()
            ]
            if fetches:
                self._issue(*fetches, limit=self.policy.repair)
        return True

    def _roll_back(self) -> bool:
        self._loaded = True
        step = (self.incident.step or 1) - 1
        return self._step_to(S.ROLLING_BACK, self._all(Rollback, step=step), self.policy.repair)

    def _resume_training(self) -> bool:
        self._trained = set()
        for seat in self.seats.values():
            seat.finished = False
        step = self.incident.step or 1
        return self._step_to(S.RESUMING, self._all(Resume, step=step), self.policy.regroup)

    def _success(self) -> bool:
        return self._trained == set(self.seats)

    def _close(self) -> None:
        self.incident.tasks = {}
        for seat in self.seats.values():
            began = self.incident.processes.get(seat.rank)
            if began is not None:
                self.incident.kept[seat.rank] = began == (seat.pid, seat.started)
        ends = [phase.end for phase in self.incident.phases if phase.name == "resume"]
        self.incident.closed = max(ends, default=self._now)
        self._move(S.HEALTHY)
        if self.incident.number or self.incident.faults:
            self.incidents.append(self.incident)
            self._tell(
                "incident_closed",
                incident=self.incident.number,
                strategy=self.incident.strategy,
                step=self.incident.step,
                seconds=self.incident.closed - self.incident.opened,
            )

    # ---------------------------------------------------------------- the last checkpoint, the end

    def _dump(self) -> None:
        agreed = self._agreed()
        self.incident.tasks = {}
        if isinstance(agreed, str):
            self.incident.tried.append(("dump", agreed))
            self.incident.strategy = "exit"
            return self._exit("failed", 4, f"no last checkpoint can be written: {agreed}")
        if self.state is S.DUMPING:
            self.incident.round += 1
        self._move(S.DUMPING)
        self._saved = {}
        self.incident.step = agreed + 1
        shards = planner.savers(self._groups(), self._holders(), agreed)
        writers = [s.rank for s in self.seats.values() if s.ready and s.held is not None]
        orphans = {
            s.rank: s.private[agreed]
            for s in self.seats.values()
            if s.rank not in writers and agreed in s.private
        }
        saves = [
            Save(
                **self._key(),
                to=(rank,),
                directory=self._directory(agreed),
                step=agreed,
                shards=shards.get(rank, ()),
                private=orphans if rank == writers[0] else {},
            )
            for rank in writers
        ]
        self._issue(*saves, limit=self.policy.save)
        return None

    def _directory(self, step: int) -> str:
        return f"{self._checkpoints}/step-{step:08d}"

    def _commit(self) -> bool:
        step = (self.incident.step or 1) - 1
        committer = min(s.rank for s in self.seats.values() if s.ready and s.held is not None)
        commit = Commit(
            **self._key(),
            to=(committer,),
            directory=self._directory(step),
            step=step,
            files=tuple(self._saved[name] for name in sorted(self._saved)),
        )
        self._issue(commit, limit=self.policy.save)
        return True

    def _dumped(self) -> bool:
        step = (self.incident.step or 1) - 1
        self.last_step = step
        if self._stop is not None:
            self._exit("cancelled", 128 + self._stop.signal, self._stop.why)
        else:
            why = self.incident.forced or "the job cannot go on"
            self._exit("dumped", 3, f"{why}; a last checkpoint of step {step} is written")
        return True

    def _complete(self) -> bool:
        self._exit("completed", 0, "every rank has finished")
        return True

    def _exit(self, result: str, code: int, why: str) -> None:
        """
        The outcome is decided; the ranks leave.
        """
        if self.state in SETTLED:
            return
        if self._stop is not None and result == "failed":
            result, code = "cancelled", 128 + self._stop.signal
        if self.state is not S.HEALTHY and self.incident not in self.incidents:
            opened = self.incident.number or self.incident.faults
            self.incident.strategy = self.incident.strategy or "exit"
            self.incident.closed = self._now
            if opened:
                self.incidents.append(self.incident)
        self._move(S.EXITING)
        self.outcome = JobOver(result=result, code=code, why=why)
        self._tell("job_ends", result=result, code=code, why=why)
        self.incident.tasks = {}
        self._orphans = {}
        there = (Process.JOINED, Process.READY)
        to = tuple(s.rank for s in self.seats.values() if s.process in there)
        finished = result == "completed"
        if to and finished:
            self._issue(Complete(**self._key(), to=to), limit=self.policy.join)
        elif to:
            self._issue(End(**self._key(), to=to, code=code, why=why), limit=self.policy.leave)
        if not finished:
            self._deadline = self._now + 3 * self.policy.leave
            self._ending = [EndNode(epoch=self.epoch, grace=self.policy.leave, why=why)]
            self._said.extend(self._ending)

    def _end(self) -> None:
        self.incident.tasks = {}
        if self.outcome is None:
            raise InternalError("the ranks have left before the outcome was decided")
        self._move(S.ENDED)
        end = EndNode(epoch=self.epoch, grace=self.policy.leave, why=self.outcome.why)
        self._ending = [end]
        self._said.extend([end, self.outcome])

    # ---------------------------------------------------------------- small parts

    def _move(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise InternalError(f"no way leads from {self.state} to {state}")
        self.state = state

    def _step_to(self, state: State, order: RankOrder, limit: float) -> bool:
        self._move(state)
        self.incident.tasks = {}
        self._issue(order, limit=limit)
        return True

    def _all(self, order: Callable[..., RankOrder], **facts: int) -> RankOrder:
        return order(**self._key(), to=tuple(self.seats), **facts)

    def _key(self) -> dict[str, int]:
        return {
            "epoch": self.epoch,
            "incident": self.incident.number,
            "round": self.incident.round,
        }

    def _issue(self, *orders: RankOrder, limit: float) -> None:
        waiting = {rank for order in orders for rank in order.to}
        self.incident.tasks[_name(orders[0])] = Task(
            orders=orders, waiting=waiting, issued=self._now, deadline=self._now + limit
        )
        self._said.extend(orders)

    def _answered_all(self, order: OrderName) -> bool:
        task = self.incident.tasks.get(order)
        return task is None or not task.waiting

    def _issued(self, order: OrderName) -> float:
        task = self.incident.tasks.get(order)
        return self._now if task is None else task.issued

    def _spawn(self, seat: Seat, cause: str) -> None:
        if seat.node is None:
            return
        seat.order(self._now)
        if self.incident.number or self.incident.faults:
            self.incident.started += 1
        self._orphan(
            Spawn(
                epoch=self.epoch,
                node=seat.node,
                rank=seat.rank,
                incarnation=seat.incarnation,
                cause=cause,
            )
        )

    def _orphan(self, order: Spawn | Kill) -> None:
        self._orphans.setdefault(order.rank, []).append(order)
        self._said.append(order)

    def _forget(self, rank: int, *kinds: type) -> None:
        self._orphans[rank] = [o for o in self._orphans.get(rank, []) if not isinstance(o, kinds)]

    def _everyone(self, holds: Callable[[Seat], bool]) -> bool:
        return all(holds(seat) for seat in self.seats.values())

    def _groups(self) -> dict[str, tuple[int, ...]]:
        return {shard: ranks for s in self.seats.values() for shard, ranks in s.shards.items()}

    def _holders(self) -> dict[int, planner.Holder]:
        return {s.rank: s.holder() for s in self.seats.values() if s.ready and not s.doomed}

    def _phase(self, name: str, rank: int | None, start: float, end: float) -> None:
        self.incident.phases.append(Phase(name=name, rank=rank, start=start, end=end))

    def _say(self, order: Order) -> None:
        self._said.append(order)

    def _tell(self, event: str, **facts: object) -> None:
        self._said.append(Tell(event=event, facts=facts))


def _name(order: RankOrder) -> OrderName:
    names: dict[type, OrderName] = {
        Freeze: "freeze", Stop: "stop", Load: "load", Fetch: "fetch", Regroup: "regroup",
        Rebuild: "rebuild", Rollback: "rollback", Resume: "resume", Save: "save",
        Commit: "commit", Complete: "complete", End: "end",
    }  # fmt: skip
    return names[type(order)]


def _how(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"left with code {code}"
