"""
Handles reported faults: an exception that left the training loop of a rank, a fault that an
observer outside the rank has noticed, or copies that differed at a periodic checkpoint.
"""

from typing import assert_never

from tft.core.job.comparison import Seen
from tft.core.job.rank_process import ProcessStage
from tft.core.job.rank_state import RankState
from tft.core.job.recovery import Recovery
from tft.core.job.refusals import MOST_SKIPS, RefusedStep
from tft.core.job.state import Job
from tft.core.job.transitions import SETTLED, State
from tft.protocol.messages import CheckpointFailed, Faulted, FaultKind, Noticed, StepNumbers

S = State


class Faults:
    """
    Handles the reported faults of one job.
    """

    def __init__(self, job: Job, recovery: Recovery) -> None:
        self._job = job
        self._recovery = recovery
        self._attempts = recovery.attempts

    def faulted(self, rank_state: RankState, message: Faulted) -> None:
        """
        Handle an exception that has left the training loop of a rank. Ignore a network error while
        the ranks are being stopped, because a stop breaks the connections between ranks.
        """
        job = self._job
        rank_state.training = False
        rank_state.position = message.position
        if not job.ranks.is_current(rank_state.rank, rank_state.incarnation):
            return
        stopping = job.state in (S.FREEZING, S.CLEARING)
        symptom = message.kind == "network" and stopping and not message.context_lost
        if symptom and not _has_limit(message):
            return
        if message.refused is not None:
            self._refused(message, message.refused)
        elif self._known(message):
            self._distrust(rank_state, message)
        else:
            self._learn(rank_state, message)
        if message.context_lost:
            self._attempts.terminate(rank_state, message.summary, message.kind)
        self._recovery.replan()

    def _learn(self, rank_state: RankState, message: Faulted) -> None:
        self._job.tell(
            "rank_faulted",
            rank=rank_state.rank,
            kind=message.kind,
            step=message.step,
            summary=message.summary,
            traceback=message.traceback,
        )
        evidence = message.traceback or message.summary
        self._attempts.fault(message.kind, rank_state.rank, message.step, message.at, evidence)
        self._distrust(rank_state, message)
        if message.kind == "software":
            self._attempts.force("a user's own bug is not retried")

    def _refused(self, message: Faulted, numbers: StepNumbers) -> None:
        """
        Handle the report of a rank that it has refused to apply an update, because the update has
        bad numbers (NaN, Inf or a spike). The state before the update is intact, so the step is
        computed again from that state. If another rank has applied the update nevertheless, its
        copy is used only if no copy from before the update is left. If the update of the same step
        is refused a second time, the batches of the step are left out, or the job ends with a last
        checkpoint.
        """
        job, refusals = self._job, self._job.training.refusals
        job.tell("update_refused", rank=message.rank, step=message.step, why=message.summary)
        begins = refusals.refuse(message.rank, message.step, numbers, message.summary)
        record = refusals.present
        if not begins or record is None:
            return
        self._attempts.fault(
            "numeric", None, message.step, message.at, message.summary, refused=True
        )
        # another rank may have applied the update that this rank refuses. Prefer states from before
        # the update. If none is left, the later state is used, and the sentence `why` in the report
        # tells the user
        job.incident.spread.prefer(message.step - 1)
        why = f"the update of step {message.step}, which rank {message.rank} had refused, was kept"
        job.incident.exactness.reservations.append((message.step, why))
        if record not in job.incident.exactness.refused:
            job.incident.exactness.refused.append(record)
        if record.refused > 1:
            self._refused_again(record)

    def _refused_again(self, record: RefusedStep) -> None:
        """
        Leave out the data batches of a step whose update was refused a second time, if
        `policy.skip_batch` allows this. If the policy does not allow this, or if batches were left
        out too often for this step, end the job with a last checkpoint.
        """
        job, refusals = self._job, self._job.training.refusals
        times = refusals.times.get(record.step, 0)
        if not job.policy.skip_batch:
            self._attempts.force(
                f"the update of step {record.step} was refused twice: give --skip-batch to leave "
                "its batch out"
            )
        elif times >= MOST_SKIPS:
            self._attempts.force(
                f"the update of step {record.step} was refused with {times + 1} batches in a row: "
                "the cause is the model or a device, not the data"
            )
        else:
            refusals.leave_out(record)
            job.incident.exactness.left_out[record.step] = refusals.skips[record.step]
            job.tell("batches_left_out", step=record.step, batches=record.skipped)

    def _known(self, message: Faulted) -> bool:
        """
        Return True if the incident already has the software fault that `message` reports. The same
        exception at the same step on several ranks counts as one fault.
        """
        return message.kind == "software" and any(
            fault.kind == "software"
            and fault.step == message.step
            and message.traceback.splitlines()[-1:] == fault.evidence.splitlines()[-1:]
            for fault in self._job.incident.faults
        )

    def noticed(self, message: Noticed) -> None:
        """
        Handle a fault of a rank that an observer outside the rank has noticed, such as a hang or
        damaged memory. If nothing can be done about the process of the rank, log why not. Even
        then, do not use copies that are wrong according to the message.
        """
        job = self._job
        rank_state = job.ranks.states.get(message.rank)
        why_not = self._why_not(rank_state, message.kind)
        if rank_state is None or why_not:
            job.tell(
                "notice_not_taken",
                rank=message.rank,
                kind=message.kind,
                evidence=message.evidence,
                why_not=why_not,
            )
            if rank_state is not None:
                self._noticed_late(rank_state, message)
            return None
        if message.kind == "straggler" and not _has_limit(message):
            return self._recovery.takeover.straggles(message)
        step = self._attempts.step_of(rank_state)
        # do not record the fault here for the kinds `hang` and `node`: the methods `terminate` and
        # `isolate` record it below
        if message.kind not in ("hang", "node"):
            self._attempts.fault(message.kind, rank_state.rank, step, message.at, message.evidence)
        match message.kind:
            case "process" | "hang":
                self._attempts.terminate(rank_state, message.evidence, message.kind)
                job.count(rank_state.rank)
            case "node":
                self._attempts.isolate(rank_state, message.evidence)
            case "software":
                self._attempts.force(message.evidence)
            case "straggler" | "memory" | "numeric" | "corruption" | "network":
                pass
            case _:
                assert_never(message.kind)
        self._distrust(rank_state, message)
        return self._recovery.replan()

    def _noticed_late(self, rank_state: RankState, message: Noticed) -> None:
        """
        Handle a notice about a rank whose process had the fault and is lost already, or is being
        replaced. If the notice says that wrong numbers may have spread, let all ranks go back to a
        step without these numbers.
        """
        job, incident = self._job, self._job.incident
        # look before the fault is recorded: then it is a fault of this incident in any case
        lost_here = incident.is_open and (
            rank_state.rank in incident.turnover.began_with
            or any(rank == rank_state.rank for rank, _ in incident.turnover.at_fault)
        )
        trained = rank_state.repaired or rank_state.left is not None
        polluted = message.polluted and trained and lost_here
        if job.state in SETTLED or not (polluted or message.not_after is not None):
            return
        step = self._attempts.step_of(rank_state)
        self._attempts.fault(message.kind, rank_state.rank, step, message.at, message.evidence)
        if message.not_after is not None:
            job.incident.spread.lower(message.not_after)
        if polluted:
            self._attempts.pollute(rank_state)
        self._recovery.replan()

    def overtaken(self, message: Faulted) -> None:
        """
        Handle a fault report that has arrived after the report of the end of the same process. The
        process is being replaced already. But if the report says that wrong numbers may have
        spread, let all ranks go back to a step without these numbers. Ignore the report if the rank
        has had more than one process since.
        """
        rank_state = self._job.ranks.states.get(message.rank)
        limits = [] if message.not_after is None else [message.not_after]
        if message.polluted:
            limits.append(message.position.step - 1)
        if rank_state is None or not limits or rank_state.incarnation > message.incarnation + 1:
            return
        self._spread(rank_state, message, min(limits))

    def _spread(self, rank_state: RankState, message: Faulted, limit: int) -> None:
        """
        Record the fault in `message`, and let all ranks go back to the end of step `limit` or of an
        earlier step, because copies of later steps may contain wrong numbers. Nothing is done about
        the process that has reported the fault. Do nothing if training has ended.
        """
        job = self._job
        if job.state in SETTLED:
            return
        step = self._attempts.step_of(rank_state)
        self._attempts.fault(message.kind, rank_state.rank, step, message.at, message.summary)
        job.incident.spread.lower(limit)
        self._recovery.replan()

    def differ(self, message: CheckpointFailed) -> None:
        """
        Handle a periodic checkpoint that was not completed because the copies of a shard differed.
        Add a `corruption` fault for each rank that the message names because of its wrong copy. If
        it names no rank, add one fault without a rank. Ignore the message if the copies of all
        holders were found equal, or were judged, at the same step or a later one. All copies are
        compared again when all ranks have left their loops.
        """
        training = self._job.training
        if message.step <= training.equal.judged:
            return
        sliced = not message.unsliced and training.equal.compared < message.step
        equal = training.equal.compared if sliced else training.equal.whole
        if equal >= message.step:
            # a holder was lost in an earlier incident, and the process that replaced it has fetched
            # the copies of other ranks. So the copies are equal now, but this proves nothing about
            # the lost copy. Take the last step at which the copies of all holders were compared
            equal = training.equal.judged
        self._job.tell(
            "checkpoint_differs", step=message.step, wrong=list(message.wrong), why=message.why
        )
        self._recovery.comparison.differ(
            Seen(
                at=message.at,
                step=message.step,
                equal=equal,
                wrong=message.wrong,
                decided=bool(message.wrong),
                sentence=message.why,
            )
        )
        self._recovery.replan()

    def _why_not(self, rank_state: RankState | None, kind: FaultKind) -> str:
        """
        Return a sentence that says why nothing can be done about a fault that an observer has
        noticed, or "" if something can be done.
        """
        if rank_state is None or rank_state.rank not in self._job.ranks.members:
            return "the rank does not take part in training"
        if self._job.state in SETTLED:
            return "training has ended"
        if rank_state.process.stage in (ProcessStage.ABSENT, ProcessStage.GONE):
            return "the rank has no process"
        if rank_state.process.terminating:
            return f"its process is being ended: {rank_state.process.terminating}"
        if not rank_state.ready and kind != "node":
            return "its process is starting, and has no state yet that could be wrong"
        return ""

    def _distrust(self, rank_state: RankState, message: Faulted | Noticed) -> None:
        """
        Record which copies of the training state must not be used because of a fault. After a
        `memory`, `numeric` or `corruption` fault, do not trust the copies of this rank. If the
        message says that wrong numbers may have spread to all ranks, do not use the copies that any
        rank has of later steps either.
        """
        if message.kind in ("memory", "numeric", "corruption"):
            rank_state.holdings.trusted = False
        if message.kind in ("memory", "corruption"):
            rank_state.holdings.damaged = True
        if message.polluted:
            self._attempts.pollute(rank_state)
        limit = message.not_after
        if limit is not None and self._attempts.may_be_later(rank_state, limit):
            self._job.incident.spread.lower(limit)


def _has_limit(message: Faulted | Noticed) -> bool:
    """
    Return True if the message says that wrong numbers may have spread to other ranks.
    """
    return message.polluted or message.not_after is not None
