"""
Which copies are sound: who copies from whom, and when everyone has to go back.
"""

import pytest

from tests.core.lives import names, strategies, trained, tried
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


# ---------------------------------------------------------------- one rank's memory


@pytest.mark.parametrize("kind", ["memory", "corruption", "numeric"])
def test_a_rank_whose_memory_is_suspect_copies_from_its_peers(kind: FaultKind) -> None:
    """
    When one rank says that its memory has failed, or its numbers, then it alone copies the state,
    from those who hold the same shard, and no process is ended.
    """
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


def test_what_a_damaged_memory_keeps_besides_is_not_trusted_either() -> None:
    """
    When a rank whose memory has failed keeps copies of earlier steps, then they are not used: not
    by it, and not by others.
    """
    job = trained(groups=SHARDS, keeps=2, enable=frozenset({"retry", "dump"}))
    job.fault(3, "memory")
    job.settle()
    assert job.orders(Restore) == []
    assert [f.to for f in job.orders(Fetch)] == [(3,)]


def test_copies_from_before_the_damage_are_not_trusted_after_it_is_repaired() -> None:
    """
    When a rank's memory has failed and its state was copied anew, then the copies it kept from
    before are still what they were: everyone goes back with those of its peers.
    """
    job = trained(keeps=2)
    job.fault(3, "memory")
    job.settle()
    job.fault(0, "numeric", polluted=True)
    job.settle()
    assert [(r.to, r.step) for r in job.orders(Restore)] == [((0, 1, 2), 2)]
    assert [(f.to, f.step) for f in job.orders(Fetch)] == [((3,), 3), ((3,), 2)]
    assert {s.rank for s in job.orders(Fetch)[-1].transfers[0].sources} == {0, 1, 2}


def test_copies_made_since_are_as_good_as_any() -> None:
    """
    When a rank has trained on after its memory was repaired, then what it has kept since then is
    sound.
    """
    job = trained(keeps=1)
    job.fault(3, "memory")
    job.settle()
    job.train(2)
    job.fault(0, "numeric", polluted=True)
    job.settle()
    assert [(r.to, r.step) for r in job.orders(Restore)] == [((0, 1, 2, 3), 4)]


def test_a_shard_that_no_other_has_is_loaded_by_everyone() -> None:
    """
    When the memory of the only holder of a shard fails, then all members load the newest
    checkpoint: states of two steps do not fit together.
    """
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
def test_a_rank_that_is_lost_while_all_load_has_everyone_load_again(
    lost: int, *, derives: bool
) -> None:
    """
    When everyone goes back to a checkpoint, and a rank dies when some have loaded it and others have not,
    then all load it again: what is each rank's own at that step is in the checkpoint, and nowhere else.
    """
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


def test_what_one_rank_cannot_read_is_left_by_those_who_have_read_it() -> None:
    """
    When everyone goes back to a checkpoint that one rank cannot read, and there is one before it, then all
    load that one: whoever could not read the newer one would have nothing that is its own.
    """
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


def test_a_checkpoint_that_gets_complete_while_a_process_starts_is_loaded() -> None:
    """
    When a checkpoint of a later step than the ranks hold is complete only after the strategy was chosen, then it is
    loaded, and the plan names its step.
    """
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


def test_a_reservation_about_a_step_is_dropped_when_all_go_back_behind_it() -> None:
    """
    When a copy could not be read at the end of a step, and all go back to an earlier step in the same incident, then the
    report says nothing of it: the step is computed again.
    """
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


def test_a_copy_that_is_kept_is_nearer_than_a_checkpoint() -> None:
    """
    When the only holder of a shard dies, everyone else keeps copies, and there is a checkpoint,
    then the copies are no help for that shard: the checkpoint is loaded.
    """
    job = trained(groups={"own": (0,), "rest": (1, 2, 3)}, keeps=1)
    job.checkpointed(1)
    job.kill(0)
    job.settle()
    assert [o.step for o in job.orders(Load)] == [1]
    assert job.orders(Restore) == []


def test_a_numeric_fault_alone_leaves_the_copies_a_rank_keeps() -> None:
    """
    When the numbers of the only holder of a shard went wrong and it keeps the step before, then
    it and everyone else take back that step.
    """
    job = trained(groups={"own": (0,), "rest": (1, 2, 3)}, keeps=1)
    job.fault(0, "numeric")
    job.settle()
    job.train()
    assert [(r.to, r.step) for r in job.orders(Restore)] == [(ALL, 2)]
    assert job.orders(Fetch) == []
    (incident,) = job.reports()
    assert (incident["step"], incident["steps_lost"]) == (3, 1)


