"""
The shards that a rank holds, and for each shard all ranks that hold a copy of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tft.core.plan.topology import Topology
from tft.placement.layout import report_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """
    The shards of one rank, and the holders of each shard.

    `str()` names the holders of those shards that have the fewest copies, in the form of MindIO's
    log (`rank:4, report group list: [0, 4]`).
    """

    rank: int
    groups: Mapping[str, tuple[int, ...]]
    """The ranks that hold a copy of a shard, this rank included, by shard."""

    def __str__(self) -> str:
        """
        Return the holders of those shards of this rank that have the fewest copies, with one line
        for each group of holders.
        """
        mine = f"rank:{self.rank},"
        lines = report_lines(Topology(groups=self.groups))
        return "\n".join(line for line in lines if line.startswith(mine))
