"""
Ranks whose node is gone, and a place that is found for them only when everyone stands still.
"""

from tests.core.lives import strategies, trained, tried
from tft.protocol.messages import Spawn
from tft.testing.scripted import ScriptedJob

TWO_NODES = {0: (0, 1), 1: (2, 3)}
TOO_FEW = "no node has room for rank 3 in addition to the others"


def stranded(*, lost: bool = True, room: int = 1, **facts: int) -> ScriptedJob:
    """
    Such a job, whose plugins are asked when another node has come. The first one was lost, or its
    agent does not end its processes.
    """
    job = trained(
        placement=TWO_NODES, spare={1: 2, 2: room}, advised=True, **facts,
        enable={"recover", "dump"},
    )  # fmt: skip
    if lost:
        job.lose_node(1)
    else:
        job.script.deaf = {1}
        for rank in (2, 3):
            job.notice(rank, "process", "its card is gone")
    while job.doing != "choosing":
        job.settle()
        if job.doing != "choosing":
            job.wait()
    job.come(2)
    return job


def test_the_room_of_a_node_that_is_lost_is_room_for_nobody() -> None:
    """
    When the node that was lost had room for more, and the one that has come has room for one of
    two ranks, then that is all there is: they are not waited for.
    """
    job = stranded()
    job.advise(strategy="recover")
    job.settle()
    assert job.facts("advice_not_followed")[-1]["why_not"] == TOO_FEW
    assert job.orders(Spawn) == []


def test_the_room_of_a_node_that_ends_nobody_is_no_room_for_those_who_were_on_it() -> None:
    """
    When two ranks could not be ended, and the node that has come has room for one of them, then
    they are not waited for: there is more room where they were, but not for them.
    """
    job = stranded(lost=False)
    job.advise(strategy="recover")
    job.settle()
    assert job.facts("advice_not_followed")[-1]["why_not"] == TOO_FEW
    assert job.orders(Spawn) == []


def test_who_was_started_late_is_started_again_as_often_as_any_other() -> None:
    """
    When a place was found only while everyone stood still, and the process that was started there
    dies, then that counts as its second death, not more.
    """
    job = stranded(room=2, respawns=2)
    for _ in range(2):
        job.advise(strategy="recover")
        job.script.slow = {2}
        job.settle()
        assert job.machine.incident.decision.strategy == "recover"
        job.kill(2)
        job.settle()
    job.advise()
    job.settle()
    assert tried(job)["recover"] == "rank 2 has died 3 times in this incident"
    assert strategies(job) == ["dump"]
