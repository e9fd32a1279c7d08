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
    """The process has called `Session.run`: tft knows its training state, and it can carry out
    orders."""
    GONE = "gone"
    """The process has ended."""


STARTING = frozenset({ProcessStage.ORDERED, ProcessStage.SPAWNED, ProcessStage.JOINED})
"""The stages of a process that was ordered, but cannot carry out orders yet."""


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
    """The start time of the process, as the kernel of its node counts it. Together with the pid it
    identifies the process, because a pid may be used again."""
    sender: str = ""
    """The name on the bus of the process whose claim to the rank was accepted. Only reports from
    this sender count for the rank."""
    spawned: float = 0.0
    """The time from which the limit for the start of the process is counted, by the clock of the
    controller: when it was ordered or, later, reported as started."""
    began: float = 0.0
    """The time at which the process was started, by the clock of its node."""
    terminating: str = ""
    """Why the agent was ordered to end the process. Empty: there was no such order."""
    terminating_since: float = 0.0
    blame: str = ""
    """The kind of fault that is recorded when the process ends. Empty: `process`."""
    straggles: str = ""
    """Why a successor was started that will take the rank over from this process. Empty: none was
    started."""
    invited: bool = False
    """True if the job has already stopped once so that this process can take its rank over or come
    back to the job. It is not tried a second time."""

    @property
    def ready(self) -> bool:
        """
        True if the process has called `Session.run`, so that it can carry out orders.
        """
        return self.stage is ProcessStage.READY

    def join(self, message: Joined, sender: str) -> None:
        """
        Record that the ordered process has called `tft.init`. Its later reports come from `sender`.
        """
        self.stage = ProcessStage.JOINED
        self.pid, self.started, self.sender = message.pid, message.started, sender
