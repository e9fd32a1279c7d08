"""
Which copies are sound (not polluted), which ranks copy from which, and when all ranks return to an
earlier step.
"""

import pytest

from tests.core.lives import (
    names,
    strategies,
    trained,
    tried,
)
from tft.protocol.messages import (
    FaultKind,
    Fetch,
    Kill,
    Load,
    Noticed,
    RankOrder,
    Restore,
    Resume,
    Rollback,
    Save,
    Trained,
)

ALL = (0, 1, 2, 3)
SHARDS = {"first": (0, 2), "second": (1, 3)}


# ---------------------------------------------------------------- faults in the memory of one rank


@pytest.mark.parametrize("kind", ["memory", "corruption", "numeric"])
def test_rank_with_suspect_memory_fetches_from_the_holders_of_its_shard(kind: FaultKind) -> None:
    """When one rank has a memory, corruption or numeric fault, then only that rank fetches its
    state, from the ranks that hold the same shard. No process is ended."""
    job = trained(groups=SHARDS)
    job.fault(1, kind)
    job.settle()
    (fetch,) = job.orders(Fetch)
    assert (fetch.to, fetch.step) == ((1,), 3)
    assert [(t.shard, [s.rank for s in t.sources]) for t in fetch.transfers] == [("second", [3])]
    assert [s.address for t in fetch.transfers for s in t.sources] == ["h:3"]
    job.train()
    assert strategies(job) == ["retry"]
    assert job.orders(Kill) == []


def test_ranks_are_told_whether_a_completed_step_is_given_up() -> None:
    """When a rank is lost before any rank has completed a further step, then no checkpoint of a later
    step can exist, and the ranks are told so. When all go back to an earlier step, one may exist."""
    job = trained()
    job.kill(1)
    job.settle()
    job.train(5)
    for rank in job.ranks.values():
        rank.state.backups = (5,)
    job.fault(2, "numeric", polluted=True, not_after=6)
    job.settle()
    assert [(r.step, r.goes_back) for r in job.orders(Rollback)] == [(3, False), (5, True)]


def test_kept_copies_of_a_rank_with_a_memory_fault_are_not_used() -> None:
    """When a rank with a memory fault keeps copies of earlier steps, then no rank uses these
    copies, and the rank fetches from another rank."""
    job = trained(groups=SHARDS, keeps=2, enable=frozenset({"retry", "dump"}))
    job.fault(3, "memory")
    job.settle()
    assert job.orders(Restore) == []
    assert [f.to for f in job.orders(Fetch)] == [(3,)]


def test_copies_from_before_a_memory_fault_are_not_used_after_its_repair() -> None:
    """When a rank has fetched its state after a memory fault, then its older kept copies are still
    not used. In a later rollback, the rank fetches the step from the other ranks."""
    job = trained(keeps=2)
    job.fault(3, "memory")
    job.settle()
    job.fault(0, "numeric", polluted=True)
    job.settle()
    assert [(r.to, r.step) for r in job.orders(Restore)] == [((0, 1, 2), 2)]
    assert [(f.to, f.step) for f in job.orders(Fetch)] == [((3,), 3), ((3,), 2)]
    assert {s.rank for s in job.orders(Fetch)[-1].transfers[0].sources} == {0, 1, 2}


def test_copies_made_after_a_memory_repair_are_sound() -> None:
    """When a rank has trained on after the repair of its memory, then the copies that it has kept
    since the repair are used like those of other ranks."""
    job = trained(keeps=1)
    job.fault(3, "memory")
    job.settle()
    job.train(2)
    job.fault(0, "numeric", polluted=True)
    job.settle()
    assert [(r.to, r.step) for r in job.orders(Restore)] == [((0, 1, 2, 3), 4)]


