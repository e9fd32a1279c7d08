"""
Define the events that the job machine receives. Event names are in the past tense, and `at` is the
time by the clock of the controller.
"""

from dataclasses import dataclass

from tft.protocol.messages import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """
    A report was received. Each report is received once, in the order in which its sender sent it.
    """

    at: float
    sender: str
    number: int
    message: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePassed:
    """
    The time returned by `Machine.next_deadline` has come.
    """

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled:
    """
    No rank has made progress for longer than the step times of this job allow.
    """

    at: float
    silence: float
    """Seconds since the last progress of any rank."""
    limit: float
    """The limit in seconds, computed from the step times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicesAgreed:
    """
    Every slice of every shard was compared at `step` or later, and all copies were equal.
    """

    at: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicesDiffered:
    """
    A slice of a shard was not equal on all ranks that hold the shard.
    """

    at: float
    shard: str
    step: int
    """The step at whose end the slice was digested."""
    right: tuple[int, ...]
    """The ranks whose copies count, because they are the majority. Empty: there is none."""
    wrong: tuple[int, ...]
    sound: int
    """The last step at which this slice was equal on all ranks: the copies differ since a later
    step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptionTraced:
    """
    Steps after which copies differed without a majority were computed again, and what these ranks
    had computed was the first that came out otherwise. So these ranks had a wrong copy.
    """

    at: float
    incident: int
    """The number of the incident that the copies led to."""
    ranks: tuple[int, ...]
    step: int
    """The last step before the gradients were wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Led:
    """
    This controller leads from now on, in this epoch.
    """

    at: float
    epoch: int
    lost: int = 0
    """The number of events of the damaged story that this controller could not read. What the
    machine knows is incomplete then."""


SliceVerdict = SlicesAgreed | SlicesDiffered | CorruptionTraced
"""What the comparison of slices has found."""
Own = DeadlinePassed | Stalled | SliceVerdict | Led
"""The events that the controller creates itself. No other process sends them."""
Event = Received | Own
