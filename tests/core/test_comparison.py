"""
Ranks with different copies of the same shard: which rank is at fault, and from which copy all ranks
continue.
"""

from dataclasses import replace
from typing import Any

import pytest

from tests.core.lives import strategies, trained, tried
from tft.core.job.comparison import Copy, differences
from tft.core.job.incident import Incident, Phase
from tft.core.job.incident_report import incident_report
from tft.core.job.policy import STRATEGIES, Policy
from tft.core.plan.savers import savers
from tft.core.plan.standing import Standing
from tft.core.plan.topology import Topology
from tft.protocol.messages import (
    Checkpointed,
    CheckpointFailed,
    Compare,
    Fetch,
    Kill,
    Load,
    Rebuild,
    Regroup,
    Restore,
    Resume,
    Rollback,
    Save,
    Stop,
)
from tft.testing.scripted import ScriptedJob

PAIRS = {"first": (0, 2), "second": (1, 3)}


def fetched(orders: list[Fetch]) -> list[tuple[int, int, set[int]]]:
    """
    Return, for each order to fetch, the rank, the step, and the set of source ranks.
    """
    return [
        (order.to[0], order.step, {s.rank for t in order.transfers for s in t.sources})
        for order in orders
    ]


# ---------------------------------------------------------------- a minority of copies


@pytest.mark.parametrize("what", ["content", "settings"])
def test_rank_with_a_wrong_copy_has_a_corruption_fault(what: str) -> None:
    """When a rank is lost and one remaining rank holds a different copy, then that rank has a
    corruption fault. It and the new process fetch from the ranks whose copies are equal."""
    job = trained()
    setattr(job.ranks[1].state, what, "wrong")
    job.kill(3)
    job.settle()
    job.train()
    assert sorted(fetched(job.orders(Fetch))) == [(1, 3, {0, 2}), (3, 3, {0, 2})]
    (incident,) = job.reports()
    assert [(f["kind"], f["rank"], f["step"]) for f in incident["faults"]] == [
        ("process", 3, 4),
        ("corruption", 1, 4),
    ]
    part = "model" if what == "content" else "description"
    assert incident["faults"][1]["evidence"] == (
        f"ranks [1] hold another copy of {part} of shard 'dense' at the end of step 3 than ranks "
        "[0, 2]"
    )
    assert strategies(job) == ["recover"]
    assert {one.state.content for one in job.ranks.values()} == {"right"}


def test_report_names_the_steps_that_a_wrong_copy_may_have_polluted() -> None:
    """When a copy becomes wrong in a step after the last comparison, then the report names the
    steps whose all-reduces may be wrong. When the copies of that step were already compared and
    were equal, then the report names no step."""
    job = trained()
    job.kill(3)
    job.settle()
    job.train(2)
    job.ranks[1].state.content = "wrong"
    job.kill(3)
    job.settle()
    job.ranks[2].state.content = "wrong, too"
    job.kill(3)
    job.settle()
    job.train()
    assert [incident["inexact"] for incident in job.reports()] == [
        [],
        [
            "ranks [1] hold another copy of model of shard 'dense' at the end of step 5 than "
            "ranks [0, 2]; it is not known since when they differ: the contributions of ranks "
            "[1] to all-reduces in steps 4 to 5 may be in the state of all ranks"
        ],
    ]


def test_equal_copies_are_not_reported() -> None:
    """When all copies are equal, then the report says nothing about them, and only the new process
    fetches."""
    job = trained()
    job.kill(3)
    job.settle()
    job.train()
    assert [order.to for order in job.orders(Fetch)] == [(3,)]
    assert [tell.event for tell in job.tells if tell.event == "copies_differ"] == []
    assert job.reports()[0]["inexact"] == []


def test_restored_copies_are_compared() -> None:
    """When all ranks restore a copy of an earlier step and the copy of one rank differs, then that
    rank has a corruption fault and fetches from the others."""
    job = trained(keeps=2)
    job.ranks[1].state.content = "wrong"
    job.fault(2, "numeric", polluted=True)
    job.settle()
    job.train()
    assert [(order.to, order.step) for order in job.orders(Restore)] == [((0, 1, 2, 3), 2)]
    assert fetched(job.orders(Fetch)) == [(1, 2, {0, 2, 3})]
    assert [(f["kind"], f["rank"]) for f in job.reports()[0]["faults"]] == [
        ("numeric", 2),
        ("corruption", 1),
    ]


def test_report_says_a_wrong_copy_of_step_1_may_have_spread() -> None:
    """When a copy is wrong at the end of step 1, then its rank has a corruption fault. The report
    says that the all-reduces of step 1 may have spread the wrong numbers."""
    job = trained(steps=1)
    job.ranks[1].state.content = "wrong"
    job.fault(0, "network")
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert ("corruption", 1, 2) in [(f["kind"], f["rank"], f["step"]) for f in incident["faults"]]
    (why,) = incident["inexact"]
    assert why.endswith("to all-reduces in steps 1 to 1 may be in the state of all ranks")


def test_corruption_faults_are_in_rank_order() -> None:
    """When copies of two shards are wrong on two ranks, then the faults are in the order of the
    ranks, not of the shards."""
    groups = {"first": (0, 2, 4), "second": (1, 3, 5)}
    job = trained(world=6, groups=groups)
    for rank in (4, 1):
        job.ranks[rank].state.content = "wrong"
    job.fault(0, "network")
    job.settle()
    job.train()
    (incident,) = job.reports()
    faults = [f["rank"] for f in incident["faults"] if f["kind"] == "corruption"]
    assert faults == [1, 4]


def test_two_wrong_copies_of_one_rank_are_one_fault() -> None:
    """When a rank holds wrong copies of two shards, then the rank has one fault, and its evidence
    names both shards."""
    everyone = (0, 1, 2, 3)
    job = trained(groups={"first": everyone, "second": everyone})
    job.ranks[1].state.content = "wrong"
    job.fault(0, "network")
    job.settle()
    job.train()
    (fault,) = [f for f in job.reports()[0]["faults"] if f["kind"] == "corruption"]
    assert fault["evidence"] == "; ".join(
        f"ranks [1] hold another copy of model of shard '{shard}' at the end of step 3 than ranks "
        "[0, 2, 3]"
        for shard in ("first", "second")
    )


def test_rank_with_repeated_wrong_copies_counts_as_flapping() -> None:
    """When a rank holds a wrong copy in two incidents, then the rank counts as failing too often,
    although each incident began with another rank."""
    job = trained(flaps=1, enable=frozenset({"retry", "recover", "dump"}))
    for rank in (0, 2):
        job.ranks[1].state.content = "wrong"
        job.fault(rank, "network")
        job.settle()
        job.train()
    assert job.machine._job.flapping(1).startswith("rank 1 was the cause of 2 incidents")


