"""
The shards that a rank holds, and for each shard the other ranks that hold it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tft.core.plan.topology import Topology
from tft.placement.layout import report_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """
    The shards of one rank, and the holders of each shard.

    `str()` gives the holders of the shards with the fewest copies, in the form of MindIO's log
    (`rank:4, report group list: [0, 4]`).
    """

    rank: int
    groups: Mapping[str, tuple[int, ...]]
    """By shard: the ranks that hold a copy of it."""

    def __str__(self) -> str:
        """
        Return one line for each group of holders that this rank belongs to, if their shard has the
        fewest copies.
        """
        mine = f"rank:{self.rank},"
        lines = report_lines(Topology(groups=self.groups))
        return "\n".join(line for line in lines if line.startswith(mine))
