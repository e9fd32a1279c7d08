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
class Led:
    """
    This controller leads from now on, in this epoch.
    """

    at: float
    epoch: int


Event = Received | DeadlinePassed | Stalled | Led
