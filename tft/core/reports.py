"""
Takes in what ranks, agents, people and plugins report: keeps what it says, and hands on what
follows from it.
"""

from dataclasses import replace
from typing import assert_never

from tft.core.commands import JobOver
from tft.core.course import Course
from tft.core.incident import PHASES
from tft.core.job import Job
from tft.core.seats import STARTING, Process, Seat
from tft.core.table import SETTLED, Reaction, State
from tft.protocol.messages import (
    Advised,
    Answered,
    Checkpointed,
    Exited,
    Faulted,
    FaultKind,
    Finished,
    Joined,
    Kill,
    NodeJoined,
    NodeLost,
    Noticed,
    OrderName,
    PauseRequested,
    Position,
    Ready,
    Refused,
    Report,
    ResumeRequested,
    Spawn,
    Spawned,
    StopRequested,
    StoreOpened,
    Trained,
)

S = State
R = Reaction


class Reports:
    """
    The ears of one job's machine.
    """

    def __init__(self, job: Job, course: Course) -> None:
        self._job = job
        self._course = course
        self._rounds = course.rounds

    def take(self, message: Report, reaction: Reaction, sender: str) -> None:
        """
        Keeps what a report says. `reaction` is what the table says it leads to. A rank is spoken
        for by the process whose claim was accepted: what another one says of it is absorbed.
        """
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
                self._stop_requested(message, reaction)
            case PauseRequested():
                self._pause_requested(message, reaction)
            case ResumeRequested():
                self._resume_requested(reaction)
            case Noticed():
                self._noticed(message)
            case Advised():
                self._course.choice.advised(message)
            case Joined():
                self._joined(message, sender)
            case Ready() | Faulted() | Answered() | Trained() | Finished() | Checkpointed():
                seat = self._job.find(message.rank, message.incarnation)
                if seat is not None and seat.process is not Process.GONE and seat.sender == sender:
                    self._from_seat(seat, message)
            case _:
                assert_never(message)

    def _from_seat(
        self, seat: Seat, message: Ready | Faulted | Answered | Trained | Finished | Checkpointed
    ) -> None:
        match message:
            case Ready():
                self._ready(seat, message)
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
                self._job.finished.add(seat.rank)
                seat.training = False
                seat.position = Position(step=message.step, window=False)
                seat.held = message.step
                self._job.last_step = max(self._job.last_step, message.step)
                self._job.trained.add(seat.rank)
            case Checkpointed():
                self._job.checkpoints[message.step] = message.directory
            case _:
                assert_never(message)

    # ---------------------------------------------------------------- nodes

    def _node_joined(self, message: NodeJoined) -> None:
        job = self._job
        known = message.node in job.nodes and message.node not in job.lost_nodes
        agent = (message.host, message.pid)
        if message.node in job.isolated or (known and agent == job.agents[message.node]):
            return
        if known:  # what ran there has gone with the agent before this one
            why = f"another agent has come up on node {message.node}"
            self._node_lost(NodeLost(node=message.node, why=why, at=message.at))
        if job.state in SETTLED:
            return  # nothing is started any more
        job.agents[message.node] = agent
        for rank in message.ranks:
            job.node_orders[rank] = [
                order for order in job.node_orders.get(rank, []) if order.node != message.node
            ]  # of processes that are gone with the agent that had them
        job.nodes[message.node] = message.ranks
        job.lost_nodes.discard(message.node)
        for rank in message.ranks:
            seat = job.seats.get(rank)
            if seat is not None and seat.process is Process.ABSENT:
                seat.node = message.node
                job.placed()
                job.spawn(seat, message.node, "the job starts")
        settled = sum(
            seat.node == message.node for seat in (*job.seats.values(), *job.heirs.values())
        )
        job.room[message.node] = len(message.ranks) + message.spare - settled
        self._course.recall()

    def _node_lost(self, message: NodeLost) -> None:
        job = self._job
        agent = job.agents.get(message.node)
        if message.pid and agent is not None and agent[1] != message.pid:
            return None  # another one has come up since then
        job.lost_nodes.add(message.node)
        if message.node not in job.nodes and job.state is S.AWAITING and self._placeless():
            return self._course.ending.exit("failed", 4, message.why)
        for seat in [*job.seats.values(), *job.heirs.values(), *job.retiring]:
            if seat.node != message.node or seat.process in (Process.GONE, Process.ABSENT):
                continue
            job.forget(seat.rank, seat.incarnation, Spawn, Kill)
            matters = self._matters(seat) and job.state not in SETTLED
            if job.state not in SETTLED:  # silent is not dead: should it be heard again, it ends
                job.kill(seat, f"node {message.node} was given up", last_words=False)
            step = self._rounds.step_of(seat)
            self._gone(seat)
            if matters:
                self._rounds.fault("node", seat.rank, step, message.at, message.why)
                job.count(seat.rank)
                self._course.lost(seat)
        return None

    def _placeless(self) -> bool:
        """
        Some rank was never asked for: its node has not joined.
        """
        return any(seat.process is Process.ABSENT for seat in self._job.seats.values())

    def _gone(self, seat: Seat) -> None:
        job, process = self._job, (seat.rank, seat.incarnation)
        job.starting.pop(process, None)
        job.running.discard(process)
        if seat in job.condemned:
            job.condemned.remove(seat)
        if job.holds_seat(seat):
            job.finished.discard(seat.rank)
        seat.process = Process.GONE
        seat.training = False
        seat.held, seat.backups = None, ()
        if seat in job.retiring:
            job.retiring.remove(seat)
        elif not job.holds_seat(seat):
            del job.heirs[seat.rank]
        else:
            return
        if seat.node is not None:  # its place is free again
            job.room[seat.node] = job.room.get(seat.node, 0) + 1

    def _matters(self, seat: Seat) -> bool:
        """
        Its loss is the job's: it is no heir, and no rank outside.
        """
        return self._job.holds_seat(seat) and seat.rank in self._job.members

    def _store_opened(self, message: StoreOpened) -> None:
        job = self._job
        replaced = job.stores.pop(message.node, None) is not None
        job.stores[message.node] = (message.host, message.port)
        if job.state is S.AWAITING:
            job.deadline = None  # what was waited for may be this
        if replaced and not job.answered_all("regroup"):
            job.tell("store_replaced", port=message.port)
            self._rounds.again("the rendezvous store was lost while groups were formed")

    # ---------------------------------------------------------------- processes

    def _spawned(self, message: Spawned) -> None:
        seat = self._job.find(message.rank, message.incarnation)
        if seat is not None and seat.process is Process.ORDERED:
            seat.process = Process.SPAWNED
            seat.pid = message.pid
            self._job.starts(seat)
            seat.began = message.at
            self._job.running.add((seat.rank, seat.incarnation))
            self._job.forget(message.rank, message.incarnation, Spawn)

    def _joined(self, message: Joined, sender: str) -> None:
        job = self._job
        if message.rank not in job.seats or message.world != len(job.seats):
            return self._refuse(
                message,
                sender,
                f"rank {message.rank} of {message.world} has no place in a job of "
                f"{len(job.seats)} ranks",
            )
        seat = job.find(message.rank, message.incarnation)
        holder = job.seats[message.rank]
        taken = seat is not None and seat.process in (Process.JOINED, Process.READY)
        if (
            seat is not None
            and taken
            and (seat.pid, seat.started) == (message.pid, message.started)
        ):
            return None
        if seat is None or taken or seat.process is Process.GONE:
            return self._refuse(
                message,
                sender,
                f"rank {message.rank} is held by process {holder.pid} (incarnation "
                f"{holder.incarnation}); process {message.pid} (incarnation "
                f"{message.incarnation}) came without being asked for",
            )
        job.forget(message.rank, message.incarnation, Spawn)
        job.joined = True
        job.running.add((seat.rank, seat.incarnation))
        seat.join(message, sender)
        if job.incident.number:
            job.phase("await", seat.rank, seat.began, message.at)
        return None

    def _refuse(self, message: Joined, sender: str, why: str) -> None:
        job = self._job
        refused = Refused(
            epoch=job.epoch, rank=message.rank, pid=message.pid, started=message.started, why=why
        )
        job.refused[sender] = (refused, job.now)
        job.say(refused)
        self._job.tell("claim_refused", rank=message.rank, pid=message.pid, why=why)

    def _ready(self, seat: Seat, message: Ready) -> None:
        job = self._job
        seat.process = Process.READY
        job.starting.pop((seat.rank, seat.incarnation), None)
        seat.shards = {copies.shard: copies.ranks for copies in message.shards}
        seat.column = message.column
        seat.held = 0 if job.virgin and not job.resumed else None
        job.placed()

    def _exited(self, message: Exited) -> None:
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
        if message.private:
            seat.private = message.private
        if retires:
            job.seats[seat.rank].private = seat.private
        if job.state in SETTLED:
            return self._left_late(seat, message)
        if not self._matters(seat):
            return job.tell("rank_gone", rank=seat.rank, code=message.code, outside=True)
        if self._left_in_peace(seat, message, was):
            return None
        job.tell("rank_gone", rank=seat.rank, code=message.code, incarnation=seat.incarnation)
        self._blame(seat, message, was)
        return self._course.lost(seat)

    def could_not_end(self, seat: Seat) -> None:
        """
        Its agent has not ended a process in time. It is given up without a last word: nobody obeys
        in its place, and none is started for its rank where it may still sit.
        """
        job = self._job
        step = self._rounds.step_of(seat)
        matters = self._matters(seat)
        self._gone(seat)
        if seat.node is not None:
            seat.shunned |= {seat.node}
            if seat.rank in job.seats:
                job.seats[seat.rank].shunned |= {seat.node}
        why = f"its process could not be ended within {job.policy.kill:.0f} s"
        job.tell("rank_not_ended", rank=seat.rank, incarnation=seat.incarnation, why=why)
        if matters:
            if not self._blamed(seat):
                self._rounds.fault("process", seat.rank, step, job.now, why)
            self._course.lost(seat)

    def _blame(self, seat: Seat, message: Exited, was: Process) -> None:
        """
        The fault that the end of a process stands for.
        """
        evidence = message.stack or seat.doomed or _how(message.code)
        if seat.blame == "hang" and message.stopped:
            evidence = f"the process was stopped (SIGSTOP)\n{evidence}"
        step = self._step_of(message, was)
        kind: FaultKind = "process"
        forced = ""
        if self._blamed(seat):
            return self._update_evidence(seat, evidence, step)
        if was is not Process.READY and message.code >= 0:
            kind = "software"
            forced = (
                f"rank {seat.rank} left with code {message.code} before it took any order: "
                "its log says why"
            )
        elif message.code == 0:
            kind = "software"
            forced = f"rank {seat.rank} left with code 0 before all ranks had finished"
        self._rounds.fault(kind, seat.rank, step, message.at, evidence)
        if kind == "process" and not seat.doomed:
            self._job.count(seat.rank)
        if forced:
            self._rounds.force(forced)
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
        outcome = self._job.outcome
        if outcome is not None and outcome.result == "completed" and message.code:
            why = f"all steps are done, but then rank {seat.rank} {_how(message.code)}"
            self._job.outcome = JobOver(result="failed", code=4, why=why)

    def _left_in_peace(self, seat: Seat, message: Exited, was: Process) -> bool:
        """
        A script that never calls `tft.init` ends as its ranks end.
        """
        if was not in (Process.ORDERED, Process.SPAWNED) or self._job.anyone_joined():
            return False
        if message.code:
            why = f"rank {seat.rank} {_how(message.code)} and no rank has called tft.init"
            self._course.ending.exit("failed", 4, why)
        elif all(s.process is Process.GONE for s in self._job.seats.values()):
            self._course.ending.exit("completed", 0, "every rank has ended")
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

    # ---------------------------------------------------------------- requests

    def _stop_requested(self, message: StopRequested, reaction: Reaction) -> None:
        if self._job.stop is not None:
            return None
        self._job.stop = message
        if reaction is not R.FORCE:
            return None  # that is what is being done
        if not any(seat.ready for seat in self._job.seated()):
            code = 128 + message.signal if message.signal else 4
            return self._course.ending.exit(
                "cancelled" if message.signal else "failed", code, message.why
            )
        self._rounds.force(message.why)
        return self._course.replan()

    def _pause_requested(self, message: PauseRequested, reaction: Reaction) -> None:
        if reaction is R.PAUSE:
            self._course.pausing.begin(message)
        elif self._job.pause is None:
            self._job.pause = message

    def _resume_requested(self, reaction: Reaction) -> None:
        if not self._job.answered_all("check"):
            return self._job.tell("check_not_over")  # some of its sums would meet those of a step
        self._job.pause, self._job.checked = None, ""
        if reaction is R.RELEASE:
            self._course.pausing.release()

    # ---------------------------------------------------------------- faults

    def _faulted(self, seat: Seat, message: Faulted) -> None:
        job = self._job
        seat.training = False
        seat.position = message.position
        if not self._matters(seat):
            return
        symptom = message.kind == "network" and job.state in (S.FREEZING, S.CLEARING)
        if symptom or self._known(message):
            return
        job.tell(
            "rank_faulted",
            rank=seat.rank,
            kind=message.kind,
            step=message.step,
            summary=message.summary,
            traceback=message.traceback,
        )
        evidence = message.traceback or message.summary
        self._rounds.fault(message.kind, seat.rank, message.step, message.at, evidence)
        self._distrust(seat, message.kind, polluted=message.polluted)
        if message.kind == "software":
            self._rounds.force("a user's own bug is not retried")
        self._course.replan()

    def _distrust(self, seat: Seat, kind: FaultKind, *, polluted: bool) -> None:
        """
        What a fault makes of the copies: of this rank's own, and, where what is wrong may have
        spread with the last update, of everybody's since then.
        """
        if kind in ("memory", "numeric", "corruption"):
            seat.trusted = False
        if kind in ("memory", "corruption"):
            seat.damaged = True
        if polluted:
            self._rounds.pollute(seat)

    def _known(self, message: Faulted) -> bool:
        """
        The same exception on all ranks is one fault.
        """
        return message.kind == "software" and any(
            fault.kind == "software"
            and fault.step == message.step
            and message.traceback.splitlines()[-1:] == fault.evidence.splitlines()[-1:]
            for fault in self._job.incident.faults
            if self._job.incident.is_open
        )

    def _noticed(self, message: Noticed) -> None:
        """
        What was seen from outside is taken as if the rank had said it itself.
        """
        job = self._job
        seat = job.seats.get(message.rank)
        if seat is None or not self._matters(seat) or seat.doomed:
            return None
        if not seat.ready and (message.kind != "node" or seat.process not in STARTING):
            return None  # another process is on its way, and has nothing yet that could be wrong
        step = self._rounds.step_of(seat)
        match message.kind:
            case "straggler":
                return self._course.straggles(message)
            case "process" | "hang":
                if message.kind == "process":  # whoever is ended for a hang is named for it there
                    self._rounds.fault("process", seat.rank, step, message.at, message.evidence)
                self._rounds.doom(seat, message.evidence, message.kind)
                job.count(seat.rank)
            case "node":
                self._rounds.isolate(seat, message.evidence)
            case "memory" | "numeric" | "corruption" | "network" | "software":
                self._rounds.fault(message.kind, seat.rank, step, message.at, message.evidence)
                self._distrust(seat, message.kind, polluted=message.polluted)
                if message.kind == "software":
                    self._rounds.force(message.evidence)
            case _:
                assert_never(message.kind)
        return self._course.replan()

    # ---------------------------------------------------------------- answers

    def _answered(self, seat: Seat, message: Answered) -> None:
        job = self._job
        task = job.incident.tasks.get(message.order)
        key = (message.incident, message.round)
        if task is None or key != (job.incident.number, job.incident.round):
            return None
        if seat.rank not in task.waiting or not job.holds_seat(seat):
            return None
        seat.position, seat.held, seat.backups = message.position, message.held, message.backups
        if job.resumed and not seat.held:
            seat.held = None  # what a script begins with is not what the checkpoint holds
        job.phase(PHASES.get(message.order, message.order), seat.rank, message.began, message.at)
        if message.private:  # it cannot write this itself: somebody else does
            seat.private = {(job.incident.step or 1) - 1: message.private}
        if message.failure is not None:
            return self._failed(seat, message.order, message.failure)
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
                seat.training = seat.repaired = True
            case "fetch" | "load":
                if seat.damaged:
                    seat.doubted = message.position.step
                seat.trusted, seat.damaged = True, False
                if message.order == "load":  # it has what is its own from there, too
                    seat.private, seat.page = {}, seat.node
            case "restore":
                seat.trusted = True
            case "rollback":
                seat.private, seat.page = {}, seat.node
            case _:
                pass

    def _failed(self, seat: Seat, order: OrderName, why: str) -> None:
        job, rounds = self._job, self._rounds
        job.tell("order_failed", rank=seat.rank, order=order, why=why)
        match order:
            case "freeze" | "stop":
                rounds.doom(seat, f"could not {order}: {why}", "process")
            case "load" if not job.incident.is_open:
                self._course.ending.exit(
                    "failed", 4, f"rank {seat.rank} could not load the checkpoint: {why}"
                )
            case "save":
                self._course.ending.save_failed(seat, why)
            case "commit":
                self._course.ending.commit_failed(seat, why)
            case "restore" if job.state is S.DUMPING:
                self._course.ending.save_failed(seat, why)
            case "restore":
                seat.damaged = True  # its copies are not what they should be: others have some
                rounds.again(f"rank {seat.rank} could not {order}: {why}")
            case "hold":  # nothing is wrong, but there is no pause
                self._course.pausing.give_up(f"rank {seat.rank} could not {order}: {why}")
            case "release":  # in a pause nothing is wrong yet: this is what is
                evidence = f"rank {seat.rank} could not {order}: {why}"
                rounds.fault("network", None, seat.position.step + 1, job.now, evidence)
            case "load":  # an older one may be whole
                job.checkpoints.pop((job.incident.step or 1) - 1, None)
                rounds.again(f"rank {seat.rank} could not {order}: {why}")
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


def _how(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"left with code {code}"
