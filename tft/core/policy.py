"""
Every limit the judgement goes by: seconds unless named otherwise, each with its reason.
"""

from dataclasses import dataclass
from typing import Literal

STRATEGIES = ("migrate", "scale_out", "retry", "recover", "scale_in", "dump")
"""What can be enabled, in the order in which they are tried. `exit` is what is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """
    The limits of one job.
    """

    enable: frozenset[str] = frozenset(STRATEGIES)
    """The strategies that may be used."""
    max_incidents: int = 100
    """After so many incidents the next one ends in `dump`."""
    flaps: int = 5
    """So many incidents may one rank cause within `flap_window`; after the next one it is neither
    retried nor replaced."""
    flap_window: float = 600.0
    """Long enough to see a machine that dies again and again, short enough to forget bad luck."""
    replace: Literal["process", "node"] = "process"
    """What is replaced when a process is lost: that one, or all of its node."""
    spread_savers: bool = False
    """A last checkpoint is written by the lowest-placed holders, or spread over the nodes."""
    save_copies: bool = False
    """Whoever holds a shard writes it into a last checkpoint, not one rank alone."""
    skip_batch: bool = False
    """After a numeric fault that took everyone back, the batches up to it are left out."""
    keep_checkpoints: int = 0
    """How many periodic checkpoints are kept, the newest; 0: all."""
    advised: bool = False
    """Recovery plugins are asked before a strategy is followed."""
    advice: float = 30.0
    """How long they may take: an external scheduler has to look at its cluster first."""
    patience: float = 600.0
    """How long they may have everyone wait, in all, in one incident."""
    respawns: int = 3
    """How often one rank is started again within one incident: a crash loop is not survived."""
    attempts: int = 3
    """How often a strategy is begun anew after an order failed, before the next is tried."""
    backoff: float = 2.0
    """Before a strategy is begun a third time, and further ones, and before the last time in any case:
    what it needs may be on its way."""
    patient: int = 3
    """How often an order is given its time again when most do not answer it: then it is the bus."""
    kill: float = 10.0
    """The kernel ends a process in milliseconds, unless a driver or a file system holds it."""
    freeze: float = 2.0
    """A live control thread answers in milliseconds; more than this and it does not run."""
    grace: float = 1.0
    """What peers have already contributed to a collective arrives in less than this."""
    stop: float = 10.0
    """A training thread reaches a collective or a step boundary within this, or is stuck."""
    repair: float = 300.0
    """For orders that move or load state: bounded by its size, not by us."""
    regroup: float = 60.0
    """Forming groups takes tens of milliseconds when everyone is there."""
    rebuild: float = 120.0
    """Building wrappers is the user's code, and may send a model once round."""
    gather: float = 3600.0
    """From one node that joins to the next, while ranks have no place: somebody may start them by
    hand, one after the other; nobody takes an hour to go to the next."""
    join: float = 300.0
    """From spawning a process to its `Session.run`: imports and the building of a model."""
    hold: float = 600.0
    """For coming to a step boundary; after it the pause is given up. A hang is noticed before."""
    tail: float = 3600.0
    """Between the first rank that finishes and the last: one that hangs in the loop is noticed before,
    one that has left it and is never heard is not."""
    pause: float = 3600.0
    """After this a paused job goes on by itself: whoever paused it may be gone."""
    check: float = 600.0
    """A check of links and devices takes minutes."""
    save: float = 1800.0
    """Writing a shard to a slow file system."""
    leave: float = 5.0
    """What a rank gets to unwind when the job is over."""
    first_step: float = 600.0
    """The limit for a step before step times are known: compilation, caches."""
    stall_floor: float = 3.0
    """No stall is called earlier: a busy machine pauses a process for a second now and then."""
    stall_factor: float = 20.0
    """How many median steps without any progress make a stall."""
    warming: float = 10.0
    """How many times longer the first step after a resume may take: a new process is cold."""
    node_silence: float = 10.0
    """A node that sends no beat for this long, while others do, is lost."""
