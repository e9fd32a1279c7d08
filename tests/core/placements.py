"""
Placements of state on ranks as in real jobs, and standings of ranks.

A standing is what the planner knows of a rank: its process, the step it holds, and its backups.
"""

from collections.abc import Collection

from tft.core.plan.repair import Repair
from tft.core.plan.standing import Standing, Terms
from tft.core.plan.topology import Topology, strided

ALL = frozenset({"migrate", "scale_out", "retry", "recover", "scale_in", "dump"})


def everybody(world: int, step: int | None = 4, **others: int | None) -> dict[int, Standing]:
    """
    Return a standing for every rank. All ranks hold `step`, except those that `others` names.

    `r1=None` means that rank 1 holds no complete step. `r2=3` means that rank 2 holds step 3.
    """
    held = dict.fromkeys(range(world), step)
    held |= {int(name[1:]): where for name, where in others.items()}
    return {
        rank: Standing(rank=rank, address=f"host:{rank}", held=where, strategies=ALL)
        for rank, where in held.items()
    }


def without(standings: dict[int, Standing], gone: Collection[int]) -> dict[int, Standing]:
    """
    Return the standings with the processes of the ranks in `gone` lost.
    """
    lost = {rank: Standing(rank=rank, alive=False, strategies=ALL) for rank in gone}
    return standings | lost


def replaced(standings: dict[int, Standing], new: Collection[int]) -> dict[int, Standing]:
    """
    Return the standings with new processes for the ranks in `new`. The new processes hold no state
    yet.
    """
    fresh = {rank: Standing(rank=rank, address=f"host:{rank}", strategies=ALL) for rank in new}
    return standings | fresh


def optimizer(world: int, copies: int, kind: str = "optimizer") -> Topology:
    """
    Return a data-parallel group whose optimizer state is cut into shards. Each shard has `copies`
    copies.
    """
    return Topology(groups=strided(kind, range(world), copies))


def grid(tp: int, pp: int, dp: int, *, copies: int, node: int = 8) -> Topology:
    """
    Return a topology with tensor, pipeline and data parallelism, with ranks counted in this order.

    The parameters of a (tp, pp) coordinate are on all ranks of its data-parallel group. The
    optimizer state of the coordinate is cut over these ranks. A model replica consists of all (tp,
    pp) coordinates of one dp rank. The ranks of a replica leave and return together.
    """
    groups: dict[str, tuple[int, ...]] = {}
    width = tp * pp
    for place in range(width):
        ranks = range(place, width * dp, width)
        groups[f"parameters.{place}"] = tuple(ranks)
        groups |= strided(f"optimizer.{place}", ranks, copies)
    world = range(width * dp)
    columns = [tuple(range(first, first + width)) for first in range(0, width * dp, width)]
    return Topology(
        groups=groups,
        columns={rank: columns[rank // width] for rank in world},
        nodes={rank: rank // node for rank in world},
    )


def terms(**changes: object) -> Terms:
    """
    Return terms in which every strategy is enabled and nothing has happened yet, except for
    `changes`.
    """
    return Terms(**({"enabled": ALL} | changes))  # type: ignore[arg-type] # the fields have different types


def fetched(plan: Repair | str) -> dict[int, dict[str, list[int]]]:
    """
    Return, for each rank and shard, the ranks from which the shard is fetched.
    """
    assert isinstance(plan, Repair), plan
    return {
        rank: {part.shard: [source.rank for source in part.sources] for part in parts}
        for rank, parts in plan.transfers.items()
    }
