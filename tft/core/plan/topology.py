"""
Define the topology of a job: which ranks hold which shard of the state, on which nodes the ranks
run, and which ranks can leave the job only together. This module does not know data, tensor or
pipeline parallelism. It knows only the groups of ranks that the ranks themselves report.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tft.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """
    The shard groups, the model replicas and the nodes of a job.
    """

    groups: Mapping[str, tuple[int, ...]]
    """By shard: the ranks that hold a copy of the shard, in a fixed order. A rank may hold any
    number of shards, and a group of holders may have any size."""
    columns: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By rank: the ranks of the model replica to which this rank belongs. These ranks hold the
    whole model together, and can leave the job and come back only together. A rank without an entry
    can leave alone."""
    nodes: Mapping[int, int] = field(default_factory=dict)
    """By rank: the node on which the rank runs."""

    def columns_of(self, ranks: Iterable[int]) -> frozenset[int]:
        """
        Return `ranks` and all ranks that belong to the same model replicas, because all ranks of a
        model replica must leave the job together.
        """
        return frozenset(peer for rank in ranks for peer in self.columns.get(rank) or (rank,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """
    The shards of which several members of a job (ranks that take part in it) hold a copy. Only
    slices of such shards can be compared between ranks.
    """

    groups: Mapping[str, tuple[int, ...]]
    """By shard with several holders: the members that hold the shard."""
    names: Mapping[int, Sequence[str]]
    """By member: the names of all shards of the member. The index of a name in this sequence is the
    number of the shard in the digests that the member sends (`SliceDigest.shard`)."""
    columns: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By member: the ranks of the model replica to which the member belongs (see
    `Topology.columns`)."""

    def peers(self) -> dict[int, tuple[int, ...]]:
        """
        Return for each member all members that hold a copy of one of its shards, itself included. A
        member that shares no shard has no entry.
        """
        found: dict[int, tuple[int, ...]] = {}
        known: dict[tuple[str, ...], tuple[int, ...]] = {}
        for rank, names in self.names.items():
            shared = tuple(name for name in names if name in self.groups)
            if shared not in known:
                known[shared] = tuple(sorted({r for name in shared for r in self.groups[name]}))
            if shared:
                found[rank] = known[shared]
        return found


def strided(kind: str, ranks: Sequence[int], copies: int) -> dict[str, tuple[int, ...]]:
    """
    Return the shard groups (by shard: the ranks that hold it) of a state that is cut into N =
    `len(ranks) // copies` shards. The shards are given to the ranks in turn, so shard 0 is held by
    every N-th rank of `ranks`. Each shard has at least `copies` holders. The first shards may have
    one holder more than the others.

    The shards are named `kind.0`, `kind.1`, …. If N is 1, every rank holds the whole state, and the
    only shard is named `kind`. MindIO TFT, a fault-tolerance library for Ascend devices, forms its
    replica groups by the same rule. Raises `UsageError` if `copies` is less than 1 or more than the
    number of ranks.
    """
    if not 1 <= copies <= len(ranks):
        raise UsageError(
            f"{len(ranks)} ranks can hold 1 to {len(ranks)} copies of their state, not {copies}"
        )
    stride = len(ranks) // copies
    if stride == 1:
        return {kind: tuple(ranks)}
    return {f"{kind}.{shard}": tuple(ranks[shard::stride]) for shard in range(stride)}
