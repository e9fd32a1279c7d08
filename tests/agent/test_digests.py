"""
When a beat brings the digests of slices that a rank has posted on its page.
"""

import pytest

from tft.agent.ranks import MANY, PARTS, _RankState
from tft.page import Page


@pytest.fixture
def rank() -> _RankState:
    """
    Return a rank of a node, with an empty page.
    """
    return _RankState(rank=0, slot=0, page=Page.create())


def post(rank: _RankState, step: int, of: int, shards: int = 1) -> None:
    """
    Post the digests of the slices of one step.
    """
    for shard in range(shards):
        rank.page.post((0, 1), step, number=step % of, of=of, shard=shard, digest=step)


@pytest.mark.parametrize(("of", "steps"), [(1, 1), (8, 1), (48, 48 // PARTS)])
def test_digests_are_brought_several_times_in_a_cycle(
    rank: _RankState, of: int, steps: int
) -> None:
    """When the steps of a part of the cycle are digested, then a beat brings them at once. Each beat
    begins the next part."""
    assert not rank.urgent()
    rank.pulse(0)
    for part in range(3):
        for step in range(part * steps + 1, (part + 1) * steps + 1):
            assert not rank.urgent() or step == 1
            post(rank, step, of)
        assert rank.urgent()
        assert rank.pulse(0).digests[-1].step == (part + 1) * steps


def test_many_digests_are_brought_at_once(rank: _RankState) -> None:
    """When a rank has posted many digests for one step, then a beat brings them at once."""
    post(rank, 1, 480)
    rank.pulse(0)
    post(rank, 2, 480, shards=MANY - 1)
    assert not rank.urgent()
    post(rank, 3, 480)
    assert rank.urgent()


def test_slow_digests_are_left_to_the_next_beat(rank: _RankState) -> None:
    """When a beat has the digests of fewer steps than a part of the cycle, then none that follow are
    worth a beat of their own. They are again when steps are as short as at the beginning."""
    hurried = []
    for begin, count in ((1, 6), (7, 5), (12, 5), (17, 7)):
        for step in range(begin, begin + count):
            post(rank, step, 48)
        rank.pulse(0)
        hurried.append(rank.hurried)
    assert hurried == [True, False, False, True]


def test_digests_of_steps_that_are_computed_again_are_brought(rank: _RankState) -> None:
    """When a rank has gone back to an earlier step, then its new digests are brought too."""
    post(rank, 30, 48)
    rank.pulse(0)
    post(rank, 20, 48)
    assert rank.urgent()


def test_last_digests_of_a_process_are_in_one_more_beat(rank: _RankState) -> None:
    """When nothing was posted since the last beats, then a beat brings no digests any more."""
    post(rank, 1, 8)
    brought = [len(rank.pulse(0).digests) for _ in range(6)]
    assert brought[0] == 1
    assert brought[-1] == 0
