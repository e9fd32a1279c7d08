"""
Copies that differ while the job trains: what the job machine does about them.
"""

from typing import Any

import pytest

from tests.core.lives import strategies, trained
from tft.core.job.events import CorruptionTraced, SlicesAgreed, SlicesDiffered
from tft.core.job.policy import Policy
from tft.core.job.transitions import State
from tft.protocol.messages import CheckpointFailed, Compare, Complete, Fetch, Restore, Resume
from tft.testing.scripted import ScriptedJob


def differ(job: ScriptedJob, *wrong: int, right: tuple[int, ...] = (), sound: int = 5) -> None:
    """
    Let slices differ that were equal at the end of step `sound`.
    """
    job.slices(SlicesDiffered(at=0.0, shard="dense", step=8, right=right, wrong=wrong, sound=sound))


def faults(job: ScriptedJob) -> list[tuple[str, int | None]]:
    return [(fault["kind"], fault["rank"]) for fault in job.reports()[-1]["faults"]]


def test_compared_step_only_grows() -> None:
    """When slices were compared up to a step, then copies count as sound up to that step."""
    job = trained(steps=8)
    job.slices(SlicesAgreed(at=0.0, step=6))
    job.slices(SlicesAgreed(at=0.0, step=4))
    assert job.machine.compared == 6
    assert job.state is State.HEALTHY


def test_all_ranks_return_to_a_copy_from_before_the_difference() -> None:
    """When one of several copies differs, then all ranks return to the newest kept copy that is not
    later than the last step at which the slice was equal. The wrong rank fetches that copy, because
    its own memory is not trusted."""
    job = trained(steps=8, keeps=4)
    differ(job, 1, right=(0, 2, 3))
    job.settle()
    job.train()
    assert strategies(job) == ["retry"]
    assert faults(job) == [("corruption", 1)]
    (restore,) = job.orders(Restore)
    assert (restore.to, restore.step) == ((0, 2, 3), 5)
    assert [(fetch.to, fetch.step) for fetch in job.orders(Fetch)] == [((1,), 5)]
    report = job.reports()[-1]
    assert (report["step"], report["steps_lost"], report["inexact"]) == (6, 3, [])


def test_checkpoint_serves_when_no_rank_keeps_an_early_copy() -> None:
    """When no kept copy is old enough but a checkpoint is, then all ranks load the checkpoint."""
    job = trained(steps=8, keeps=1)
    job.checkpointed(4)
    differ(job, 1, right=(0, 2, 3))
    job.settle()
    job.train()
    assert (strategies(job), job.reports()[-1]["step"]) == (["retry"], 5)


@pytest.mark.parametrize("content", ["another", "right"])
def test_majority_counts_when_no_early_copy_is_left(content: str) -> None:
    """When no copy is old enough, then the wrong rank fetches the copy of the majority, no step is
    lost, and the report says from which step on the state may be wrong. The same follows if the
    copies have become equal again."""
    job = trained(steps=8)
    job.ranks[1].state.content = content
    differ(job, 1, right=(0, 2, 3))
    job.settle()
    job.train()
    assert strategies(job) == ["retry"]
    assert [(fetch.to, fetch.step) for fetch in job.orders(Fetch)] == [((1,), 8)]
    (sentence,) = job.reports()[-1]["inexact"]
    assert "since step 6" in sentence


def test_job_ends_without_an_early_copy_when_the_policy_says_so() -> None:
    """When no copy is old enough and the policy is `end`, then the job ends, and the reason names
    the last sound step."""
    job = trained(steps=8, corruption="end")
    differ(job, 1, right=(0, 2, 3))
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert "of step 5 or earlier" in job.over.why


def test_two_copies_that_differ_return_to_an_early_copy() -> None:
    """When two copies differ, then nobody is named, and both ranks restore their own early copy."""
    job = trained(world=2, steps=8, keeps=4)
    differ(job, 0, 1)
    job.settle()
    job.train()
    assert strategies(job) == ["retry"]
    assert faults(job) == [("corruption", None)]
    (restore,) = job.orders(Restore)
    assert (restore.to, restore.step) == ((0, 1), 5)