def test_a_rank_ahead_takes_back_its_own_copy() -> None:
    """
    When a rank has completed a step that nobody else can, and it cannot give it to all, then it
    comes back to the others instead.
    """
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


# ---------------------------------------------------------------- what may have spread


def test_what_may_have_spread_takes_everyone_back_to_their_copies() -> None:
    """
    When the last update may have spread what is wrong, then no copy of that step is used, though
    every rank has one: each takes back the one before, and that step is computed again.
    """
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


def test_a_damaged_rank_gets_the_earlier_step_from_the_copies_of_others() -> None:
    """
    When a memory fault may have spread, then the rank it came from has no sound copy, and fetches
    from the copies of the others.
    """
    job = trained(keeps=1)
    job.fault(2, "memory", polluted=True)
    job.settle()
    assert [(r.to, r.step) for r in job.orders(Restore)] == [((0, 1, 3), 2)]
    (fetch,) = job.orders(Fetch)
    assert (fetch.to, fetch.step) == ((2,), 2)
    assert {s.rank for s in fetch.transfers[0].sources} == {0, 1, 3}


def test_a_process_lost_while_everyone_goes_back_gets_the_earlier_step() -> None:
    """
    When a rank dies in the incident in which everyone goes back, then its new process fetches the
    earlier step as well.
    """
    job = trained(keeps=1)
    job.fault(2, "numeric", polluted=True)
    job.kill(0)
    job.settle()
    job.train()
    assert [(r.to, r.step) for r in job.orders(Restore)] == [((1, 2, 3), 2)]
    assert [(f.to, f.step) for f in job.orders(Fetch)] == [((0,), 2)]
    assert strategies(job) == ["recover"]


def test_the_earliest_of_several_pollutions_counts() -> None:
    """
    When a second rank reports a pollution from further back, then that is how far all go.
    """
    job = trained(keeps=3)
    job.window(1)
    job.close(1)
    job.fault(1, "numeric", polluted=True)
    job.script.stuck = {0, 2, 3}
    job.fault(2, "numeric", polluted=True)
    job.settle()
    assert {r.step for r in job.orders(Restore)} == {2}


def test_without_early_copies_everyone_loads_a_checkpoint_that_is_early_enough() -> None:
    """
    When nobody keeps copies and the newest checkpoint is polluted, too, then an older one is
    loaded by all.
    """
    job = trained()
    job.checkpointed(1)
    job.checkpointed(3)
    job.fault(2, "numeric", polluted=True)
    job.settle()
    job.train()
    assert [(o.to, o.directory) for o in job.orders(Load)] == [(ALL, "/periodic/1")]
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"], incident["steps_lost"]) == ("retry", 2, 2)


def test_a_checkpoint_of_a_step_that_was_gone_back_behind_is_not_loaded_any_more() -> None:
    """
    When everyone has gone back behind the newest checkpoint, and trained on from there, then that
    one is of a way that nobody went on: where no copy is left, the one before it is loaded.
    """
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


def test_where_nothing_is_early_enough_nothing_is_saved_and_the_sentence_says_so() -> None:
    """
    When what is wrong may be in every copy there is, then it is neither trained on nor saved.
    """
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


def test_a_link_that_breaks_beside_a_pollution_does_not_hide_it() -> None:
    """
    When connections break in the incident in which numbers are polluted, then everyone goes back
    all the same.
    """
    job = trained(keeps=1)
    job.fault(0, "network")
    job.fault(2, "numeric", polluted=True)
    job.fault(1, "network")
    job.settle()
    assert [r.step for r in job.orders(Restore)] == [2]
    job.train()
    (incident,) = job.reports()
    assert [(f["kind"], f["rank"]) for f in incident["faults"]] == [("numeric", 2)]


def test_a_pollution_noticed_from_outside_counts_as_much() -> None:
    """
    When somebody outside sees that numbers are polluted, then everyone goes back.
    """
    job = trained(keeps=1)
    job.notice(1, "numeric", "the loss of rank 1 has diverged", polluted=True)
    job.settle()
    assert [(r.to, r.step) for r in job.orders(Restore)] == [(ALL, 2)]


@pytest.mark.parametrize("noticed", [False, True])
def test_who_knows_how_old_it_is_takes_everyone_back_so_far(*, noticed: bool) -> None:
    """
    When it is known after which step numbers went wrong, then everyone loads the newest checkpoint that is not
    later, however many there are since; those are loaded no more.
    """
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


