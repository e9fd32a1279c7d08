"""
Define the commands that the job machine returns, in addition to the orders of the protocol.
"""

from dataclasses import dataclass

from tft.core.job.incident import Fault
from tft.core.plan.offers import Offer
from tft.protocol.messages import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOver:
    """
    The outcome of the job. As a command, it tells the controller to write the report and to exit.
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
    """The node on which the rank runs, or ran last. None: the rank never had a node."""
    member: bool
    """True if the rank takes part in the training."""
    alive: bool
    """True if the rank has a process that can receive orders."""
    held: int | None
    """The step of the complete state with which the rank trains. None: the rank has no complete
    state."""
    sound: bool
    """True if no fault has touched the state of step `held`."""
    backups: tuple[int, ...]
    """The earlier steps of which the rank keeps a sound copy in memory."""
    shards: tuple[str, ...]
    """The shards of which the rank holds a copy."""
    column: tuple[int, ...]
    """The ranks of the model replica of this rank. They can leave the job and come back to it only
    together."""
    unplaceable: str
    """Why no other process can be started for the rank. Empty: one can be started, or none is
    needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consult:
    """
    Ask the recovery plugins which strategy to follow. The answer is an `Advised` message for this
    incident and this round.
    """

    incident: int
    round: int
    faults: tuple[Fault, ...]
    offers: tuple[Offer, ...]
    """The offers, in the order in which the job would try them. The first possible offer is
    followed, unless a plugin advises another one."""
    ranks: tuple[RankFacts, ...]
    """The facts about all ranks of the world, by rank number."""
    until: float
    """The time at which the machine decides without advice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """
    Write an event into the log for operators, with its facts.
    """

    event: str
    facts: dict[str, object]


Command = Order | JobOver | Consult | Tell
