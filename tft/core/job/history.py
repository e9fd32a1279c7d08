"""
Define the class for the facts about the closed incidents of a job. Later decisions need these
facts.
"""

from dataclasses import dataclass, field

from tft.core.job.incident import Incident


@dataclass(slots=True, kw_only=True)
class History:
    """
    The closed incidents of a job, and which ranks have caused these incidents.
    """

    next_number: int
    """The number that the next incident of the job will get."""
    lost: int = 0
    """The number of events that could not be read, because the story (the recorded events of the
    job) is damaged."""
    incidents: list[Incident] = field(default_factory=list)
    troubles: dict[int, list[float]] = field(default_factory=dict)
    """By rank: the times of the incidents that the rank has caused, in seconds by the clock of the
    controller."""

    corruptions: dict[tuple[int, int | None], set[int]] = field(default_factory=dict)
    """By rank and node: the numbers of the incidents in which the rank had wrong copies of shards
    while its process was on that node."""

    def recent(self, rank: int, since: float) -> int:
        """
        Return how many incidents a rank has caused at the time `since` or later.
        """
        return sum(at >= since for at in self.troubles.get(rank, ()))
