"""
Handles the verdicts of the slice comparison, which compares the copies of shards while the job
trains (see `tft.core.link.slice_comparison`). A verdict says that copies are equal up to a step,
that copies differ, or which ranks had a wrong copy.
"""

from dataclasses import replace

from tft.core.job.comparison import Difference, Seen
from tft.core.job.events import CorruptionTraced, SlicesAgreed, SlicesDiffered
from tft.core.job.incident import Fault, Incident
from tft.core.job.recovery import Recovery
from tft.core.job.state import Job


class Integrity:
    """
    Handles the verdicts about the copies of the shards of one job.
    """

    def __init__(self, job: Job, recovery: Recovery) -> None:
        self._job = job
        self._recovery = recovery
        self._attempts = recovery.attempts

    def agreed(self, event: SlicesAgreed) -> None:
        """
        Handle the verdict that all copies of all shards were equal at a step. Record this step as
        the last one at which the copies are known to have been equal.
        """
        training = self._job.training
        training.sliced = True
        training.equal.compared = max(training.equal.compared, event.step)

    def differed(self, event: SlicesDiffered) -> None:
        """
        Handle the verdict that the copies of a slice of a shard differ: open an incident, or add a
        fault to the open incident.
        """
        job, training = self._job, self._job.training
        training.sliced = True
        # `event.sound` is the last step at which this slice was equal on all ranks. If all copies
        # were found equal at a later step, for example at a periodic checkpoint, use the later step
        equal = (
            training.equal.compared
            if event.sound < training.equal.compared < event.step
            else event.sound
        )
        job.tell(
            "slices_differ", shard=event.shard, step=event.step, right=list(event.right),
            wrong=list(event.wrong), sound=equal,
        )  # fmt: skip
        difference = Difference(
            shard=event.shard, step=event.step, right=event.right, wrong=event.wrong,
            parts=("a slice",), tail=False,
        )  # fmt: skip
        self._recovery.comparison.differ(Seen.of(difference, equal=equal, at=event.at))
        self._recovery.replan()

    def traced(self, event: CorruptionTraced) -> None:
        """
        Record in the report of an earlier incident which ranks had a wrong copy. The `corruption`
        faults of that incident name no rank so far, because no majority showed which copy was
        right. Do nothing if training may not have continued bit for bit after that incident, or if
        yet another rank had a wrong copy: gradients then differ for another reason, and prove
        nothing about these copies.
        """
        job = self._job
        incident = self._incident(event.incident)
        if incident is None or incident.exactness.sentences:
            return
        known = {fault.rank for fault in incident.faults if fault.kind == "corruption"} - {None}
        if not known.issubset(event.ranks):
            return
        why = (
            f"when the steps were computed again, the results of ranks {list(event.ranks)} were "
            f"the first that differed, in step {event.step + 1}: these ranks had the wrong copy"
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
        Return the incident with this number, or None if the job had no such incident.
        """
        known = (*self._job.history.incidents, self._job.incident)
        return next((each for each in known if each.number == number), None)
