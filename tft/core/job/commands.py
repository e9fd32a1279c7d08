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
class RankFacts:
    """
    The facts about a rank that the planner uses while a strategy is chosen.
    """

    rank: int
    node: int | None
    """The node that the rank runs on, or ran on last; None: it has never had one."""
    member: bool
    """True if the rank takes part in the training."""
    alive: bool
    """True if the process of the rank takes orders."""
    held: int | None
    """The step whose whole state the rank has in use. None: there is no such state."""
    sound: bool
    """True if no fault has touched that state."""
    backups: tuple[int, ...]
    """Earlier steps of which the rank keeps a sound copy."""
    shards: tuple[str, ...]
    """The shards of which the rank holds a copy."""
    column: tuple[int, ...]
    """The ranks that can only leave and come back together with this rank."""
    unplaceable: str
    """Why no other process can be started for the rank. Empty: one can, or none is needed."""


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
    ranks: tuple[RankFacts, ...]
    """All ranks of the world, in their order."""
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