def test_a_rank_that_was_long_not_heard_may_have_come_further() -> None:
    """
    When it is noticed from outside after which step numbers went wrong, and the rank has not been heard since an earlier
    step, then all go back behind that step: ranks may have completed later steps meanwhile.
    """
    job = trained(keeps=2)
    assert job.machine._job.ranks.states[2].position.step == 1
    job.notice(2, "numeric", not_after=2)
    job.settle()
    job.train()
    assert [(order.to, order.step) for order in job.orders(Restore)] == [(ALL, 2)]


@pytest.mark.parametrize(
    ("limits", "step"), [((1, 2), 1), ((2, 1), 1), ((2, None), 2), ((None, 1), 1)]
)
def test_of_several_that_know_it_the_earliest_counts(
    limits: tuple[int | None, int | None], step: int
) -> None:
    """
    When two ranks say after which step their numbers went wrong, or one says only that it may have spread,
    then everyone takes back a copy that is none later than what either says.
    """
    job = trained(keeps=3)
    for rank, not_after in zip((1, 2), limits, strict=True):
        job.fault(rank, "numeric", polluted=not_after is None, not_after=not_after)
    job.settle()
    assert {r.step for r in job.orders(Restore)} == {step}


def test_a_step_that_nobody_has_reached_is_no_limit() -> None:
    """
    When numbers are said to have gone wrong after a step that is not trained yet, then this rank alone copies
    the state, and no batch is left out.
    """
    job = trained(skip_batch=True)
    job.checkpointed(1)
    job.fault(2, "numeric", not_after=9)
    job.settle()
    assert job.orders(Load) == []
    assert [(f.to, f.step) for f in job.orders(Fetch)] == [((2,), 3)]
    assert {r.skip for r in job.orders(Rollback)} == {0}


def test_what_others_have_completed_since_is_later() -> None:
    """
    When a rank knows its own last step to be sound, and the others have completed another one, then they go
    back to it, and the batch of that step is left out.
    """
    job = trained(skip_batch=True, keeps=1)
    for rank in (0, 1, 3):
        job.close(rank)
    job.fault(2, "numeric", not_after=3)
    job.settle()
    assert {(r.step, r.skip) for r in job.orders(Rollback)} == {(3, 1)}


def test_where_nothing_is_as_old_as_is_known_the_sentence_says_so() -> None:
    """
    When there is no checkpoint from before numbers went wrong, then nothing is loaded and nothing saved.
    """
    job = trained()
    job.checkpointed(3)
    job.fault(2, "numeric", polluted=True, not_after=1)
    job.settle()
    assert job.over is not None
    assert job.over.code == 4
    assert "no sound copy of shard 'dense', of step 1 or earlier, is left" in job.over.why
    assert job.orders(Save) == []


@pytest.mark.parametrize("says", ["that it goes on", "what it has trained"])
def test_a_pollution_counts_however_late_the_rank_is_heard_that_says_so(says: str) -> None:
    """
    When a rank goes on in another process, trains, and is heard only after a fault elsewhere has begun
    another round, then it was in the loop all the same: what it says to have spread takes everyone back.
    """
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


def test_a_rank_that_could_not_go_on_has_spread_nothing() -> None:
    """
    When a new process fails to go on with the others, and is seen to have bad numbers then, then it had
    contributed nothing: nobody goes back.
    """
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
    assert job.orders(Restore) == []


# ---------------------------------------------------------------- numbers that go wrong again


def test_numbers_that_go_wrong_again_take_everyone_one_step_further_back() -> None:
    """
    When the same step fails again after a retry, then what went wrong may have been in the state
    that everyone was brought to: the step before is tried, where it is kept.
    """
    job = trained(keeps=1)
    for _ in range(2):
        job.fault(2, "numeric")
        job.settle()
    job.train()
    assert [(f.to, f.step) for f in job.orders(Fetch)] == [((2,), 3)]
    assert [(r.to, r.step) for r in job.orders(Restore)] == [(ALL, 2)]
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"]) == ("retry", 3)


def test_numbers_that_go_wrong_at_another_step_are_another_fault() -> None:
    """
    When a step was trained in between, then nothing came back: nobody goes back further.
    """
    job = trained(keeps=1)
    for _ in range(2):
        job.fault(2, "numeric")
        job.settle()
        job.train()
    assert job.orders(Restore) == []
    assert strategies(job) == ["retry", "retry"]


