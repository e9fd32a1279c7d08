"""
Handles the verdicts of the comparison that runs while the job trains: copies that are equal up to a
step, copies that differ, and the rank that had a wrong copy.
"""

from dataclasses import replace

from tft.core.job.events import CorruptionTraced, SlicesAgreed, SlicesDiffered
from tft.core.job.incident import Fault, Incident
from tft.core.job.recovery import Recovery
from tft.core.job.state import Job


class Integrity:
    """
    Handles the verdicts about the copies of one job.
    """

    def __init__(self, job: Job, recovery: Recovery) -> None:
        self._job = job
        self._recovery = recovery
        self._attempts = recovery.attempts

    def agreed(self, event: SlicesAgreed) -> None:
        """
        Note that all copies were equal at the end of a step: they are sound up to that step.
        """
        training = self._job.training
        training.sliced = True
        training.compared = max(training.compared, event.step)

    def differed(self, event: SlicesDiffered) -> None:
        """
        Stop the job, because copies of a shard differ. All of them may be wrong since the last step
        at which they were equal: a wrong copy spreads with the gradients of its rank.
        """
        job, training = self._job, self._job.training
        training.sliced = True
        # a periodic checkpoint may have compared all copies since the slice was equal
        sound = max(event.sound, training.compared)
        job.tell(
            "slices_differ", shard=event.shard, step=event.step, right=list(event.right),
            wrong=list(event.wrong), sound=sound,
        )  # fmt: skip
        if self._is_known(event, sound):
            return
        said = f"a slice of shard {event.shard!r} at the end of step {event.step}"
        since = f"it was equal on all ranks at the end of step {sound}"
        if event.right:
            for rank in event.wrong:
                why = f"rank {rank} holds another copy of {said} than ranks {list(event.right)}"
                self._attempts.fault(
                    "corruption", rank, event.step + 1, event.at, f"{why}; {since}"
                )
                job.ranks.states[rank].holdings.distrust()
        else:
            why = f"ranks {list(event.wrong)} hold different copies of {said}"
            self._attempts.fault("corruption", None, event.step + 1, event.at, f"{why}; {since}")
        incident = job.incident
        spread = incident.spread
        spread.sliced, spread.shard, spread.undecided = sound, event.shard, not event.right
        gone = (
            f"copies of {said} differed, and all ranks went on from later state than that of step "
            f"{sound}: the state of all ranks may be wrong since step {sound + 1}"
        )
        incident.exactness.reservations.append((sound + 1, gone))
        self._recovery.comparison.blame(event.wrong if event.right else ())

    def _is_known(self, event: SlicesDiffered, sound: int) -> bool:
        """
        Return whether an incident since the digests were made has found the same: its faults name
        the ranks, and its report says since when the state may be wrong.
        """
        named = set(event.wrong) if event.right else {None}
        return any(
            named <= {fault.rank for fault in incident.faults if fault.kind == "corruption"}
            and any(since <= sound + 1 for since, _ in incident.exactness.reservations)
            for incident in self._job.history.incidents
            if incident.progress.furthest >= event.step
        )

    def traced(self, event: CorruptionTraced) -> None:
        """
        Name the ranks that had a wrong copy in the faults of the incident to which it had led. Until
        now the incident only knew that copies differed. If training does not continue bit for bit
        after that incident, other gradients say nothing about copies: then nobody is named.
        """
        job = self._job
        incident = self._incident(event.incident)
        if incident is None or incident.exactness.sentences:
            return
        why = (
            f"the steps were computed again, and what ranks {list(event.ranks)} had computed was the "
            f"first that came out otherwise, in step {event.step + 1}: these ranks had the wrong copy"
        )
        job.tell("corruption_traced", incident=event.incident, ranks=list(event.ranks), why=why)
        faults: list[Fault] = []
        for fault in incident.faults:
            if fault.kind == "corruption" and fault.rank is None:
                evidence = f"{fault.evidence}; {why}"
                faults += [replace(fault, rank=rank, evidence=evidence) for rank in event.ranks]
            else:
                faults.append(fault)
        incident.faults = faults
        self._recovery.comparison.blame(event.ranks, event.incident)

    def _incident(self, number: int) -> Incident | None:
        """
        Return an incident of the job by its number.
        """
        known = (*self._job.history.incidents, self._job.incident)
        return next((each for each in known if each.number == number), None)
