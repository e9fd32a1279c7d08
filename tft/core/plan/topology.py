"""
Own which ranks hold which shard of the state, on which nodes they run, and which ranks leave
together. This module knows no kind of parallelism by name: a placement is what the ranks report.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tft.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """
    The shard groups of a job, its model replicas (columns) and its nodes.
    """

    groups: Mapping[str, tuple[int, ...]]
    """Shard to the ranks that hold a copy of it, in the order of their placement. A rank may hold
    any number of shards, and a group may have any size."""
    columns: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Rank to the ranks that can only leave and come back together with it (one model replica). A
    rank that is not a key leaves alone."""
    nodes: Mapping[int, int] = field(default_factory=dict)
    """Rank to the node it runs on."""

    def columns_of(self, ranks: Iterable[int]) -> frozenset[int]:
        """
        Return these ranks and all ranks that have to leave together with them.
        """
        return frozenset(peer for rank in ranks for peer in self.columns.get(rank) or (rank,))


def strided(kind: str, ranks: Sequence[int], copies: int) -> dict[str, tuple[int, ...]]:
    """
    Return the groups of a state that is cut into `len(ranks) // copies` shards, which are laid out
    one after another. The ranks that hold copies of one shard are one stride (the number of shards)
    apart. If the division leaves a remainder, the first shards have one copy more. The shards are
    named `kind.0`, `kind.1`, …; if every rank holds the whole state, the only shard is named
    `kind`.

    The rule is the rule of MindIO TFT's replica groups. Raises `UsageError` if `copies` is less
    than 1 or more than the number of ranks.
    """
    if not 1 <= copies <= len(ranks):
        raise UsageError(f"{len(ranks)} ranks can hold 1 to {len(ranks)} copies, not {copies}")
    stride = len(ranks) // copies
    if stride == 1:
        return {kind: tuple(ranks)}
    return {f"{kind}.{shard}": tuple(ranks[shard::stride]) for shard in range(stride)}
