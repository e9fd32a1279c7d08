"""
How a job gathers: nodes come one after the other, or do not come, and who is none of it is sent away.
"""

import pytest

from tests.core.lives import names, trained
from tft.core.job.policy import Policy
from tft.protocol.messages import End, Joined, NodeJoined, NodeLost, Refused, Spawn, StoreOpened
from tft.testing.scripted import ScriptedJob

NODES: dict[int, tuple[int, ...]] = {0: (0, 1), 1: (2, 3), 2: (4, 5)}


def gathering(**facts: object) -> ScriptedJob:
    """
    Three nodes of two ranks, of which the first has come.
    """
    job = ScriptedJob(6, placement=NODES, **facts)  # type: ignore[arg-type] # fields by name
    job.lead(1)
    assert job.machine.next_deadline() is None
    job.come(0)
    job.report(StoreOpened(node=0, host="h", port=1, at=job.now))
    job.settle()
    return job


def test_a_job_whose_nodes_do_not_all_come_ends_after_an_hour_without_another() -> None:
    """
    When an agent dies before anybody has heard of it, then the others wait for an hour after the
    last that came, and the job ends with a sentence that names the ranks without a place.
    """
    job = gathering()
    job.now += 3500.0
    job.come(1)
    came = job.now
    job.settle()
    job.now += 3500.0
    assert job.doing == "awaiting"
    job.wait()
    assert job.now == pytest.approx(came + 3600.0)
    assert job.doing == "exiting"
    assert job.machine.next_deadline() == pytest.approx(job.now + 5.0)  # for their leaving
    assert {order.to for order in job.orders(End)} == {(0, 1, 2, 3)}
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert job.over.why == (
        "ranks [4, 5] have no place: no other node has come within 3600 s after the last one"
    )
    assert job.machine.next_deadline() is None


def test_a_new_leader_gives_the_nodes_their_time_again() -> None:
    """
    When a controller takes over while nodes are still to come, then the hour begins anew.
    """
    job = gathering()
    job.now += 3000.0
    job.lead(2)
    assert job.machine.next_deadline() == pytest.approx(job.now + 3600.0)


def test_a_limit_that_passes_while_nodes_are_awaited_ends_nothing_else() -> None:
    """
    When a process is not ready in time and nodes are still to come, then it is replaced, and the
    nodes are waited for all the same.
    """
    job = ScriptedJob(6, placement=NODES)
    job.script.slow = {1}
    job.lead(1)
    job.come(0)
    job.report(StoreOpened(node=0, host="h", port=1, at=job.now))
    job.settle()
    job.wait()
    job.arrive(1)
    job.settle()
    assert job.doing == "awaiting"
    for node in (1, 2):
        job.come(node)
        job.settle()
    job.train()
    assert job.doing == "healthy"


def test_a_job_that_has_gathered_waits_for_no_more_nodes() -> None:
    """
    When all ranks have a place, then no hour counts any more.
    """
    job = gathering()
    for node in (1, 2):
        job.come(node)
        job.settle()
    job.train()
    assert job.doing == "healthy"
    assert job.machine.next_deadline() is None
    job.now += 7200.0
    job.script.slow = {1}
    job.kill(1)
    job.settle()
    assert job.doing == "awaiting"
    assert job.machine.next_deadline() == pytest.approx(job.now + 300.0, abs=0.1)


def test_a_node_that_is_lost_before_it_came_ends_the_start() -> None:
    """
    When it is told that an agent has ended that nobody had heard of, and some ranks have no place,
    then the job ends at once, and says what was told.
    """
    job = gathering()
    job.report(NodeLost(node=2, pid=7, why="the agent of node 2 has ended", at=job.now))
    assert job.doing == "exiting"
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert job.over.why == "the agent of node 2 has ended"


def test_a_node_that_is_lost_before_it_came_ends_the_start_while_it_is_talked_over() -> None:
    """
    When recovery plugins are asked about a rank that died while nodes were still to come, and one
    of those is lost, then no advice is waited for.
    """
    job = gathering(policy=Policy(advised=True))
    job.kill(1)
    assert job.doing == "choosing"
    job.report(NodeLost(node=2, pid=7, why="the agent of node 2 has ended", at=job.now))
    assert job.doing == "exiting"


@pytest.mark.parametrize("comes", [False, True])
def test_another_node_that_is_lost_before_it_came_ends_nothing_once_more(comes: bool) -> None:
    """
    When the start has been ended, and a node is lost that nobody had heard of by then, then the
    ranks go on leaving, and the job ends as it was to.
    """
    job = gathering()
    job.report(NodeLost(node=2, pid=7, why="the agent of node 2 has ended", at=job.now))
    said = len(job.said)
    if comes:
        job.come(1)
    job.report(NodeLost(node=1, pid=1, why="the agent of node 1 has ended", at=job.now))
    assert (job.doing, len(job.said)) == ("exiting", said)
    job.settle()
    assert job.over is not None
    assert job.over.why == "the agent of node 2 has ended"


def test_a_spare_node_that_is_lost_before_it_came_ends_nothing() -> None:
    """
    When every rank has a place, or had one, then a node that never came is not missed.
    """
    job = gathering()
    for node in (1, 2):
        job.come(node)
    assert job.doing == "awaiting"
    job.report(NodeLost(node=3, why="the agent of node 3 has ended", at=job.now))
    job.settle()
    job.train()
    assert job.doing == "healthy"
    job.report(NodeLost(node=4, why="the agent of node 4 has ended", at=job.now))
    assert job.doing == "healthy"


def test_a_node_that_came_and_is_lost_while_others_are_awaited_ends_nothing() -> None:
    """
    When a node is lost while others are still to come, then the start is an incident: its ranks
    are started where there is room, and the job begins when the others have come.
    """
    job = gathering(spare={3: 2})
    job.come(3)
    job.lose_node(0)
    job.settle()
    assert job.doing == "awaiting"
    for node in (1, 2):
        job.come(node)
        job.settle()
    job.train()
    assert {job.ranks[rank].node for rank in (0, 1)} == {3}
    assert job.doing == "healthy"


def test_a_node_with_too_many_ranks_starts_those_that_the_job_has() -> None:
    """
    When an agent names ranks beyond the world, then they are not started.
    """
    job = ScriptedJob(2)
    job.lead(1)
    job.report(NodeJoined(node=0, host="h", pid=1, ranks=(0, 1, 2, 3), at=job.now))
    assert [s.rank for s in job.orders(Spawn)] == [0, 1]


@pytest.mark.parametrize(
    ("rank", "world", "why"),
    [
        (2, 8, "rank 2 of 8 has no place in a job of 4 ranks"),
        (5, 4, "rank 5 of 4 has no place in a job of 4 ranks"),
    ],
)
def test_a_process_of_another_world_is_refused(rank: int, world: int, why: str) -> None:
    """
    When a process claims a rank that the job has not, or in a world of another size, then it is
    told so, and nobody else is disturbed.
    """
    job = trained()
    job.report(
        Joined(
            rank=rank, incarnation=0, world=world, pid=77, started=5, host="h", address="h:9",
            adaptor="fake", strategies=(), at=job.now,
        )
    )  # fmt: skip
    assert names(job.said) == ["Refused"]
    assert [r.why for r in job.orders(Refused)] == [why]
    assert job.facts("claim_refused") == [{"rank": rank, "pid": 77, "why": why}]
    assert job.doing == "healthy"
