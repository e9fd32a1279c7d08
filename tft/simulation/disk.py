"""
The shared file system of a simulated cluster.
"""

from dataclasses import dataclass, field

from tft.simulation.truth import Digests, Written


@dataclass(slots=True)
class Disk:
    """
    The checkpoint files on the shared file system, complete and unfinished.
    """

    parts: dict[str, dict[str, Written]] = field(default_factory=dict)
    """By directory and file name: the files of checkpoints that are still being written."""
    copies: dict[str, dict[int, Digests]] = field(default_factory=dict)
    """By directory and rank: the digests that a rank gives for its copies while the ranks write
    a periodic checkpoint."""
    whole: dict[str, dict[str, Written]] = field(default_factory=dict)
    """By directory and file name: the files of complete checkpoints."""
    unreadable: set[str] = field(default_factory=set)
    """Directories of complete checkpoints that cannot be read."""
    own: dict[int, dict[int, dict[str, Written]]] = field(default_factory=dict)
    """By step and rank: the checkpoints that ranks write without tft and do not report. The file
    with the empty name contains the rank's data position (the number of batches that it has drawn).
    """

    def found(self, world: int, not_after: int | None) -> int | None:
        """
        Return the newest step, not later than `not_after`, of which all `world` ranks have written
        a checkpoint without tft. Return None if there is no such step.
        """
        whole = [step for step, parts in self.own.items() if len(parts) == world]
        return max((s for s in whole if not_after is None or s <= not_after), default=None)
