"""
The documented cases of MindIO TFT's replica groups, and the layouts of real jobs.
"""

import pytest

from tests.core.placements import everybody, fetched, grid, optimizer, replaced, terms, without
from tft.core.plan.coverage import covered_step
from tft.core.plan.repair import plan_repair
from tft.core.plan.savers import savers
from tft.core.plan.topology import Topology, strided


def test_rank_5_saves_the_shard_of_lost_rank_1() -> None:
    """When eight ranks hold an optimizer state cut into four and rank 1 is lost, then ranks 0, 2, 3
    and 5 write the last checkpoint."""
    plan = savers(optimizer(8, 2), without(everybody(8), [1]), 4, None, spread=False)
    assert plan == {
        0: ("optimizer.0",),
        5: ("optimizer.1",),
        2: ("optimizer.2",),
        3: ("optimizer.3",),
    }


@pytest.mark.parametrize(
    ("lost", "writers", "sources"),
    [
        ((3,), {0, 1}, {3: [1]}),
        ((0, 3), {1, 2}, {0: [2], 3: [1]}),
        ((2, 3), {0, 1}, {2: [0], 3: [1]}),
    ],
)
def test_remaining_holders_save_and_repair_the_shards_of_lost_ranks(
    lost: tuple[int, ...], writers: set[int], sources: dict[int, list[int]]
) -> None:
    """When four ranks hold two copies of each shard and one copy of each is left, then the
    remaining holders save it. The successors fetch the shards from these holders."""
    topology = optimizer(4, 2)
    assert savers(topology, without(everybody(4), lost), 4, None, spread=False).keys() == writers
    plan = fetched(plan_repair(topology, replaced(everybody(4), lost), range(4), terms()))
    assert {rank: [s for parts in p.values() for s in parts] for rank, p in plan.items()} == sources


def test_shard_is_lost_when_both_of_its_copies_are_lost() -> None:
    """When ranks 1 and 3 of four ranks were the only holders of a shard and both are lost, then no
    step is covered. The message names the shard."""
    assert covered_step(optimizer(4, 2).groups, without(everybody(4), [1, 3])) == (
        "no sound copy of shard 'optimizer.1' is left on ranks [1, 3]"
    )


@pytest.mark.parametrize("survivor", range(4))
def test_one_remaining_rank_with_a_full_copy_saves_and_repairs_the_others(survivor: int) -> None:
    """When every rank has the whole state and only one rank is left, then this rank saves the state
    and repairs the others."""
    topology = optimizer(4, 4)
    gone = [rank for rank in range(4) if rank != survivor]
    assert savers(topology, without(everybody(4), gone), 4, None, spread=False) == {
        survivor: ("optimizer",)
    }
    plan = fetched(plan_repair(topology, replaced(everybody(4), gone), range(4), terms()))
    assert plan == {rank: {"optimizer": [survivor]} for rank in gone}


def test_experts_and_dense_state_are_fetched_from_separate_groups() -> None:
    """When each of four experts has two copies on eight ranks and the dense state is cut in two,
    then a lost rank fetches each from its own holders."""
    groups = strided("dense", range(8), 4)  # 0 2 4 6 and 1 3 5 7
    for expert in range(4):
        groups |= strided(f"expert.{expert}", (expert, expert + 4), 2)
    topology = Topology(groups=groups)
    plan = fetched(plan_repair(topology, replaced(everybody(8), [1]), range(8), terms()))
    assert plan == {1: {"dense.1": [3, 5, 7], "expert.1": [5]}}
    why = covered_step(groups, without(everybody(8), [1, 5]))
    assert why == "no sound copy of shard 'expert.1' is left on ranks [1, 5]"


def test_group_of_odd_size_has_one_shard_with_an_additional_copy() -> None:
    """When five ranks hold two copies of each shard, then the first shard survives the loss of two
    holders, and the second shard does not."""
    topology = optimizer(5, 2)
    assert covered_step(topology.groups, without(everybody(5), [0, 4])) == 4
    assert isinstance(covered_step(topology.groups, without(everybody(5), [1, 3])), str)


def test_ranks_of_a_lost_node_fetch_from_both_other_replicas() -> None:
    """When a node of four ranks is lost with tp 2, pp 2 and dp 3, then its ranks fetch parameters
    and optimizer shards from both other replicas."""
    topology = grid(2, 2, 3, copies=3, node=4)
    plan = fetched(plan_repair(topology, replaced(everybody(12), range(4, 8)), range(12), terms()))
    assert plan == {
        rank: {
            f"parameters.{rank - 4}": [rank - 4, rank + 4],
            f"optimizer.{rank - 4}": [rank - 4, rank + 4],
        }
        for rank in range(4, 8)
    }