def test_loaded_copies_are_compared_before_the_first_step_of_a_resumed_job() -> None:
    """When a resumed job has a fault while the wrappers are built, then the loaded copies are
    compared, and a wrong copy is replaced."""
    job = ScriptedJob(4, Policy(), strategies=STRATEGIES, resume=("/checkpoints/step-7", 7))
    job.script.slow = {3}
    job.start()
    job.arrive(3)
    while not job.orders(Rebuild):
        job.obey_next()
    job.ranks[1].state.content = "wrong"
    job.fault(0, "network")
    job.settle()
    job.train()
    assert [told["wrong"] for told in job.facts("copies_differ")] == [[1]]
    assert {one.state.content for one in job.ranks.values()} == {"right"}


# ---------------------------------------------------------------- two copies that differ


def test_two_differing_copies_roll_all_ranks_back_to_the_last_comparison() -> None:
    """When the only two holders of a shard have different copies, then all ranks load a checkpoint
    that is not later than the last comparison."""
    job = trained(groups=PAIRS, steps=2)
    job.fault(0, "network")  # every incident compares all copies
    job.settle()
    job.checkpointed(2)
    job.train(2)
    job.checkpointed(4)
    job.ranks[2].state.content = "wrong"
    job.fault(1, "network")
    job.settle()
    job.train()
    assert [(order.directory, order.step) for order in job.orders(Load)] == [("/periodic/2", 2)]
    incident = job.reports()[-1]
    assert [(f["kind"], f["rank"]) for f in incident["faults"]] == [("corruption", None)]
    assert (
        "ranks [0, 2] hold different copies of model of shard 'first'"
        in incident["faults"][0]["evidence"]
    )
    assert (incident["strategy"], incident["step"]) == ("retry", 3)


def test_two_differing_copies_fail_a_job_without_a_sound_checkpoint() -> None:
    """When the only two holders of a shard differ, and no copy or checkpoint up to the last
    comparison is left, then the job fails with a reason. No checkpoint is written."""
    job = trained(groups=PAIRS)
    job.ranks[2].state.settings = "wrong"
    job.fault(1, "network")
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert (
        "no sound copy of shard 'first', of step 0 or earlier, is left on ranks [0, 2]"
        in job.over.why
    )
    assert job.orders(Save) == []


def test_two_differing_copies_of_the_last_compared_step_are_not_used() -> None:
    """When the only two holders of a shard differ at the step of the last comparison, then neither
    copy is used. All ranks load the checkpoint of that step, and the incident ends."""
    job = trained(groups=PAIRS, steps=2)
    job.checkpointed(2)
    job.fault(0, "network")  # every incident compares all copies
    job.settle()
    job.ranks[2].state.content = "wrong"
    job.fault(1, "network")
    job.settle()
    job.train()
    assert [(order.directory, order.step) for order in job.orders(Load)] == [("/periodic/2", 2)]
    (incident,) = job.reports()
    assert ("corruption", None) in [(f["kind"], f["rank"]) for f in incident["faults"]]
    assert incident["step"] == 3


def test_initial_states_are_not_compared_when_the_wrappers_are_not_built() -> None:
    """When the ranks stop before the wrappers are built, then their initial states are not
    compared, because the wrappers make them equal later."""
    job = ScriptedJob(3, Policy(), strategies=STRATEGIES)
    job.script.slow = {2}
    job.start()
    for rank, one in job.ranks.items():
        one.state.content = f"of rank {rank}"
    job.script.failures[0, "regroup"] = ["no route to the store"]
    job.arrive(2)
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert len(job.orders(Stop)) == 1
    assert job.facts("copies_differ") == []


def begun_with_another_copy() -> ScriptedJob:
    """Return a job of three ranks in which rank 1 has begun with another learning rate than the
    others. All ranks have trained two steps."""
    job = ScriptedJob(3, Policy(), strategies=STRATEGIES)
    job.script.slow = {2}
    job.start()
    job.ranks[1].state.settings = "another learning rate"
    job.arrive(2)
    job.settle()
    job.train(2)
    return job


def test_initial_states_are_compared_once_after_the_wrappers_are_built() -> None:
    """When the wrappers are built and one rank begins with a different copy, then the operator is
    told before the first step, and training begins."""
    job = begun_with_another_copy()
    assert [order.to for order in job.orders(Compare)] == [(0, 1, 2)]
    (told,) = job.facts("begins_unlike")
    assert told["why"] == (
        "ranks [1] hold another copy of description of shard 'dense' at the end of step 0 than "
        "ranks [0, 2]"
    )
    assert job.machine.begins_unlike == (told["why"],)
    assert job.doing == "healthy"


def test_copies_that_a_script_has_made_equal_are_not_reported() -> None:
    """When a rank begins with a different copy, and the copies are found equal in a later incident,
    then the report does not name the rank."""
    job = begun_with_another_copy()
    assert len(job.machine.begins_unlike) == 1
    job.ranks[1].state.settings = job.ranks[0].state.settings
    job.fault(0, "network")
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert job.machine.begins_unlike == ()


def test_copies_that_a_repair_has_made_equal_are_reported() -> None:
    """When a rank begins with a different copy, and is replaced by a process that fetches the copy
    of another rank, then the report still names the rank: it has trained another model."""
    job = begun_with_another_copy()
    job.kill(1)
    job.settle()
    job.train(2)
    job.fault(0, "network")
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert len(job.machine.begins_unlike) == 1


@pytest.mark.parametrize("moment", [Compare, Rollback, Resume])
@pytest.mark.parametrize("odd", [(1,), (2, 3)])
def test_differing_initial_states_are_not_a_fault(moment: type, odd: tuple[int, ...]) -> None:
    """When the initial states differ and a fault comes before the first step ends, then each rank
    keeps its own state, because the script may still broadcast the state of rank 0."""
    job = ScriptedJob(4, Policy(), strategies=STRATEGIES)
    job.script.slow = {3}
    job.start()
    for rank in odd:
        job.ranks[rank].state.content = "of its own"
    job.arrive(3)
    job.ranks[3].state.content = "of its own" if 3 in odd else "right"
    while not job.orders(moment):
        job.obey_next()
    job.fault(0, "network")
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert job.orders(Fetch) == []
    assert {told["shard"] for told in job.facts("begins_unlike")} == {"dense"}
    assert [fault.kind for each in job.machine.incidents for fault in each.faults] == ["network"]


def test_initial_states_are_compared_once_per_round_after_a_fault() -> None:
    """When a fault comes while the initial states are compared, then the ranks get the order to
    compare again in the new incident, once in each round."""
    job = ScriptedJob(3, Policy(), strategies=STRATEGIES)
    job.script.slow = {2}
    job.start()
    job.arrive(2)
    while not job.orders(Compare):
        job.obey_next()
    job.fault(1, "memory")
    job.settle()
    job.train()
    rounds = [(order.incident, order.round) for order in job.orders(Compare)]
    assert len(rounds) == len(set(rounds)) == 2
    assert job.facts("begins_unlike") == []
    assert job.doing == "healthy"