def test_all_ranks_load_a_checkpoint_when_the_only_holder_of_a_shard_fails() -> None:
    """When the memory of the only holder of a shard fails, then all members load the newest
    checkpoint, so that all states belong to one step."""
    job = trained(groups={"own": (0,), "rest": (1, 2, 3)})
    job.checkpointed(1)
    job.fault(0, "memory")
    job.settle()
    job.train()
    assert [(o.to, o.directory, o.step) for o in job.orders(Load)] == [(ALL, "/periodic/1", 1)]
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"], incident["steps_lost"]) == ("retry", 2, 2)


@pytest.mark.parametrize("derives", [True, False])
@pytest.mark.parametrize("lost", [1, 3])
def test_all_ranks_load_again_when_a_rank_dies_during_the_load(lost: int, *, derives: bool) -> None:
    """When a rank dies while only some ranks have loaded the checkpoint, then all ranks load it
    again, because only the checkpoint has their rank-local state of that step."""
    job = trained(derives=derives)
    job.checkpointed(1)
    job.script.muted = {(1, "load")}
    job.fault(2, "numeric", polluted=True)
    job.settle()
    assert job.doing == "repairing"
    job.script.muted = set()
    job.kill(lost)
    job.settle()
    job.train()
    assert [(o.to, o.step) for o in job.orders(Load)] == [(ALL, 1), (ALL, 1)]
    assert (job.orders(Fetch), [r.derive for r in job.orders(Rollback)]) == ([], [()])
    assert strategies(job) == ["recover"]
    assert [incident["steps_lost"] for incident in job.reports()] == [2]


def test_all_ranks_load_an_older_checkpoint_when_one_rank_cannot_read_the_newer() -> None:
    """When one rank fails twice to read the newest checkpoint and an older one exists, then all
    ranks load the older one."""
    job = trained(derives=False)
    job.checkpointed(1)
    job.checkpointed(2)
    job.script.failures[1, "load"] = ["a file is damaged"] * 2
    job.fault(2, "numeric", polluted=True)
    job.settle()
    job.wait()
    job.settle()
    job.train()
    assert [(o.to, o.step) for o in job.orders(Load)] == [(ALL, 2), (ALL, 2), (ALL, 1)]
    assert [r.step for r in job.orders(Rollback)] == [1]
    assert strategies(job) == ["retry"]


def test_checkpoint_that_completes_after_the_decision_is_loaded() -> None:
    """When a checkpoint of a later step becomes complete only after the strategy was chosen, then
    all ranks load this checkpoint, and the plan names its step."""
    job = trained()
    job.script.slow = {3}
    job.kill(3)
    job.settle()
    assert job.machine.incident.decision.plan is not None
    assert job.machine.incident.decision.plan.step == 3
    job.checkpointed(4)
    job.arrive(3)
    job.settle()
    job.train()
    assert [(order.directory, order.step) for order in job.orders(Load)] == [("/periodic/4", 4)]
    plan = job.machine.incidents[-1].decision.plan
    assert plan is not None
    assert plan.repair is not None
    assert (plan.step, plan.repair.load) == (4, "/periodic/4")


def test_report_omits_an_unread_copy_when_its_step_is_computed_again() -> None:
    """When a copy could not be read at the end of a step and all ranks go back to an earlier step,
    then the report does not mention that copy."""
    job = trained(keeps=2)
    job.ranks[2].state.content = ""
    job.kill(1)
    job.settle()
    assert len(job.machine.incident.exactness.sentences) == 1
    job.ranks[2].state.content = "right"
    job.fault(3, "numeric", polluted=True)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert (incident["step"], incident["inexact"]) == (3, [])


def test_checkpoint_is_loaded_when_kept_copies_lack_a_shard() -> None:
    """When the only holder of a shard dies, then all ranks load the checkpoint. The kept copies of
    the other ranks are not used, because they do not contain that shard."""
    job = trained(groups={"own": (0,), "rest": (1, 2, 3)}, keeps=1)
    job.checkpointed(1)
    job.kill(0)
    job.settle()
    assert [o.step for o in job.orders(Load)] == [1]
    assert job.orders(Restore) == []


