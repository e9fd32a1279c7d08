"""
Decide which rank writes which part of a last checkpoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from tft.core.plan.coverage import sound
from tft.core.plan.standing import Standings
from tft.core.plan.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """
    The plan that says which rank writes which part of a last checkpoint. If a writer is lost, this
    plan is dropped and a new plan is made.
    """

    step: int
    writers: tuple[int, ...] = ()
    """The ranks that write a part of the checkpoint. The first rank in the list also writes the
    rank-local state of lost ranks, as far as that state is known."""
    with_local_state: frozenset[int] = frozenset()
    """The writers that write their own rank-local state. All other writers write shards, but not
    their own rank-local state."""
    restoring: tuple[int, ...] = ()
    """The writers that first restore their earlier copy of the state of `step` from memory. These
    ranks train with the state of another step, or with a wrong state."""
    shards: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """By writer: the shards that this rank writes. Each shard of the job has one such writer."""
    copies: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """By writer: the shards that this rank writes as further copies. According to `shards`, another
    rank writes these shards too."""


def plan_save(
    topology: Topology,
    standings: Standings,
    able: Mapping[int, bool],
    step: int,
    ceiling: int | None,
    *,
    shards: Mapping[int, tuple[str, ...]],
    with_copies: bool,
) -> SavePlan:
    """
    Return which rank writes which part of a last checkpoint of `step`. `shards` is the result of
    `savers`.

    The keys of `able` are the ranks that can write. The value of a rank is True if its rank-local
    state of `step` is valid. Such a rank writes this state even if it writes no shards, because no
    other rank has the state.
    """
    restoring = tuple(rank for rank in sorted(shards) if not standings[rank].uses(step, ceiling))
    restored = {
        **standings,
        **{rank: replace(standings[rank], held=step, sound=True) for rank in restoring},
    }
    copies = copiers(topology, restored, step, ceiling, shards) if with_copies else {}
    with_local_state = frozenset(rank for rank, belongs in able.items() if belongs)
    taking_part = {*with_local_state, *shards, *copies}
    return SavePlan(
        step=step,
        writers=tuple(rank for rank in able if rank in taking_part),
        with_local_state=with_local_state,
        restoring=restoring,
        shards=shards,
        copies=copies,
    )


def savers(
    topology: Topology,
    standings: Standings,
    step: int,
    ceiling: int | None,
    *,
    spread: bool,
    writing: Mapping[str, int] = MappingProxyType({}),
) -> dict[int, tuple[str, ...]]:
    """
    Assign each shard to exactly one rank, which has the shard as it was at the end of `step` and
    will write it. Without `spread`, this is the first such rank among the holders of the shard.
    With `spread`, it is a rank on the node that has the fewest shards to write so far.

    `writing` has, by shard, the rank that writes the shard already, by an earlier plan for the same
    step. This rank keeps the shard: if another rank wrote files with the same names, it would
    overwrite files whose digests the first rank has computed already.
    """
    plan: dict[int, list[str]] = {}
    by_node: dict[int, int] = {}
    for shard, ranks in topology.groups.items():
        holders = sound(shard, ranks, standings, step, ceiling)
        # prefer the copies with which ranks train, because these copies were just compared. Earlier
        # copies in memory were not compared, and a rank that has only these may have left the job
        holders = [holder for holder in holders if holder.uses(step, ceiling)] or holders
        chosen = holders[0].rank
        if writing.get(shard) in {holder.rank for holder in holders}:
            chosen = writing[shard]
        elif spread:
            chosen = min(
                (holder.rank for holder in holders),
                key=lambda rank: (by_node.get(_node(topology, rank), 0), len(plan.get(rank, ()))),
            )
        by_node[_node(topology, chosen)] = by_node.get(_node(topology, chosen), 0) + 1
        plan.setdefault(chosen, []).append(shard)
    return {rank: tuple(shards) for rank, shards in plan.items()}


def copiers(
    topology: Topology, standings: Standings, step: int, ceiling: int | None,
    savers: Mapping[int, Sequence[str]],
) -> dict[int, tuple[str, ...]]:  # fmt: skip
    """
    Return, for each rank that trains with the state of `step`, the shards of which this rank can
    write a further copy. These are the shards that the rank holds, apart from those that `savers`
    assigns to the rank. `savers` assigns one writer to each shard.
    """
    return {
        rank: tuple(
            shard
            for shard, ranks in topology.groups.items()
            if rank in ranks and shard not in savers.get(rank, ())
            if standing in sound(shard, ranks, standings, step, ceiling)
        )
        for rank, standing in standings.items()
        if standing.uses(step, ceiling)
    }


def _node(topology: Topology, rank: int) -> int:
    return topology.nodes.get(rank, 0)
