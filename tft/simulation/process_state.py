"""
The data of one simulated process of a rank. The data are grouped by subject: the process itself,
its steps, its training thread, its memory, and its part in the collectives.
"""

from dataclasses import dataclass, field
from typing import Literal

from tft.core.rank.protocol import Execute
from tft.protocol.messages import Joined, Position
from tft.simulation.schedule import Mishap
from tft.simulation.truth import Content

NEVER = 1 << 60
"""A step that no job reaches."""

Phase = Literal[
    "starting", "idle", "working", "forward", "all-reduce", "gate", "window", "tail", "average", "leaving", "gone"
]  # fmt: skip
"""What a training thread is doing, or is waiting for."""


@dataclass(slots=True)
class Life:
    """
    The facts about a process that its node knows: whether the process lives, and whether it has
    joined the job.
    """

    alive: bool = True
    stopped: bool = False
    """True when the whole process is stopped, including the control thread."""
    held_until: float = 0.0
    """The virtual time before which the kernel does not end the process, even after SIGKILL."""
    joined: Joined | None = None
    """The report that the process has called `tft.init`. None if the process has not called it yet.
    """
    accepted: bool = False
    """True when a controller has acknowledged the report `joined` of the process."""


@dataclass(slots=True)
class Steps:
    """
    The position of the training thread, and the steps up to which it may train.
    """

    completed: int = 0
    window_open: bool = False
    tail: bool = False
    """True when the update window of step `completed` has closed and the step has not ended."""
    line: str = ""
    """The last source line that the training thread reached. If the tail of a step (the code after
    its update window) is interrupted, the rank reports this line."""
    announce: bool = False
    """True when the thread must report the next step that it completes."""
    lock: int = NEVER
    """The update windows of all steps after this one stay closed. With `NEVER`, every window may
    open."""
    leave_after: int = NEVER
    """The step after which the training thread leaves the loop. With `NEVER`, the thread stays in
    the loop."""
    interrupted: tuple[int, int] = (-1, 0)
    """The step in the middle of which the thread left the loop, and the incident for which it left.
    The number of the incident is -1 until a `Stop` order names the incident."""
    interrupted_data: int = 0
    """The data position (number of batches drawn) at which the thread left the loop in a step (see
    `interrupted`)."""
    attempt: tuple[int, int] = (0, 0)
    """The incident and the round of the resume order after which the rank trains."""

    def position(self) -> Position:
        """
        Return the position of the training thread.
        """
        return Position(step=self.completed, window=self.window_open, tail=self.tail)

    def lets_go(self) -> bool:
        """
        Return whether a thread that waits at the step gate (before an update) may stop waiting. The
        thread may go on when its next step is allowed, or when it has to leave the loop before that
        step.
        """
        return self.completed + 1 <= self.lock or self.completed + 1 > self.leave_after


@dataclass(slots=True)
class TrainingThread:
    """
    What the training thread is doing, and its orders.
    """

    phase: Phase = "starting"
    stuck: bool = False
    """True when the training thread hangs for ever, because of an injected fault."""
    task: Execute | None = None
    """The order that the training thread is carrying out."""
    pending: list[Execute] = field(default_factory=list)
    """The orders that wait until the training thread is free, oldest first."""
    aside: Execute | None = None
    """The `compare` order for which another thread digests the state. None: there is none."""
    errand: bool = False
    """True while the training thread carries out an order in the loop, where it waits at the step
    gate (before an update). Other orders are carried out outside the loop."""


@dataclass(slots=True)
class Memory:
    """
    The state that a rank holds in memory, and the rank's copies of earlier states.
    """

    content: dict[str, Content]
    """By shard: the present content of the shard."""
    copies: dict[int, dict[str, Content]] = field(default_factory=dict)
    """By step: copies of the shards at the end of earlier steps."""
    data: int = 0
    """The number of batches that the rank has drawn."""
    torn: bool = False
    """True when the content is incomplete: partly that of one step and partly that of another, or
    partly overwritten."""
    unsaid: bool = False
    """True when a silent corruption has changed the state, and the rank has not reported digests
    since then."""
    miscopies: Mishap | None = None
    """The mishap (injected fault) that will silently corrupt the state that this rank is fetching.
    None when there is no such mishap."""


@dataclass(slots=True)
class Collectives:
    """
    The state of a rank's process group and of its device, and what the rank contributes to the
    all-reduces.
    """

    cut: bool = True
    """True when this process has closed its connections to the process group."""
    summed: bool = False
    """True when the all-reduces for which the rank waits are complete and their results are
    on the way."""
    context_lost: bool = False
    """True when the device context is lost: the device takes no more work from this process."""
    poison: bool = False
    """True when the rank will contribute wrong data to the next all-reduces."""
    spoilt: bool = False
    """True when the last all-reduces contained wrong data from some rank."""
    contributed: int = 0
    """The digest of the rank's last contribution to the all-reduces. Set only in a job that
    compares slices (parts of the shards)."""
    wrong_gradients: int = 0
    """Not 0 if the last all-reduces contained gradients that were computed from corrupted content.
    All members of the group then have the same number."""
