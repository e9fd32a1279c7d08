"""
What is seen of a rank from outside: it is dealt with, or whoever said it reads why not.
"""

import pytest

from tests.core.lives import names, strategies, trained, tried
from tft.core.job.policy import Policy
from tft.protocol.messages import FaultKind, Fetch, Kill, Noticed, Restore, StoreOpened
from tft.testing.scripted import ScriptedJob


def not_taken(job: ScriptedJob) -> list[object]:
    """
    Why notices were not taken.
    """
    return [facts["why_not"] for facts in job.facts("notice_not_taken")]


def test_a_notice_of_a_rank_that_takes_no_part_is_told_and_not_taken() -> None:
    """
    When something is seen of a rank outside the world, or of one that has left with its column,
    then nothing follows, and the log says why.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3)}, enable=frozenset({"scale_in", "dump"}))
    job.kill(3)
    job.settle()
    job.train()
    job.said.clear()
    job.notice(3, "memory", "too many corrected errors")
    job.report(Noticed(rank=9, kind="memory", evidence="too many corrected errors", at=job.now))
    assert job.said == []
    assert job.doing == "healthy"
    assert job.facts("notice_not_taken") == [
        {
            "rank": rank,
            "kind": "memory",
            "evidence": "too many corrected errors",
            "why_not": "the rank does not take part",
        }
        for rank in (3, 9)
    ]


def test_a_notice_of_a_process_that_is_starting_is_told_and_not_taken() -> None:
    """
    When a fault is seen of a rank whose next process is only on its way, then the new process is
    left in peace, and the log says why.
    """
    job = trained()
    job.script.slow = {1}
    job.kill(1)
    job.settle()
    before = len(job.said)
    job.notice(1, "hang")
    assert len(job.said) == before
    assert not_taken(job) == ["its process is starting, and has no state yet that could be wrong"]


def test_a_node_is_given_up_though_its_process_is_only_starting() -> None:
    """
    When it is the node that is wrong, then the process that starts there is ended and comes up on
    another; it is no member's state that is lost.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3), 2: ()}, spare={2: 2})
    job.script.slow = {3}
    job.kill(3)
    job.settle()
    job.notice(3, "node", "its fan has failed")
    job.script.slow = set()
    job.settle()
    job.train()
    assert not_taken(job) == []
    assert [k.rank for k in job.orders(Kill)] == [2, 3]
    assert {job.ranks[rank].node for rank in (2, 3)} == {2}
    assert job.doing == "healthy"


def test_a_notice_of_a_rank_without_a_process_is_told_and_not_taken() -> None:
    """
    When a rank has lost its process and nobody may start another yet, then there is nothing that a
    notice could be about; nor where none was asked for yet.
    """
    job = trained(enable=frozenset({"scale_in", "dump"}))
    job.kill(3)
    job.notice(3, "process")
    assert job.orders(Kill) == []
    fresh = ScriptedJob(2)
    fresh.notice(1, "node")
    assert not_taken(job) == not_taken(fresh) == ["the rank has no process"]


def test_a_notice_of_a_process_that_is_being_ended_is_told_and_not_taken() -> None:
    """
    When the same is said once more, then the process is not ended twice, and it is one fault.
    """
    job = trained()
    job.notice(1, "process", "its card is gone")
    job.notice(1, "process", "its card is gone")
    assert [k.rank for k in job.orders(Kill)] == [1]
    assert not_taken(job) == ["its process is being ended: its card is gone"]
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert len(incident["faults"]) == 1


@pytest.mark.parametrize("kind", ["process", "hang"])
def test_what_is_seen_of_a_rank_while_the_job_starts_counts_against_it(kind: FaultKind) -> None:
    """
    When a rank may cause no incident, and something is seen of it while others still start, then it
    is not given another process.
    """
    job = ScriptedJob(3, Policy(flaps=0))
    job.script.slow = {2}
    job.lead(1)
    job.come(0)
    job.report(StoreOpened(node=0, host="h", port=1, at=job.now))
    job.settle()
    job.notice(1, kind, "its card is gone")
    job.settle()
    assert "rank 1 was the cause of 1 incidents" in tried(job)["recover"]


@pytest.mark.parametrize("kind", ["memory", "corruption"])
def test_where_memory_is_bad_the_kept_copies_are_not_trusted(kind: FaultKind) -> None:
    """
    When the memory of a rank is suspect, then it takes its state from others, though it keeps a
    copy of the step before; so it is for what it has sent out as for what it says itself.
    """
    job = trained(keeps=1, groups={"a": (0, 1), "b": (2, 3)})
    job.notice(1, kind)
    job.window(3)
    job.settle()
    job.train()
    assert [f.to for f in job.orders(Fetch)] == [(1,)]
    assert 1 not in {rank for order in job.orders(Restore) for rank in order.to}
    assert strategies(job) == ["retry"]
    assert names(job.said).count("Freeze") == 1
