"""
Define every limit and setting that the decisions about a job use. Times are in seconds. The text
under a limit says why it has its value.
"""

from dataclasses import dataclass
from typing import Literal

OnCorruption = Literal["majority", "end", "continue"]
"""What the job can do when copies of a shard differ and no copy from before the difference is left.
`Policy.corruption` explains the choices."""

STRATEGIES = ("migrate", "scale_out", "retry", "recover", "scale_in", "dump")
"""The recovery strategies that can be enabled, in the order in which they are tried. If none of
these strategies is possible, the job ends without a last checkpoint (the strategy `exit`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """
    The limits and settings of one job.
    """

    enable: frozenset[str] = frozenset(STRATEGIES)
    """The recovery strategies that the job may use."""
    max_incidents: int = 100
    """The number of incidents that a job may have. In the next incident after that, the job saves a
    last checkpoint and ends."""
    flaps: int = 5
    """The number of incidents that one rank may cause within `flap_window`. If the rank causes one
    more, the strategies `retry` and `recover` are not used: the rank must leave the job, or the job
    ends."""
    flap_window: float = 600.0
    """The time within which the incidents of one rank are counted for `flaps`. This time is long
    enough to detect a machine that fails again and again, and short enough to forget single
    failures."""
    replace: Literal["process", "node"] = "process"
    """What is replaced when a process is lost. `process`: only this process. `node`: all processes
    on the node of the lost process."""
    spread_savers: bool = False
    """Which rank writes a shard into the last checkpoint of the job. False: the first of the ranks
    that hold the shard. True: a holder on the node that has the fewest shards to write, so that the
    work is spread over all nodes."""
    save_copies: bool = False
    """True: every holder of a shard writes its copy into the last checkpoint of the job. False:
    only one holder writes the shard."""
    corruption: OnCorruption = "majority"
    """What to do when copies of a shard differ and no copy from before the difference is left.
    `majority`: use the copy that most holders have; without a majority, end the job. `end`: end the
    job. `continue`: use the copy of the majority or, without one, of the lowest rank."""
    skip_batch: bool = False
    """True: after a numeric fault and the return to an earlier step, all ranks skip the data
    batches of the steps up to the faulty step. False: they train on the same batches again."""
    checkpoint_every: int = 0
    """The number of steps between two periodic checkpoints. 0: there are none."""
    keep_checkpoints: int = 0
    """The number of periodic checkpoints to keep, counted from the newest. 0: keep all."""
    advised: bool = False
    """True if there are recovery plugins. The job asks these plugins for advice before it follows a
    recovery strategy."""
    advice: float = 30.0
    """The time that recovery plugins have for one answer. This time is long enough for a plugin to
    ask an external scheduler first."""
    patience: float = 600.0
    """The total time for which recovery plugins may make the job wait in one incident."""
    respawns: int = 3
    """How many times another process is started for one rank within one incident. A process that
    always crashes at its start must not be started forever."""
    attempts: int = 3
    """How many times a recovery strategy is attempted in one incident. If all attempts fail, the
    next strategy is tried. A new fault restarts the count."""
    backoff: float = 2.0
    """The unit of the time that the job waits before it repeats a recovery strategy. If `attempts` is
    2, the second attempt waits once this time. If `attempts` is larger, the second attempt begins
    at once, the third waits once this time, the fourth twice this time, and so on. Something that
    was missing, such as a node with room, may become available meanwhile."""
    patient: int = 3
    """How many times the time limit of an order is restarted if most ranks do not answer the order.
    The likely cause is then the bus, not a rank."""
    kill: float = 10.0
    """The limit for the end of a process, counted from the order to its agent to end the process.
    The kernel ends a process in milliseconds, unless a driver or a file system blocks the process.
    """
    freeze: float = 2.0
    """The limit for a rank to answer a freeze order. The control thread of the rank's process
    answers in milliseconds. A longer silence means that this thread does not run."""
    grace: float = 1.0
    """The time that a collective may take to end after a peer has died. Data that peers have
    already sent arrives in less time than this."""
    stop: float = 10.0
    """The limit for a training thread to leave its loop. Within this time, a thread that is not
    stuck reaches a collective or a step boundary, where it can leave the loop."""
    repair: float = 300.0
    """The limit for orders to copy or load training state. How long a rank needs depends on the
    size of the state, not on tft."""
    regroup: float = 60.0
    """The limit for forming process groups. When all ranks are there, they form their process
    groups in tens of milliseconds."""
    rebuild: float = 120.0
    """The limit for building wrappers such as DDP. The wrappers are built by code of the user,
    which may send a whole model to all ranks."""
    gather: float = 3600.0
    """While some ranks still have no node: the limit from the moment when one node joins the job
    until the next node joins. The limit is long, because a person may start the nodes by hand."""
    join: float = 300.0
    """The limit from the start of a process to its call of `Session.run`. In this time the script
    imports its modules and builds the model."""
    hold: float = 600.0
    """The limit for all ranks to reach the step boundary at which they will pause. When the limit
    has passed, the pause is given up. A rank that hangs is noticed earlier."""
    tail: float = 3600.0
    """The limit between the first and the last rank that finish training. Only this limit notices a
    rank that has left its loop and sends no report. A rank that hangs in its loop is noticed
    earlier."""
    pause: float = 3600.0
    """The limit of a pause. When the limit has passed, the job continues by itself, because the
    client that has requested the pause may be gone."""
    check: float = 600.0
    """The limit for a check of links and devices. Such a check takes minutes."""
    save: float = 1800.0
    """The limit for a rank to write its part of the last checkpoint, even to a slow file system."""
    leave: float = 5.0
    """The time that the process of a rank gets to leave when the job is over."""
    wind_up: float = 60.0
    """The limit for scripts to end after `Session.run` has returned, counted from a request to end
    the completed job. Without such a request there is no limit. In this time a script can write a
    model to disk."""
    first_step: float = 600.0
    """The limit for a step while step times are not known yet. Compilation and caches make the
    first step slow."""
    stall_floor: float = 3.0
    """A stall is reported only if no rank has made progress for at least this time, even if steps
    are very short. A busy machine may stop a process for a second now and then."""
    stall_factor: float = 20.0
    """A stall is reported if no rank makes progress for this many median step times."""
    warming: float = 10.0
    """The factor by which the first step after a resume may take longer than other steps. New
    processes have cold caches."""
    node_silence: float = 10.0
    """A node that sends no heartbeat for this long, while other nodes do, counts as lost."""