@pytest.mark.parametrize("content", ["another", "right"])
def test_two_copies_that_differ_end_the_job_without_an_early_copy(content: str) -> None:
    """When two copies differ and no copy is old enough, then the job ends with a sentence. The same
    follows if the copies have become equal again."""
    job = trained(world=2, steps=8)
    job.ranks[1].state.content = content
    differ(job, 0, 1)
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert "of step 5 or earlier" in job.over.why


def test_two_copies_that_differ_are_made_equal_when_the_policy_is_to_continue() -> None:
    """When two copies differ, no copy is old enough, and the policy is `continue`, then the copy of
    the lowest rank is used, and the report names both ranks and the first step that may be
    wrong."""
    job = trained(world=2, steps=8, corruption="continue")
    job.ranks[1].state.content = "another"
    differ(job, 0, 1)
    job.settle()
    job.train()
    assert strategies(job) == ["retry"]
    assert [(fetch.to, fetch.step) for fetch in job.orders(Fetch)] == [((1,), 8)]
    report = job.reports()[-1]
    assert any("since step 6" in sentence for sentence in report["inexact"])
    assert any("[0, 1]" in fault["evidence"] for fault in report["faults"])


def test_early_copy_of_every_rank_counts_when_the_policy_is_to_continue() -> None:
    """When two copies differ, the policy is `continue`, and each rank is the only holder of another
    shard, then both ranks are to restore their own early copies: no copy of a rank is given up."""
    groups = {"dense": (0, 1), "left": (0,), "right": (1,)}
    job = trained(world=2, steps=8, keeps=4, corruption="continue", groups=groups)
    job.ranks[1].state.content = "another"
    differ(job, 0, 1)
    job.settle()
    restore, *_ = job.orders(Restore)
    assert (restore.to, restore.step) == ((0, 1), 5)


@pytest.mark.parametrize(("keeps", "step"), [(6, 3), (4, 5), (1, 8)])
def test_difference_in_another_shard_takes_all_ranks_further_back(keeps: int, step: int) -> None:
    """When a slice differs and the copies of another shard turn out to differ too, then all ranks
    return to a step at which all shards were compared. The digests of the other shard may still
    have been on their way, so the step at which the slice was equal says nothing about it. It is
    the next choice if no earlier copy is left."""
    groups = {"dense": (0, 1, 2), "expert": (3, 4, 5)}
    job = trained(world=6, steps=8, keeps=keeps, groups=groups)
    job.slices(SlicesAgreed(at=0.0, step=3))
    job.ranks[4].state.content = "another"
    differ(job, 1, right=(0, 2))
    assert job.machine.compared == 3
    job.settle()
    assert {fetch.step for fetch in job.orders(Fetch)} == {step}
    assert bool(job.machine.incident.exactness.reservations) == (step > 3)


def test_traced_rank_is_named_in_the_report_of_its_incident() -> None:
    """When the steps were computed again and a rank is found to have had the wrong copy, then the
    fault of the closed incident names that rank."""
    job = trained(world=2, steps=8, keeps=4)
    differ(job, 0, 1)
    job.settle()
    job.train(2)
    job.slices(CorruptionTraced(at=0.0, incident=1, ranks=(1,), step=6))
    assert faults(job) == [("corruption", 1)]
    assert "step 7" in job.reports()[-1]["faults"][0]["evidence"]
    assert job.state is State.HEALTHY


def test_nobody_is_traced_when_training_does_not_continue_bit_for_bit() -> None:
    """When the report of the incident has a reservation, such as an RNG that was made anew, then
    the gradients of a right copy may come out otherwise. So no rank is named."""
    job = trained(world=2, steps=8, keeps=4)
    differ(job, 0, 1)
    job.settle()
    job.machine.incident.exactness.reservations.append((5, "the RNG of rank 0 was made anew"))
    job.train(2)
    job.slices(CorruptionTraced(at=0.0, incident=1, ranks=(0,), step=6))
    assert faults(job) == [("corruption", None)]
    assert job.facts("corruption_traced") == []


