"""
What a rank holds, and who else does.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tft.core.layout import report_lines
from tft.core.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """
    The shards of one rank. As text, who holds a copy of what it holds with the fewest copies, in the
    form of MindIO's log: `rank:4, report group list: [0, 4]`.
    """

    rank: int
    groups: Mapping[str, tuple[int, ...]]
    """Shard to the ranks that hold a copy of it."""

    def __str__(self) -> str:
        """
        A line for each of its scarcest groups.
        """
        mine = f"rank:{self.rank},"
        lines = report_lines(Topology(groups=self.groups))
        return "\n".join(line for line in lines if line.startswith(mine))
