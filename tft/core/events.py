"""
What the job machine is told. Past tense; `at` is the controller's clock.
"""

from dataclasses import dataclass

from tft.protocol.messages import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """
    A report came in, for the first time and in its sender's order.
    """

    at: float
    sender: str
    number: int
    message: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePassed:
    """
    The moment named by `Machine.next_deadline` has come.
    """

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled:
    """
    No rank has moved for longer than the job's own step times allow.
    """

    at: float
    silence: float
    """Seconds since the last movement of any rank."""
    limit: float
    """The limit that was learnt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Led:
    """
    This controller leads from now on, in this epoch.
    """

    at: float
    epoch: int


Event = Received | DeadlinePassed | Stalled | Led