def test_kept_copies_of_a_rank_with_a_numeric_fault_are_used() -> None:
    """When the only holder of a shard has a numeric fault and keeps a copy of the step before, then
    all ranks restore that step."""
    job = trained(groups={"own": (0,), "rest": (1, 2, 3)}, keeps=1)
    job.fault(0, "numeric")
    job.settle()
    job.train()
    assert [(r.to, r.step) for r in job.orders(Restore)] == [(ALL, 2)]
    assert job.orders(Fetch) == []
    (incident,) = job.reports()
    assert (incident["step"], incident["steps_lost"]) == (3, 1)


def test_ranks_that_are_one_step_ahead_restore_their_own_copy() -> None:
    """When some ranks have completed a step that the other ranks can neither complete nor fetch,
    then the first ranks restore their kept copies of the step before."""
    job = trained(groups=SHARDS, keeps=1)
    for rank in (0, 2):
        job.window(rank)
        job.close(rank)
    job.script.stuck = {1, 3}
    job.fault(1, "network")
    job.settle()
    assert [(r.to, r.step) for r in job.orders(Restore)] == [((0, 2), 3)]
    assert job.orders(Fetch) == []
    assert {r.step for r in job.ranks.values()} == {3}


# ---------------------------------------------------------------- faults that may have spread


def test_polluted_step_makes_all_ranks_restore_the_step_before() -> None:
    """When the last update may have spread a numeric fault to all ranks, then no copy of that step
    is used. All ranks restore the step before and compute the step again."""
    job = trained(keeps=1)
    job.fault(2, "numeric", polluted=True)
    job.settle()
    assert names([o for o in job.said if isinstance(o, RankOrder)]) == [
        "Freeze", "Stop", "Regroup", "Restore", "Rebuild", "Rollback", "Resume",
    ]  # fmt: skip
    assert [(r.to, r.step) for r in job.orders(Restore)] == [(ALL, 2)]
    assert [(r.to, r.step, r.skip) for r in job.orders(Rollback)] == [(ALL, 2, 0)]
    job.train()
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"], incident["steps_lost"]) == ("retry", 3, 1)
    assert job.doing == "healthy"


def test_rank_with_a_polluted_memory_fault_fetches_the_earlier_step() -> None:
    """When a memory fault may have spread to all ranks, then its rank has no sound copy. It fetches
    the earlier step from the kept copies of the other ranks."""
    job = trained(keeps=1)
    job.fault(2, "memory", polluted=True)
    job.settle()
    assert [(r.to, r.step) for r in job.orders(Restore)] == [((0, 1, 3), 2)]
    (fetch,) = job.orders(Fetch)
    assert (fetch.to, fetch.step) == ((2,), 2)
    assert {s.rank for s in fetch.transfers[0].sources} == {0, 1, 3}


def test_new_process_fetches_the_earlier_step_in_a_rollback() -> None:
    """When a rank dies in an incident in which all ranks roll back, then its new process fetches
    the earlier step from the other ranks."""
    job = trained(keeps=1)
    job.fault(2, "numeric", polluted=True)
    job.kill(0)
    job.settle()
    job.train()
    assert [(r.to, r.step) for r in job.orders(Restore)] == [((1, 2, 3), 2)]
    assert [(f.to, f.step) for f in job.orders(Fetch)] == [((0,), 2)]
    assert strategies(job) == ["recover"]


def test_all_ranks_go_back_behind_the_earliest_of_two_pollutions() -> None:
    """When two ranks report pollution in different steps, then all ranks go back to the step before
    the earlier pollution."""
    job = trained(keeps=3)
    job.window(1)
    job.close(1)
    job.fault(1, "numeric", polluted=True)
    job.script.stuck = {0, 2, 3}
    job.fault(2, "numeric", polluted=True)
    job.settle()
    assert {r.step for r in job.orders(Restore)} == {2}