def test_initial_states_of_a_resumed_job_are_compared() -> None:
    """When a job resumes from a checkpoint and one rank has different settings, then the operator
    is told, with the step of the checkpoint."""
    job = ScriptedJob(3, Policy(), strategies=STRATEGIES, resume=("/checkpoints/step-7", 7))
    job.script.slow = {2}
    job.start()
    job.ranks[1].state.settings = "another learning rate"
    job.arrive(2)
    job.settle()
    job.train()
    (told,) = job.facts("begins_unlike")
    assert "at the end of step 7" in str(told["why"])


def test_late_report_about_an_already_repaired_step_is_ignored() -> None:
    """When a report arrives late that copies of step 3 differed at a checkpoint, and these copies
    were compared and repaired since, then no new incident begins."""
    job = trained()
    job.ranks[2].state.content = "wrong"
    job.kill(3)
    job.settle()
    job.train()
    incidents = len(job.machine.incidents)
    not_checkpointed(job, 3, 2)
    job.settle()
    assert len(job.machine.incidents) == incidents
    assert job.doing == "healthy"


def test_disputed_copies_are_one_fault_after_a_second_round() -> None:
    """When two holders differ with no majority, and another rank is lost before training continues,
    then the report has one corruption fault only."""
    job = trained(groups=PAIRS, steps=2)
    job.checkpointed(2)
    job.fault(0, "network")  # every incident compares all copies
    job.settle()
    job.ranks[2].state.content = "wrong"
    job.script.slow = {3}
    job.kill(3)
    job.settle()
    assert job.doing == "awaiting"
    job.kill(1)
    job.settle()
    job.arrive(3)
    job.settle()
    job.train()
    assert job.doing == "healthy"
    faults = [f["kind"] for f in job.reports()[-1]["faults"]]
    assert faults.count("corruption") == 1


# ---------------------------------------------------------------- comparisons after a repair


def test_fetched_copy_is_compared() -> None:
    """When a rank has fetched a damaged copy, then the comparison finds it, and the rank fetches
    the copy once more."""
    job = trained()
    job.script.miscopied = {3: 1}
    job.kill(3)
    job.settle()
    job.train()
    assert [order.to for order in job.orders(Fetch)] == [(3,), (3,)]
    assert {one.state.content for one in job.ranks.values()} == {"right"}
    assert job.doing == "healthy"


def test_fetched_copy_does_not_count_in_a_later_round() -> None:
    """When a rank has fetched a wrong copy and another fault comes before the comparison, then the
    fetched copy has no vote in the comparison. The two other copies differ without a majority, and
    the job fails."""
    job = trained(world=3)
    job.kill(2)
    while not job.orders(Fetch):
        job.obey_next()
    job.ranks[0].state.content = "wrong"
    job.script.muted = {(1, "regroup")}
    job.settle()
    assert job.ranks[2].state.content == "wrong"
    job.script.muted = set()
    job.fault(1, "network")
    job.settle()
    assert job.over is not None
    assert job.over.result == "failed"
    assert [tell["right"] for tell in job.facts("copies_differ")] == [[]]


def test_strategy_fails_when_every_fetched_copy_is_damaged() -> None:
    """When every copy that a rank fetches is damaged, then the strategy fails. The report says
    which copy differs from the others after the repair."""
    job = trained()
    job.script.miscopied = {3: 99}
    job.kill(3)
    job.settle()
    while job.doing == "awaiting":
        job.wait()
        job.settle()
    assert tried(job)["recover"] == (
        "after a repair ranks [3] hold another copy of model of shard 'dense' at the end of step 3 "
        "than ranks [0, 1, 2]"
    )


