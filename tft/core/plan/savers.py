"""
Find which rank saves which shards of a last checkpoint.
"""

from collections.abc import Mapping, Sequence

from tft.core.plan.coverage import sound
from tft.core.plan.standing import Standings
from tft.core.plan.topology import Topology


def savers(
    topology: Topology, standings: Standings, step: int, ceiling: int | None, *, spread: bool
) -> dict[int, tuple[str, ...]]:
    """
    Assign each shard to exactly one rank that has it at `step`. Without `spread` this is the first
    such rank in the order of placement; with `spread` it is a rank on the node with the fewest
    shards to write so far.
    """
    plan: dict[int, list[str]] = {}
    by_node: dict[int, int] = {}
    for shard, ranks in topology.groups.items():
        holders = sound(shard, ranks, standings, step, ceiling)
        # copies in use were compared just now; kept copies, maybe of ranks that have left, were not
        holders = [holder for holder in holders if holder.uses(step, ceiling)] or holders
        chosen = holders[0].rank
        if spread:
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
    Return which ranks can write further copies of which shards, in addition to the saver of each
    shard: all ranks that have the shard in use.
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