def test_nobody_is_traced_when_another_rank_had_a_wrong_copy_too() -> None:
    """When the incident has found yet another rank with a wrong copy, then its numbers have spread,
    and gradients may come out otherwise for that reason. So no rank is named."""
    job = trained(world=3, steps=8, keeps=4)
    job.ranks[2].state.content = "wrong"
    differ(job, 0, 1)
    job.settle()
    job.train(2)
    before = faults(job)
    assert ("corruption", None) in before
    assert ("corruption", 2) in before
    job.slices(CorruptionTraced(at=0.0, incident=1, ranks=(0,), step=6))
    assert faults(job) == before
    assert job.facts("corruption_traced") == []


def elastic(**facts: Any) -> ScriptedJob:  # Any: as in `trained`
    """
    Return a job of two nodes with two ranks each, and a third node with room for both ranks of one.
    """
    return trained(steps=8, keeps=4, placement={0: (0, 1), 1: (2, 3), 2: ()}, spare={2: 2}, **facts)


def test_node_is_left_when_a_rank_on_it_is_corrupted_again() -> None:
    """When a rank has wrong copies for the second time on the same node, then its node is given up,
    and the ranks of that node start elsewhere."""
    job = elastic()
    for _ in range(2):
        differ(job, 1, right=(0, 2, 3), sound=job.ranks[0].step - 3)
        job.settle()
        job.train(8)
    assert strategies(job) == ["retry", "recover"]
    assert ("node", 1) in faults(job)


def test_repeated_corruption_is_said_when_no_node_has_room() -> None:
    """When a rank has wrong copies again and no other node has room, then the job goes on, and the
    log says why the node is not left."""
    job = trained(steps=8, keeps=4)
    for _ in range(2):
        differ(job, 1, right=(0, 2, 3), sound=job.ranks[0].step - 3)
        job.settle()
        job.train(8)
    assert strategies(job) == ["retry", "retry"]
    assert [facts["rank"] for facts in job.facts("corruption_repeats")] == [1]


@pytest.mark.parametrize("policy", ["majority", "continue"])
def test_difference_that_a_fault_brings_up_leads_to_an_early_copy_too(policy: str) -> None:
    """When slices are compared in every step, and another incident finds copies that differ, then
    all ranks return to a copy from before the last step at which all copies were equal."""
    job = trained(steps=8, keeps=4, corruption=policy)
    job.slices(SlicesAgreed(at=0.0, step=6))
    job.ranks[1].state.content = "another"
    job.fault(2, "memory")
    job.settle()
    job.train()
    assert job.reports()[-1]["step"] == 7


def test_attempt_of_the_digests_stays_the_same_in_a_pause() -> None:
    """When a job pauses and goes on, then the attempt whose slices are compared is still that of
    the last resume order, as the ranks tag their digests. A fault begins another one."""
    job = trained(steps=8)
    before = job.machine.attempt
    job.pause()
    job.settle()
    job.go_on()
    job.settle()
    job.train()
    assert job.state is State.HEALTHY
    assert job.machine.attempt == before == (0, 0)
    job.fault(2, "memory")
    job.settle()
    (resume,) = job.orders(Resume)
    assert job.machine.attempt == (resume.incident, resume.round) != before


def test_compared_step_is_at_most_the_step_that_all_ranks_return_to() -> None:
    """When all ranks return to an earlier step and a copy of it cannot be read, then later steps,
    which are computed again, no longer count as compared."""
    job = trained(steps=8, keeps=4)
    job.slices(SlicesAgreed(at=0.0, step=6))
    job.ranks[2].state.content = ""
    job.notice(1, "numeric", not_after=4)
    job.settle()
    assert job.orders(Restore)[0].step == 4
    assert job.facts("copies_not_compared")[0]["ranks"] == [2]
    assert job.machine.compared == 4


