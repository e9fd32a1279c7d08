"""
Nobody moves: who is taken for the one that hangs, when others are silent or lost besides.
"""

from tests.core.lives import strategies, trained
from tft.protocol.messages import Kill


def test_who_does_not_wait_is_suspected_beside_one_that_is_silent() -> None:
    """
    When nobody moves, one rank does not answer, and of the others one does not wait for anybody,
    then both are ended: whoever is silent is not counted among those who could be waiting.
    """
    job = trained(3)
    job.ranks[2].hung = True
    job.ranks[0].waiting = False
    job.stall()
    job.settle()
    job.wait()
    job.settle()
    job.train()
    assert [kill.rank for kill in job.orders(Kill)] == [2, 0]
    assert job.doing == "healthy"


def test_nobody_is_suspected_when_only_a_lost_rank_could_have_waited() -> None:
    """
    When nobody moves, a rank is lost, and none of the others waits for anybody, then none of them
    is taken for the one that hangs.
    """
    job = trained(3)
    job.slow = {2}
    for rank in (0, 1):
        job.ranks[rank].waiting = False
    job.stall()
    job.kill(2)
    job.settle()
    job.arrive(2)
    job.settle()
    job.train()
    assert job.orders(Kill) == []
    assert strategies(job) == ["recover"]
