"""
Follows the story of a run that may still be running: gives each event to a job machine as soon as
the event is written. So a command of an operator, such as `tft status`, knows the incidents of the
job as the controller knows them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tft.core.job.events import Received
from tft.core.job.incident import Incident
from tft.core.job.incident_report import incident_report
from tft.core.job.machine import Machine
from tft.errors import StoryCorrupt, UsageError
from tft.protocol.messages import NodeJoined, NodeLost, Spawned
from tft.replay.recording import Opened, StoryEvent, StoryReader


class StoryFollower:
    """
    The job machine of the newest run in a story, in the state after the last event that was read.

    If the story cannot be read, or if the machine of this version fails at an event, `failure` says
    why. The facts that were known before that event stay available.
    """

    def __init__(self, path: Path) -> None:
        self.failure = ""
        """Why no further events of the story are read. Empty: reading has not failed."""
        self.nodes: dict[int, NodeJoined] = {}
        """By node that takes part: the last report with which its agent joined."""
        self.pids: dict[tuple[int, int], int] = {}
        """By rank and incarnation: the pid of the process."""
        self.run = ""
        """The identifier of the run. While a new run is starting, this is still the run before,
        because the story contains nothing of the new run yet."""
        self.stages: list[tuple[str, float]] = []
        """The states of the job since the newest incident was opened, or since the run began, each
        with the time in seconds at which it began, on the clock of the controller's machine."""
        self._number = 0
        self._reader = StoryReader(path)
        self._machine: Machine | None = None
        self._earlier = 0

    def read(self) -> None:
        """
        Read what was added to the story.
        """
        if self.failure:
            return
        try:
            for line in self._reader.news():
                self._take(line)
        except (OSError, StoryCorrupt, UsageError) as unread:
            self.failure = str(unread)
        except Exception as broken:  # noqa: BLE001 # a machine with a bug may raise any exception
            self.failure = f"the job machine fails: {type(broken).__name__}: {broken}"

    def _take(self, line: Opened | StoryEvent) -> None:
        if isinstance(line, Opened):
            self._machine, self._earlier = line.machine(), line.first_incident - 1
            self.nodes.clear()
            self.pids.clear()
            self.run = line.run
            self._number, self.stages = 0, [(str(self._machine.state), line.at)]
            return
        if self._machine is None:
            return
        self._machine.handle(line.event)
        self._stage(line.event.at)
        match line.event:
            case Received(message=NodeJoined() as joined):
                self.nodes[joined.node] = joined
            case Received(message=NodeLost(node=node)):
                self.nodes.pop(node, None)
            case Received(message=Spawned() as spawned):
                self.pids[spawned.rank, spawned.incarnation] = spawned.pid
            case _:
                pass

    def _stage(self, at: float) -> None:
        assert self._machine is not None
        incident, state = self._machine.incident, str(self._machine.state)
        if incident.is_open and incident.number != self._number:
            self._number = incident.number
            self.stages = []
        if not self.stages or self.stages[-1][0] != state:
            self.stages.append((state, at))

    # ---------------------------------------------------------------- facts

    @property
    def members(self) -> frozenset[int] | None:
        """
        The ranks that take part in training. None if this is not known.
        """
        return None if self._machine is None else self._machine.members

    @property
    def last_step(self) -> int | None:
        """
        The highest completed step that a rank has reported. Ranks report steps only in and after
        incidents, so the job may have completed more steps. None if this is not known.
        """
        return None if self._machine is None else self._machine.last_step

    @property
    def count(self) -> int:
        """
        The number of incidents of the job, with those of earlier runs in the same run directory.
        """
        return self._earlier + len(self.closed) + (self.open is not None)

    @property
    def closed(self) -> Sequence[Incident]:
        """
        The closed incidents of this run, the oldest first.
        """
        return () if self._machine is None else self._machine.incidents

    @property
    def open(self) -> Incident | None:
        """
        The open incident, or None if no incident is open.
        """
        if self._machine is None or not self._machine.incident.is_open:
            return None
        return self._machine.incident

    def described(self, incident: Incident) -> dict[str, Any]:  # Any: JSON
        """
        Return an incident in the form that it has in `report.json`.
        """
        return incident_report(incident, lambda _: None)
