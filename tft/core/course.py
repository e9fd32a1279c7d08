"""
The way through an incident: from a fault, by freeze, stop, choice and repair, back to training;
or by a last checkpoint to the end. One move at a time, each when everything it needs is there.
"""

from tft.core import planner
from tft.core.commands import JobOver
from tft.core.incident import Fault, Incident
from tft.core.job import PARKED, RUNNING, SETTLED, Job, State
from tft.core.policy import STRATEGIES
from tft.core.seats import Process, Seat
from tft.errors import InternalError
from tft.protocol.messages import (
    Commit,
    Complete,
    End,
    EndNode,
    FaultKind,
    Fetch,
    Freeze,
    Kill,
    Load,
    Rebuild,
    Regroup,
    Resume,
    Rollback,
    Save,
    Stop,
)

S = State


class Course:
    """
    Moves one job on.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def fault(
        self, kind: FaultKind, rank: int | None, step: int, seen: float, evidence: str
    ) -> None:
        """
        A new fault opens an incident or joins the one that is open.
        """
        self.open()
        incident = self._job.incident
        again = any((f.kind, f.rank, f.step) == (kind, rank, step) for f in incident.faults)
        if again and self._job.state is S.RESUMING and kind not in ("process", "node", "hang"):
            incident.failed[incident.strategy] = f"the {kind} fault at step {step} came back"
        incident.faults.append(Fault(kind=kind, rank=rank, step=step, seen=seen, evidence=evidence))
        if self._job.state not in (S.FREEZING, S.CLEARING, *PARKED):
            incident.attempts = 0
            self.freeze()

    def force(self, why: str) -> None:
        """
        Nothing but a last checkpoint comes into question from here on.
        """
        if self._job.state is S.DUMPING:
            return
        self.open()
        self._job.incident.forced = self._job.incident.forced or why
        if self._job.state not in (S.FREEZING, S.CLEARING, S.AWAITING):
            self.freeze()
        elif self._job.state is S.AWAITING:
            self._choose()

    def open(self) -> None:
        if self._job.state is S.HEALTHY:
            self._job.incident = Incident(number=self._job.next_number, opened=self._job.now)
        elif self._job.incident.number == 0:  # the start itself has become an incident
            self._job.incident.number, self._job.incident.opened = (
                self._job.next_number,
                self._job.now,
            )
        else:
            return
        self._job.next_number += 1
        self._job.incident.processes = {
            s.rank: (s.pid, s.started) for s in self._job.seats.values() if s.ready
        }
        if self._job.incident.number > self._job.policy.max_incidents:
            self._job.incident.forced = (
                f"the job has had {self._job.policy.max_incidents} incidents, which is its limit"
            )

    def lost(self, seat: Seat) -> None:
        """
        A rank without a process: it answers nothing more, and another process is started.
        """
        self._job.incident.saw(seat.position)
        for task in self._job.incident.tasks.values():
            task.waiting.discard(seat.rank)
        if self._why_not_respawn(seat) is None:
            self._job.incident.respawns[seat.rank] = (
                self._job.incident.respawns.get(seat.rank, 0) + 1
            )
            self._job.spawn(seat, f"rank {seat.rank} has lost its process")
        if self._job.state is S.AWAITING:
            self._choose()
        elif self._job.state is S.DUMPING:
            self.dump()

    def _why_not_respawn(self, seat: Seat) -> str | None:
        if self._job.incident.forced:
            return self._job.incident.forced
        if "recover" not in self._job.policy.enable:
            return "recover is not enabled"
        if seat.node in self._job.lost_nodes:
            return f"node {seat.node} is gone, and its ranks have no other place"
        if self._job.incident.respawns.get(seat.rank, 0) >= self._job.policy.respawns:
            return (
                f"rank {seat.rank} has died {self._job.policy.respawns + 1} times in this incident"
            )
        if self._job.state is S.DUMPING:
            return "a last checkpoint is being written"
        return None

    def again(self, why: str) -> None:
        """
        A strategy is begun anew, a few times; then it has failed.
        """
        self._job.incident.attempts += 1
        if self._job.incident.attempts >= self._job.policy.attempts:
            self._job.incident.failed[self._job.incident.strategy] = why
            self._job.incident.attempts = 0
        self.freeze()

    def doom(self, seat: Seat, why: str, blame: FaultKind) -> None:
        """
        The process of a rank is to be ended; its end will come in as `Exited`.
        """
        if seat.doomed or seat.node is None:
            return
        seat.doomed, seat.blame = why, blame
        for task in self._job.incident.tasks.values():
            task.waiting.discard(seat.rank)
        if blame == "hang":
            evidence = self._job.incident.suspicion or why
            step = seat.position.step + 1
            self.fault("hang", seat.rank, step, self._job.now, evidence)
        self._job.order_node(
            Kill(
                epoch=self._job.epoch,
                node=seat.node,
                rank=seat.rank,
                incarnation=seat.incarnation,
                last_words=blame == "hang",
                cause=why,
            )
        )

    def advance(self) -> bool:
        """
        One move, if everything it needs is there.
        """
        tasks = self._job.incident.tasks
        match self._job.state:
            case S.AWAITING if self._job.every(lambda s: s.ready) and self._job.store is not None:
                return self._repair()
            case S.FREEZING if self._job.answered_all("freeze"):
                return self._after_freeze()
            case S.CLEARING if self._job.answered_all("stop"):
                return self._choose()
            case S.REPAIRING if not any(task.waiting for task in tasks.values()):
                return self._job.step_to(
                    S.REBUILDING, self._job.to_all(Rebuild), self._job.policy.rebuild
                )
            case S.REBUILDING if self._job.answered_all("rebuild"):
                self._job.virgin = False
                return self._roll_back()
            case S.ROLLING_BACK if self._job.answered_all("rollback"):
                return self._resume_training()
            case S.RESUMING if self._job.answered_all("resume") and self._success():
                self._close()
                return True
            case S.HEALTHY if self._job.every(lambda s: s.finished):
                return self._complete()
            case S.DUMPING if self._job.dying():
                return False  # what it was to write is planned anew when its end has come in
            case S.DUMPING if self._job.answered_all("save") and "commit" not in tasks:
                return self._commit()
            case S.DUMPING if "commit" in tasks and self._job.answered_all("commit"):
                return self._dumped()
            case S.EXITING if self._job.every(lambda s: s.process not in RUNNING):
                self.end()
                return True
            case _:
                return False

    def freeze(self) -> None:
        """
        A new round: whatever was under way is given up, and everyone says where they stand.
        """
        self._job.incident.round += 1
        self._job.incident.tasks = {}
        self._job.incident.strategy = ""
        self._job.trained = set()
        self._job.move(S.FREEZING)
        to = tuple(s.rank for s in self._job.seats.values() if s.ready and not s.doomed)
        causes = [f"{f.kind} at rank {f.rank}" for f in self._job.incident.roots()]
        cause = ", ".join(causes) or self._job.incident.suspicion or self._job.incident.forced
        limit = self._job.policy.freeze
        if to:
            self._job.issue(Freeze(**self._job.key(), to=to, cause=cause), limit=limit)

    def _after_freeze(self) -> bool:
        suspects = [s for s in self._job.seats.values() if s.blame == "hang" and not s.doomed]
        ready = [s for s in self._job.seats.values() if s.ready and not s.doomed]
        if self._job.incident.suspicion and suspects and len(suspects) < len(ready):
            for seat in suspects:
                self.doom(seat, "it hangs while the others wait for it", "hang")
        for seat in suspects:
            seat.blame = seat.blame if seat.doomed else ""
        if self._job.dying():
            return False
        for seat in self._job.seats.values():
            self._job.incident.saw(seat.position)
        # Whoever has begun this update had all its sums complete: so has everyone else, or will.
        finish = self._job.incident.reached
        if self._job.incident.suspicion and not self._job.incident.faults:
            self.fault("network", None, finish + 1, self._job.now, self._job.incident.suspicion)
        self._job.incident.suspicion = ""
        self._job.move(S.CLEARING)
        to = tuple(s.rank for s in self._job.seats.values() if s.ready)
        if to:
            grace = self._job.policy.grace
            stop = Stop(**self._job.key(), to=to, finish=finish, grace=grace)
            self._job.issue(stop, limit=self._job.policy.stop)
        return True

    def _choose(self) -> bool:
        """
        The first strategy that can work, and for each one before it the reason why it cannot.
        """
        if self._job.dying():
            return False
        self._job.incident.tried = []
        for strategy in STRATEGIES:
            why_not = self._job.incident.failed.get(strategy) or self._why_not(strategy)
            if why_not is None:
                return self._follow(strategy)
            self._job.incident.tried.append((strategy, why_not))
        reasons = "; ".join(f"{name}: {why}" for name, why in self._job.incident.tried)
        self._job.incident.strategy = "exit"
        self.exit("failed", 4, f"nothing is left to be done ({reasons})")
        return True

    def _why_not(self, strategy: str) -> str | None:
        unable = [
            s.rank for s in self._job.seats.values() if s.ready and strategy not in s.strategies
        ]
        lost = [s for s in self._job.seats.values() if s.process is Process.GONE]
        agreed = self._job.agreed()
        if strategy not in self._job.policy.enable:
            return f"{strategy} is not enabled"
        if unable:
            return f"the adaptor of ranks {unable} cannot take part"
        if strategy == "dump":
            return self._why_no_dump(agreed)
        if self._job.incident.forced:
            return self._job.incident.forced
        if strategy == "retry" and (self._job.incident.respawns or lost):
            ranks = sorted({*self._job.incident.respawns, *(s.rank for s in lost)})
            return f"ranks {ranks} have lost their process"
        if lost:
            return self._why_not_respawn(lost[0])
        if isinstance(agreed, str) and not self._fresh():
            return agreed
        if strategy == "recover" and not self._job.incident.respawns:
            return self._why_not_replace()
        return None

    def _why_not_replace(self) -> str | None:
        """
        Replacing the processes of the faulty ranks must leave every shard a holder.
        """
        going = {seat.rank for seat in self._replaceable()}
        if not going:
            return "no rank can be named whose process should be replaced"
        staying = {r: h for r, h in self._job.holders().items() if r not in going}
        left = planner.agreed_step(self._job.groups(), staying)
        return None if isinstance(left, int) else f"with ranks {sorted(going)} replaced, {left}"

    def _why_no_dump(self, agreed: int | str) -> str | None:
        if isinstance(agreed, str):
            return agreed
        if self._job.virgin:
            return "no step has been trained yet"
        return None

    def _fresh(self) -> bool:
        """
        Nothing has been trained or loaded: every rank's own initial state will do.
        """
        return self._job.virgin and (self._job.resume is None or not self._job.loaded)

    def _replaceable(self) -> list[Seat]:
        return [self._job.seats[r] for r in self._job.incident.faulty() if self._job.seats[r].ready]

    def _follow(self, strategy: str) -> bool:
        self._job.incident.strategy = strategy
        self._job.tell("strategy_chosen", incident=self._job.incident.number, strategy=strategy)
        if strategy == "dump":
            self.dump()
            return True
        self._job.move(S.AWAITING)
        if strategy == "recover" and not self._job.incident.respawns:
            for seat in self._replaceable():
                self.doom(seat, "a retry did not help", "process")
        return True

    def _repair(self) -> bool:
        """
        Everyone is there: form the groups, and copy what has to be copied.
        """
        if self._job.dying():
            return False
        if self._job.incident.strategy == "":
            return self._choose()
        step = self._job.agreed()
        if self._fresh():
            step = 0 if self._job.resume is None else self._job.resume[1]
        if isinstance(step, str):
            return self._choose()
        self._job.incident.step = step + 1
        self._job.move(S.REPAIRING)
        self._job.incident.tasks = {}
        host, port = self._job.store or ("", 0)
        name = f"{self._job.name}/{self._job.incident.number}.{self._job.incident.round}"
        regroup = Regroup(
            **self._job.key(),
            to=tuple(self._job.seats),
            step=step + 1,
            name=name,
            host=host,
            port=port,
        )
        self._job.issue(regroup, limit=self._job.policy.regroup)
        if self._fresh() and self._job.resume is not None:
            directory = self._job.resume[0]
            load = Load(
                **self._job.key(), to=tuple(self._job.seats), directory=directory, step=step
            )
            self._job.issue(load, limit=self._job.policy.repair)
        elif not self._fresh():
            parts = planner.transfers(self._job.groups(), self._job.holders(), step)
            fetches = [
                Fetch(**self._job.key(), to=(rank,), step=step, transfers=transfers)
                for rank, transfers in parts.items()
            ]
            if fetches:
                self._job.issue(*fetches, limit=self._job.policy.repair)
        return True

    def _roll_back(self) -> bool:
        self._job.loaded = True
        step = (self._job.incident.step or 1) - 1
        return self._job.step_to(
            S.ROLLING_BACK, self._job.to_all(Rollback, step=step), self._job.policy.repair
        )

    def _resume_training(self) -> bool:
        self._job.trained = set()
        for seat in self._job.seats.values():
            seat.finished = False
        step = self._job.incident.step or 1
        return self._job.step_to(
            S.RESUMING, self._job.to_all(Resume, step=step), self._job.policy.regroup
        )

    def _success(self) -> bool:
        return self._job.trained == set(self._job.seats)

    def _close(self) -> None:
        self._job.incident.tasks = {}
        for seat in self._job.seats.values():
            began = self._job.incident.processes.get(seat.rank)
            if began is not None:
                self._job.incident.kept[seat.rank] = began == (seat.pid, seat.started)
        ends = [phase.end for phase in self._job.incident.phases if phase.name == "resume"]
        self._job.incident.closed = max(ends, default=self._job.now)
        self._job.move(S.HEALTHY)
        if self._job.incident.number or self._job.incident.faults:
            self._job.incidents.append(self._job.incident)
            self._job.tell(
                "incident_closed",
                incident=self._job.incident.number,
                strategy=self._job.incident.strategy,
                step=self._job.incident.step,
                seconds=self._job.incident.closed - self._job.incident.opened,
            )

    def dump(self) -> None:
        agreed = self._job.agreed()
        self._job.incident.tasks = {}
        if isinstance(agreed, str):
            self._job.incident.tried.append(("dump", agreed))
            self._job.incident.strategy = "exit"
            return self.exit("failed", 4, f"no last checkpoint can be written: {agreed}")
        if self._job.state is S.DUMPING:
            self._job.incident.round += 1
        self._job.move(S.DUMPING)
        self._job.saved = {}
        self._job.incident.step = agreed + 1
        shards = planner.savers(self._job.groups(), self._job.holders(), agreed)
        # a torn rank too: what it holds is void, but its RNG and data position are nobody else's
        writers = [s.rank for s in self._job.seats.values() if s.able]
        orphans = {
            s.rank: s.private[agreed]
            for s in self._job.seats.values()
            if s.rank not in writers and agreed in s.private
        }
        saves = [
            Save(
                **self._job.key(),
                to=(rank,),
                directory=self._directory(agreed),
                step=agreed,
                shards=shards.get(rank, ()),
                private=orphans if rank == writers[0] else {},
            )
            for rank in writers
        ]
        self._job.issue(*saves, limit=self._job.policy.save)
        return None

    def _directory(self, step: int) -> str:
        return f"{self._job.checkpoints}/step-{step:08d}"

    def _commit(self) -> bool:
        step = (self._job.incident.step or 1) - 1
        committer = min(s.rank for s in self._job.seats.values() if s.able)
        commit = Commit(
            **self._job.key(),
            to=(committer,),
            directory=self._directory(step),
            step=step,
            files=tuple(self._job.saved[name] for name in sorted(self._job.saved)),
        )
        self._job.issue(commit, limit=self._job.policy.save)
        return True

    def _dumped(self) -> bool:
        step = (self._job.incident.step or 1) - 1
        self._job.last_step = step
        if self._job.stop is not None:
            self.exit("cancelled", 128 + self._job.stop.signal, self._job.stop.why)
        else:
            why = self._job.incident.forced or "the job cannot go on"
            self.exit("dumped", 3, f"{why}; a last checkpoint of step {step} is written")
        return True

    def _complete(self) -> bool:
        self.exit("completed", 0, "every rank has finished")
        return True

    def exit(self, result: str, code: int, why: str) -> None:
        """
        The outcome is decided; the ranks leave.
        """
        if self._job.state in SETTLED:
            return
        if result == "failed":
            self._job.last_step = max(self._job.last_step, self._job.incident.furthest)
        if self._job.stop is not None and result == "failed":
            result, code = "cancelled", 128 + self._job.stop.signal
        if self._job.state is not S.HEALTHY and self._job.incident not in self._job.incidents:
            opened = self._job.incident.number or self._job.incident.faults
            self._job.incident.strategy = self._job.incident.strategy or "exit"
            self._job.incident.closed = self._job.now
            if opened:
                self._job.incidents.append(self._job.incident)
        self._job.move(S.EXITING)
        self._job.outcome = JobOver(result=result, code=code, why=why)
        self._job.tell("job_ends", result=result, code=code, why=why)
        self._job.incident.tasks = {}
        self._job.node_orders = {}
        there = (Process.JOINED, Process.READY)
        to = tuple(s.rank for s in self._job.seats.values() if s.process in there)
        finished = result == "completed"
        if to and finished:
            self._job.issue(Complete(**self._job.key(), to=to), limit=self._job.policy.join)
        elif to:
            self._job.issue(
                End(**self._job.key(), to=to, code=code, why=why), limit=self._job.policy.leave
            )
        if not finished:
            self._job.deadline = self._job.now + 3 * self._job.policy.leave
            self._job.ending = [
                EndNode(epoch=self._job.epoch, grace=self._job.policy.leave, why=why)
            ]
            self._job.said.extend(self._job.ending)

    def end(self) -> None:
        self._job.incident.tasks = {}
        if self._job.outcome is None:
            raise InternalError("the ranks have left before the outcome was decided")
        self._job.move(S.ENDED)
        end = EndNode(
            epoch=self._job.epoch, grace=self._job.policy.leave, why=self._job.outcome.why
        )
        self._job.ending = [end]
        self._job.said.extend([end, self._job.outcome])
