"""
Own every limit and choice that the decisions of a job use. Times are in seconds. The texts say why
a limit has its value.
"""

from dataclasses import dataclass
from typing import Literal

OnCorruption = Literal["majority", "end", "continue"]
"""The choices for the case that copies of a shard differ and no copy from before the difference is
left. `Policy.corruption` explains them."""

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
    """The number of incidents that a job may have. If there is one more, the job saves a last
    checkpoint and ends."""
    flaps: int = 5
    """The number of incidents that one rank may cause within `flap_window`. After one more, neither
    `retry` nor `recover` is used: the rank must leave the job, or the job ends."""
    flap_window: float = 600.0
    """The time in which the incidents of one rank are counted for `flaps`. It is long enough to
    detect a machine that fails again and again, and short enough to forget single failures."""
    replace: Literal["process", "node"] = "process"
    """What is replaced when a process is lost: only this process, or all processes of its node."""
    spread_savers: bool = False
    """Which rank writes a shard into a last checkpoint. False: the first holder in the shard group.
    True: a holder on the node that has the fewest shards to write, so that all nodes write."""
    save_copies: bool = False
    """True: every holder of a shard writes its copy into a last checkpoint. False: only one holder
    writes the shard."""
    corruption: OnCorruption = "majority"
    """What to do when copies of a shard differ and no copy from before the difference is left.
    `majority`: use the copy that most holders have; without a majority, end the job. `end`: end the
    job. `continue`: use the copy of the majority or, without one, of the lowest rank."""
    skip_batch: bool = False
    """True: after a numeric fault, skip the data batches from the step that all members return to
    up to the faulty step. False: train on the same batches again."""
    checkpoint_every: int = 0
    """The number of steps between two periodic checkpoints. 0: there are none."""
    keep_checkpoints: int = 0
    """The number of periodic checkpoints to keep, counted from the newest. 0: keep all."""
    advised: bool = False
    """True if there are recovery plugins, which are asked before a strategy is followed."""
    advice: float = 30.0
    """The time that recovery plugins have for one answer. They may have to ask an external
    scheduler first."""
    patience: float = 600.0
    """The total time for which recovery plugins may make the job wait in one incident."""
    respawns: int = 3
    """How many times another process is started for one rank within one incident. A process that
    always crashes at its start must not be started forever."""
    attempts: int = 3
    """How many times a strategy is attempted in one incident. If all attempts fail, the next
    strategy is tried. A new fault restarts the count."""
    backoff: float = 2.0
    """The time by which each attempt of a strategy waits longer than the one before. With three or
    more `attempts`, the second attempt does not wait and the third waits this long. The last
    attempt always waits, because what was missing may become available meanwhile."""
    patient: int = 3
    """How many times the time limit of an order is restarted if most ranks do not answer it. The
    likely cause is then the bus, not a rank."""
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
    """The limit from the start of a process to its call of `Session.run`. In this time the script
    imports its modules and builds the model."""
    hold: float = 600.0
    """The limit for all ranks to reach a step boundary. After this time the pause is given up. A
    hang is noticed earlier."""
    tail: float = 3600.0
    """The limit between the first rank that finishes training and the last one. Only this limit
    notices a rank that has left its loop and sends no report. A rank that hangs in its loop is
    noticed earlier."""
    pause: float = 3600.0
    """The limit of a pause. When it has passed, the job continues by itself, because the client
    that paused it may be gone."""
    check: float = 600.0
    """The limit for a check of links and devices. Such a check takes minutes."""
    save: float = 1800.0
    """The limit for writing a shard, even to a slow file system."""
    leave: float = 5.0
    """The time that a rank gets to leave when the job is over."""
    first_step: float = 600.0
    """The limit for a step while step times are not known yet. Compilation and caches make the
    first step slow."""
    stall_floor: float = 3.0
    """The shortest time without progress of any rank that is reported as a stall. A busy machine
    may stop a process for a second now and then."""
    stall_factor: float = 20.0
    """The number of median step times without progress of any rank after which a stall is reported.
    """
    warming: float = 10.0
    """The factor by which the first step after a resume may take longer than other steps, because
    new processes have cold caches."""
    node_silence: float = 10.0
    """A node that sends no heartbeat for this long, while other nodes do, counts as lost."""