def test_numbers_that_go_wrong_again_get_a_new_process_where_nothing_is_kept() -> None:
    """
    When there is no earlier copy to go back to, then a retry has failed: the rank's process is
    replaced, though it lives.
    """
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


def test_a_guess_about_how_far_to_go_back_is_no_reason_to_end() -> None:
    """
    When the step before could be tried only with what a rank that has died since then had kept,
    then the guess is dropped rather than the job.
    """
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


def test_what_a_plugin_rules_out_after_a_guess_was_dropped_is_no_guess() -> None:
    """
    When a guess about how far to go back was dropped, and a plugin then says that nothing after an
    earlier step is sound, then that stands: the job ends when that step is not to be had.
    """
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


# ---------------------------------------------------------------- leaving batches out


def test_the_batches_that_broke_it_are_left_out_where_that_is_wanted() -> None:
    """
    When a batch may be what breaks the numbers and the policy says so, then after going back the
    batches up to and with the one that failed are not used again.
    """
    job = trained(keeps=1, skip_batch=True)
    job.fault(2, "numeric", polluted=True)
    job.settle()
    assert [(r.step, r.skip) for r in job.orders(Rollback)] == [(2, 2)]


@pytest.mark.parametrize("wanted", [True, False])
def test_no_batch_is_left_out_unless_it_took_everyone_back(wanted: bool) -> None:
    """
    When a fault did not take everyone back, then every batch is used, wanted or not.
    """
    job = trained(keeps=1, skip_batch=wanted)
    job.fault(2, "memory")
    job.settle()
    assert [r.skip for r in job.orders(Rollback)] == [0]


def test_batches_are_left_out_when_numbers_go_wrong_again() -> None:
    """
    When the same step fails twice and everyone goes one step further back, then the failing batch
    is left out, and the one before it, too.
    """
    job = trained(keeps=1, skip_batch=True)
    for _ in range(2):
        job.fault(2, "numeric")
        job.settle()
    assert [(r.step, r.skip) for r in job.orders(Rollback)] == [(3, 0), (2, 2)]


# ---------------------------------------------------------------- what cannot be taken back


def test_a_copy_that_cannot_be_taken_back_is_fetched_from_others() -> None:
    """
    When a rank cannot take its copy back, then in the next round it fetches the step from those
    who can give it; so does the one whose numbers went wrong, whose word was cut off.
    """
    job = trained(keeps=1)
    job.script.failures[1, "restore"] = ["digest differs"]
    job.fault(2, "numeric", polluted=True)
    job.settle()
    job.train()
    assert [r.to for r in job.orders(Restore)] == [(0, 1, 2, 3)]
    assert [(f.to, f.step) for f in job.orders(Fetch)] == [((1,), 2), ((2,), 2)]
    assert strategies(job) == ["retry"]
    assert job.facts("order_failed") == [{"rank": 1, "order": "restore", "why": "digest differs"}]


# ---------------------------------------------------------------- where somebody was


@pytest.mark.parametrize("kind", ["memory", "network", "process", "hang", "node"])
def test_what_is_seen_from_outside_is_told_with_the_step_it_was_seen_in(kind: FaultKind) -> None:
    """
    When somebody outside sees a fault of a rank that trains, then nobody knows where that rank is
    until it says so: it is that step which is reported.
    """
    job = trained(steps=7, placement={0: (0, 1, 2), 1: (3,)}, spare={0: 1})
    job.notice(3, kind)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert [(f["kind"], f["rank"], f["step"]) for f in incident["faults"]] == [(kind, 3, 8)]


def test_a_node_that_is_lost_was_where_the_others_were() -> None:
    """
    When a node is lost with all that its ranks could have said, then the step they were in is
    the one that the others compute.
    """
    job = trained(steps=7, placement={0: (0, 1, 2), 1: (3,)}, spare={0: 1})
    job.lose_node(1)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert [(f["rank"], f["step"]) for f in incident["faults"]] == [(3, 8)]


def test_a_pollution_by_one_that_cannot_say_where_it_was_goes_back_further() -> None:
    """
    When the rank whose numbers are polluted is lost with its node before it says where it was,
    then it may have been a step behind the others: everyone goes back one more.
    """
    job = trained(steps=7, placement={0: (0, 1, 2), 1: (3,)}, spare={0: 1}, keeps=2)
    job.notice(3, "numeric", polluted=True)
    job.lose_node(1)
    job.settle()
    assert {r.step for r in job.orders(Restore)} == {5}