def test_older_checkpoint_is_loaded_when_the_newest_is_polluted() -> None:
    """When no rank keeps copies and the newest checkpoint is polluted, then all ranks load an older
    checkpoint."""
    job = trained()
    job.checkpointed(1)
    job.checkpointed(3)
    job.fault(2, "numeric", polluted=True)
    job.settle()
    job.train()
    assert [(o.to, o.directory) for o in job.orders(Load)] == [(ALL, "/periodic/1")]
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"], incident["steps_lost"]) == ("retry", 2, 2)


def test_checkpoint_after_the_rollback_step_is_not_loaded_later() -> None:
    """When all ranks have rolled back to a step before the newest checkpoint and trained on, then a
    later fault does not load this checkpoint, but the one before it."""
    job = trained(groups={"own": (0,), "rest": (1, 2, 3)}, keeps=1)
    job.checkpointed(1)
    job.checkpointed(3)
    job.fault(2, "numeric", polluted=True)
    job.settle()
    job.train(2)
    assert {r.step for r in job.orders(Restore)} == {2}
    job.kill(0)
    job.settle()
    assert [(o.step, o.directory) for o in job.orders(Load)] == [(1, "/periodic/1")]


def test_job_fails_without_a_checkpoint_when_every_copy_may_be_polluted() -> None:
    """When every copy may be polluted, then the job fails with a reason, and no last checkpoint is
    saved."""
    job = trained()
    job.fault(2, "numeric", polluted=True)
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    nothing = "no sound copy of shard 'dense', of step 2 or earlier, is left on ranks [0, 1, 2, 3]"
    assert tried(job)["retry"] == nothing
    assert tried(job)["dump"] == nothing
    assert nothing in job.over.why
    assert job.orders(Save) == []


def test_network_faults_do_not_hide_a_polluted_numeric_fault() -> None:
    """When connections break in the incident of a polluted numeric fault, then all ranks still
    restore the earlier step. The report has only the numeric fault."""
    job = trained(keeps=1)
    job.fault(0, "network")
    job.fault(2, "numeric", polluted=True)
    job.fault(1, "network")
    job.settle()
    assert [r.step for r in job.orders(Restore)] == [2]
    job.train()
    (incident,) = job.reports()
    assert [(f["kind"], f["rank"]) for f in incident["faults"]] == [("numeric", 2)]


def test_pollution_noticed_from_outside_rolls_all_ranks_back() -> None:
    """When an outside observer reports that the numbers of a rank are polluted, then all ranks
    restore the step before."""
    job = trained(keeps=1)
    job.notice(1, "numeric", "the loss of rank 1 has diverged", polluted=True)
    job.settle()
    assert [(r.to, r.step) for r in job.orders(Restore)] == [(ALL, 2)]


@pytest.mark.parametrize("noticed", [False, True])
def test_known_step_of_a_pollution_selects_the_checkpoint_to_load(*, noticed: bool) -> None:
    """When the last step before a pollution is known, then all ranks load the newest checkpoint
    that is not later than this step. Later checkpoints are never loaded again."""
    job = trained()
    for step in (1, 2, 3):
        job.checkpointed(step)
    wrong = job.notice if noticed else job.fault
    wrong(2, "numeric", polluted=True, not_after=1)
    job.settle()
    job.train(2)
    assert [(o.to, o.directory) for o in job.orders(Load)] == [(ALL, "/periodic/1")]
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"], incident["steps_lost"]) == ("retry", 2, 2)
    job.fault(0, "numeric", polluted=True)
    job.settle()
    assert job.orders(Load)[-1].directory == "/periodic/1"


