"""
Define the commands of the job machine, in addition to the orders of the protocol.
"""

from dataclasses import dataclass

from tft.core.job.incident import Fault
from tft.core.plan.offers import Offer
from tft.protocol.messages import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOver:
    """
    The job is over: write the report and exit with `code`.
    """

    result: str
    """`completed`, `dumped`, `failed` or `cancelled`."""
    code: int
    """The exit code of `tft run`."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Consult:
    """
    Ask the recovery plugins which strategy to follow. The answer is an `Advised` for this incident
    and this round.
    """

    incident: int
    round: int
    faults: tuple[Fault, ...]
    offers: tuple[Offer, ...]
    """The offers, in the order in which they would be tried. The first that nothing rules out is
    followed, unless a plugin advises otherwise."""
    until: float
    """The time at which the machine decides without advice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """
    An event for operators to read, with its facts.
    """

    event: str
    facts: dict[str, object]


Command = Order | JobOver | Consult | Tell
