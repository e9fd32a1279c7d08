"""
Define the events that the job machine receives. Event names are in the past tense. The field `at`
of an event is the time at which it happened, by the clock of the controller.
"""

from dataclasses import dataclass

from tft.protocol.messages import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """
    The controller has received a report from another process. The job machine gets each report only
    once. It gets the reports of one sender in the order in which the sender has sent them.
    """

    at: float
    sender: str
    number: int
    message: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePassed:
    """
    The time has come that the method `Machine.next_deadline` had returned.
    """

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled:
    """
    No rank has made progress for longer than a limit that depends on the step times of this job.
    """

    at: float
    silence: float
    """Seconds since the last progress of any rank."""
    limit: float
    """The limit that `silence` has exceeded, in seconds. The limit is computed from the step times.
    """
    out: bool = False
    """True if all ranks have left their training loops, and `silence` began when the last one left.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicesAgreed:
    """
    Verdict of the slice comparison, which compares copies of shards during training: every slice of
    every shard was compared at the end of `step` or later, and all copies were equal.
    """

    at: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicesDiffered:
    """
    Verdict of the slice comparison, which compares copies of shards during training: one slice of a
    shard was not equal on all ranks that hold the shard.
    """

    at: float
    shard: str
    step: int
    """The step at whose end the ranks digested the slice."""
    right: tuple[int, ...]
    """The ranks whose copies are right, because they are the majority. Empty: there is no majority.
    """
    wrong: tuple[int, ...]
    sound: int
    """The last step at whose end this slice was found equal on all ranks. The copies began to
    differ at some later step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptionTraced:
    """
    Verdict of the slice comparison: it is now known which ranks had a wrong copy in an earlier
    incident, in which no majority could show this. After that incident the ranks computed the same
    steps again. The results of the ranks in `ranks` were the first that differed from before.
    """

    at: float
    incident: int
    """The number of the incident that was opened because copies differed."""
    ranks: tuple[int, ...]
    step: int
    """The last step before the first step whose results were different when the ranks computed the
    step again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Led:
    """
    A controller process has started and leads the job from now on. The new controller may replace
    an earlier one that has ended. `epoch` is the number of the new controller.
    """

    at: float
    epoch: int
    lost: int = 0
    """The number of events that this controller could not read from a damaged story (the recorded
    events of the job). If it is not 0, the machine does not know everything about the job."""


SliceVerdict = SlicesAgreed | SlicesDiffered | CorruptionTraced
"""The verdicts of the slice comparison, which compares the copies of shards during training."""
Own = DeadlinePassed | Stalled | SliceVerdict | Led
"""The events that the controller creates itself. No other process sends such events."""
Event = Received | Own
