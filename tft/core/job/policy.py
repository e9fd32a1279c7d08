"""
Own every limit that decisions use. Values are in seconds unless a text says otherwise; the texts
give the reasons of the limits.
"""

from dataclasses import dataclass
from typing import Literal

OnCorruption = Literal["majority", "end", "continue"]
"""What can follow when copies differ and no copy from before is left."""

STRATEGIES = ("migrate", "scale_out", "retry", "recover", "scale_in", "dump")
"""The strategies that can be enabled, in the order in which they are tried. If none of them is
possible, the job ends without a last checkpoint (`exit`)."""


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
    """The time in which incidents of one rank are counted, see `flaps`. It is long enough to detect
    a machine that fails again and again, and short enough to forget bad luck."""
    replace: Literal["process", "node"] = "process"
    """What is replaced when a process is lost: only this process, or all processes of its node."""
    spread_savers: bool = False
    """False: the first holder of each shard in the order of placement writes it into a last
    checkpoint. True: the writers are spread over the nodes."""
    save_copies: bool = False
    """True: every holder of a shard writes the shard into a last checkpoint. False: only one rank
    does."""
    corruption: OnCorruption = "majority"
    """What follows when copies differ and no copy from before is left. `majority`: the copies of
    the majority count, and without one the job ends. `end`: the job ends. `continue`: as
    `majority`, and without one the copy of the lowest rank counts."""
    skip_batch: bool = False
    """True: after a numeric fault that took all members back, the batches up to the faulty step are
    skipped."""
    checkpoint_every: int = 0
    """The number of steps between two periodic checkpoints. 0: there are none."""
    keep_checkpoints: int = 0
    """The number of periodic checkpoints to keep; the newest are kept. 0: keep all."""
    advised: bool = False
    """True: the recovery plugins are asked before a strategy is followed."""
    advice: float = 30.0
    """The time that recovery plugins have for one answer. They may have to ask an external
    scheduler first."""
    patience: float = 600.0
    """The total time for which recovery plugins may make the job wait in one incident."""
    respawns: int = 3
    """How many times one rank is started again within one incident. A process that always crashes
    at its start must not be started forever."""
    attempts: int = 3
    """How many times a strategy is attempted, the first time included. Then it has failed, and the
    next strategy is tried. A new fault restarts the count."""
    backoff: float = 2.0
    """The wait before the third attempt of a strategy; each later attempt waits this much longer.
    The last attempt always waits, because what the strategy needs may become available meanwhile.
    """
    patient: int = 3
    """How many times the limit of an order is restarted if most ranks do not answer it: then the
    bus, not a rank, is the likely cause."""
    kill: float = 10.0
    """The limit for a process to end after it was ordered to. The kernel ends a process in
    milliseconds, unless a driver or a file system blocks it."""
    freeze: float = 2.0
    """The limit for the answer to a freeze. A live control thread answers in milliseconds; a longer
    silence means that the thread does not run."""
    grace: float = 1.0
    """The time that a collective may take to end after a peer has died. Data that peers have
    already sent arrives in less time than this."""
    stop: float = 10.0
    """The limit for a training thread to leave its loop. It reaches a collective or a step boundary
    within this time, or it is stuck."""
    repair: float = 300.0
    """The limit for orders that move or load state. The time depends on the size of the state, not
    on tft."""
    regroup: float = 60.0
    """The limit for forming process groups. They form in tens of milliseconds once all ranks are
    there."""
    rebuild: float = 120.0
    """The limit for building wrappers such as DDP. This is code of the user, and may send a whole
    model to all ranks."""
    gather: float = 3600.0
    """The limit from one node that joins to the next, while ranks have no place. Nodes may be
    started by hand, one after another, but nobody takes an hour between two of them."""
    join: float = 300.0
    """The limit from the start of a process to its `Session.run`, for imports and the building of a
    model."""
    hold: float = 600.0
    """The limit for all ranks to reach a step boundary. After this time the pause is given up. A
    hang is noticed earlier."""
    tail: float = 3600.0
    """The limit between the first rank that finishes training and the last. A rank that hangs in
    its loop is noticed earlier; a rank that has left its loop and sends no report is noticed only
    by this limit."""
    pause: float = 3600.0
    """The limit of a pause. After it a paused job continues by itself, because the client that
    paused it may be gone."""
    check: float = 600.0
    """The limit for a check of links and devices, which takes minutes."""
    save: float = 1800.0
    """The limit for writing a shard, even to a slow file system."""
    leave: float = 5.0
    """The time that a rank gets to leave when the job is over."""
    first_step: float = 600.0
    """The limit for a step while step times are not known yet. Compilation and caches make the
    first step slow."""
    stall_floor: float = 3.0
    """No stall is reported before this time has passed, because a busy machine may stop a process
    for a second now and then."""
    stall_factor: float = 20.0
    """A stall is reported after this many median step times without any progress."""
    warming: float = 10.0
    """The factor by which the first step after a resume may take longer than others, because new
    processes have cold caches."""
    node_silence: float = 10.0
    """A node that sends no heartbeat for this long, while other nodes do, counts as lost."""