def test_all_ranks_go_back_when_the_last_report_of_the_polluted_rank_is_old() -> None:
    """When the state of a rank is reported as wrong after step 2, and the rank's own last report is
    of an earlier step, then all ranks restore step 2. They may have completed later steps since
    that report."""
    job = trained(keeps=2)
    assert job.machine._job.ranks.states[2].position.step == 1
    job.notice(2, "numeric", not_after=2)
    job.settle()
    job.train()
    assert [(order.to, order.step) for order in job.orders(Restore)] == [(ALL, 2)]


@pytest.mark.parametrize(
    ("limits", "step"), [((1, 2), 1), ((2, 1), 1), ((2, None), 2), ((None, 1), 1)]
)
def test_earliest_limit_of_two_pollutions_selects_the_step(
    limits: tuple[int | None, int | None], step: int
) -> None:
    """When two ranks report pollution, each with or without its last correct step, then all ranks
    restore a step that is early enough for both reports."""
    job = trained(keeps=3)
    for rank, not_after in zip((1, 2), limits, strict=True):
        job.fault(rank, "numeric", polluted=not_after is None, not_after=not_after)
    job.settle()
    assert {r.step for r in job.orders(Restore)} == {step}


def test_limit_beyond_the_current_step_affects_only_its_rank() -> None:
    """When a rank reports wrong numbers after a step that no rank has completed, then only that
    rank fetches the state. No batch is skipped."""
    job = trained(skip_batch=True)
    job.checkpointed(1)
    job.fault(2, "numeric", not_after=9)
    job.settle()
    assert job.orders(Load) == []
    assert [(f.to, f.step) for f in job.orders(Fetch)] == [((2,), 3)]
    assert {r.skip for r in job.orders(Rollback)} == {0}


def test_step_completed_by_the_other_ranks_after_the_last_sound_step_is_skipped() -> None:
    """When a rank reports its last correct step and the other ranks have completed one more step,
    then they roll back to that step, and the batch of the further step is skipped."""
    job = trained(skip_batch=True, keeps=1)
    for rank in (0, 1, 3):
        job.close(rank)
    job.fault(2, "numeric", not_after=3)
    job.settle()
    assert {(r.step, r.skip) for r in job.orders(Rollback)} == {(3, 1)}


def test_job_fails_when_no_checkpoint_is_older_than_the_pollution() -> None:
    """When no checkpoint is from before the numbers went wrong, then the job fails with a reason.
    No checkpoint is saved."""
    job = trained()
    job.checkpointed(3)
    job.fault(2, "numeric", polluted=True, not_after=1)
    job.settle()
    assert job.over is not None
    assert job.over.code == 4
    assert "no sound copy of shard 'dense', of step 1 or earlier, is left" in job.over.why
    assert job.orders(Save) == []


@pytest.mark.parametrize("says", ["that it goes on", "what it has trained"])
def test_late_report_of_a_pollution_rolls_all_ranks_back(says: str) -> None:
    """When the report that a rank has resumed arrives only after a new round began, then a
    pollution of this rank still counts, and all ranks restore an earlier step."""
    job = trained(keeps=2)
    job.script.muted = {(1, "resume")}
    job.kill(1)
    job.settle()
    (resume,) = job.orders(Resume)
    late = job.ranks[1]
    resumed = late.answer(resume, "resume", None, found=("pass", ""), at=job.now)
    late.training = True
    job.train(2)
    job.script.muted = {(0, "freeze")}
    job.fault(2, "network")
    job.settle()
    step = Trained(rank=1, incarnation=1, step=4, at=job.now)
    job.report(resumed if says == "that it goes on" else step)
    job.fault(1, "numeric", polluted=True)
    job.script.muted = set()
    job.repeat()
    job.settle()
    assert {restore.step for restore in job.orders(Restore)} == {4}


