"""
A rank that fails again and again: how long it is borne with, and what is done then.
"""

import pytest

from tests.core.lives import strategies, trained, tried
from tft.protocol.messages import FaultKind, Regroup, Spawn
from tft.testing.scripted import ScriptedJob

WHY = "rank 1 was the cause of 3 incidents within 600 s"
NO_SHRINKING = frozenset({"retry", "recover", "dump"})


def fails(job: ScriptedJob, kind: FaultKind, rank: int = 1) -> None:
    """
    A rank fails, and what can be done about it is done.
    """
    if kind == "process":
        job.kill(rank)
    else:
        job.fault(rank, kind)
    job.settle()
    if job.over is None:
        job.train()


@pytest.mark.parametrize("kind", ["process", "memory", "numeric"])
def test_job_is_dumped_when_a_rank_fails_too_often_and_it_cannot_shrink(kind: FaultKind) -> None:
    """When a rank caused more incidents than allowed and the job cannot shrink, then the rank is
    not repaired again. The report gives the reason, and the job is dumped."""
    job = trained(flaps=2, enable=NO_SHRINKING)
    for _ in range(3):
        assert job.over is None
        fails(job, kind)
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)
    assert strategies(job)[-1] == "dump"
    assert tried(job)["recover"] == WHY
    assert tried(job)["retry"] == (
        WHY if kind != "process" else "ranks [1] have lost their process"
    )
    assert len(job.orders(Spawn)) == (2 if kind == "process" else 0)


@pytest.mark.parametrize("kind", ["process", "memory"])
def test_rank_that_fails_too_often_leaves_when_the_job_can_shrink(kind: FaultKind) -> None:
    """When a rank fails too often and the job can shrink, then the rank leaves, also when its
    process is alive. The other ranks continue."""
    job = trained(flaps=2)
    for _ in range(3):
        fails(job, kind)
    assert strategies(job)[-1] == "scale_in"
    assert tried(job)["recover"] == WHY
    assert job.machine.members == {0, 2, 3}
    assert [r.without for r in job.orders(Regroup)][-1] == (1,)
    assert job.doing == "healthy"


def test_rank_that_left_after_too_many_failures_rejoins_only_after_the_window() -> None:
    """When a rank has left after too many failures, then no process is started for it. After the
    failure window, the rank rejoins."""
    job = trained(flaps=1)
    for _ in range(2):
        fails(job, "process")
    assert job.machine.members == {0, 2, 3}
    before = len(job.orders(Spawn))
    fails(job, "network", rank=2)
    assert len(job.orders(Spawn)) == before
    assert job.machine.members == {0, 2, 3}
    job.now += 700.0
    fails(job, "network", rank=2)
    job.train()
    assert job.machine.members == {0, 1, 2, 3}


def test_failures_outside_the_window_do_not_count() -> None:
    """When the failures of a rank are far enough apart, then the rank is replaced every time."""
    job = trained(flaps=2, flap_window=100.0)
    for _ in range(6):
        fails(job, "process")
        job.now += 60.0
    assert strategies(job) == ["recover"] * 6
    assert job.doing == "healthy"


def test_failures_are_counted_per_rank() -> None:
    """When four ranks fail one after another, then each is replaced, and no rank counts as failing
    too often."""
    job = trained(flaps=1)
    for rank in range(4):
        fails(job, "process", rank)
    assert strategies(job) == ["recover"] * 4


def test_rank_that_reports_broken_connections_is_not_counted_as_failing() -> None:
    """When a rank reports broken connections each time another rank dies, then only the ranks that
    died are counted."""
    job = trained(flaps=1)
    job.fault(0, "network")
    job.kill(1)
    job.settle()
    job.train()
    job.fault(0, "network")
    job.kill(2)
    job.settle()
    job.train()
    assert strategies(job) == ["recover", "recover"]
    assert {rank: len(at) for rank, at in job.machine._job.history.troubles.items()} == {1: 1, 2: 1}


def test_two_deaths_of_a_rank_in_one_incident_count_once() -> None:
    """When the new process of a rank dies in the same incident, then this counts as one failure of
    the rank."""
    job = trained(flaps=1)
    job.kill(1)
    job.settle()
    job.kill(1)
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert {rank: len(at) for rank, at in job.machine._job.history.troubles.items()} == {1: 1}


def test_flapping_rank_leaves_when_another_rank_fails_with_it() -> None:
    """When a rank that fails too often and another rank die together, then the job follows
    `scale_in`, and the first rank leaves."""
    job = trained(flaps=1)
    fails(job, "process")
    job.script.slow = {2}
    job.kill(1)
    job.kill(2)
    job.settle()
    job.train()
    assert strategies(job)[-1] == "scale_in"
    assert 1 not in job.machine.members
    assert job.doing == "healthy"


def test_rank_leaves_when_it_loses_its_node_too_often() -> None:
    """When a rank loses its node more often than allowed, then the rank is not moved again, and
    leaves the job."""
    job = trained(
        flaps=1, placement={0: (0, 1, 2), 1: (3,), 2: (), 3: (), 4: ()}, spare={2: 1, 3: 1, 4: 1}
    )
    for node in (1, 2):
        job.lose_node(node)
        job.settle()
        job.train()
    assert [s.node for s in job.orders(Spawn)] == [2]
    assert strategies(job) == ["recover", "scale_in"]
    assert tried(job)["recover"] == "rank 3 was the cause of 2 incidents within 600 s"


def test_job_is_dumped_when_it_has_too_many_incidents() -> None:
    """When the job has reached its limit of 2 incidents, then the next incident ends in a last
    checkpoint, for any rank."""
    job = trained(max_incidents=2)
    for rank in (0, 1, 2):
        fails(job, "process", rank)
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)
    assert tried(job)["recover"] == "the job has had 2 incidents, which is its limit"
    assert [s.rank for s in job.orders(Spawn)] == [0, 1]