def test_checkpoint_that_was_compared_counts_as_sound() -> None:
    """When a periodic checkpoint was compared after the slice was equal last, then the job returns
    to that checkpoint."""
    job = trained(world=2, steps=8)
    job.checkpointed(7, compared=True)
    assert job.machine.compared == 7
    differ(job, 0, 1, sound=5)
    job.settle()
    job.train()
    assert (strategies(job), job.reports()[-1]["step"]) == (["retry"], 8)


def test_node_is_kept_when_no_rank_elsewhere_has_its_shards() -> None:
    """When a rank has wrong copies again and only ranks of its node hold a shard, then the job goes
    on there, although another node has room."""
    groups = {"a": (0, 1, 2), "b": (3, 4, 5)}
    job = trained(
        world=6, steps=8, keeps=4, groups=groups,
        placement={0: (0, 1, 2), 1: (3, 4, 5), 2: ()}, spare={2: 3},
    )  # fmt: skip
    for _ in range(2):
        job.slices(
            SlicesDiffered(
                at=0.0, shard="a", step=job.ranks[0].step, right=(0, 2), wrong=(1,),
                sound=job.ranks[0].step - 3,
            )
        )  # fmt: skip
        job.settle()
        job.train(8)
    assert strategies(job) == ["retry", "retry"]
    assert "no rank elsewhere" in str(job.facts("corruption_repeats")[0]["why_not"])


def test_rank_keeps_its_other_shards_when_its_copy_of_one_is_passed_over() -> None:
    """When two copies differ, the policy is `continue`, no early copy is left, and each rank is the
    only holder of another shard, then the higher rank fetches the shard that differs and keeps the
    other one."""
    groups = {"dense": (0, 1), "left": (0,), "right": (1,)}
    job = trained(world=2, steps=8, corruption="continue", groups=groups)
    job.ranks[1].state.content = "another"
    differ(job, 0, 1)
    job.settle()
    job.train()
    (fetch,) = job.orders(Fetch)
    assert fetch.to == (1,)
    assert [transfer.shard for transfer in fetch.transfers] == ["dense"]
    assert strategies(job) == ["retry"]


# ---------------------------------------------------------------- the end of the job


def sliced(**facts: Any) -> ScriptedJob:  # Any: as in `trained`
    """
    Return a job whose ranks compare slices, after 8 steps. All copies were equal after step 6.
    """
    job = trained(steps=8, **facts)
    job.slices(SlicesAgreed(at=0.0, step=6))
    return job


def test_copies_are_compared_once_more_before_the_job_is_complete() -> None:
    """When all ranks of a job that compares slices have finished, then their copies are compared
    as a whole, and the job completes when they are equal."""
    job = sliced()
    job.finish()
    assert [order.to for order in job.orders(Compare)] == [(0, 1, 2, 3)]
    assert job.over is not None
    assert (job.over.result, job.over.why) == ("completed", "every rank has finished")
    assert job.reports() == []


def test_copies_are_compared_at_the_end_of_a_short_job() -> None:
    """When a job ends before each slice had its turn, then the reports of the ranks say that slices
    are compared, and the copies are compared at the end. Without slices they are not."""
    job = trained()
    job.finish(sliced=True)
    assert len(job.orders(Compare)) == 1
    other = trained()
    other.finish()
    assert other.orders(Compare) == []


def test_flip_in_the_last_steps_is_undone() -> None:
    """When a copy has changed since its slices were compared and all ranks finish, then the job
    does not complete: all ranks return to a copy from before, and finish again."""
    job = sliced(keeps=4)
    job.ranks[1].state.content = "another"
    job.finish()
    assert (job.orders(Complete), job.over) == ([], None)
    job.ranks[1].state.content = "right"
    job.train(2)
    job.finish()
    assert job.over is not None
    assert job.over.result == "completed"
    assert faults(job) == [("corruption", 1)]
    report = job.reports()[-1]
    assert (report["step"], report["steps_lost"], report["inexact"]) == (7, 2, [])
    assert len(job.orders(Compare)) == 3  # the end, the incident, and the end again


