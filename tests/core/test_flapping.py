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
def test_a_rank_that_fails_too_often_ends_in_a_last_checkpoint(kind: FaultKind) -> None:
    """
    When a rank was the cause of more incidents than are allowed, and the job cannot shrink, then
    it is neither retried nor replaced again: the sentence stands beside both.
    """
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
def test_a_rank_that_fails_too_often_leaves_where_the_job_can_shrink(kind: FaultKind) -> None:
    """
    When the others can go on without the rank that fails again and again, then they do, though
    its process may live.
    """
    job = trained(flaps=2)
    for _ in range(3):
        fails(job, kind)
    assert strategies(job)[-1] == "scale_in"
    assert tried(job)["recover"] == WHY
    assert job.machine.members == {0, 2, 3}
    assert [r.without for r in job.orders(Regroup)][-1] == (1,)
    assert job.doing == "healthy"


def test_a_rank_that_left_for_failing_too_often_is_not_asked_back() -> None:
    """
    When a flapping rank has left, then no process is started for it, and the one that it has is
    not taken in, as long as its failures are not forgotten.
    """
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


def test_a_window_that_passes_forgives() -> None:
    """
    When the failures of a rank lie far enough apart, then it is replaced every time.
    """
    job = trained(flaps=2, flap_window=100.0)
    for _ in range(6):
        fails(job, "process")
        job.now += 60.0
    assert strategies(job) == ["recover"] * 6
    assert job.doing == "healthy"


def test_the_failures_of_several_ranks_are_counted_apart() -> None:
    """
    When one rank after the other fails, then none of them flaps.
    """
    job = trained(flaps=1)
    for rank in range(4):
        fails(job, "process", rank)
    assert strategies(job) == ["recover"] * 4


def test_a_rank_that_only_saw_the_others_fail_is_not_blamed() -> None:
    """
    When a rank reports broken connections whenever another one dies, then only the one that died
    is counted.
    """
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


def test_several_deaths_in_one_incident_count_once() -> None:
    """
    When a replacement dies in the same incident, then that is for the limit of replacements to
    judge, not for this one.
    """
    job = trained(flaps=1)
    job.kill(1)
    job.settle()
    job.kill(1)
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert {rank: len(at) for rank, at in job.machine._job.history.troubles.items()} == {1: 1}


def test_a_rank_that_flaps_is_named_even_where_another_one_fails() -> None:
    """
    When the rank that flaps and another one fail together, then the flapping one leaves with the
    other, and nobody is replaced for nothing.
    """
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


def test_a_node_that_dies_again_and_again_is_given_up_with_its_ranks() -> None:
    """
    When a node is lost once more than is allowed, then its ranks are not moved again.
    """
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


def test_too_many_incidents_of_anyone_end_in_a_last_checkpoint() -> None:
    """
    When the job has had as many incidents as it may, then the next one is its last, whoever
    causes it.
    """
    job = trained(max_incidents=2)
    for rank in (0, 1, 2):
        fails(job, "process", rank)
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)
    assert tried(job)["recover"] == "the job has had 2 incidents, which is its limit"
    assert [s.rank for s in job.orders(Spawn)] == [0, 1]