def test_pollution_of_a_rank_that_did_not_resume_counts_for_the_lost_process() -> None:
    """When a new process fails to resume and is then reported to have wrong numbers, then all ranks
    go back to before the last update of the lost process: the new one took no part in training."""
    job = trained(keeps=2)
    job.script.failures[1, "resume"] = ["the script is gone"]
    job.kill(1)
    while not job.orders(Resume):
        job._obey(job._queue.popleft())
    job.script.muted = {(0, "freeze")}
    job.settle()
    assert job.doing == "freezing"
    evidence = "the loss of rank 1 has diverged"
    job.report(Noticed(rank=1, kind="numeric", evidence=evidence, polluted=True, at=job.now))
    job.script.muted = set()
    job.repeat()
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert {restore.step for restore in job.orders(Restore)} == {2}


# ---------------------------------------------------------------- repeated numeric faults


def test_repeated_numeric_fault_at_one_step_goes_one_step_further_back() -> None:
    """When the same step has a numeric fault again after a retry, then all ranks go one step
    further back, if they keep copies of that step."""
    job = trained(keeps=1)
    for _ in range(2):
        job.fault(2, "numeric")
        job.settle()
    job.train()
    assert [(f.to, f.step) for f in job.orders(Fetch)] == [((2,), 3)]
    assert [(r.to, r.step) for r in job.orders(Restore)] == [(ALL, 2)]
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"]) == ("retry", 3)


def test_numeric_fault_at_a_later_step_goes_no_further_back() -> None:
    """When a numeric fault occurs at a later step after training, then the job follows `retry`
    again, and no rank restores an earlier step."""
    job = trained(keeps=1)
    for _ in range(2):
        job.fault(2, "numeric")
        job.settle()
        job.train()
    assert job.orders(Restore) == []
    assert strategies(job) == ["retry", "retry"]


def test_repeated_numeric_fault_replaces_the_process_without_kept_copies() -> None:
    """When the same step has a numeric fault again and no rank keeps an earlier copy, then `retry`
    has failed, and the live process of the rank is replaced."""
    job = trained()
    for _ in range(2):
        job.fault(2, "numeric")
        job.settle()
    job.train()
    assert [(k.rank, k.last_words) for k in job.orders(Kill)] == [(2, False)]
    assert [k.cause for k in job.orders(Kill)] == [
        "no retry: the numeric fault at step 4 occurred again"
    ]
    (incident,) = job.reports()
    assert incident["strategy"] == "recover"
    assert tried(job) == {"retry": "the numeric fault at step 4 occurred again"}


def test_further_step_back_is_dropped_when_no_copy_of_it_is_left() -> None:
    """When a repeated fault suggests to go back to an earlier step, but a copy that this needs is
    gone, then the job does not end. It follows `retry` from the present step."""
    job = trained(groups={"own": (0,), "rest": (1, 2, 3)}, keeps=1, strategies=("retry", "dump"))
    for _ in range(2):
        job.fault(2, "numeric")
        if job.machine.incident.spread.ceiling is not None:
            job.ranks[0].state.backups = ()
        job.settle()
    job.train()
    assert job.orders(Restore) == []
    assert job.machine.incident.spread.ceiling is None
    assert [f.step for f in job.orders(Fetch)] == [3, 3]
    assert strategies(job) == ["retry"]


def test_step_limit_of_a_plugin_is_not_dropped() -> None:
    """When a suggested earlier step was dropped, and a plugin then requires an earlier step, then
    the limit of the plugin is kept. The job fails when no state of such a step can be loaded."""
    groups = {"own": (0,), "rest": (1, 2, 3)}
    job = trained(groups=groups, keeps=1, advised=True, strategies=("retry", "dump"), attempts=1)
    job.fault(2, "numeric")
    job.settle()
    job.advise()
    job.settle()
    job.fault(2, "numeric")
    job.ranks[0].state.backups = ()
    job.settle()
    assert job.machine.incident.spread.ceiling is None
    job.checkpointed(2)
    job.script.failures[0, "load"] = ["the manifest is damaged"]
    job.advise(strategy="mine", base="retry", not_after=2)
    job.settle()
    job.advise()
    job.settle()
    assert job.over is not None
    assert job.over.result == "failed"
    assert "of step 2 or earlier" in job.over.why


