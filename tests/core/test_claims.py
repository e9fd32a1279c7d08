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


def test_a_process_that_has_claimed_its_rank_is_not_displaced_before_it_is_ready() -> None:
    """
    When a second process claims a rank whose own has claimed it and is not ready, then the second
    one is refused, and learns who holds the rank.
    """
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


def test_who_was_started_for_a_rank_is_named_before_it_has_claimed_it() -> None:
    """
    When a process comes as one that was never asked for, and the one that was has only started,
    then the refusal names that one.
    """
    job = starting(1)
    claim(job, 1, 77, incarnation=3)
    assert "held by process 1001 (incarnation 0)" in refusals(job)[0]


def test_a_process_that_was_given_up_and_claims_its_rank_again_is_refused() -> None:
    """
    When a node was given up and one of its processes can be heard again, then its claim is refused:
    it would wait for an answer for ever.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3)}, enable=frozenset({"scale_in", "dump"}))
    lost = job.ranks[3]
    job.report(NodeLost(node=1, why="it is not heard any more", at=job.now))
    job.join(lost)
    assert [refused.rank for refused in job.orders(Refused)] == [3]


def test_a_claim_is_refused_when_the_job_is_over() -> None:
    """
    When a process that nobody asked for claims a rank of a job that has ended, then it is refused
    and not told that it was heard: it would take up what the rank was ordered last.
    """
    job = trained()
    job.finish()
    assert job.doing == "ended"
    claim(job, 1, 77)
    assert len(refusals(job)) == 1
    assert list(job.machine.refused) == ["stranger.77"]


def test_a_start_that_is_told_twice_begins_once() -> None:
    """
    When an agent says twice that it has started a process, then the time for it is not given again.
    """
    job = starting(1)
    job.join(job.ranks[0])
    limit = job.machine.next_deadline()
    assert limit is not None
    job.now += 100.0
    job.report(Spawned(node=0, rank=1, incarnation=0, pid=1001, at=job.now))
    assert job.machine.next_deadline() == limit


def test_a_process_counts_as_running_though_its_start_was_never_told() -> None:
    """
    When a process has claimed its rank and its agent has never said that it runs, then the job is not
    over before it has left.
    """
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


def test_nothing_is_saved_of_a_resumed_job_that_has_loaded_nothing() -> None:
    """
    When the end of a resumed job is asked for while one of its ranks still starts, then what the
    others begin with is not written as if it were a step of the job.
    """
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
def test_a_store_that_opens_beside_another_disturbs_nobody(node: int) -> None:
    """
    When another node opens its store while groups are formed, then they are formed where they
    were begun.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3), 2: ()})
    job.script.muted = {(0, "regroup")}
    job.fault(0, "network")
    job.settle()
    job.report(StoreOpened(node=node, host="h", port=9, at=job.now))
    job.settle()
    assert [(r.port, r.round) for r in job.orders(Regroup)] == [(1, 1)]
    assert job.facts("store_replaced") == []


def test_the_store_of_a_node_that_comes_back_disturbs_nobody_who_meets_elsewhere() -> None:
    """
    When a node that had a store before opens another one while groups are formed at that of another
    node, then they are formed there.
    """
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


def test_a_store_that_is_lost_while_groups_are_formed_is_why_it_is_begun_anew() -> None:
    """
    When the store comes back elsewhere while groups are formed, and that was the last attempt, then
    the report says so of the strategy.
    """
    job = trained(attempts=1, enable=frozenset({"retry", "dump"}))
    job.script.muted = {(0, "regroup")}
    job.fault(0, "network")
    job.settle()
    job.reopen_store(9)
    job.settle()
    assert tried(job)["retry"] == "the rendezvous store was lost while groups were formed"
