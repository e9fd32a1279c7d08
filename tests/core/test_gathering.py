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


def test_job_fails_when_no_other_node_joins_for_an_hour() -> None:
    """When a node never joins, then the job waits 3600 s after the last node that joined. Then the
    job fails, and the reason names the ranks without a place."""
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


def test_new_controller_waits_another_hour_for_the_nodes() -> None:
    """When a controller takes over while nodes have not joined, then the 3600 s begin again."""
    job = gathering()
    job.now += 3000.0
    job.lead(2)
    assert job.machine.next_deadline() == pytest.approx(job.now + 3600.0)


def test_late_process_is_replaced_while_nodes_have_not_joined() -> None:
    """When a process is not ready in time while nodes have not joined, then it is replaced. The job
    still waits for the nodes."""
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


def test_node_deadline_ends_when_all_ranks_have_a_place() -> None:
    """When all ranks have a place, then there is no deadline for nodes any more."""
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


def test_job_fails_at_once_when_a_node_is_lost_before_it_joins() -> None:
    """When an agent that never joined is reported as ended while ranks have no place, then the job
    fails at once with that reason."""
    job = gathering()
    job.report(NodeLost(node=2, pid=7, why="the agent of node 2 has ended", at=job.now))
    assert job.doing == "exiting"
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert job.over.why == "the agent of node 2 has ended"


def test_job_ends_when_a_node_is_lost_before_it_joins_while_plugins_are_asked() -> None:
    """When plugins are asked about a dead rank and a node is lost before it joins, then the job
    ends without waiting for advice."""
    job = gathering(policy=Policy(advised=True))
    job.kill(1)
    assert job.doing == "choosing"
    job.report(NodeLost(node=2, pid=7, why="the agent of node 2 has ended", at=job.now))
    assert job.doing == "exiting"


@pytest.mark.parametrize("comes", [False, True])
def test_second_node_lost_before_it_joins_does_not_change_the_end(comes: bool) -> None:
    """When the job already ends because of one lost node and a second node is lost, then no new
    order is sent. The first reason stays."""
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


def test_lost_spare_node_that_never_joined_is_ignored() -> None:
    """When every rank has a place and a node that never joined is lost, then the job continues."""
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


def test_ranks_move_when_a_joined_node_is_lost_during_the_start() -> None:
    """When a joined node is lost while other nodes have not joined, then its ranks start on a node
    with room. The job begins when the other nodes have joined."""
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


def test_node_starts_only_the_ranks_of_the_job() -> None:
    """When an agent names ranks beyond the size of the job, then no process is started for these
    ranks."""
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
def test_claim_with_a_wrong_rank_or_world_size_is_refused(rank: int, world: int, why: str) -> None:
    """When a process claims a rank that does not exist, or names another world size, then its claim
    is refused with the reason. The job stays healthy."""
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
