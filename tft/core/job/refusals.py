"""
Own what is known about updates that the ranks have refused to apply because of their numbers (NaN,
Inf or a spike), and find out the cause: the data or the model, or a device.
"""

from dataclasses import dataclass, field
from typing import Literal

from tft.protocol.messages import StepNumbers

Cause = Literal["data or model", "device", "unknown"]

MOST_SKIPS = 3
"""How many times the batches of one step are replaced by the next ones. If the update is still
refused, the cause is not the data: the model has diverged, or a device always fails."""


@dataclass(slots=True, kw_only=True)
class RefusedStep:
    """
    One step whose update was refused, with all attempts to compute it from the same batches.
    """

    step: int
    attempts: list[dict[int, StepNumbers]] = field(default_factory=list)
    """One entry for each attempt to compute the step: by rank, the digests of what it has computed.
    """
    refused: int = 0
    """How many of the attempts were refused."""
    reasons: dict[int, str] = field(default_factory=dict)
    """By rank: why it has refused the update, in the last attempt that was refused."""
    skipped: int = 0
    """How many batches were left out because the update was refused."""

    @property
    def batches(self) -> int:
        """
        How many batches each rank takes in this step.
        """
        return max((each.batches for one in self.attempts for each in one.values()), default=1)

    @property
    def changed(self) -> tuple[int, ...]:
        """
        The ranks whose own losses or gradients were not the same in all attempts.
        """
        return tuple(sorted(rank for rank, own in self._own().items() if len(own) > 1))

    @property
    def ranks(self) -> tuple[int, ...]:
        """
        The ranks whose device is the cause, because they computed different numbers from the same
        state and batch. Empty if this is so for all of several ranks: then the computation cannot
        be repeated bit for bit, and different numbers show nothing about a device.
        """
        return () if self._inexact() else self.changed

    @property
    def cause(self) -> Cause:
        """
        The cause of the refusal, from a comparison of the attempts, which begin with the same state
        and the same batch. If they give the same numbers, the cause is the data or the model. If
        they give different numbers, the cause is a device.
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
        Return the digests of what each rank has computed alone in the refused step, before the
        all-reduce (losses and gradients), without duplicates. Ranks that have computed the step
        only once are left out.
        """
        found: dict[int, list[str]] = {}
        for attempt in self.attempts:
            for rank, numbers in attempt.items():
                found.setdefault(rank, []).append(numbers.own)
        return {rank: set(own) for rank, own in found.items() if len(own) > 1}


@dataclass(slots=True, kw_only=True)
class Refusals:
    """
    The refused updates of a job.
    """

    present: RefusedStep | None = None
    """The refused step that is computed again, with its present batches. None: there is none."""
    under_way: bool = False
    """True if some rank has reported numbers of the present attempt. Each order to enter the loop
    begins a new attempt."""
    refusing: bool = False
    """True if the present attempt was refused."""
    skips: dict[int, int] = field(default_factory=dict)
    """By step: how many batches are left out before it is computed."""
    times: dict[int, int] = field(default_factory=dict)
    """By step: how many times batches were left out before it."""

    def refuse(self, rank: int, step: int, numbers: StepNumbers, why: str) -> bool:
        """
        Record that a rank has refused the update of `step`. `numbers` has the digests of what it
        has computed, `why` the reason. Return True if this is the first refusal in this attempt.
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
        Record what a rank has computed in `step`, whose update it has applied. Steps other than the
        refused one are ignored.
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
        Record that the members enter the loop again, so that their next reports belong to a new
        attempt.
        """
        self.under_way = self.refusing = False
        if self.present is not None and self.present.skipped:
            self.present = None  # the next attempt has another batch

    def leave_out(self, record: RefusedStep) -> None:
        """
        Record that the batches of a refused step are left out whenever the step is computed again.
        """
        record.skipped = record.batches
        self.skips[record.step] = self.skips.get(record.step, 0) + record.skipped
        self.times[record.step] = self.times.get(record.step, 0) + 1

    def returns_to(self, step: int) -> int:
        """
        Record that all members continue from the end of `step`. Return how many batches they must
        leave out before the next step. Forget the batches to leave out at steps after that: they
        are left out again only if those steps are refused again.
        """
        for known in (self.skips, self.times):
            for later in [each for each in known if each > step + 1]:
                del known[later]
        return self.skips.get(step + 1, 0)

    def over(self) -> None:
        """
        Record that the incident is over: all members have trained one more step.
        """
        self.present = None
