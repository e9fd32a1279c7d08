"""
What the job machine asks for, beside the orders of the protocol.
"""

from dataclasses import dataclass

from tft.core.incident import Fault
from tft.core.planner import Offer
from tft.protocol.messages import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOver:
    """
    Nothing is left to be done: write the report and leave with `code`.
    """

    result: str
    """`completed`, `dumped`, `failed` or `cancelled`."""
    code: int
    """The exit code of `tft run`."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Consult:
    """
    Ask the recovery plugins which strategy to follow; an `Advised` for this incident and round
    is the answer.
    """

    incident: int
    round: int
    faults: tuple[Fault, ...]
    offers: tuple[Offer, ...]
    """In the order in which they would be tried; the first that nothing rules out is followed
    unless somebody advises otherwise."""
    until: float
    """When the machine decides without advice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """
    Something an operator wants to read: an event and its facts.
    """

    event: str
    facts: dict[str, object]


Command = Order | JobOver | Consult | Tell
