"""
Define what is known about refused updates: ranks have not applied them, because their numbers were
bad (NaN, Inf or a spike). Find out the cause: the data or the model, or a device.
"""

from dataclasses import dataclass, field
from typing import Literal

from tft.protocol.messages import StepNumbers

Cause = Literal["data or model", "device", "unknown"]

MOST_SKIPS = 3
"""How many times the batches of one step are left out and replaced by the next batches. If the
update is still refused after that, the cause is not the data: the model has diverged, or a device
always fails."""


@dataclass(slots=True, kw_only=True)
class RefusedStep:
    """
    One step whose update ranks have refused, with all attempts to compute the step from the same
    batches.
    """

    step: int
    attempts: list[dict[int, StepNumbers]] = field(default_factory=list)
    """One entry for each attempt to compute the step: by rank, the digests of the losses and
    gradients that the rank has computed."""
    refused: int = 0
    """How many of the attempts to compute the step have ended with a refusal of the update."""
    reasons: dict[int, str] = field(default_factory=dict)
    """By rank: why the rank has refused the update in the last attempt with a refusal."""
    skipped: int = 0
    """The number of batches of this step that will be left out, because the update was refused."""

    @property
    def batches(self) -> int:
        """
        The number of data batches that each rank consumes in this step.
        """
        return max((each.batches for one in self.attempts for each in one.values()), default=1)

    @property
    def changed(self) -> tuple[int, ...]:
        """
        The ranks whose own losses or gradients (before the all-reduce) were not the same in all
        attempts to compute the step.
        """
        return tuple(sorted(rank for rank, own in self._own().items() if len(own) > 1))

    @property
    def ranks(self) -> tuple[int, ...]:
        """
        The ranks whose device is the cause of the refusal, because they computed different numbers
        from the same state and batch. If all of several ranks did so, the result is empty: the
        training itself does not repeat bit for bit, so different numbers do not point to a device.
        """
        return () if self._inexact() else self.changed

    @property
    def cause(self) -> Cause:
        """
        The cause of the refusal. It follows from a comparison of the attempts to compute the step,
        which all begin with the same state and the same batch. If all attempts give the same
        numbers, the cause is the data or the model. If they give different numbers, the cause is a
        device. The cause is unknown if there are no two attempts to compare, or if training does
        not repeat bit for bit.
        """
        compared = self._own()
        if not compared or self._inexact():
            return "unknown"
        common = {
            each.common for one in self.attempts for rank, each in one.items() if rank in compared
        }
        return "device" if self.changed or len(common) > 1 else "data or model"

    def _inexact(self) -> bool:
        compared = self._own()
        return len(compared) > 1 and len(self.changed) == len(compared)

    def _own(self) -> dict[int, set[str]]:
        """
        Return, by rank, the set of digests of what the rank has computed alone in the refused step:
        its losses and gradients before the all-reduce. A rank with the same numbers in all attempts
        has one digest. Ranks that have computed the step only once are left out.
        """
        found: dict[int, list[str]] = {}
        for attempt in self.attempts:
            for rank, numbers in attempt.items():
                found.setdefault(rank, []).append(numbers.own)
        return {rank: set(own) for rank, own in found.items() if len(own) > 1}


@dataclass(slots=True, kw_only=True)
class Refusals:
    """
    The updates that ranks of a job have refused to apply, because the numbers of the update were
    bad (NaN, Inf or a spike).
    """

    present: RefusedStep | None = None
    """The step whose update was refused and that is computed again. None: there is no such step."""
    under_way: bool = False
    """True if, in the present attempt, any rank has reported the digests of its losses and
    gradients. Each order to enter the training loop begins a new attempt."""
    refusing: bool = False
    """True if any rank has refused the update in the present attempt."""
    skips: dict[int, int] = field(default_factory=dict)
    """By step: how many batches the ranks leave out before they compute the step."""
    times: dict[int, int] = field(default_factory=dict)
    """By step: how many times it was decided to leave out further batches before the step."""

    def refuse(self, rank: int, step: int, numbers: StepNumbers, why: str) -> bool:
        """
        Record that a rank has refused the update of `step`. `numbers` has the digests of what the
        rank has computed, `why` is the reason of the refusal. Return True if no other rank has
        refused the update before in the present attempt to compute the step.
        """
        if self.present is None or self.present.step != step:
            self.present, self.under_way, self.refusing = RefusedStep(step=step), False, False
        begins = not self.refusing
        self._attempt(self.present)[rank] = numbers
        if begins:
            self.refusing = True
            self.present.refused += 1
            self.present.reasons = {}
        self.present.reasons[rank] = why
        return begins

    def trained(self, rank: int, step: int, numbers: StepNumbers | None) -> None:
        """
        Record what a rank has computed in `step`, whose update the rank has applied. Do this only
        for the step whose update was refused before, and ignore all other steps.
        """
        if self.present is not None and self.present.step == step and numbers is not None:
            self._attempt(self.present)[rank] = numbers

    def _attempt(self, record: RefusedStep) -> dict[int, StepNumbers]:
        if not self.under_way:
            self.under_way = True
            record.attempts.append({})
        return record.attempts[-1]

    def resumed(self) -> None:
        """
        Record that the ranks enter the training loop again. Their next reports belong to a new
        attempt to compute the refused step.
        """
        self.under_way = self.refusing = False
        if self.present is not None and self.present.skipped:
            self.present = None  # the step is computed from other batches now: drop its record

    def leave_out(self, record: RefusedStep) -> None:
        """
        Record that the batches with which the update of a step was refused are left out when the
        step is computed again.
        """
        record.skipped = record.batches
        self.skips[record.step] = self.skips.get(record.step, 0) + record.skipped
        self.times[record.step] = self.times.get(record.step, 0) + 1

    def returns_to(self, step: int) -> int:
        """
        Record that all ranks continue from the end of `step`. Return how many batches they must
        leave out before the step after it. Forget which batches were left out before later steps:
        these batches are left out again only if the updates of those steps are refused again.
        """
        for known in (self.skips, self.times):
            for later in [each for each in known if each > step + 1]:
                del known[later]
        return self.skips.get(step + 1, 0)

    def over(self) -> None:
        """
        Record that the incident with the refused update is over, because all ranks have trained one
        more step.
        """
        self.present = None
