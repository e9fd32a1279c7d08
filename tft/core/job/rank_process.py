"""
Define the facts about one process of a rank. The process holds the rank, has held it, or is a
successor that will take the rank over.
"""

from dataclasses import dataclass
from enum import StrEnum

from tft.protocol.messages import Joined


class ProcessStage(StrEnum):
    """
    The stages of a process, from the order to start it until its end.
    """

    ABSENT = "absent"
    """No agent was ordered yet to start a process for the rank."""
    ORDERED = "ordered"
    """The agent was ordered to start the process, and has not reported its start yet."""
    SPAWNED = "spawned"
    """The process runs. It has not called `tft.init` yet, and may never do so."""
    JOINED = "joined"
    """The process has called `tft.init`."""
    READY = "ready"
    """The process has called `Session.run`, so tft knows the training state of the process. From
    now on the process can carry out orders."""
    GONE = "gone"
    """The process has ended."""


STARTING = frozenset({ProcessStage.ORDERED, ProcessStage.SPAWNED, ProcessStage.JOINED})
"""The stages of a process that an agent was ordered to start and that cannot carry out orders
yet."""


@dataclass(slots=True, kw_only=True)
class RankProcess:
    """
    One process of a rank, from the order to start it until its end.
    """

    incarnation: int = -1
    """The incarnation of this process. -1: no process was ordered for the rank yet."""
    stage: ProcessStage = ProcessStage.ABSENT
    pid: int = 0
    started: int = 0
    """The start time of the process, as the kernel of its node counts time. The pid and the start
    time together identify the process, because a pid may be used again."""
    sender: str = ""
    """The name on the bus of the process whose claim to the rank was accepted. Only reports from
    this sender count for the rank."""
    spawned: float = 0.0
    """The time from which the limit for the start of the process is counted, by the clock of the
    controller. First this is the time of the order to start the process. When the agent reports the
    start, it becomes the time of that report."""
    began: float = 0.0
    """The time at which the process was started, as reported by its agent. Until the agent has
    reported, this is the time of the order to start the process."""
    terminating: str = ""
    """Why the agent was ordered to end the process. Empty: the agent has no order to end it."""
    terminating_since: float = 0.0
    blame: str = ""
    """The kind of the fault because of which the process is ended, such as `hang`. Empty: there is
    no such fault."""
    straggles: str = ""
    """Why a successor, which will take the rank over from this process, was started. Empty: no
    successor was started."""
    invited: bool = False
    """True if the job has already stopped training once so that this process could take its rank
    over, or bring its rank back to the job. The job does not stop for this process a second
    time."""

    @property
    def ready(self) -> bool:
        """
        True if the process has called `Session.run`, so that it can carry out orders.
        """
        return self.stage is ProcessStage.READY

    def join(self, message: Joined, sender: str) -> None:
        """
        Record that the process has called `tft.init` and may hold its rank. `sender` is the name on
        the bus from which the later reports of this process come.
        """
        self.stage = ProcessStage.JOINED
        self.pid, self.started, self.sender = message.pid, message.started, sender
