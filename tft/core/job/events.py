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
    Verdict of the slice comparison: every slice of every shard was compared at the end of `step` or
    later, and all copies were equal.
    """

    at: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicesDiffered:
    """
    Verdict of the slice comparison: one slice of a shard was not equal on all ranks that hold the
    shard.
    """

    at: float
    shard: str
    step: int
    """The step at whose end the slice was digested."""
    right: tuple[int, ...]
    """The ranks whose copies are right, because they are the majority. Empty: there is no majority.
    """
    wrong: tuple[int, ...]
    sound: int
    """The last step at which this slice was found equal on all ranks. The copies began to differ at
    some later step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptionTraced:
    """
    Verdict of the slice comparison: it is now known which ranks had a wrong copy in an earlier
    incident, although no majority showed it then. The steps were computed again, and the results
    of these ranks were the first that came out different.
    """

    at: float
    incident: int
    """The number of the incident that the different copies had caused."""
    ranks: tuple[int, ...]
    step: int
    """The step before the first one whose results came out different."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Led:
    """
    This controller is the leader from now on, with this epoch (the number of the leader).
    """

    at: float
    epoch: int
    lost: int = 0
    """The number of events that this controller could not read from a damaged story (the recorded
    events of the job). If it is not 0, the facts in the machine are incomplete."""


SliceVerdict = SlicesAgreed | SlicesDiffered | CorruptionTraced
"""The verdicts of the slice comparison, which compares the copies of shards during training."""
Own = DeadlinePassed | Stalled | SliceVerdict | Led
"""The events that the controller creates itself. No other process sends them."""
Event = Received | Own
