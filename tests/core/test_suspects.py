"""
Nobody moves: who is taken for the one that hangs, when others are silent or lost besides.
"""

import pytest

from tests.core.lives import strategies, trained
from tft.protocol.messages import Kill


def test_who_does_not_wait_is_suspected_beside_one_that_is_silent() -> None:
    """
    When nobody moves, one rank does not answer, and of the others one does not wait for anybody,
    then both are ended: whoever is silent is not counted among those who could be waiting.
    """
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


def test_a_silent_rank_is_none_that_could_have_waited() -> None:
    """
    When nobody moves, one rank does not answer, and none of the others waits for anybody, then
    only the silent one is ended.
    """
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


def test_who_was_suspected_with_all_others_is_not_suspected_the_next_time() -> None:
    """
    When nobody moves and nobody waits for anybody, so that nobody stands out, and it happens again
    when all but one are waiting, then it is that one.
    """
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
def test_a_stall_without_a_suspect_is_a_fault_of_the_network(*, window: bool, step: int) -> None:
    """
    When nobody moves and all are waiting, then the report has a network fault of no rank, at the step after the last one
    that some rank has begun to update, with the silence as its evidence.
    """
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


def test_nobody_is_suspected_when_only_a_lost_rank_could_have_waited() -> None:
    """
    When nobody moves, a rank is lost, and none of the others waits for anybody, then none of them
    is taken for the one that hangs.
    """
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
