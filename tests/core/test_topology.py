"""
Which ranks hold copies of the same shard, and who leaves together.
"""

import pytest

from tests.core.placements import grid
from tft.core.plan.topology import Topology, strided
from tft.errors import UsageError


def test_copies_of_a_shard_are_a_stride_apart() -> None:
    """When the optimizer state of eight ranks is cut into four shards, then each shard is on two
    ranks whose numbers differ by four."""
    assert strided("optimizer", range(8), 2) == {
        "optimizer.0": (0, 4),
        "optimizer.1": (1, 5),
        "optimizer.2": (2, 6),
        "optimizer.3": (3, 7),
    }


def test_ranks_of_a_group_need_not_be_consecutive() -> None:
    """When the group is every eighth rank, then the copies are on these ranks, in the order of the
    group."""
    assert strided("o", (3, 11, 19, 27), 2) == {"o.0": (3, 19), "o.1": (11, 27)}


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_state_that_every_rank_has_is_one_shard(world: int) -> None:
    """When there are as many copies as ranks, then the state is not cut, and the shard has no
    number."""
    assert strided("parameters", range(world), world) == {"parameters": tuple(range(world))}


def test_single_copies_give_one_shard_per_rank() -> None:
    """When every shard has one copy, then there are as many shards as ranks."""
    assert strided("o", range(3), 1) == {"o.0": (0,), "o.1": (1,), "o.2": (2,)}


def test_remaining_ranks_hold_additional_copies_of_the_first_shards() -> None:
    """When seven ranks hold two copies of each shard, then there are three shards, and the first
    shard has three copies."""
    assert strided("o", range(7), 2) == {"o.0": (0, 3, 6), "o.1": (1, 4), "o.2": (2, 5)}


def test_state_is_not_cut_when_copies_exceed_half_of_the_ranks() -> None:
    """When three ranks are to hold two copies of a state, then the state cannot be cut, and each
    rank holds a copy."""
    assert strided("o", range(3), 2) == {"o": (0, 1, 2)}


@pytest.mark.parametrize("copies", [0, 5, -1])
def test_impossible_number_of_copies_is_refused(copies: int) -> None:
    """When the number of copies is larger than the number of ranks, or less than one, then an error
    gives the possible range."""
    with pytest.raises(UsageError, match=f"4 ranks can hold 1 to 4 copies, not {copies}"):
        strided("o", range(4), copies)


def test_ranks_of_a_column_leave_together() -> None:
    """When the ranks of a model replica depend on each other, then they leave together. With tp 2
    and dp 2, rank 2 leaves with rank 3."""
    topology = grid(2, 1, 2, copies=1)
    assert topology.columns_of([3]) == {2, 3}
    assert topology.columns_of([3, 0]) == {0, 1, 2, 3}
    assert topology.columns_of([]) == frozenset()


def test_rank_without_a_column_leaves_alone() -> None:
    """When a rank has no column, then no other rank leaves with it."""
    assert Topology(groups={}, columns={1: (0, 1)}).columns_of([0, 2]) == {0, 2}