def test_two_copies_that_differ_at_the_end_end_the_job() -> None:
    """When two copies differ after the last step and no earlier one is left, then the job ends with
    a sentence."""
    job = sliced(world=2)
    job.ranks[1].state.content = "another"
    job.finish()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert "step 6 or earlier" in job.over.why


def test_rank_that_cannot_read_its_copy_at_the_end_is_named() -> None:
    """When a rank cannot read its copies at the end, then the job completes, and its report says
    that these copies were not compared."""
    job = sliced()
    job.ranks[2].state.content = ""
    job.finish()
    assert job.over is not None
    assert job.over.result == "completed"
    assert "copies of ranks [2] could not be read and were not compared" in job.over.why


def test_rank_that_dies_while_the_copies_are_compared_at_the_end_is_replaced() -> None:
    """When a rank is killed during the last comparison, then an incident begins, and the job
    completes after it."""
    job = sliced()
    job.script.muted = {(1, "compare")}
    job.finish()
    assert job.state is State.CONFIRMING
    job.script.muted = set()
    job.kill(1)
    job.settle()
    job.train()
    job.finish()
    assert job.over is not None
    assert (job.over.result, strategies(job)) == ("completed", ["recover"])


def test_rank_that_does_not_compare_at_the_end_hangs() -> None:
    """When a rank does not answer the last comparison in time, then it counts as hanging."""
    job = sliced()
    job.script.muted = {(1, "compare")}
    job.finish()
    job.script.muted = set()
    job.let_pass(Policy().repair + 1)
    job.settle()
    job.train()
    job.finish()
    assert job.over is not None
    assert (job.over.result, faults(job)) == ("completed", [("hang", 1)])


def test_difference_at_the_end_counts_if_a_rank_dies_before_it_is_compared_again() -> None:
    """When copies differ at the end of the job, and a rank dies before it has left its loop, then
    all ranks still return to a copy from before the difference."""
    for world, dies in ((4, 1), (2, 0), (2, 1)):
        job = sliced(world=world, keeps=4)
        job.ranks[1].state.content = "another"
        job.script.muted = {(dies, "freeze")}
        job.finish()
        assert job.state is State.FREEZING
        job.script.muted = set()
        job.kill(dies)
        job.settle()
        assert job.machine.incident.progress.agreed <= 6, (world, dies)
        assert job.machine.incident.exactness.sentences == []


@pytest.mark.parametrize("state", [State.FREEZING, State.CLEARING, State.REBUILDING])
def test_slices_that_differ_count_while_an_incident_is_handled(state: State) -> None:
    """When a rank dies and the digests of its last slices arrive while the incident is handled, then
    all ranks return to a copy from before the difference."""
    job = trained(world=3, steps=8, keeps=4)
    job.slices(SlicesAgreed(at=0.0, step=5))
    job.kill(1)
    while job.state is not state:
        job.obey_next()
    differ(job, 1, right=(0, 2))
    job.settle()
    job.train()
    assert job.reports()[-1]["step"] - 1 <= 5
    assert ("corruption", 1) in faults(job)


def test_slices_that_differ_count_while_the_copies_are_compared_at_the_end() -> None:
    """When a slice of a step before the last one differs and the news comes when all ranks have
    finished, then the job does not complete, although the copies are equal again."""
    job = sliced(world=3, keeps=4)
    job.script.muted = {(1, "compare")}
    job.finish()
    differ(job, 1, right=(0, 2), sound=4)
    job.script.muted = set()
    job.settle()
    assert job.over is None
    assert job.machine.incident.progress.agreed <= 6


