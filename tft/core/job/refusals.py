"""
Own what is known about updates that the ranks have refused because of their numbers, and find out
the cause: the data or the model, or a device.
"""

from dataclasses import dataclass, field
from typing import Literal

from tft.protocol.messages import StepNumbers

Cause = Literal["data or model", "device", "unknown"]

MOST_SKIPS = 3
"""How many times batches are left out at one step. If the step is refused with all of them, the
cause is not the data: the model has diverged, or a device fails always."""


@dataclass(slots=True, kw_only=True)
class RefusedStep:
    """
    One step whose update was refused, computed with one batch.
    """

    step: int
    attempts: list[dict[int, StepNumbers]] = field(default_factory=list)
    """For each attempt to compute the step: by rank, what it has computed."""
    refused: int = 0
    """How many of the attempts were refused."""
    reasons: dict[int, str] = field(default_factory=dict)
    """By rank: why it has refused the update, in its last attempt."""
    skipped: int = 0
    """How many batches were left out because of these refusals."""

    @property
    def batches(self) -> int:
        """
        How many batches the step takes.
        """
        return max((each.batches for one in self.attempts for each in one.values()), default=1)

    @property
    def changed(self) -> tuple[int, ...]:
        """
        The ranks that have computed other numbers of their own in another attempt.
        """
        return tuple(sorted(rank for rank, own in self._own().items() if len(own) > 1))

    @property
    def ranks(self) -> tuple[int, ...]:
        """
        The ranks whose device is the cause. If the numbers of all ranks have changed, the
        computation cannot be repeated bit for bit, and that shows nothing about a device.
        """
        return () if self._inexact() else self.changed

    @property
    def cause(self) -> Cause:
        """
        The cause, from the comparison of the attempts. The same numbers again mean the data or the
        model. If other numbers come from the same state and the same batch, the cause is a device.
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
        Return the own numbers of each rank of which more than one attempt is known.
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
    """The step that is computed again, with its present batch. None: there is none."""
    under_way: bool = False
    """True if the present attempt has numbers already. Each order to enter the loop begins another
    attempt."""
    refusing: bool = False
    """True if the present attempt was refused."""
    skips: dict[int, int] = field(default_factory=dict)
    """By step: how many batches are left out before it is computed."""
    times: dict[int, int] = field(default_factory=dict)
    """By step: how many times batches were left out before it."""

    def refuse(self, rank: int, step: int, numbers: StepNumbers, why: str) -> bool:
        """
        Record that a rank has refused the update of `step`. Return True if no other rank has
        refused it in this attempt.
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
        Record what a rank has computed in a step whose update it has applied.
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
        Record that the members enter the loop again: what they report from now on is of another
        attempt.
        """
        self.under_way = self.refusing = False
        if self.present is not None and self.present.skipped:
            self.present = None  # the next attempt has another batch

    def leave_out(self, record: RefusedStep) -> None:
        """
        Leave out the batches of a refused step from now on.
        """
        record.skipped = record.batches
        self.skips[record.step] = self.skips.get(record.step, 0) + record.skipped
        self.times[record.step] = self.times.get(record.step, 0) + 1

    def returns_to(self, step: int) -> int:
        """
        Record that all members continue from the end of `step`. Return how many batches they leave
        out first. Batches of later steps are left out when these are refused again.
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
