"""
Own every limit that decisions use. Values are in seconds unless stated otherwise, and each limit
has its reason.
"""

from dataclasses import dataclass
from typing import Literal

STRATEGIES = ("migrate", "scale_out", "retry", "recover", "scale_in", "dump")
"""The strategies that can be enabled, in the order in which they are tried. `exit` remains if none
of them is possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """
    The limits of one job.
    """

    enable: frozenset[str] = frozenset(STRATEGIES)
    """The strategies that may be used."""
    max_incidents: int = 100
    """After this many incidents the next one ends in `dump`."""
    flaps: int = 5
    """The number of incidents that one rank may cause within `flap_window`. After the next one the
    rank is neither retried nor replaced."""
    flap_window: float = 600.0
    """Long enough to see a machine that fails again and again, short enough to forget bad luck."""
    replace: Literal["process", "node"] = "process"
    """What is replaced when a process is lost: only that process, or all processes of its node."""
    spread_savers: bool = False
    """False: the first holder of each shard in the order of placement writes it into a last
    checkpoint. True: the writers are spread over the nodes."""
    save_copies: bool = False
    """True: every holder of a shard writes the shard into a last checkpoint. False: only one rank
    does."""
    skip_batch: bool = False
    """True: after a numeric fault that took all members back, the batches up to the fault are left
    out."""
    checkpoint_every: int = 0
    """The number of steps between two periodic checkpoints. 0: there are none."""
    keep_checkpoints: int = 0
    """The number of periodic checkpoints to keep; the newest are kept. 0: keep all."""
    advised: bool = False
    """True: recovery plugins are consulted before a strategy is followed."""
    advice: float = 30.0
    """The time that recovery plugins have for an answer: an external scheduler has to look at its
    cluster first."""
    patience: float = 600.0
    """The total time for which recovery plugins may make the job wait in one incident."""
    respawns: int = 3
    """How many times one rank is started again within one incident. A crash loop is not
    survived."""
    attempts: int = 3
    """How many times a strategy is begun, the first time included, before it has failed and the
    next strategy is tried. A new fault starts the count again."""
    backoff: float = 2.0
    """The wait before the third attempt of a strategy; each later attempt waits this much longer.
    The last attempt always waits. What the strategy needs may be on its way."""
    patient: int = 3
    """How many times an order is given its limit again if most ranks do not answer it: then the bus
    is the cause."""
    kill: float = 10.0
    """The kernel ends a process in milliseconds, unless a driver or a file system blocks the
    process."""
    freeze: float = 2.0
    """A live control thread answers in milliseconds. If it takes longer than this, it does not
    run."""
    grace: float = 1.0
    """The contributions that peers have already made to a collective arrive in less than this."""
    stop: float = 10.0
    """A training thread reaches a collective or a step boundary within this time, or is stuck."""
    repair: float = 300.0
    """For orders that move or load state. The time depends on the size of the state, not on tft."""
    regroup: float = 60.0
    """Process groups form in tens of milliseconds once all ranks are there."""
    rebuild: float = 120.0
    """Building wrappers is the user's code. It may send a whole model to all ranks."""
    gather: float = 3600.0
    """From one node that joins to the next, while ranks have no place. Nodes may be started by
    hand, one after another, but nobody takes an hour to go to the next."""
    join: float = 300.0
    """From the spawn of a process to its `Session.run`: imports and the building of a model."""
    hold: float = 600.0
    """For reaching a step boundary. After this time the pause is given up. A hang is noticed
    earlier."""
    tail: float = 3600.0
    """Between the first rank that finishes and the last. A rank that hangs in the loop is noticed
    earlier; a rank that has left the loop and sends no report is noticed only by this limit."""
    pause: float = 3600.0
    """After this time a paused job goes on by itself: the client that paused the job may be
    gone."""
    check: float = 600.0
    """A check of links and devices takes minutes."""
    save: float = 1800.0
    """For writing a shard to a slow file system."""
    leave: float = 5.0
    """The time that a rank gets to unwind when the job is over."""
    first_step: float = 600.0
    """The limit for a step while step times are not known: compilation and caches take time."""
    stall_floor: float = 3.0
    """No stall is reported earlier than this: a busy machine pauses a process for a second now and
    then."""
    stall_factor: float = 20.0
    """The number of median step times without any progress that make a stall."""
    warming: float = 10.0
    """The factor by which the first step after a resume may take longer: a new process is cold."""
    node_silence: float = 10.0
    """A node that sends no beat for this long, while other nodes do, is lost."""
