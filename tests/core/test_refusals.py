"""
Updates that ranks refuse because of their numbers: the step is computed again, then its batches are
left out, and the report names the cause.
"""

from typing import Any

import pytest

from tests.core.lives import strategies, trained
from tft.protocol.messages import Fetch, Rollback, Save, StepNumbers
from tft.testing.scripted import ScriptedJob

ALL = (0, 1, 2, 3)


def numbers(own: str = "same", common: str = "norm", batches: int = 1) -> StepNumbers:
    """
    Return what a rank has computed.
    """
    return StepNumbers(own=own, common=common, batches=batches)


def refusing(**facts: Any) -> ScriptedJob:  # Any: named fields of `trained`
    """
    Return a healthy job after 3 steps, whose ranks compute the same numbers each time.
    """
    job = trained(**facts)
    job.script.numbers = {rank: numbers() for rank in ALL}
    return job


def again(job: ScriptedJob, *ranks: int) -> None:
    """
    Let ranks refuse the present step, and let the job act on it.
    """
    job.refuse(*ranks)
    job.settle()


def refused(job: ScriptedJob) -> list[dict[str, Any]]:  # Any: JSON
    """
    Return the refused steps of the only incident.
    """
    (incident,) = job.reports()
    found: list[dict[str, Any]] = incident["refused"]
    return found


def test_refused_step_is_computed_again_in_all_processes() -> None:
    """When all ranks refuse the update of a step, then no rank fetches a state or loses its
    process, and no batch is left out. All ranks compute the step again."""
    job = refusing(skip_batch=True)
    again(job, *ALL)
    assert job.orders(Fetch) == []
    assert [(r.step, r.skip) for r in job.orders(Rollback)] == [(3, 0)]
    job.train()
    assert strategies(job) == ["retry"]
    assert {rank.step for rank in job.ranks.values()} == {4}


def test_refusals_of_several_ranks_are_one_fault_without_a_rank() -> None:
    """When all ranks refuse a step, then the report has one numeric fault that names no rank, the
    reason of each rank, and how often the step was refused."""
    job = refusing()
    again(job, *ALL)
    job.train()
    (incident,) = job.reports()
    assert [(f["kind"], f["rank"], f["step"]) for f in incident["faults"]] == [("numeric", None, 4)]
    (found,) = refused(job)
    assert (found["step"], found["times"], found["skipped"]) == (4, 1, 0)
    assert found["why"] == [f"rank {rank}: the loss is nan" for rank in ALL]


def test_update_that_one_rank_has_applied_is_given_up() -> None:
    """When one rank has applied the update that the others refuse, then this rank fetches the state
    before the update from them."""
    job = refusing()
    job.window(2)
    job.close(2)
    again(job, 0, 1, 3)
    assert [(f.to, f.step) for f in job.orders(Fetch)] == [((2,), 3)]
    assert [r.step for r in job.orders(Rollback)] == [3]
    job.train()
    assert {rank.step for rank in job.ranks.values()} == {4}


def test_single_refusal_counts_for_all_ranks() -> None:
    """When one rank refuses an update that all others have applied, then all of them return to the
    state before it."""
    job = refusing()
    for rank in (0, 1, 2):
        job.window(rank)
        job.close(rank)
    again(job, 3)
    assert sorted(f.to for f in job.orders(Fetch)) == [(0,), (1,), (2,)]
    assert {f.step for f in job.orders(Fetch)} == {3}


def test_same_batch_refused_twice_is_left_out() -> None:
    """When the same step is refused twice with the same numbers, then its batch is left out on all
    ranks, and the report names the step, the batch, and the data or the model as the cause."""
    job = refusing(skip_batch=True)
    again(job, *ALL)
    again(job, *ALL)
    job.train()
    assert [(r.step, r.skip) for r in job.orders(Rollback)] == [(3, 0), (3, 1)]
    (found,) = refused(job)
    assert (found["cause"], found["ranks"], found["times"], found["skipped"]) == (
        "data or model", [], 2, 1,
    )  # fmt: skip
    (incident,) = job.reports()
    assert incident["inexact"] == [
        "batches left out on all ranks before step 4, because its update was refused twice: 1"
    ]


def test_all_batches_of_a_step_are_left_out() -> None:
    """When a step takes four batches and is refused twice, then four batches are left out."""
    job = refusing(skip_batch=True)
    job.script.numbers = {rank: numbers(batches=4) for rank in ALL}
    again(job, *ALL)
    again(job, *ALL)
    assert [r.skip for r in job.orders(Rollback)] == [0, 4]


