"""
Nobody moves: who is taken for the one that hangs, when others are silent or lost besides.
"""

import pytest

from tests.core.lives import strategies, trained
from tft.protocol.messages import Kill


def test_computing_rank_is_ended_together_with_a_silent_rank() -> None:
    """When no rank moves, one rank is silent and only one of the others does not wait, then both
    are ended. The silent rank does not count as a waiting rank."""
    job = trained(3)
    job.ranks[2].hung = True
    job.ranks[0].loop.waiting = False
    job.stall()
    job.settle()
    job.wait()
    job.settle()
    job.train()
    assert [kill.rank for kill in job.orders(Kill)] == [2, 0]
    assert job.doing == "healthy"


def test_only_the_silent_rank_is_ended_when_no_other_rank_waits() -> None:
    """When no rank moves, one rank is silent and none of the others waits for another rank, then
    only the silent rank is ended."""
    job = trained(3)
    job.ranks[2].hung = True
    for rank in (0, 1):
        job.ranks[rank].loop.waiting = False
    job.stall()
    job.settle()
    job.wait()
    job.settle()
    job.train()
    assert [kill.rank for kill in job.orders(Kill)] == [2]
    assert job.doing == "healthy"


def test_earlier_stall_of_all_ranks_does_not_affect_the_next_suspicion() -> None:
    """When no rank moves and none waits, then no rank is ended. When the next stall has only one
    rank that does not wait, then this rank is ended."""
    job = trained(3)
    for rank in range(3):
        job.ranks[rank].loop.waiting = False
    job.stall()
    job.settle()
    assert job.orders(Kill) == []
    for rank in (0, 1):
        job.ranks[rank].loop.waiting = True
    job.stall()
    job.settle()
    job.train()
    assert [kill.rank for kill in job.orders(Kill)] == [2]


@pytest.mark.parametrize(("window", "step"), [(False, 4), (True, 5)])
def test_stall_without_a_suspect_is_reported_as_a_network_fault(*, window: bool, step: int) -> None:
    """When no rank moves and all ranks wait, then the report has a network fault without a rank.
    Its step follows the last updated step, and its evidence is the silence."""
    job = trained(3)
    if window:
        job.window(1)
    job.stall(5.0)
    job.settle()
    job.train()
    (incident,) = job.reports()
    (fault,) = incident["faults"]
    assert (fault["kind"], fault["rank"], fault["step"]) == ("network", None, step)
    assert "5" in fault["evidence"]
    assert job.orders(Kill) == []


def test_no_rank_is_suspected_when_only_a_lost_rank_could_have_waited() -> None:
    """When no rank moves, one rank is lost and none of the others waits for another rank, then no
    rank is ended as a hang."""
    job = trained(3)
    job.script.slow = {2}
    for rank in (0, 1):
        job.ranks[rank].loop.waiting = False
    job.stall()
    job.kill(2)
    job.settle()
    job.arrive(2)
    job.settle()
    job.train()
    assert job.orders(Kill) == []
    assert strategies(job) == ["recover"]