REPLICAS = {rank: (rank // 2 * 2, rank // 2 * 2 + 1) for rank in range(6)}
"""Three model replicas of two ranks each."""
THIRDS = {"first": (0, 2, 4), "second": (1, 3, 5)}
SHRINKS = frozenset({"retry", "scale_in", "dump"})


def test_copy_fetched_from_a_leaving_rank_is_compared_with_its_source() -> None:
    """When a member fetches a damaged copy from a rank that leaves, and only that rank has ended
    the step, then the member fetches once more."""
    columns = {rank: REPLICAS[rank] for rank in range(4)}
    job = trained(groups=PAIRS, columns=columns, enable=SHRINKS)
    job.ranks[0].loop.tail = job.ranks[0].loop.cut = True
    job.script.miscopied = {0: 1}
    job.kill(3)
    job.settle()
    job.train()
    assert fetched(job.orders(Fetch)) == [(0, 3, {2}), (0, 3, {2})]
    assert job.machine.members == {0, 1}
    assert job.ranks[0].state.content == "right"


def test_differing_copies_are_disputed_when_their_source_is_lost() -> None:
    """When two members fetch from a rank that leaves, one copy is damaged, and the source ends
    before the comparison, then the job fails. The report has a corruption fault without a rank."""
    job = trained(world=6, groups=THIRDS, columns=REPLICAS, enable=SHRINKS)
    for rank in (0, 2):
        job.ranks[rank].loop.tail = job.ranks[rank].loop.cut = True
    job.script.miscopied = {0: 1}
    job.kill(5)
    while job.ranks[0].state.content == "right":
        job.obey_next()
    job.kill(4)
    job.settle()
    assert job.over is not None
    assert job.over.result == "failed"
    faults = [(f["kind"], f["rank"]) for f in job.reports()[0]["faults"]]
    assert faults == [("process", 5), ("corruption", None)]


def test_copy_of_a_rank_that_has_left_is_not_compared_with_the_members() -> None:
    """When the members roll back to a step of which a rank outside the job holds a different copy,
    then no difference is reported, neither in this round nor in the next."""
    job = trained(world=6, groups=THIRDS, columns=REPLICAS, keeps=2, enable=SHRINKS)
    job.kill(5)
    job.settle()
    job.train()
    assert job.machine.members == {0, 1, 2, 3}
    for rank in (0, 2):
        job.ranks[rank].state.content = "unlike the copy of rank 4"
    job.fault(1, "numeric", polluted=True)
    job.settle()
    job.fault(0, "network")
    job.settle()
    job.train()
    assert [order.step for order in job.orders(Restore)] == [3]
    assert job.facts("copies_differ") == []
    incident = job.reports()[-1]
    assert incident["inexact"] == []
    # the later network fault is a consequence of the numeric fault, and is not listed
    assert [f["kind"] for f in incident["faults"]] == ["numeric"]


# ---------------------------------------------------------------- tails of steps


def test_copy_fetched_from_ranks_in_the_tail_is_compared() -> None:
    """When all remaining ranks were cut off in the tail and a new process fetches a damaged copy,
    then the process fetches once more."""
    job = trained()
    for rank in (0, 1, 2):
        job.ranks[rank].loop.tail = job.ranks[rank].loop.cut = True
    job.script.miscopied = {3: 1}
    job.kill(3)
    job.settle()
    job.train()
    assert [order.to for order in job.orders(Fetch)] == [(3,), (3,)]
    assert {one.state.content for one in job.ranks.values()} == {"right"}


def test_report_lists_the_tail_lines_with_their_ranks_in_order() -> None:
    """When ranks were cut off at different or unknown lines of the tail, then the report has one
    sentence for each line, with its ranks in order."""
    job = trained(world=9)
    for one in job.ranks.values():
        one.loop.tail = one.loop.cut = True
    for rank in (8, 1):
        job.ranks[rank].loop.line = "train.py:61"
    job.kill(3)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert [why.partition(", and")[0] for why in incident["inexact"]] == [
        "ranks [0, 2, 4, 5, 6, 7] were cut off in the tail of step 3 at an unknown line",
        "ranks [1, 8] were cut off in the tail of step 3 at train.py:61",
    ]


def test_report_omits_the_tail_when_all_ranks_restore_an_earlier_step() -> None:
    """When all ranks were cut off in the tail and restore their copies of the step before, then the
    report says nothing about the tail."""
    job = trained(keeps=2)
    for one in job.ranks.values():
        one.loop.tail = one.loop.cut = True
    job.fault(2, "numeric", polluted=True)
    job.settle()
    job.train()
    assert [order.step for order in job.orders(Restore)] == [2]
    assert job.reports()[0]["inexact"] == []


def test_report_omits_the_tail_when_a_checkpoint_of_that_step_is_loaded() -> None:
    """When all remaining ranks were cut off in the tail and then load a checkpoint of that step,
    then the report says nothing about the tail."""
    job = trained(groups=PAIRS)
    for rank in (0, 1, 2):
        job.ranks[rank].loop.tail = job.ranks[rank].loop.cut = True
    job.kill(3)
    job.settle()
    assert job.doing == "resuming"
    job.checkpointed(3)
    job.script.deaf = {0}
    job.kill(1)
    job.kill(3)
    job.settle()
    job.train()
    assert [order.step for order in job.orders(Load)] == [3]
    assert job.reports()[0]["inexact"] == []


def test_new_process_is_told_that_steps_have_a_tail() -> None:
    """When the remaining ranks report that their steps have a tail, then the order to resume says
    so, because a new process cannot know it in its first step."""
    job = trained()
    for one in job.ranks.values():
        one.loop.tails = True
    job.kill(3)
    job.settle()
    job.train()
    assert [order.tails for order in job.orders(Resume)] == [True]


def test_ranks_cut_off_in_the_tail_fetch_from_a_rank_that_ended_the_step() -> None:
    """When one rank has ended the step and two ranks were cut off in the tail, then these two ranks
    and the new process fetch from the first rank. The two ranks have no fault."""
    job = trained()
    for rank in (1, 2):
        job.ranks[rank].loop.tail = job.ranks[rank].loop.cut = True
        job.ranks[rank].state.settings = "of the tail"
    job.kill(3)
    job.settle()
    job.train()
    assert sorted(fetched(job.orders(Fetch))) == [(1, 3, {0}), (2, 3, {0}), (3, 3, {0})]
    (incident,) = job.reports()
    assert [fault["kind"] for fault in incident["faults"]] == ["process"]
    assert incident["inexact"] == []
    assert (incident["step"], incident["steps_lost"]) == (4, 0)


def test_copy_of_a_rank_that_ended_the_step_counts_more_than_tail_copies() -> None:
    """When one member has ended the step and most other ranks were cut off in the tail, then the
    copy of that member is used. The report has no corruption fault."""
    columns = {rank: (0, 1) if rank < 2 else (2, 3, 4, 5) for rank in range(6)}
    job = trained(world=6, columns=columns, enable=frozenset({"scale_in", "dump"}))
    for rank in range(1, 5):
        job.ranks[rank].loop.tail = job.ranks[rank].loop.cut = True
        job.ranks[rank].state.settings = "of the tail"
    job.kill(5)
    job.settle()
    job.train()
    assert fetched(job.orders(Fetch)) == [(1, 3, {0})]
    (incident,) = job.reports()
    assert incident["strategy"] == "scale_in"
    assert [fault["kind"] for fault in incident["faults"]] == ["process"]
    assert incident["inexact"] == [
        "ranks [2, 3, 4, 5] have left the job: the steps after step 3 lack their part of the data "
        "until they come back"
    ]


def test_fetched_copy_of_the_ended_step_counts_after_its_source_is_lost() -> None:
    """When the members have fetched from the only rank that ended the step, and that rank is then
    lost, then the fetched copies are used. A copy of a rank that was cut off in the tail is not
    used."""
    columns = {rank: (rank // 2 * 2, rank // 2 * 2 + 1) for rank in range(6)}
    job = trained(world=6, columns=columns, enable=frozenset({"scale_in", "dump"}))
    for rank in (0, 1, 2, 3, 5):
        job.ranks[rank].loop.tail = job.ranks[rank].loop.cut = True
        job.ranks[rank].state.settings = "of the tail"
    job.kill(3)
    while not job.orders(Rebuild):
        job.obey_next()
    job.kill(4)
    job.settle()
    job.train()
    assert job.facts("copies_differ") == []
    assert job.doing == "healthy"
    assert job.machine.members == {0, 1}
    assert {job.ranks[rank].state.settings for rank in (0, 1)} == {"right"}
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"]) == ("scale_in", 4)
    assert ["have left the job" in why for why in incident["inexact"]] == [True]


def test_report_says_that_no_remaining_rank_has_ended_the_step() -> None:
    """When all remaining ranks were cut off in the tail and their copies differ, then all ranks use
    the copy of the majority, and no rank has a fault. The report says where the ranks were cut off.
    """
    job = trained()
    for rank in (0, 1, 2):
        job.ranks[rank].loop.tail = job.ranks[rank].loop.cut = True
        job.ranks[rank].loop.line = "train.py:57"
    job.ranks[1].state.settings, job.ranks[1].loop.line = "of the tail", "train.py:61"
    job.kill(3)
    job.settle()
    job.train()
    assert sorted(fetched(job.orders(Fetch))) == [(1, 3, {0, 2}), (3, 3, {0, 2})]
    (incident,) = job.reports()
    assert [fault["kind"] for fault in incident["faults"]] == ["process"]
    assert incident["inexact"] == [
        "ranks [0, 2] were cut off in the tail of step 3 at train.py:57, and no rank is left that "
        "has ended the step: the code after that line was not run for this step "
        "(on a device: perhaps all of it was run, but with results of aborted collectives)"
    ]
    assert [order.step for order in job.orders(Rollback)] == [3]


def test_report_says_that_the_last_checkpoint_was_written_from_the_tail() -> None:
    """When the only rank that has ended the step cannot write the last checkpoint, then the copies
    of ranks that were cut off in the tail are saved. The report names the line at which they were
    cut off."""
    job = trained(enable=frozenset({"dump"}))
    for rank in (1, 2, 3):
        job.ranks[rank].loop.tail = job.ranks[rank].loop.cut = True
        job.ranks[rank].loop.line = "train.py:57"
    job.script.failures[0, "save"] = ["the disk is full"]
    job.fault(3, "network")
    job.settle()
    assert job.over is not None
    assert job.over.result == "dumped"
    (incident,) = job.reports()
    assert incident["inexact"] == [
        "ranks [1, 2, 3] were cut off in the tail of step 3 at train.py:57, and no rank is left "
        "that has ended the step: the code after that line was not run for this step "
        "(on a device: perhaps all of it was run, but with results of aborted collectives)"
    ]


def test_report_names_the_tail_of_the_first_round_after_a_second_round() -> None:
    """When all remaining ranks were cut off in the tail and another rank is lost before the
    incident ends, then the report still names the tail and its line."""
    job = trained(keeps=2)
    for rank in (0, 1, 2):
        job.ranks[rank].loop.tail = job.ranks[rank].loop.cut = True
        job.ranks[rank].loop.line = "train.py:57"
    job.kill(3)
    job.settle()
    job.kill(2)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert [(fault["kind"], fault["rank"]) for fault in incident["faults"]] == [
        ("process", 3),
        ("process", 2),
    ]
    assert incident["inexact"] == [
        "ranks [0, 1, 2] were cut off in the tail of step 3 at train.py:57, and no rank is left "
        "that has ended the step: the code after that line was not run for this step "
        "(on a device: perhaps all of it was run, but with results of aborted collectives)"
    ]


def test_report_omits_the_tail_when_its_step_is_computed_again() -> None:
    """When all remaining ranks were cut off in the tail and a second round goes back to an earlier
    step, then the report says nothing about the tail."""
    job = trained(keeps=2)
    for rank in (0, 1, 2):
        job.ranks[rank].loop.tail = job.ranks[rank].loop.cut = True
    job.kill(3)
    job.settle()
    job.fault(2, "numeric", polluted=True)
    job.settle()
    job.train()
    assert job.reports()[0]["inexact"] == []
    assert job.reports()[0]["step"] == 3


def test_rank_at_the_later_line_of_the_tail_is_the_source() -> None:
    """When two remaining ranks were cut off in the tail and differ, then the rank at the later line
    is the source for all others."""
    job = trained(world=3)
    for rank, line in ((0, 57), (1, 61)):
        job.ranks[rank].loop.tail = job.ranks[rank].loop.cut = True
        job.ranks[rank].loop.line, job.ranks[rank].state.settings = f"train.py:{line}", f"at {line}"
    job.kill(2)
    job.settle()
    job.train()
    assert sorted(fetched(job.orders(Fetch))) == [(0, 3, {1}), (2, 3, {1})]
    assert job.orders(Kill) == []


def test_report_names_the_tail_when_another_fault_comes_before_success() -> None:
    """When all ranks continue from the copy of a rank that was cut off in the tail, and another
    fault comes before the incident is over, then the report still names the tail."""
    job = trained(world=3)
    for rank in (0, 1):
        job.ranks[rank].loop.tail = job.ranks[rank].loop.cut = True
        job.ranks[rank].loop.line = "train.py:57"
    job.kill(2)
    job.settle()
    assert job.doing == "resuming"
    job.fault(0, "network")
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert incident["inexact"] == [
        "ranks [0, 1] were cut off in the tail of step 3 at train.py:57, and no rank is left that "
        "has ended the step: the code after that line was not run for this step "
        "(on a device: perhaps all of it was run, but with results of aborted collectives)"
    ]


def test_rank_that_fetches_one_shard_is_still_the_source_of_another() -> None:
    """When two ranks were cut off in the tail, then the rank at the earlier line fetches the common
    shard. The same rank is the source of the shard that no other rank holds."""
    job = trained(world=3, groups={"dense": (0, 1, 2), "expert.0": (0, 2), "expert.1": (1,)})
    for rank, line in ((0, 57), (1, 61)):
        job.ranks[rank].loop.tail = job.ranks[rank].loop.cut = True
        job.ranks[rank].loop.line, job.ranks[rank].state.settings = f"train.py:{line}", f"at {line}"
    job.kill(2)
    job.settle()
    job.train()
    found = {
        (order.to[0], t.shard): {s.rank for s in t.sources}
        for order in job.orders(Fetch)
        for t in order.transfers
    }
    assert found == {(0, "dense"): {1}, (2, "dense"): {1}, (2, "expert.0"): {0}}
    assert strategies(job) == ["recover"]


def test_report_names_a_shard_whose_holders_were_all_cut_off_in_the_tail() -> None:
    """When a rank was cut off in the tail, and no rank that ended the step holds a certain shard of
    that rank, then the report says so."""
    job = trained(groups={"dense": (0, 1, 2, 3), **PAIRS})
    for rank in (1, 2):
        job.ranks[rank].loop.tail = job.ranks[rank].loop.cut = True
        job.ranks[rank].loop.line = "train.py:57"
    job.kill(3)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert incident["inexact"] == [
        "ranks [1] were cut off in the tail of step 3 at train.py:57, and no rank among "
        "the ranks that hold the same shard is left that has ended the step: the code after "
        "that line was not run for this step (on a device: perhaps all of it was run, but with "
        "results of aborted collectives)"
    ]


def test_report_says_once_which_loops_draw_random_numbers_in_the_tail() -> None:
    """When the loops of some ranks draw random numbers in their tails, then the report says so
    once, with all these ranks."""
    job = trained()
    for rank in (0, 2):
        job.ranks[rank].loop.inexact = ("the loop draws",)
    job.kill(3)
    job.settle()
    job.train()
    assert job.reports()[0]["inexact"] == ["ranks [0, 2]: the loop draws"]


def test_report_says_what_a_rollback_could_not_restore() -> None:
    """When a part of the rank-local state of a replaced rank was lost, then the report of this
    incident says what was lost, and the report of the next one does not."""
    job = trained()
    job.ranks[2].loop.lost = "its buffers are those of rank 1"
    job.kill(3)
    job.settle()
    job.ranks[2].loop.lost = ""
    job.train()
    job.kill(3)
    job.settle()
    job.train()
    assert [each["inexact"] for each in job.reports()] == [
        ["rank 2: its buffers are those of rank 1"],
        [],
    ]


def test_later_answer_does_not_remove_a_reported_draw_in_the_tail() -> None:
    """When a rank reports that its loop draws random numbers in the tail, then a later answer
    without that remark does not remove the remark from the report."""
    job = trained()
    job.ranks[0].loop.inexact = ("the loop draws",)
    job.script.muted = {(1, "regroup")}
    job.kill(3)
    job.settle()
    job.ranks[0].loop.inexact = ()
    job.script.muted = set()
    job.repeat()
    job.settle()
    job.train()
    assert job.reports()[0]["inexact"] == ["ranks [0]: the loop draws"]


def test_draw_in_the_tail_is_not_reported_for_the_next_process_of_a_rank() -> None:
    """When the loop of a rank drew random numbers in its tails and the rank gets a new process,
    then the next report does not mention the draw."""
    job = trained()
    job.ranks[3].loop.inexact = ("the loop draws",)
    job.fault(0, "network")
    job.settle()
    job.train()
    job.kill(3)
    job.settle()
    job.train()
    assert [each["inexact"] for each in job.reports()] == [["ranks [3]: the loop draws"], []]


@pytest.mark.parametrize(("steps", "inexact"), [(0, []), (1, ["ranks [0, 2]: the loop draws"])])
def test_draw_in_the_tail_is_reported_only_after_the_first_step(
    steps: int, inexact: list[str]
) -> None:
    """When loops draw random numbers in their tails and a fault comes before the first step, then
    the report does not mention the draw. After the first step the report does."""
    job = trained(steps=steps) if steps else ScriptedJob(4, Policy(), strategies=STRATEGIES).start()
    for rank in (0, 2):
        job.ranks[rank].loop.inexact = ("the loop draws",)
    job.fault(1, "network")
    job.settle()
    job.train()
    assert job.reports()[0]["inexact"] == inexact


# --------------------------------------------------------------- the rule that finds the right copy


def copy_of(rank: int, **facts: Any) -> Copy:  # Any: the fields have different types
    """
    Return a rank's report of its copy of one shard at the end of step 7.

    `facts` replaces other fields. `parts` maps the parts of the shard to digests.
    """
    parts = facts.pop("parts", {"model": "a"})
    return Copy(rank=rank, shards={"dense": parts}, **{"step": 7, **facts})


def copies(*digests: str, brought: tuple[int, ...] = ()) -> dict[int, Copy]:
    """
    Return a copy of one shard for each digest, by rank. Each shard has a single part.

    The ranks in `brought` have received their copies from other ranks.
    """
    made = {rank: copy_of(rank, parts={"model": d}) for rank, d in enumerate(digests)}
    return made | {rank: replace(made[rank], brought=True) for rank in brought}


@pytest.mark.parametrize(
    ("digests", "right"),
    [
        ("aab", (0, 1)), ("aaab", (0, 1, 2)), ("aabc", (0, 1)), ("ab", ()), ("aabb", ()), ("abc", ()),
        ("aabbb", (2, 3, 4)),
    ],
)  # fmt: skip
def test_copy_is_right_when_at_least_two_ranks_and_the_most_ranks_hold_it(
    digests: str, right: tuple[int, ...]
) -> None:
    """When copies differ, then the copy that most ranks hold is right. At least two ranks must hold
    this copy, and no other copy may have as many holders."""
    (found,) = differences({"dense": tuple(range(5))}, copies(*digests))
    assert found.right == right
    assert sorted((*found.right, *found.wrong)) == list(range(len(digests)))


def test_fetched_copies_do_not_count_in_the_comparison() -> None:
    """When two ranks have fetched the same copy and a third rank holds its own different copy, then
    the third rank is right."""
    (found,) = differences({"dense": (0, 1, 2)}, copies("a", "b", "b", brought=(1, 2)))
    assert (found.right, found.wrong) == ((0,), (1, 2))


def test_part_that_one_rank_declares_its_own_is_not_compared() -> None:
    """When one rank says that a part is its own, then that part is not compared on any rank."""
    held = {
        rank: copy_of(rank, parts={"model": "a", "model.mean": mean})
        for rank, mean in enumerate(("", "b", "c"))
    }
    assert differences({"dense": (0, 1, 2)}, held) == []


def test_copies_of_different_steps_are_not_compared() -> None:
    """
    When ranks hold different steps, then their copies are not compared.
    """
    held = {rank: copy_of(rank, step=rank, parts={"model": str(rank)}) for rank in (0, 1)}
    assert differences({"dense": (0, 1)}, held) == []


def test_differences_are_listed_in_step_order() -> None:
    """When ranks hold copies of two steps and the copies of each step differ, then both differences
    are found, the earlier step first."""
    steps = {0: 9, 1: 9, 2: 7, 3: 7}
    held = {
        rank: copy_of(rank, step=step, parts={"model": str(rank)}) for rank, step in steps.items()
    }
    found = differences({"dense": (0, 1, 2, 3)}, held)
    assert [(each.step, each.wrong) for each in found] == [(7, (2, 3)), (9, (0, 1))]


def test_copy_from_the_tail_is_not_compared_with_copies_of_the_ended_step() -> None:
    """When two ranks that have ended the step differ, then the copy of a third rank from the tail
    does not decide between them and is not wrong."""
    held = copies("a", "b") | {2: copy_of(2, tail=True, parts={"model": "a"})}
    (found,) = differences({"dense": (0, 1, 2)}, held)
    assert (found.right, found.wrong, found.tail) == ((), (0, 1), False)


def test_differing_parts_are_named_in_alphabetical_order() -> None:
    """When several parts of a shard differ, then all differing parts are named in alphabetical
    order, and no other part is named."""
    same, odd = {"same": "x"}, [f"part-{letter}" for letter in "fbdace"]
    held = {rank: copy_of(rank, parts=same | dict.fromkeys(odd, str(rank))) for rank in (0, 1)}
    (found,) = differences({"dense": (0, 1)}, held)
    assert found.parts == tuple(sorted(odd))


def test_no_copy_is_right_when_all_were_fetched() -> None:
    """When every rank has fetched its copy and the copies differ, then no copy is right."""
    (found,) = differences({"dense": (0, 1)}, copies("a", "b", brought=(0, 1)))
    assert (found.right, found.wrong) == ((), (0, 1))


@pytest.mark.parametrize(
    ("lines", "right"),
    [
        (("train.py:57", "train.py:61"), 1),
        (("", "train.py:1"), 1),
        (("train.py", "train.py:1"), 1),
        (("train.py:57", "train.py:57"), 0),
        (("", ""), 0),
    ],
)
def test_copy_at_the_later_line_of_the_tail_is_right(lines: tuple[str, str], right: int) -> None:
    """When two ranks were cut off in the tail and differ, then the rank at the later line is right.
    An unknown line counts as the earliest; at equal lines the lower rank is right."""
    held = {
        rank: copy_of(rank, tail=True, line=line, parts={"model": str(rank)})
        for rank, line in enumerate(lines)
    }
    (found,) = differences({"dense": (0, 1)}, held)
    assert (found.right, found.wrong, found.tail) == ((right,), (1 - right,), True)


# ---------------------------------------------------------------- comparisons at a checkpoint


def not_checkpointed(job: ScriptedJob, step: int, *wrong: int) -> None:
    """
    Report that rank 0 found different copies when it tried to commit the checkpoint of `step`.

    `wrong` are the ranks whose copies differ.
    """
    job.report(
        CheckpointFailed(
            rank=0, incarnation=0, step=step, why="ranks hold different copies", differ=True, wrong=wrong, at=job.now
        )
    )  # fmt: skip


def test_wrong_copy_found_at_a_checkpoint_is_a_fault_of_its_rank() -> None:
    """When a checkpoint fails because one rank holds a different copy, then that rank has a fault
    and fetches from the others."""
    job = trained()
    job.ranks[1].state.content = "wrong"
    not_checkpointed(job, 3, 1)
    job.settle()
    job.train()
    assert fetched(job.orders(Fetch)) == [(1, 3, {0, 2, 3})]
    assert {f["rank"] for f in job.reports()[0]["faults"]} == {1}
    assert strategies(job) == ["retry"]


def test_differing_copies_at_a_checkpoint_are_a_fault_without_a_rank() -> None:
    """When a checkpoint fails because copies differ and the wrong rank is unknown, then the
    incident has a corruption fault without a rank. The comparison then finds the wrong copy."""
    job = trained()
    job.ranks[1].state.content = "wrong"
    not_checkpointed(job, 3)
    job.settle()
    job.train()
    kinds = [(fault["kind"], fault["rank"]) for fault in job.reports()[0]["faults"]]
    assert ("corruption", None) in kinds
    assert fetched(job.orders(Fetch)) == [(1, 3, {0, 2, 3})]


def test_checkpoint_difference_before_the_last_comparison_is_ignored() -> None:
    """When a checkpoint report says late that copies of an earlier step differed, and all copies
    were compared since, then the job stays healthy."""
    job = trained()
    job.train()
    job.fault(0, "network")
    job.settle()
    job.train()
    not_checkpointed(job, 3, 1)
    assert job.doing == "healthy"


def test_checkpoint_whose_copies_were_compared_is_loaded() -> None:
    """When two holders differ, then all ranks load the checkpoint whose copies were compared when
    it was made, not a later checkpoint without a comparison."""
    job = trained(groups=PAIRS, steps=4)
    job.report(
        Checkpointed(
            rank=0, incarnation=0, directory="/periodic/2", step=2, compared=True, at=job.now
        )
    )
    job.checkpointed(4)  # the copies of step 4 were not compared
    job.ranks[2].state.content = "wrong"
    job.fault(1, "network")
    job.settle()
    job.train()
    assert [(order.directory, order.step) for order in job.orders(Load)] == [("/periodic/2", 2)]
    assert strategies(job) == ["retry"]


def test_report_has_the_comparison_time_of_the_slowest_rank() -> None:
    """When ranks compute digests more than once in an incident, then the report has the largest
    total of one rank, without the time between."""
    incident = Incident(number=1, opened=0.0)
    incident.phases = [
        Phase(name="compare", rank=0, start=1.0, end=1.5),
        Phase(name="compare", rank=1, start=1.0, end=1.25),
        Phase(name="compare", rank=1, start=9.0, end=9.5),
    ]
    seconds = incident_report(incident, lambda fault: None)["seconds"]
    assert isinstance(seconds, dict)
    assert seconds["compare"] == 0.75


def test_source_that_could_not_give_its_copy_has_a_network_fault() -> None:
    """When a rank has fetched its state although one source could not send, then the report has a
    network fault of that source. No new round begins."""
    job = trained()
    job.ranks[1].state.odd = {2: "it sent no byte for 5 s"}
    job.fault(1, "memory")
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert [(f["kind"], f["rank"], f["step"]) for f in incident["faults"]] == [
        ("memory", 1, 4),
        ("network", 2, 4),
    ]
    assert (
        "rank 1 could not fetch from rank 2: it sent no byte for 5 s"
        in incident["faults"][1]["evidence"]
    )
    assert len(job.orders(Fetch)) == 1
    assert job.facts("source_left_out") == [{"rank": 2, "to": 1, "why": "it sent no byte for 5 s"}]


def test_comparison_time_is_separate_from_repair_time() -> None:
    """When a rank fetches for 2 s and compares during the last 0.5 s, then the incident has 1.5 s
    of repair and 0.5 s of comparison."""
    job = trained()
    job.script.muted = {(1, "fetch")}
    job.fault(1, "memory")
    job.settle()
    job.now += 10.0
    one, (fetch,) = job.ranks[1], job.orders(Fetch)
    one.obey(fetch, lambda rank: job.ranks[rank].sound_steps(), stuck=False)
    answer = one.answer(fetch, "fetch", None, found=("pass", ""), at=job.now)
    job.report(replace(answer, began=job.now - 2.0, compared=0.5))
    job.settle()
    job.train()
    (incident,) = job.machine.incidents
    at = answer.at
    spans = [(p.name, p.start, p.end) for p in incident.phases if p.rank == 1]
    assert ("repair", at - 2.0, at - 0.5) in spans
    assert ("compare", at - 0.5, at) in spans


def test_rank_with_a_restored_copy_is_a_source_after_a_dispute() -> None:
    """When the only two holders of a shard differ and restore their kept copies of an earlier step,
    and one of them is lost, then the other rank is the source for the new process."""
    job = trained(groups=PAIRS, keeps=2, steps=2)
    job.fault(3, "network")  # every incident compares all copies
    job.settle()
    job.train()
    job.ranks[2].state.content = "wrong"
    job.fault(1, "network")
    job.script.muted = {(1, "regroup")}
    while not job.orders(Restore):
        job.obey_next()
    job.ranks[2].state.content = "right"
    job.settle()
    assert [order.step for order in job.orders(Restore)] == [2]
    job.script.muted = set()
    job.kill(2)
    job.settle()
    job.train()
    assert fetched(job.orders(Fetch)) == [(2, 2, {0})]
    assert job.doing == "healthy"


# ---------------------------------------------------------------- the order `compare`


def test_comparison_has_the_time_limit_of_a_repair() -> None:
    """When the ranks are asked to compare their copies, then their deadline is the repair limit and
    not the limit to leave the loop."""
    job = trained()
    job.script.muted = {(rank, "compare") for rank in range(4)}
    job.fault(1, "network")
    job.settle()
    deadline = job.machine.next_deadline()
    assert deadline is not None
    assert deadline - job.now > job.policy.repair - 1
    assert [order.to for order in job.orders(Compare)] == [(0, 1, 2, 3)]


def test_copies_are_not_compared_when_no_shard_is_shared_or_the_step_is_unused() -> None:
    """When each shard has only one holder, or all ranks go back to a step before a polluted one,
    then no rank gets an order to compare."""
    job = trained(groups={str(rank): (rank,) for rank in range(4)})
    job.fault(1, "network")
    job.settle()
    assert job.orders(Compare) == []
    job = trained(keeps=1)
    job.fault(2, "numeric", polluted=True)
    job.settle()
    assert job.orders(Compare) == []


def test_only_ranks_that_share_a_shard_compare_in_rank_order() -> None:
    """When two of nine ranks share a shard, then only these two get the order to compare, in rank
    order."""
    own = {str(rank): (rank,) for rank in range(9) if rank not in (1, 8)}
    job = trained(world=9, groups={"shared": (8, 1), **own})
    job.fault(3, "network")
    job.settle()
    assert [order.to for order in job.orders(Compare)] == [(1, 8)]


def test_ranks_are_ordered_to_compare_together_with_the_stop() -> None:
    """When ranks are ordered to leave their loops, then they are ordered at once to compare, and to
    form groups. No strategy is chosen before all have left their loops and compared."""
    job = trained(world=3)
    job.script.muted = {(1, "stop"), (2, "compare")}
    job.fault(0, "network")
    job.settle()
    assert [order.to for order in job.orders(Compare)] == [(0, 1, 2)]
    assert job.machine.incident.tasks["compare"].waiting == {1, 2}
    assert [order.to for order in job.orders(Regroup)] == [(0, 1, 2)]
    assert job.doing == "clearing"


def test_limit_of_the_comparison_begins_when_all_ranks_have_left_their_loops() -> None:
    """When a rank leaves its loop late, for example because it evaluates, then all ranks have the
    whole limit to compare after that. Only then is a rank that does not compare ended."""
    job = trained(world=3, after=3600.0)
    job.ranks[0].loop.after = True
    job.script.muted = {(0, "stop"), (1, "compare")}
    job.kill(2)
    job.settle()
    job.let_pass(3000.0)
    assert job.orders(Kill) == []
    job.script.muted = {(1, "compare")}
    job.repeat()
    job.settle()
    assert job.machine.incident.tasks["compare"].waiting == {1}
    job.let_pass(job.machine._job.policy.repair - 1.0)
    assert job.orders(Kill) == []
    job.let_pass(1.5)
    assert [kill.rank for kill in job.orders(Kill)] == [1]


def test_rank_that_could_not_be_asked_at_the_stop_is_asked_after_it() -> None:
    """When the step that the ranks are to finish may not be used, then no rank digests its copies as
    soon as it has left its loop. Ranks that have an earlier step then are asked after that."""
    job = trained(groups=PAIRS, keeps=1)
    for rank in (0, 2):
        job.window(rank)
        job.close(rank)
    job.script.stuck = {1, 3}
    job.fault(0, "numeric", polluted=True)
    job.settle()
    orders = [order for order in job.said if isinstance(order, Stop | Compare)]
    assert [type(order) for order in orders] == [Stop, Compare]
    assert (orders[0].to, orders[1].to) == ((0, 1, 2, 3), (1, 3))
    assert job.orders(Rollback)[0].step == 3


def test_copy_fetched_from_the_only_remaining_holder_is_compared() -> None:
    """When only one holder of a shard is left, then it reports its digests too. A new process that
    has fetched a damaged copy from it fetches once more."""
    job = trained(groups=PAIRS)
    job.script.miscopied = {2: 1}
    job.kill(2)
    job.settle()
    job.train()
    assert {order.to for order in job.orders(Compare)} == {(0, 1, 3)}
    assert [order.to for order in job.orders(Fetch)] == [(2,), (2,)]
    assert {one.state.content for one in job.ranks.values()} == {"right"}


@pytest.mark.parametrize("tail", [True, False])
def test_suspect_copy_is_compared_before_it_is_used(tail: bool) -> None:
    """When the copies of a rank are in doubt but this rank is the only holder of a shard, then its
    copies are used. They are first compared with the copies of the other ranks."""
    groups = {"dense": (0, 1, 2), "own": (0,)}
    job = trained(world=3, groups=groups, enable=frozenset({"retry", "dump"}))
    job.ranks[0].state.content = "unlike"
    for one in job.ranks.values():
        one.loop.tail = one.loop.cut = tail
    job.fault(0, "numeric")
    job.settle()
    job.train()
    assert job.facts("doubt_dropped")
    assert {tell["shard"] for tell in job.facts("copies_differ")} >= {"dense"}
    # copies that differ because of their tails are no fault, and the majority is the source
    if tail:
        assert fetched(job.orders(Fetch)) == [(0, 3, {1, 2})]
        assert {one.state.content for one in job.ranks.values()} == {"right"}
    else:  # the memory of rank 0 is damaged, and no other rank holds the shard `own`
        assert job.over is not None
        assert job.over.result == "failed"


def test_rank_that_cannot_read_its_state_is_left_out_of_the_comparison() -> None:
    """When a rank cannot read its state, then the other ranks are compared without that rank."""
    job = trained()
    job.script.failures[2, "compare"] = ["the device is lost"]
    job.fault(1, "network")
    job.settle()
    job.train()
    assert strategies(job) == ["retry"]
    assert job.orders(Fetch) == []


def test_earlier_copy_of_the_tail_counts_when_the_later_rank_is_lost() -> None:
    """When two ranks differ in the tail and the rank at the later line is lost before it gives its
    copy, then the copy of the other rank counts."""
    job = trained(world=3)
    for rank, line in ((0, 57), (1, 61)):
        job.ranks[rank].loop.tail = job.ranks[rank].loop.cut = True
        job.ranks[rank].loop.line, job.ranks[rank].state.settings = f"train.py:{line}", f"at {line}"
    job.script.slow = {2}
    job.kill(2)
    job.settle()
    assert job.doing == "awaiting"
    job.kill(1)
    job.settle()
    job.arrive(2)
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert {one.state.settings for one in job.ranks.values()} == {"at 57"}


@pytest.mark.parametrize("spread", [False, True])
def test_last_checkpoint_is_written_from_copies_in_use(spread: bool) -> None:
    """When some ranks hold a step as their current state and a lower rank keeps only a backup of
    that step, then a rank with the current state writes it. Backups were not compared."""
    topology = Topology(groups={"dense": (0, 1, 2)})
    standings = {
        0: Standing(rank=0, held=7, sound=False, backups=(5,)),
        1: Standing(rank=1, held=5),
        2: Standing(rank=2, held=5),
    }
    assert savers(topology, standings, 5, None, spread=spread) == {1: ("dense",)}
    alone = {0: standings[0]}
    assert savers(topology, alone, 5, None, spread=spread) == {0: ("dense",)}


def test_unread_copy_does_not_count_as_compared() -> None:
    """When a rank cannot read its state for the comparison, then the report says that the copy was
    not compared. Its step does not count as compared."""
    job = trained()
    job.ranks[2].state.content = ""
    job.kill(1)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert incident["inexact"] == [
        "the copies of ranks [2] could not be read and were not compared"
    ]
    assert job.facts("copies_not_compared") == [
        {"ranks": [2], "step": 3, "why": incident["inexact"][0]}
    ]
    assert job.machine._job.training.equal.compared == 0


@pytest.mark.parametrize(
    ("unread", "steps", "news"),
    [(0, 1, False), (1, 1, False), (2, 1, True), (3, 1, True), (2, 0, False)],
)
def test_unread_copy_is_reported_only_when_another_rank_holds_the_shard(
    unread: int, steps: int, news: bool
) -> None:
    """When a rank cannot read its state, then this is reported only when another rank shares a
    shard. Before the first step, this is not reported, because initial states may differ."""
    groups = {"0": (0,), "1": (1,), "shared": (2, 3)}
    job = ScriptedJob(4, Policy(), strategies=STRATEGIES, groups=groups).start()
    job.train(steps)
    job.ranks[unread].state.content = ""
    job.fault(1, "network")
    job.settle()
    job.train()
    assert [told["ranks"] for told in job.facts("copies_not_compared")] == [[unread]] * news
    assert job.machine._job.training.equal.compared == (0 if news else steps)