# ---------------------------------------------------------------- skipped batches


def test_batches_up_to_the_failing_one_are_skipped_when_the_policy_says_so() -> None:
    """When the policy sets `skip_batch` and all ranks roll back because of a polluted step, then
    the batches up to and including the failing one are skipped."""
    job = trained(keeps=1, skip_batch=True)
    job.fault(2, "numeric", polluted=True)
    job.settle()
    assert [(r.step, r.skip) for r in job.orders(Rollback)] == [(2, 2)]


@pytest.mark.parametrize("wanted", [True, False])
def test_no_batch_is_skipped_without_a_rollback_of_all_ranks(wanted: bool) -> None:
    """When a memory fault does not make all ranks roll back, then no batch is skipped, whether
    `skip_batch` is set or not."""
    job = trained(keeps=1, skip_batch=wanted)
    job.fault(2, "memory")
    job.settle()
    assert [r.skip for r in job.orders(Rollback)] == [0]


def test_two_batches_are_skipped_when_a_numeric_fault_repeats() -> None:
    """When the same step fails twice and all ranks go one step further back, then the failing batch
    and the batch before it are skipped."""
    job = trained(keeps=1, skip_batch=True)
    for _ in range(2):
        job.fault(2, "numeric")
        job.settle()
    assert [(r.step, r.skip) for r in job.orders(Rollback)] == [(3, 0), (2, 2)]


# -------------------------------------------------------------- kept copies that cannot be restored


def test_rank_that_cannot_restore_its_copy_fetches_it() -> None:
    """When one rank cannot restore its kept copy, then it fetches the step in the next round. The
    rank with the numeric fault fetches too, because its answer that it has restored was cut off."""
    job = trained(keeps=1)
    job.script.failures[1, "restore"] = ["digest differs"]
    job.fault(2, "numeric", polluted=True)
    job.settle()
    job.train()
    assert [r.to for r in job.orders(Restore)] == [(0, 1, 2, 3)]
    assert [(f.to, f.step) for f in job.orders(Fetch)] == [((1,), 2), ((2,), 2)]
    assert strategies(job) == ["retry"]
    assert job.facts("order_failed") == [{"rank": 1, "order": "restore", "why": "digest differs"}]


# --------------------------------------------------------------- steps that are recorded for faults


@pytest.mark.parametrize("kind", ["memory", "network", "process", "hang", "node"])
def test_fault_noticed_from_outside_has_the_step_of_the_rank(kind: FaultKind) -> None:
    """When an outside observer reports a fault of a training rank, then the report of the incident
    has the step that the rank was in."""
    job = trained(steps=7, placement={0: (0, 1, 2), 1: (3,)}, spare={0: 1})
    job.notice(3, kind)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert [(f["kind"], f["rank"], f["step"]) for f in incident["faults"]] == [(kind, 3, 8)]


def test_fault_of_a_lost_node_has_the_step_of_the_other_ranks() -> None:
    """When a node is lost and its ranks cannot report their step, then the fault has the step that
    the other ranks compute."""
    job = trained(steps=7, placement={0: (0, 1, 2), 1: (3,)}, spare={0: 1})
    job.lose_node(1)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert [(f["rank"], f["step"]) for f in incident["faults"]] == [(3, 8)]


def test_polluted_rank_lost_without_a_step_goes_one_step_further_back() -> None:
    """When a polluted rank is lost with its node before it reports its step, then it may have been
    one step behind. All ranks go back one step further."""
    job = trained(steps=7, placement={0: (0, 1, 2), 1: (3,)}, spare={0: 1}, keeps=2)
    job.notice(3, "numeric", polluted=True)
    job.lose_node(1)
    job.settle()
    assert {r.step for r in job.orders(Restore)} == {5}