def test_rollback_to_the_same_step_leaves_the_batch_out_again() -> None:
    """When a rank dies while the step is computed with the next batch, then the refused batch is
    left out after that rollback as well."""
    job = refusing(skip_batch=True)
    again(job, *ALL)
    again(job, *ALL)
    job.kill(1)
    job.settle()
    job.train()
    assert [(r.step, r.skip) for r in job.orders(Rollback)] == [(3, 0), (3, 1), (3, 1)]


def test_earlier_rollback_leaves_no_batch_out() -> None:
    """When all ranks return to an earlier step after a batch was left out, then no batch is left
    out there: the step that was refused comes later."""
    job = refusing(skip_batch=True, keeps=2)
    again(job, *ALL)
    again(job, *ALL)
    job.train()
    job.fault(1, "memory", not_after=2)
    job.settle()
    assert [(r.step, r.skip) for r in job.orders(Rollback)][-1] == (2, 0)


def test_job_without_permission_to_skip_ends_with_a_last_checkpoint() -> None:
    """When the same step is refused twice and no batch may be left out, then the state before the
    step is saved, and the job ends with a sentence that names the option."""
    job = refusing()
    again(job, *ALL)
    again(job, *ALL)
    assert {save.step for save in job.orders(Save)} == {3}
    assert job.over is not None
    assert "the update of step 4 was refused twice" in job.over.why
    assert "--skip-batch" in job.over.why


def test_model_that_refuses_every_batch_ends_the_job() -> None:
    """When a step is refused with four batches in a row, then the data is not the cause: the job
    ends with a last checkpoint."""
    job = refusing(skip_batch=True)
    for _ in range(8):
        again(job, *ALL)
    assert [r.skip for r in job.orders(Rollback)] == [0, 1, 1, 2, 2, 3, 3]
    assert job.over is not None
    assert "refused with 4 batches in a row" in job.over.why


@pytest.mark.parametrize("skips", [True, False])
def test_rank_that_computes_other_numbers_is_named(skips: bool) -> None:
    """When one rank computes other numbers of its own in the second attempt, and the update is
    accepted, then its device is the cause: the fault names the rank."""
    job = refusing(skip_batch=skips)
    job.script.numbers[2] = numbers("broken")
    again(job, *ALL)
    job.script.numbers = {rank: numbers(common="right") for rank in ALL}
    job.train()
    (found,) = refused(job)
    assert (found["cause"], found["ranks"], found["skipped"]) == ("device", [2], 0)
    (incident,) = job.reports()
    assert [(f["kind"], f["rank"], f["step"]) for f in incident["faults"]] == [("numeric", 2, 4)]


def test_changed_norm_alone_means_a_device_without_a_name() -> None:
    """When only the norm of the reduced gradients differs in the second attempt, then a device is
    the cause, and no rank is named."""
    job = refusing()
    again(job, *ALL)
    job.script.numbers = {rank: numbers(common="right") for rank in ALL}
    job.train()
    (found,) = refused(job)
    assert (found["cause"], found["ranks"]) == ("device", [])


def test_computation_that_never_repeats_blames_no_device() -> None:
    """When the numbers of all ranks differ in the second attempt, then the cause is unknown: the
    computation cannot be repeated bit for bit."""
    job = refusing()
    again(job, *ALL)
    job.script.numbers = {rank: numbers("other", "other") for rank in ALL}
    job.train()
    (found,) = refused(job)
    assert (found["cause"], found["ranks"]) == ("unknown", [])


def test_step_that_is_refused_in_a_later_incident_is_tried_again_first() -> None:
    """When a step was refused once and then accepted, and a later step is refused, then the later
    step is computed again first."""
    job = refusing(skip_batch=True)
    for _ in range(2):
        again(job, *ALL)
        job.train()
    assert [(r.step, r.skip) for r in job.orders(Rollback)] == [(3, 0), (4, 0)]
    assert strategies(job) == ["retry", "retry"]


def test_refusals_count_against_no_rank() -> None:
    """When one update after another is refused because of the data, then no rank counts as one that
    fails again and again."""
    job = refusing(skip_batch=True, flaps=1)
    for _ in range(4):
        again(job, *ALL)
        job.train()
    assert strategies(job) == ["retry"] * 4
