"""
Which ranks hold which piece of state, where they sit, and who leaves together. Nothing here knows
a parallelism by name: a placement is whatever the ranks say it is.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tft.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """
    The shard groups of a job, its elastic columns and its nodes.
    """

    groups: Mapping[str, tuple[int, ...]]
    """Shard to the ranks that hold a copy of it, in the order of their placement. A rank may hold
    any number of shards, groups may be of any size."""
    columns: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Rank to the ranks that can only leave and come back with it; not named: it goes alone."""
    nodes: Mapping[int, int] = field(default_factory=dict)
    """Rank to the node it runs on."""

    def columns_of(self, ranks: Iterable[int]) -> frozenset[int]:
        """
        These ranks and everyone who has to leave with them.
        """
        return frozenset(peer for rank in ranks for peer in self.columns.get(rank) or (rank,))


def strided(kind: str, ranks: Sequence[int], copies: int) -> dict[str, tuple[int, ...]]:
    """
    The groups of a state that is cut into `len(ranks) // copies` shards laid out one after
    another: the copies of a shard sit a stride apart. Where the division leaves a remainder, the
    first shards have one copy more. Shards are named `kind.0`, `kind.1`, …; a state of which
    every rank has all is the single shard `kind`.

    The rule is that of MindIO TFT's replica groups. Raises `UsageError` for a number of copies
    that so many ranks cannot hold.
    """
    if not 1 <= copies <= len(ranks):
        raise UsageError(f"{len(ranks)} ranks can hold 1 to {len(ranks)} copies, not {copies}")
    stride = len(ranks) // copies
    if stride == 1:
        return {kind: tuple(ranks)}
    return {f"{kind}.{shard}": tuple(ranks[shard::stride]) for shard in range(stride)}
