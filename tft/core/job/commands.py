"""
Define the commands that the job machine returns to the controller, in addition to the orders to
ranks and agents, which `tft.protocol.messages` defines.
"""

from dataclasses import dataclass

from tft.core.job.incident import Fault
from tft.core.plan.offers import Offer
from tft.protocol.messages import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOver:
    """
    The outcome of the job. When the job machine returns this command, the controller writes the
    report of the job and exits.
    """

    result: str
    """How the job ends: `completed`, `dumped` (ended with a last checkpoint), `failed` (ended
    without a last checkpoint) or `cancelled` (a signal has asked for the end)."""
    code: int
    """The exit code of the command `tft run`."""
    why: str
    sound: int | None = None
    """The last step whose checkpoint may be used, if the job has ended in an incident with wrong
    numbers: checkpoints of later steps may contain these numbers. None: there is no such limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """
    The facts about one rank that the controller gives to recovery plugins when it asks them which
    recovery strategy the job should follow.
    """

    rank: int
    node: int | None
    """The node on which the process of the rank runs, or ran last. None: the rank never had a
    node."""
    member: bool
    """True if the rank takes part in the training."""
    alive: bool
    """True if the rank has a process that can carry out orders and is not being ended."""
    held: int | None
    """The step whose state is in the memory of the rank: the complete training state at the end of
    this step. None: the rank has no complete state."""
    sound: bool
    """True if the state of step `held` is right, as far as the controller knows."""
    backups: tuple[int, ...]
    """The earlier steps of which the rank keeps a copy of the training state in memory. Copies that
    are known to be wrong are left out."""
    shards: tuple[str, ...]
    """The shards of which the rank holds a copy."""
    column: tuple[int, ...]
    """The ranks of the model replica to which this rank belongs. All ranks of a replica must leave
    the job together, and come back together."""
    unplaceable: str
    """Why no other process can be started for the rank. Empty: another process can be started, or
    the rank has not lost its process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consult:
    """
    Ask the recovery plugins which recovery strategy to follow. Their answer is an `Advised` message
    with the same incident and round.
    """

    incident: int
    round: int
    faults: tuple[Fault, ...]
    offers: tuple[Offer, ...]
    """One offer for each recovery strategy, in the order in which the job would try the strategies.
    An offer says what the strategy would do, or why it is not possible. The job follows the first
    possible offer, unless a plugin advises another one."""
    ranks: tuple[RankFacts, ...]
    """The facts about each rank of the job, in the order of the rank numbers."""
    until: float
    """The time at which the job machine decides without advice, by the clock of the controller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """
    Write one entry into the log for operators: the name of an event, and facts about the event.
    """

    event: str
    facts: dict[str, object]


Command = Order | JobOver | Consult | Tell
