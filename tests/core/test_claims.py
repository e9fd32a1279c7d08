"""
A process from its start to its claim: it is counted from when it is first heard of, its time begins
once, and one process speaks for a rank.
"""

import pytest

from tests.core.lives import trained, tried
from tft.core.job.policy import Policy
from tft.protocol.messages import (
    Joined,
    NodeLost,
    Refused,
    Regroup,
    Save,
    Spawned,
    StoreOpened,
)
from tft.testing.scripted import ScriptedJob


def claim(job: ScriptedJob, rank: int, pid: int, incarnation: int = 0) -> None:
    """
    A process that nobody asked for claims a rank.
    """
    job.report(
        Joined(
            rank=rank, incarnation=incarnation, world=job.world, pid=pid, started=5, host="h",
            address="h:9", adaptor="fake", strategies=(), at=job.now,
        ),
        sender=f"stranger.{pid}",
    )  # fmt: skip


def refusals(job: ScriptedJob) -> list[str]:
    """
    What those who were refused are told.
    """
    return [refused.why for refused in job.orders(Refused)]


def starting(*slow: int) -> ScriptedJob:
    """
    A job of two ranks, of which these are not ready yet.
    """
    job = ScriptedJob(2)
    job.script.slow = set(slow)
    job.lead(1)
    job.come(0)
    job.report(StoreOpened(node=0, host="h", port=1, at=job.now))
    job.settle()
    return job


def test_second_claim_of_a_rank_is_refused_before_the_first_process_is_ready() -> None:
    """When a second process claims a rank whose own process is not ready, then the claim is
    refused. The refusal names the process that holds the rank."""
    job = starting(1)
    job.join(job.ranks[1])
    claim(job, 1, 77)
    assert refusals(job) == [
        "rank 1 is held by process 1001 (incarnation 0); process 77 (incarnation 0) came without "
        "being asked for"
    ]
    job.ready(job.ranks[1])
    job.settle()
    job.train()
    assert job.doing == "healthy"


def test_refusal_names_the_started_process_before_it_claims_its_rank() -> None:
    """When an unrequested process claims a rank and the requested process has only started, then
    the refusal names the requested process."""
    job = starting(1)
    claim(job, 1, 77, incarnation=3)
    assert "held by process 1001 (incarnation 0)" in refusals(job)[0]


def test_claim_from_a_lost_node_is_refused() -> None:
    """When a node was reported lost and one of its processes claims its rank again, then the claim
    is refused, so that the process does not wait without end."""
    job = trained(placement={0: (0, 1), 1: (2, 3)}, enable=frozenset({"scale_in", "dump"}))
    lost = job.ranks[3]
    job.report(NodeLost(node=1, why="it is not heard any more", at=job.now))
    job.join(lost)
    assert [refused.rank for refused in job.orders(Refused)] == [3]


def test_claim_is_refused_when_the_job_has_ended() -> None:
    """When an unrequested process claims a rank of a job that has ended, then the claim is refused.
    The process must not carry out the last order of that rank."""
    job = trained()
    job.finish()
    assert job.doing == "ended"
    claim(job, 1, 77)
    assert len(refusals(job)) == 1
    assert list(job.machine.refused) == ["stranger.77"]


def test_second_start_report_does_not_extend_the_deadline() -> None:
    """When an agent reports the start of a process twice, then the deadline of the process does not
    move."""
    job = starting(1)
    job.join(job.ranks[0])
    limit = job.machine.next_deadline()
    assert limit is not None
    job.now += 100.0
    job.report(Spawned(node=0, rank=1, incarnation=0, pid=1001, at=job.now))
    assert job.machine.next_deadline() == limit


def test_process_counts_as_running_without_a_start_report() -> None:
    """When a process has claimed its rank and its agent never reported the start, then the job ends
    only after that process has ended."""
    job = ScriptedJob(1)
    job.lead(1)
    job.come(0)
    job._queue.clear()
    job.ranks[0].alive = True
    job.join(job.ranks[0])
    job.ready(job.ranks[0])
    job.report(StoreOpened(node=0, host="h", port=1, at=job.now))
    job.settle()
    job.train()
    job.script.muted = {(0, "complete")}
    job.finish()
    job.lead(2)
    assert job.doing == "exiting"
    job.kill(0, 0)
    assert job.doing == "ended"


def test_resumed_job_saves_no_checkpoint_before_it_has_loaded_one() -> None:
    """When a stop request comes while a rank of a resumed job still starts, then no checkpoint is
    saved, because the initial states are not a step of the job."""
    job = ScriptedJob(2, Policy(), resume=("/run/checkpoints/step-00000005", 5))
    job.script.slow = {1}
    job.lead(1)
    job.come(0)
    job.report(StoreOpened(node=0, host="h", port=1, at=job.now))
    job.settle()
    job.stop(0)
    job.settle()
    assert job.orders(Save) == []
    assert job.doing in ("exiting", "ended")


@pytest.mark.parametrize("node", [1, 2])
def test_second_store_does_not_change_where_groups_are_formed(node: int) -> None:
    """When another node opens its store while groups are formed, then the groups are formed at the
    first store."""
    job = trained(placement={0: (0, 1), 1: (2, 3), 2: ()})
    job.script.muted = {(0, "regroup")}
    job.fault(0, "network")
    job.settle()
    job.report(StoreOpened(node=node, host="h", port=9, at=job.now))
    job.settle()
    assert [(r.port, r.round) for r in job.orders(Regroup)] == [(1, 1)]
    assert job.facts("store_replaced") == []


def test_reopened_store_of_another_node_does_not_change_where_groups_are_formed() -> None:
    """When a node opens its store again while groups are formed at the store of another node, then
    the groups are still formed at that other store."""
    job = ScriptedJob(4, placement={0: (0, 1), 1: (2, 3)}, strategies=("retry", "dump"))
    job.report(StoreOpened(node=1, host="h1", port=1, at=job.now))
    job.start()
    job.script.muted = {(0, "regroup")}
    job.fault(0, "network")
    job.settle()
    job.report(StoreOpened(node=1, host="h1", port=9, at=job.now))
    job.settle()
    assert [(r.host, r.port, r.round) for r in job.orders(Regroup)] == [("h", 1, 0), ("h", 1, 1)]
    assert job.facts("store_replaced") == []


def test_report_says_the_store_was_lost_while_groups_were_formed() -> None:
    """When the store reopens at another port while groups are formed in the last attempt, then the
    report gives the lost store as the reason against the strategy."""
    job = trained(attempts=1, enable=frozenset({"retry", "dump"}))
    job.script.muted = {(0, "regroup")}
    job.fault(0, "network")
    job.settle()
    job.reopen_store(9)
    job.settle()
    assert tried(job)["retry"] == "the rendezvous store was lost while groups were formed"
