"""
Faults that say since when numbers are wrong (`not_after`, `polluted`): every rank goes back, whatever
the kind of the fault is, and whatever happens to the rank at fault meanwhile.
"""

from typing import get_args

import pytest

from tests.core.lives import trained
from tests.core.test_comparison import not_checkpointed
from tft.protocol.messages import (
    Commit,
    Faulted,
    FaultKind,
    Load,
    Noticed,
    OrderName,
    Restore,
    Save,
)
from tft.testing.scripted import ScriptedJob

SINCE = 2
"""The first step with wrong numbers."""


def wrong_since(job: ScriptedJob, kind: FaultKind = "numeric", rank: int = 2) -> None:
    """
    Report that a rank has sent wrong gradients since step `SINCE`.
    """
    job.report(
        Noticed(
            rank=rank, kind=kind, evidence="wrong gradients", polluted=True,
            not_after=SINCE - 1, at=job.now,
        )
    )  # fmt: skip


def went_back(job: ScriptedJob) -> bool:
    """
    Let the job go on, and return whether its ranks have gone back to a step before `SINCE`.
    """
    job.settle()
    if job.over is None:
        job.train(2)
        job.finish()
        job.settle()
    return any(
        order.step < SINCE for order in job.said if isinstance(order, (Restore, Load, Commit))
    )


def lose(job: ScriptedJob, when: str) -> None:
    """
    Bring the process of rank 2 to the stage `when` of its replacement.
    """
    if when == "ending":
        job.script.deaf = {0}
        job.notice(2, "process", "card 2 was taken away")
        return
    job.script.slow = {2} if when == "starting" else set()
    job.script.muted = {(2, "fetch")} if when == "fetching" else set()
    job.kill(2)
    if when != "gone":
        job.settle()


def let_go_on(job: ScriptedJob, when: str) -> None:
    """
    Let the replacement of rank 2 go on, which `lose` has held at the stage `when`.
    """
    job.script.muted = set()
    if when == "starting":
        job.script.slow = set()
        job.arrive(2)
    if when == "ending":
        job.settle()
        job.kill(2)


@pytest.mark.parametrize("kind", get_args(FaultKind))
def test_limit_of_a_notice_counts_for_every_kind(kind: FaultKind) -> None:
    """When an observer says since when a rank has sent wrong gradients, then no rank keeps later
    state, whatever the kind of the fault is."""
    job = trained(steps=3, keeps=3, placement={0: (0, 1), 1: (2, 3)}, spare={0: 2})
    job.checkpointed(1)
    wrong_since(job, kind)
    assert went_back(job)


@pytest.mark.parametrize("when", ["starting", "fetching", "ending", "left"])
def test_limit_counts_although_the_rank_is_being_replaced(when: str) -> None:
    """When the process of the rank is lost or being ended, or its rank has left the job, then the
    notice is not taken, but no rank keeps later state."""
    left = {"enable": frozenset({"retry", "scale_in", "dump"})} if when == "left" else {}
    job = trained(4, steps=3, keeps=3, **left)
    job.checkpointed(1)
    lose(job, when)
    wrong_since(job)
    let_go_on(job, when)
    assert went_back(job)


@pytest.mark.parametrize("order", ["regroup", "rebuild", "rollback"])
def test_last_update_of_a_rank_that_leaves_the_job_is_given_up(order: OrderName) -> None:
    """When a rank is lost, and the others go on without it, then a notice that its last update has
    spread wrong numbers counts until they train."""
    job = trained(4, steps=3, keeps=3, enable=frozenset({"retry", "scale_in", "dump"}))
    job.checkpointed(1)
    job.script.muted = {(0, order)}
    job.kill(2)
    job.settle()
    job.notice(2, "memory", "the card had wrong results", polluted=True)
    job.script.muted = set()
    job.repeat()
    job.settle()
    assert max(order.step for order in job.said if isinstance(order, (Restore, Load))) < 3


def test_notice_about_a_rank_that_was_lost_in_an_earlier_incident_is_ignored() -> None:
    """When a rank has left the job, and another one leaves later, then a notice about the first one
    changes nothing."""
    job = trained(4, steps=3, keeps=3, enable=frozenset({"retry", "scale_in", "dump"}))
    job.checkpointed(1)
    job.kill(2)
    job.settle()
    job.train(5)
    job.script.muted = {(0, "rollback")}
    job.kill(1)
    job.settle()
    evidence = "the card had wrong results"
    job.report(Noticed(rank=2, kind="memory", evidence=evidence, polluted=True, at=job.now))
    job.script.muted = set()
    job.repeat()
    job.settle()
    assert not any(isinstance(order, (Restore, Load)) for order in job.said)


@pytest.mark.parametrize("when", ["gone", "starting", "fetching", "ending"])
def test_last_update_of_a_lost_process_is_given_up(when: str) -> None:
    """When the process of a rank is lost or being ended, and a notice then says that its last update
    has spread wrong numbers, then no rank keeps the state after that update."""
    job = trained(4, steps=3, keeps=3)
    job.checkpointed(1)
    lose(job, when)
    job.notice(2, "memory", "the card had wrong results", polluted=True)
    let_go_on(job, when)
    job.settle()
    assert max(order.step for order in job.said if isinstance(order, (Restore, Load))) < 3