@pytest.mark.parametrize("agreed", [4, 7])
def test_difference_that_slices_leave_out_is_found_at_a_checkpoint(agreed: int) -> None:
    """When a checkpoint finds copies that differ, then the job is stopped, even if all slices were
    equal at a later step: module buffers are in no slice. All ranks return to the last step at which
    the whole copies were compared, or the report says that the state may be wrong."""
    job = trained(steps=8, keeps=4)
    job.slices(SlicesAgreed(at=0.0, step=agreed))
    job.report(
        CheckpointFailed(
            rank=0, incarnation=0, step=6, why="ranks [1] hold another copy of buffer model.rope",
            wrong=(1,), differ=True, unsliced=True, at=job.now,
        )
    )  # fmt: skip
    job.settle()
    job.train()
    assert faults(job) == [("corruption", 1)]
    (sentence,) = job.reports()[-1]["inexact"]
    assert "since step 1" in sentence


def test_step_before_the_difference_is_before_it() -> None:
    """When a checkpoint has found equal copies at a later step than a slice that differed, then all
    ranks return to a step before the slice differed."""
    job = trained(world=3, steps=8, keeps=4)
    job.checkpointed(8, compared=True)
    differ(job, 1, right=(0, 2))
    assert job.facts("slices_differ")[0]["sound"] == 5
    job.settle()
    job.train()
    assert job.reports()[-1]["step"] - 1 <= 5


def test_functions_after_the_last_step_are_called_again_after_a_corruption() -> None:
    """When the copy of a rank was wrong at the end of a step, then the functions after that step
    are called again on all ranks: they may have used the wrong copy."""
    job = trained(steps=8, after=1.0)
    job.slices(SlicesAgreed(at=0.0, step=8))
    job.ranks[0].state.content = "another"
    job.finish()
    assert [order.again for order in job.orders(Resume)] == [True]


def test_ranks_that_finish_at_different_steps_are_said() -> None:
    """When ranks finish at different steps, then their copies cannot be compared, and the report
    says so."""
    job = sliced(world=3)
    for rank in (0, 2):
        job.window(rank)
        job.close(rank)
    job.finish()
    assert job.over is not None
    assert "ranks [1] after step 8, ranks [0, 2] after step 9" in job.over.why


def test_every_step_counts_as_compared_if_nothing_can_be_compared() -> None:
    """When each shard has one holder, then no copies can differ, and there is no limit to the steps
    that count as compared."""
    job = trained(world=2, steps=8, groups={"left": (0,), "right": (1,)})
    assert job.machine.certified is None
    assert trained(steps=8).machine.certified == 0


def test_copies_that_a_rank_kept_before_it_was_passed_over_are_not_used() -> None:
    """When one of two copies is passed over, since nobody knows which is right, then the earlier
    copies that its rank has kept are not used in a later incident."""
    job = trained(world=2, steps=8, keeps=4, corruption="continue")
    job.slices(SlicesAgreed(at=0.0, step=1))
    job.ranks[1].state.content = "another"
    differ(job, 0, 1, sound=1)
    job.settle()
    job.train(1)
    assert [(fetch.to, fetch.step) for fetch in job.orders(Fetch)] == [((1,), 8)]
    job.said.clear()
    job.notice(0, "numeric", not_after=7)
    job.settle()
    assert [(order.to, order.step) for order in job.orders(Restore)] == [((0,), 7)]
    assert [(fetch.to, fetch.step) for fetch in job.orders(Fetch)] == [((1,), 7)]


def test_known_difference_after_a_repair_begins_another_round() -> None:
    """When copies still differ after a repair and their fault is known already, then the repair
    begins again, and the job ends when it has failed too often."""
    job = trained(steps=8, keeps=4, attempts=2)
    job.slices(SlicesAgreed(at=0.0, step=6))
    job.script.miscopied = {1: 10}
    differ(job, 1, right=(0, 2, 3), sound=6)
    job.settle()
    assert job.over is not None or job.state is not State.REPAIRING
