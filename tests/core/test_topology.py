"""
Which ranks hold copies of the same shard, and who leaves together.
"""

import pytest

from tests.core.placements import grid
from tft.core.plan.topology import Topology, strided
from tft.errors import UsageError


def test_the_copies_of_a_shard_sit_a_stride_apart() -> None:
    """
    When the optimizer state of eight ranks is cut into four, then each quarter is on two of them,
    four apart.
    """
    assert strided("optimizer", range(8), 2) == {
        "optimizer.0": (0, 4),
        "optimizer.1": (1, 5),
        "optimizer.2": (2, 6),
        "optimizer.3": (3, 7),
    }


def test_the_ranks_of_a_group_need_not_follow_each_other() -> None:
    """
    When the group is every eighth rank, then so are the copies, in its own order.
    """
    assert strided("o", (3, 11, 19, 27), 2) == {"o.0": (3, 19), "o.1": (11, 27)}


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_a_state_that_everybody_has_is_one_shard(world: int) -> None:
    """
    When there are as many copies as ranks, then nothing is cut, and the shard has no number.
    """
    assert strided("parameters", range(world), world) == {"parameters": tuple(range(world))}


def test_one_copy_each_is_a_shard_for_each() -> None:
    """
    When every shard is held once, then there are as many as ranks.
    """
    assert strided("o", range(3), 1) == {"o.0": (0,), "o.1": (1,), "o.2": (2,)}


def test_what_is_left_over_makes_some_shards_safer() -> None:
    """
    When seven ranks hold two copies of each shard, then there are three shards, and the first of
    them is held three times.
    """
    assert strided("o", range(7), 2) == {"o.0": (0, 3, 6), "o.1": (1, 4), "o.2": (2, 5)}


def test_more_than_half_as_many_copies_as_ranks_are_a_copy_for_each() -> None:
    """
    When three ranks are to hold two copies of a state, then it cannot be cut.
    """
    assert strided("o", range(3), 2) == {"o": (0, 1, 2)}


@pytest.mark.parametrize("copies", [0, 5, -1])
def test_so_many_copies_need_so_many_ranks(copies: int) -> None:
    """
    When there are to be more copies than ranks, or none, then the caller is told what is possible.
    """
    with pytest.raises(UsageError, match=f"4 ranks can hold 1 to 4 copies, not {copies}"):
        strided("o", range(4), copies)


def test_a_rank_takes_its_column_with_it() -> None:
    """
    When the ranks of a model replica depend on each other, then they leave together: with tp 2
    and dp 2, rank 3 takes rank 2 along.
    """
    topology = grid(2, 1, 2, copies=1)
    assert topology.columns_of([3]) == {2, 3}
    assert topology.columns_of([3, 0]) == {0, 1, 2, 3}
    assert topology.columns_of([]) == frozenset()


def test_a_rank_in_no_column_goes_alone() -> None:
    """
    When nothing is said about a rank, then nobody goes with it.
    """
    assert Topology(groups={}, columns={1: (0, 1)}).columns_of([0, 2]) == {0, 2}