def test_notice_about_a_process_that_never_trained_is_ignored() -> None:
    """When no process of a rank has entered the training loop, then a notice that its last update
    has spread wrong numbers changes nothing."""
    job = ScriptedJob(2)
    job.script.slow = {1}
    job.settle()
    job.notice(1, "memory", "the card had wrong results", polluted=True)
    job.script.slow = set()
    job.arrive(1)
    job.settle()
    job.train(2)
    assert not any(isinstance(order, (Restore, Load)) for order in job.said)


def test_network_error_with_a_limit_is_no_symptom() -> None:
    """When ranks are being stopped, and one reports a network error that says since when numbers
    are wrong, then the report counts."""
    job = trained(steps=3, keeps=3)
    job.checkpointed(1)
    job.kill(1)
    job.fault(2, "network", not_after=SINCE - 1)
    assert went_back(job)


def test_second_of_two_equal_bugs_may_have_a_limit() -> None:
    """When two ranks raise the same exception, and only the second says since when numbers are
    wrong, then the last checkpoint is of an earlier step."""
    job = trained(steps=3, keeps=3)
    job.checkpointed(1)
    job.fault(1, "software", "bad")
    job.fault(2, "software", "bad", not_after=SINCE - 1)
    job.settle()
    assert job.orders(Save)[-1].step < SINCE


def test_report_that_is_overtaken_by_the_end_of_its_process_counts() -> None:
    """When the end of a process is reported before its own report that numbers are wrong, then no
    rank keeps later state."""
    job = trained(steps=3, keeps=3)
    job.checkpointed(1)
    position = job.ranks[2].position
    job.kill(2)
    job.report(
        Faulted(
            rank=2, incarnation=0, kind="numeric", step=4, summary="NaN", traceback="NaN",
            position=position, polluted=True, not_after=SINCE - 1, at=job.now,
        )
    )  # fmt: skip
    assert went_back(job)


def test_notice_after_the_end_of_training_is_told() -> None:
    """When all ranks have finished, then a notice changes nothing, and the log says why."""
    job = trained(steps=3, keeps=3)
    job.script.muted = {(rank, "complete") for rank in range(4)}
    job.finish()
    job.settle()
    wrong_since(job)
    [told] = job.facts("notice_not_taken")
    assert told["why_not"] == "training has ended"


# ---------------------------------------------------------------- copies that differed before


@pytest.mark.parametrize("told", ["before the replacement", "after the resume"])
def test_difference_at_a_checkpoint_counts_although_a_holder_is_lost(told: str) -> None:
    """When the copies of the only two holders differ at a checkpoint, and one of them is lost
    before that is known, then the copy that its successor has fetched proves nothing: all ranks go
    back to the checkpoint before."""
    job = trained(2, steps=3)
    job.checkpointed(2, compared=True)
    job.ranks[0].state.content = "wrong"
    job.script.slow = {1}
    job.kill(1)
    job.settle()
    if told == "before the replacement":
        not_checkpointed(job, 3)
    job.script.slow = set()
    job.arrive(1)
    job.settle()
    job.train(1)
    if told == "after the resume":
        not_checkpointed(job, 3)
    job.settle()
    assert {order.step for order in job.orders(Load)} == {2}


def test_wrong_copy_of_a_lost_rank_makes_the_incident_inexact() -> None:
    """When a checkpoint shows that the copy of a rank was wrong which is lost meanwhile, then the
    report says that its gradients may be in the state of all ranks."""
    job = trained(3, steps=3)
    job.checkpointed(2, compared=True)
    job.kill(2)
    job.settle()
    job.train(1)
    not_checkpointed(job, 3, 2)
    job.settle()
    job.train(1)
    assert "the state of all ranks may be wrong since step 3" in str(job.reports()[-1]["inexact"])


# ---------------------------------------------------------------- while ranks save


@pytest.mark.parametrize("kind", ["memory", "corruption"])
def test_rank_with_damaged_memory_does_not_write_the_last_checkpoint(kind: FaultKind) -> None:
    """When the memory of the rank that writes a shard is found damaged before it has written, then
    another holder writes the shard."""
    job = trained(steps=3)
    job.script.muted = {(0, "save")}
    job.stop()
    job.settle()
    job.notice(0, kind, "ECC error on card 0")
    job.settle()
    job.script.muted = set()
    job.repeat()
    job.settle()
    assert [order.to for order in job.orders(Save) if order.shards][-1] != (0,)


def test_last_checkpoint_is_of_a_step_before_the_wrong_numbers() -> None:
    """When numbers turn out to be wrong while the last checkpoint is written, then a checkpoint of
    an earlier step is written in its place."""
    job = trained(steps=3, keeps=3)
    job.checkpointed(1)
    job.script.muted = {(0, "save")}
    job.stop()
    job.settle()
    wrong_since(job, rank=0)
    job.settle()
    job.script.muted = set()
    job.repeat()
    job.settle()
    assert job.orders(Commit)[-1].step < SINCE
