"""
Own the facts about the process that holds a rank, or that will take the rank over.
"""

from dataclasses import dataclass
from enum import StrEnum

from tft.protocol.messages import Joined


class ProcessStage(StrEnum):
    """
    The stages of a process, from the order to start it until its end.
    """

    ABSENT = "absent"
    """No process was ordered yet."""
    ORDERED = "ordered"
    """The agent was ordered to start the process."""
    SPAWNED = "spawned"
    """The process runs. It has not called `tft.init` yet, and may never do so."""
    JOINED = "joined"
    """The process has called `tft.init`."""
    READY = "ready"
    """The process has adopted its state and can receive orders."""
    GONE = "gone"
    """The process has ended."""


STARTING = frozenset({ProcessStage.ORDERED, ProcessStage.SPAWNED, ProcessStage.JOINED})
"""The stages of a process that cannot receive orders yet."""


@dataclass(slots=True, kw_only=True)
class RankProcess:
    """
    One process of a rank, from the order to start it until its end.
    """

    incarnation: int = -1
    """The incarnation of the process that was ordered last. -1: none was ordered yet."""
    stage: ProcessStage = ProcessStage.ABSENT
    pid: int = 0
    started: int = 0
    """The start time of the process, as the kernel of its node counts it. It distinguishes the
    process from a later one with the same pid."""
    sender: str = ""
    """The sender whose reports count for this rank: the process whose claim to the rank was
    accepted."""
    spawned: float = 0.0
    """The time at which the process was ordered or first heard of, by the clock of the
    controller."""
    began: float = 0.0
    """The time at which the process was started, by the clock of its node."""
    terminating: str = ""
    """Why the agent was ordered to end the process. Empty: it was not ordered to."""
    terminating_since: float = 0.0
    blame: str = ""
    """The kind of fault that is recorded when the process ends. Empty: `process`."""
    straggles: str = ""
    """Why another process is to take over from this one."""
    invited: bool = False
    """True if this process was ready to take over or to come back, and the job has already stopped
    once to let it in."""

    @property
    def ready(self) -> bool:
        """
        True if the process can receive orders.
        """
        return self.stage is ProcessStage.READY

    def join(self, message: Joined, sender: str) -> None:
        """
        Record that the ordered process has called `tft.init`.
        """
        self.stage = ProcessStage.JOINED
        self.pid, self.started, self.sender = message.pid, message.started, sender
