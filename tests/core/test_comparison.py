"""
Copies that differ: who is at fault for it, and what everyone goes on from.
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
    Who fetched which step from whom.
    """
    return [
        (order.to[0], order.step, {s.rank for t in order.transfers for s in t.sources})
        for order in orders
    ]


# ---------------------------------------------------------------- a minority


@pytest.mark.parametrize("what", ["content", "settings"])
def test_a_copy_unlike_the_others_is_a_fault_of_its_rank(what: str) -> None:
    """
    When a rank is lost, and of those that are left one holds another copy than the others, then that one fetches
    theirs and is named, and the new process fetches from the others alone.
    """
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
        f"ranks [1] hold another copy of {part} of shard 'dense' at the end of step 3 than ranks [0, 2]"
    )
    assert strategies(job) == ["recover"]
    assert {one.state.content for one in job.ranks.values()} == {"right"}


def test_what_a_wrong_copy_has_given_to_all_reduces_is_not_exact() -> None:
    """
    When a copy is found to be wrong in a step after the last comparison, then the report says from which step on that
    rank may have given wrong numbers to all; there is nothing to say when they were compared at the end of that very step.
    """
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


def test_equal_copies_are_no_news() -> None:
    """
    When all copies are equal, then nothing is said of them, and no rank fetches that has its own.
    """
    job = trained()
    job.kill(3)
    job.settle()
    job.train()
    assert [order.to for order in job.orders(Fetch)] == [(3,)]
    assert [tell.event for tell in job.tells if tell.event == "copies_differ"] == []
    assert job.reports()[0]["inexact"] == []


def test_copies_that_were_taken_back_are_compared() -> None:
    """
    When everyone takes back a copy of an earlier step, and that of one rank is not what the others have, then that
    rank is named, and fetches theirs.
    """
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


def test_a_wrong_copy_of_the_first_step_may_have_spread() -> None:
    """
    When a copy is found to be wrong at the end of step 1, then its rank is at fault, and the report says that step 1 may
    have spread its numbers.
    """
    job = trained(steps=1)
    job.ranks[1].state.content = "wrong"
    job.fault(0, "network")
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert ("corruption", 1, 2) in [(f["kind"], f["rank"], f["step"]) for f in incident["faults"]]
    (why,) = incident["inexact"]
    assert why.endswith("to all-reduces in steps 1 to 1 may be in the state of all ranks")


def test_ranks_with_wrong_copies_are_named_in_order() -> None:
    """
    When copies of two shards are wrong, each on another rank, then the faults are in the order of the ranks, not of the
    shards.
    """
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


def test_all_wrong_copies_of_a_rank_are_one_fault() -> None:
    """
    When a rank holds wrong copies of two shards, then it has one fault, whose evidence names both.
    """
    everyone = (0, 1, 2, 3)
    job = trained(groups={"first": everyone, "second": everyone})
    job.ranks[1].state.content = "wrong"
    job.fault(0, "network")
    job.settle()
    job.train()
    (fault,) = [f for f in job.reports()[0]["faults"] if f["kind"] == "corruption"]
    assert fault["evidence"] == "; ".join(
        f"ranks [1] hold another copy of model of shard '{shard}' at the end of step 3 than ranks [0, 2, 3]"
        for shard in ("first", "second")
    )


def test_a_rank_whose_copies_are_wrong_again_and_again_fails_too_often() -> None:
    """
    When a rank holds a wrong copy in one incident after another, then it counts as one that fails too often, though each
    incident began with another rank.
    """
    job = trained(flaps=1, enable=frozenset({"retry", "recover", "dump"}))
    for rank in (0, 2):
        job.ranks[1].state.content = "wrong"
        job.fault(rank, "network")
        job.settle()
        job.train()
    assert job.machine._job.flapping(1).startswith("rank 1 was the cause of 2 incidents")


def test_copies_are_compared_before_the_first_step_of_a_resumed_job() -> None:
    """
    When a job goes on from a checkpoint, and a fault comes while wrappers are built, then the copies that were loaded
    are compared like any other copies.
    """
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


# ---------------------------------------------------------------- nobody knows


def test_two_copies_that_differ_take_everyone_back_to_the_last_comparison() -> None:
    """
    When two holders are left whose copies differ, and there is a checkpoint that is not later than the last
    comparison, then all go back to that.
    """
    job = trained(groups=PAIRS, steps=2)
    job.fault(0, "network")  # an incident, in which all are compared
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


def test_two_copies_that_differ_end_a_job_without_anything_sound() -> None:
    """
    When two holders differ and nothing is left that is not later than the last comparison, then the job ends with a
    sentence, and no checkpoint is written of what may be wrong.
    """
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


def test_two_copies_that_differ_where_they_were_compared_last_are_not_used() -> None:
    """
    When two holders differ at the very step at which they were equal when they were compared last, then neither of
    them counts: all load the checkpoint of that step, and the incident ends.
    """
    job = trained(groups=PAIRS, steps=2)
    job.checkpointed(2)
    job.fault(0, "network")  # an incident, in which all are compared
    job.settle()
    job.ranks[2].state.content = "wrong"
    job.fault(1, "network")
    job.settle()
    job.train()
    assert [(order.directory, order.step) for order in job.orders(Load)] == [("/periodic/2", 2)]
    (incident,) = job.reports()
    assert ("corruption", None) in [(f["kind"], f["rank"]) for f in incident["faults"]]
    assert incident["step"] == 3


def test_states_that_nothing_was_trained_from_are_not_compared() -> None:
    """
    When ranks have to stop before wrappers were built, then nobody minds that they begin with different states: these
    are made equal then.
    """
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


def test_what_ranks_begin_with_is_compared_once() -> None:
    """
    When the wrappers are built, and a rank begins with another copy than the others, then it is told before the first
    step, and training begins.
    """
    job = ScriptedJob(3, Policy(), strategies=STRATEGIES)
    job.script.slow = {2}
    job.start()
    job.ranks[1].state.settings = "another learning rate"
    job.arrive(2)
    job.settle()
    job.train(2)
    assert [order.to for order in job.orders(Compare)] == [(0, 1, 2)]
    (told,) = job.facts("begins_unlike")
    assert told["why"] == (
        "ranks [1] hold another copy of description of shard 'dense' at the end of step 0 than ranks [0, 2]"
    )
    assert job.doing == "healthy"


@pytest.mark.parametrize("moment", [Compare, Rollback, Resume])
@pytest.mark.parametrize("odd", [(1,), (2, 3)])
def test_what_ranks_begin_with_is_no_fault(moment: type, odd: tuple[int, ...]) -> None:
    """
    When ranks begin with different copies, and a fault comes before the first step is done, then each goes on with its
    own, whichever most hold: rank 0 may be about to give its own to all.
    """
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


def test_a_fault_while_beginnings_are_compared_does_not_have_them_compared_twice() -> None:
    """
    When a fault comes while ranks say what they begin with, then they are asked once more, with the other questions of
    that incident, and not a second time in the same round: they would repeat their first answer.
    """
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


def test_what_a_resumed_job_begins_with_is_compared_too() -> None:
    """
    When a job goes on from a checkpoint, and a rank has other settings than the others, then that is told.
    """
    job = ScriptedJob(3, Policy(), strategies=STRATEGIES, resume=("/checkpoints/step-7", 7))
    job.script.slow = {2}
    job.start()
    job.ranks[1].state.settings = "another learning rate"
    job.arrive(2)
    job.settle()
    job.train()
    (told,) = job.facts("begins_unlike")
    assert "at the end of step 7" in str(told["why"])


def test_a_checkpoint_of_before_a_repair_is_no_fault_of_what_was_repaired() -> None:
    """
    When all have gone on from a step since, and it is told late that copies of that very step had differed, then that is
    no news: they were compared and repaired.
    """
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


def test_copies_in_dispute_are_one_fault_however_often_it_is_decided() -> None:
    """
    When two holders differ and nobody can say which is right, and another rank is lost before training goes on, then
    the difference is not reported once more.
    """
    job = trained(groups=PAIRS, steps=2)
    job.checkpointed(2)
    job.fault(0, "network")  # an incident, in which all are compared
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


# ---------------------------------------------------------------- after a repair


def test_what_was_fetched_is_compared_too() -> None:
    """
    When what a rank has fetched is not what the others hold, then it fetches once more, and is given up when that
    does not help.
    """
    job = trained()
    job.script.miscopied = {3: 1}
    job.kill(3)
    job.settle()
    job.train()
    assert [order.to for order in job.orders(Fetch)] == [(3,), (3,)]
    assert {one.state.content for one in job.ranks.values()} == {"right"}
    assert job.doing == "healthy"


def test_what_was_fetched_has_no_say_in_a_later_round() -> None:
    """
    When a rank has fetched what was wrong, and another fault comes before the copies are compared, then of the others
    each still speaks for itself alone: two of them that differ are not decided between by the copy of one.
    """
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


def test_what_comes_damaged_every_time_is_the_reason_against_the_strategy() -> None:
    """
    When what a rank fetches is damaged however often it fetches, then the strategy has failed, and the report says
    which copy was unlike the others after the repair.
    """
    job = trained()
    job.script.miscopied = {3: 99}
    job.kill(3)
    job.settle()
    while job.doing == "awaiting":
        job.wait()
        job.settle()
    assert tried(job)["recover"] == (
        "after a repair ranks [3] hold another copy of model of shard 'dense' at the end of step 3 than ranks [0, 1, 2]"
    )


REPLICAS = {rank: (rank // 2 * 2, rank // 2 * 2 + 1) for rank in range(6)}
"""Three model replicas of two ranks each."""
THIRDS = {"first": (0, 2, 4), "second": (1, 3, 5)}
SHRINKS = frozenset({"retry", "scale_in", "dump"})


def test_what_was_fetched_from_a_rank_that_leaves_is_compared_with_it() -> None:
    """
    When the only rank that has ended the step leaves with its replica, and what a member has fetched from it came
    damaged, then the member fetches once more.
    """
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


def test_damaged_copies_of_a_rank_that_is_lost_are_in_dispute() -> None:
    """
    When two members have fetched from a rank that leaves, one of the copies came damaged, and that rank ends before the
    copies are compared, then nobody can say which copy is right, and the report says so.
    """
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


def test_a_rank_that_has_left_is_not_held_to_what_the_members_hold() -> None:
    """
    When the members go back to the step that a rank holds which has left, and it holds another copy of it than most of
    them, then that is no difference, neither after the repair nor in the next round.
    """
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
    assert [f["kind"] for f in incident["faults"]] == [
        "numeric"
    ]  # a link that breaks later follows from it


# ---------------------------------------------------------------- tails


def test_what_was_fetched_from_a_tail_is_compared_too() -> None:
    """
    When all that are left were cut off in the tail, and what a new process fetches from them comes damaged, then it
    fetches once more.
    """
    job = trained()
    for rank in (0, 1, 2):
        job.ranks[rank].loop.tail = job.ranks[rank].loop.cut = True
    job.script.miscopied = {3: 1}
    job.kill(3)
    job.settle()
    job.train()
    assert [order.to for order in job.orders(Fetch)] == [(3,), (3,)]
    assert {one.state.content for one in job.ranks.values()} == {"right"}


def test_the_lines_of_a_tail_are_reported_with_their_ranks_in_order() -> None:
    """
    When ranks were cut off at different lines of the tail, and some do not know theirs, then the report has a sentence
    for each line, with its ranks in order.
    """
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


def test_the_tail_of_a_step_that_is_gone_back_behind_does_not_matter() -> None:
    """
    When all ranks were cut off in the tail of a step, and take back what they keep of the step before, then the report
    says nothing of any tail.
    """
    job = trained(keeps=2)
    for one in job.ranks.values():
        one.loop.tail = one.loop.cut = True
    job.fault(2, "numeric", polluted=True)
    job.settle()
    job.train()
    assert [order.step for order in job.orders(Restore)] == [2]
    assert job.reports()[0]["inexact"] == []


def test_a_checkpoint_of_the_step_has_the_end_of_its_tail() -> None:
    """
    When all that are left were cut off in the tail of a step, and then load a checkpoint of that step, then the report
    says nothing of the tail.
    """
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


def test_a_new_process_is_told_that_steps_end_behind_their_windows() -> None:
    """
    When the loops that are left say where their steps end, then whoever goes on after the incident is told so: a new
    process cannot know it in its first step.
    """
    job = trained()
    for one in job.ranks.values():
        one.loop.tails = True
    job.kill(3)
    job.settle()
    job.train()
    assert [order.tails for order in job.orders(Resume)] == [True]


def test_who_was_cut_off_in_its_tail_takes_what_others_have_that_ended_the_step() -> None:
    """
    When one rank has ended the step and two others were cut off in its tail, then these fetch from that one, and the
    new process does too; nothing is wrong with it.
    """
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


def test_those_left_behind_in_a_tail_do_not_outvote_who_has_ended_the_step() -> None:
    """
    When a column leaves whose ranks were cut off in the tail, and one member has ended the step, then what the others
    have fetched from that member is right, though more of those that are left behind hold something else.
    """
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
    assert incident["inexact"] == []


def test_what_was_fetched_from_who_had_ended_the_step_outlives_that_rank() -> None:
    """
    When members have fetched from the one rank that had ended the step, and that one is lost in the same incident, then
    what they hold counts, and not the copy of the tail that a rank holds which has left.
    """
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
    assert (incident["strategy"], incident["step"], incident["inexact"]) == ("scale_in", 4, [])


def test_where_nobody_has_ended_the_step_the_report_says_so() -> None:
    """
    When all that are left were cut off in the tail, and they differ, then what most hold counts, nobody is at fault,
    and the incident is not exact: the report names the lines.
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
        "ranks [0, 2] were cut off in the tail of step 3 at train.py:57, and no rank is left that has "
        "ended the step: the code after that line was not run for this step"
    ]
    assert [order.step for order in job.orders(Rollback)] == [3]


def test_a_last_checkpoint_of_a_tail_says_so_when_who_had_ended_the_step_cannot_write() -> None:
    """
    When the one rank that has ended the step cannot write, then what the others hold of its tail is saved, and the report
    names the line.
    """
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
        "ranks [1, 2, 3] were cut off in the tail of step 3 at train.py:57, and no rank is left that has "
        "ended the step: the code after that line was not run for this step"
    ]


def test_a_second_round_does_not_forget_what_the_first_has_cut_off() -> None:
    """
    When all that are left were cut off in the tail, and another rank is lost before the incident is over, then the
    report still says that the incident is not exact; what is computed again from an earlier step is exact.
    """
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
        "ranks [0, 1, 2] were cut off in the tail of step 3 at train.py:57, and no rank is left that has "
        "ended the step: the code after that line was not run for this step"
    ]


def test_a_tail_that_is_computed_again_is_exact() -> None:
    """
    When all that are left were cut off in the tail, and go back to an earlier step in a second round, then
    the report says nothing of that tail: it is computed again.
    """
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


def test_of_two_that_differ_in_their_tails_the_one_that_came_further_counts() -> None:
    """
    When two are left in the tail and differ, then the one that has come to the later line is the source.
    """
    job = trained(world=3)
    for rank, line in ((0, 57), (1, 61)):
        job.ranks[rank].loop.tail = job.ranks[rank].loop.cut = True
        job.ranks[rank].loop.line, job.ranks[rank].state.settings = f"train.py:{line}", f"at {line}"
    job.kill(2)
    job.settle()
    job.train()
    assert sorted(fetched(job.orders(Fetch))) == [(0, 3, {1}), (2, 3, {1})]
    assert job.orders(Kill) == []


def test_what_is_inexact_stays_so_when_a_fault_comes_before_success() -> None:
    """
    When all go on from what was held in a tail, and another fault comes before success, then nobody stands in that tail
    any more, and the report still says so.
    """
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
        "ranks [0, 1] were cut off in the tail of step 3 at train.py:57, and no rank is left that has "
        "ended the step: the code after that line was not run for this step"
    ]


def test_whose_copy_of_one_shard_is_outrun_still_gives_its_others() -> None:
    """
    When two are left in the tail that differ in the shard that both hold, then the one that came less far takes that from
    the other, and is still the one that gives the shard that nobody else has.
    """
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


def test_a_shard_that_nobody_has_to_the_end_of_the_step_is_inexact() -> None:
    """
    When a rank that was cut off in its tail fetches one shard from a rank that has ended the step, and nobody has ended
    it who holds its other shard, then the report says so.
    """
    job = trained(groups={"dense": (0, 1, 2, 3), **PAIRS})
    for rank in (1, 2):
        job.ranks[rank].loop.tail = job.ranks[rank].loop.cut = True
        job.ranks[rank].loop.line = "train.py:57"
    job.kill(3)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert incident["inexact"] == [
        "ranks [1] were cut off in the tail of step 3 at train.py:57, and no rank is left that "
        "has ended the step of all ranks that hold the same: the code after that line was not "
        "run for this step"
    ]


def test_an_incident_after_tails_that_draw_is_not_exact() -> None:
    """
    When the loops of some ranks draw random numbers in their tails, then the report says so, once for all of them.
    """
    job = trained()
    for rank in (0, 2):
        job.ranks[rank].loop.inexact = ("the loop draws",)
    job.kill(3)
    job.settle()
    job.train()
    assert job.reports()[0]["inexact"] == ["ranks [0, 2]: the loop draws"]


def test_what_a_loop_has_done_in_its_tails_stays_in_the_report() -> None:
    """
    When a rank says once in an incident that its loop draws random numbers in its tails, then a later answer without
    that does not take it back.
    """
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


def test_another_process_says_itself_what_its_loop_draws() -> None:
    """
    When the loop of a process drew random numbers in its tails, and the rank has another process since, whose loop says
    nothing of that, then the report does not say it of the rank any more.
    """
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
def test_only_a_step_that_was_done_has_a_tail(steps: int, inexact: list[str]) -> None:
    """
    When the loops of some ranks draw random numbers in their tails, and all begin again before the first step, then the
    report says nothing of that: there was no tail. After the first step it does.
    """
    job = trained(steps=steps) if steps else ScriptedJob(4, Policy(), strategies=STRATEGIES).start()
    for rank in (0, 2):
        job.ranks[rank].loop.inexact = ("the loop draws",)
    job.fault(1, "network")
    job.settle()
    job.train()
    assert job.reports()[0]["inexact"] == inexact


# ---------------------------------------------------------------- the rule itself


def copy_of(rank: int, **facts: Any) -> Copy:  # Any: fields, by name
    """
    A copy of one shard at the end of step 7, except for `facts`. `parts` maps its parts to digests.
    """
    parts = facts.pop("parts", {"model": "a"})
    return Copy(rank=rank, shards={"dense": parts}, **{"step": 7, **facts})


def copies(*digests: str, brought: tuple[int, ...] = ()) -> dict[int, Copy]:
    """
    One for each rank, of one shard with one part.
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
def test_most_count_where_they_are_more_than_any_others(
    digests: str, right: tuple[int, ...]
) -> None:
    """
    When copies differ, then those that most ranks hold are right: two at least, and more than hold any other.
    """
    (found,) = differences({"dense": tuple(range(5))}, copies(*digests))
    assert found.right == right
    assert sorted((*found.right, *found.wrong)) == list(range(len(digests)))


def test_what_was_brought_has_no_say() -> None:
    """
    When two ranks have fetched what the third does not hold, then the third is right.
    """
    (found,) = differences({"dense": (0, 1, 2)}, copies("a", "b", "b", brought=(1, 2)))
    assert (found.right, found.wrong) == ((0,), (1, 2))


def test_parts_that_each_rank_has_for_itself_are_not_compared() -> None:
    """
    When one rank says that a part is its own, then that part is compared on none of them.
    """
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


def test_differences_are_found_at_each_step_in_order() -> None:
    """
    When ranks hold two steps, and copies of both differ, then both differences are found, the earlier step first.
    """
    steps = {0: 9, 1: 9, 2: 7, 3: 7}
    held = {
        rank: copy_of(rank, step=step, parts={"model": str(rank)}) for rank, step in steps.items()
    }
    found = differences({"dense": (0, 1, 2, 3)}, held)
    assert [(each.step, each.wrong) for each in found] == [(7, (2, 3)), (9, (0, 1))]


def test_a_copy_of_the_tail_is_not_compared_with_copies_of_the_end() -> None:
    """
    When two ranks that have ended the step differ, then a third that was cut off in its tail says nothing about them,
    and is not called wrong.
    """
    held = copies("a", "b") | {2: copy_of(2, tail=True, parts={"model": "a"})}
    (found,) = differences({"dense": (0, 1, 2)}, held)
    assert (found.right, found.wrong, found.tail) == ((), (0, 1), False)


def test_the_parts_that_differ_are_named_in_order() -> None:
    """
    When several parts of a shard differ, then all of them are named, in the order of the alphabet, and no other part.
    """
    same, odd = {"same": "x"}, [f"part-{letter}" for letter in "fbdace"]
    held = {rank: copy_of(rank, parts=same | dict.fromkeys(odd, str(rank))) for rank in (0, 1)}
    (found,) = differences({"dense": (0, 1)}, held)
    assert found.parts == tuple(sorted(odd))


def test_copies_that_were_all_brought_prove_nothing() -> None:
    """
    When every rank has fetched its copy, and the copies differ, then none of them is right.
    """
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
def test_the_copy_that_came_furthest_in_the_tail_counts(lines: tuple[str, str], right: int) -> None:
    """
    When two ranks were cut off in the tail and differ, then the one at the later line is right. An unknown line comes
    before all others, and at one line the lower rank is right.
    """
    held = {
        rank: copy_of(rank, tail=True, line=line, parts={"model": str(rank)})
        for rank, line in enumerate(lines)
    }
    (found,) = differences({"dense": (0, 1)}, held)
    assert (found.right, found.wrong, found.tail) == ((right,), (1 - right,), True)


# ---------------------------------------------------------------- at a checkpoint


def not_checkpointed(job: ScriptedJob, step: int, *wrong: int) -> None:
    """
    Rank 0 has found, when it was to commit a checkpoint, that the copies differ.
    """
    job.report(
        CheckpointFailed(
            rank=0, incarnation=0, step=step, why="ranks hold different copies", differ=True, wrong=wrong, at=job.now
        )
    )  # fmt: skip


def test_copies_that_differ_at_a_checkpoint_are_a_fault() -> None:
    """
    When a checkpoint is not made because one rank holds another copy than the others, then that rank has a fault, and
    fetches theirs.
    """
    job = trained()
    job.ranks[1].state.content = "wrong"
    not_checkpointed(job, 3, 1)
    job.settle()
    job.train()
    assert fetched(job.orders(Fetch)) == [(1, 3, {0, 2, 3})]
    assert {f["rank"] for f in job.reports()[0]["faults"]} == {1}
    assert strategies(job) == ["retry"]


def test_copies_that_differ_at_a_checkpoint_are_a_fault_though_no_rank_is_named() -> None:
    """
    When a checkpoint is not made because the copies differ, and it is not known which of them are wrong, then the
    incident has a corruption fault of no rank, and all ranks leave their loops and are compared.
    """
    job = trained()
    job.ranks[1].state.content = "wrong"
    not_checkpointed(job, 3)
    job.settle()
    job.train()
    kinds = [(fault["kind"], fault["rank"]) for fault in job.reports()[0]["faults"]]
    assert ("corruption", None) in kinds
    assert fetched(job.orders(Fetch)) == [(1, 3, {0, 2, 3})]


def test_copies_that_were_compared_since_are_no_fault_any_more() -> None:
    """
    When all were brought to one state after the step of a checkpoint, and then it is found that their copies differed at
    that step, then nothing follows.
    """
    job = trained()
    job.train()
    job.fault(0, "network")
    job.settle()
    job.train()
    not_checkpointed(job, 3, 1)
    assert job.doing == "healthy"


def test_a_checkpoint_of_equal_copies_is_something_to_go_back_to() -> None:
    """
    When two holders differ, and the copies of a checkpoint were equal when it was made, then all go back to that.
    """
    job = trained(groups=PAIRS, steps=4)
    job.report(
        Checkpointed(
            rank=0, incarnation=0, directory="/periodic/2", step=2, compared=True, at=job.now
        )
    )
    job.checkpointed(4)  # these were not compared
    job.ranks[2].state.content = "wrong"
    job.fault(1, "network")
    job.settle()
    job.train()
    assert [(order.directory, order.step) for order in job.orders(Load)] == [("/periodic/2", 2)]
    assert strategies(job) == ["retry"]


def test_the_report_has_what_the_comparison_took_where_it_took_longest() -> None:
    """
    When ranks digest what they hold twice in an incident, then the report has the sum of the slowest of them, not what lay
    between.
    """
    incident = Incident(number=1, opened=0.0)
    incident.phases = [
        Phase(name="compare", rank=0, start=1.0, end=1.5),
        Phase(name="compare", rank=1, start=1.0, end=1.25),
        Phase(name="compare", rank=1, start=9.0, end=9.5),
    ]
    seconds = incident_report(incident, lambda fault: None)["seconds"]
    assert isinstance(seconds, dict)
    assert seconds["compare"] == 0.75


def test_a_source_that_was_left_out_of_a_transfer_is_a_fault() -> None:
    """
    When a rank has fetched what it needs, and one of its sources could not give, then the report has a fault of that one,
    beside the one it all began with, and nothing is begun anew.
    """
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


def test_the_time_of_a_comparison_is_no_part_of_the_order_that_ends_with_it() -> None:
    """
    When a rank fetches for two seconds, and compares what it has for the last half second of them, then the report has
    1.5 s of repair and half a second of comparison.
    """
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


def test_a_rank_that_has_taken_back_a_copy_is_a_source_although_its_later_copy_was_in_doubt() -> (
    None
):
    """
    When two holders differ and go back to the copies that they have kept, and one of them is lost then, then the other
    one is its source.
    """
    job = trained(groups=PAIRS, keeps=2, steps=2)
    job.fault(3, "network")  # an incident, in which all are compared
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


# ---------------------------------------------------------------- an order of its own


def test_a_comparison_has_the_time_of_a_repair() -> None:
    """
    When a state takes long to be read, then nobody is taken for one that hangs because of it: what ranks have to leave
    their loops is one limit, and what they have to say what they hold is another.
    """
    job = trained()
    job.script.muted = {(rank, "compare") for rank in range(4)}
    job.fault(1, "network")
    job.settle()
    deadline = job.machine.next_deadline()
    assert deadline is not None
    assert deadline - job.now > job.policy.repair - 1
    assert [order.to for order in job.orders(Compare)] == [(0, 1, 2, 3)]


def test_nobody_compares_what_nobody_else_is_to_hold() -> None:
    """
    When each shard belongs to one rank, or what is held is not to be used, then nobody is asked.
    """
    job = trained(groups={str(rank): (rank,) for rank in range(4)})
    job.fault(1, "network")
    job.settle()
    assert job.orders(Compare) == []
    job = trained(keeps=1)
    job.fault(2, "numeric", polluted=True)
    job.settle()
    assert job.orders(Compare) == []


def test_only_those_who_share_a_shard_are_asked_in_order() -> None:
    """
    When two of many ranks share a shard, then these two are asked what they hold, the lower one first.
    """
    own = {str(rank): (rank,) for rank in range(9) if rank not in (1, 8)}
    job = trained(world=9, groups={"shared": (8, 1), **own})
    job.fault(3, "network")
    job.settle()
    assert [order.to for order in job.orders(Compare)] == [(1, 8)]


def test_what_is_fetched_from_the_only_one_that_is_left_is_compared_with_it() -> None:
    """
    When one holder of a shard is left, then it says what it holds, and a copy that came damaged is fetched once more.
    """
    job = trained(groups=PAIRS)
    job.script.miscopied = {2: 1}
    job.kill(2)
    job.settle()
    job.train()
    assert {order.to for order in job.orders(Compare)} == {(0, 1, 3)}
    assert [order.to for order in job.orders(Fetch)] == [(2,), (2,)]
    assert {one.state.content for one in job.ranks.values()} == {"right"}


@pytest.mark.parametrize("tail", [True, False])
def test_copies_that_are_used_after_all_are_compared_first(tail: bool) -> None:
    """
    When the copies of a rank are in doubt, and it alone holds a shard, so that they are used after all, then they are
    compared with those of the others like any.
    """
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
    if tail:  # a difference of tails is no fault, and what most hold counts
        assert fetched(job.orders(Fetch)) == [(0, 3, {1, 2})]
        assert {one.state.content for one in job.ranks.values()} == {"right"}
    else:  # its memory is bad, and nobody else has its own shard
        assert job.over is not None
        assert job.over.result == "failed"


def test_a_rank_that_cannot_say_what_it_holds_is_compared_with_nobody() -> None:
    """
    When a rank cannot read its state, then the others are compared without it.
    """
    job = trained()
    job.script.failures[2, "compare"] = ["the device is lost"]
    job.fault(1, "network")
    job.settle()
    job.train()
    assert strategies(job) == ["retry"]
    assert job.orders(Fetch) == []


def test_who_had_come_further_in_the_tail_may_be_lost() -> None:
    """
    When the rank whose copy was to count is lost before it has given it, then that of the other one counts.
    """
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
def test_a_last_checkpoint_is_written_of_copies_that_were_compared(spread: bool) -> None:
    """
    When some hold a step in use, and a rank with a lower number keeps a copy of it only, then it is written by those who
    hold it in use: what is kept was compared with nobody.
    """
    topology = Topology(groups={"dense": (0, 1, 2)})
    standings = {
        0: Standing(rank=0, held=7, sound=False, backups=(5,)),
        1: Standing(rank=1, held=5),
        2: Standing(rank=2, held=5),
    }
    assert savers(topology, standings, 5, None, spread=spread) == {1: ("dense",)}
    alone = {0: standings[0]}
    assert savers(topology, alone, 5, None, spread=spread) == {0: ("dense",)}


def test_a_copy_that_cannot_be_read_is_not_taken_for_compared() -> None:
    """
    When a rank cannot read its state for the comparison, then the incident is not called exact, and
    its step does not count as compared.
    """
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
    assert job.machine._job.training.compared == 0


@pytest.mark.parametrize(
    ("unread", "steps", "news"),
    [(0, 1, False), (1, 1, False), (2, 1, True), (3, 1, True), (2, 0, False)],
)
def test_only_a_copy_that_others_hold_too_has_to_be_read(
    unread: int, steps: int, news: bool
) -> None:
    """
    When a rank cannot read its state, then that is reported where another rank holds a shard of it, and not where
    nobody does, nor before the first step: the initial states may differ.
    """
    groups = {"0": (0,), "1": (1,), "shared": (2, 3)}
    job = ScriptedJob(4, Policy(), strategies=STRATEGIES, groups=groups).start()
    job.train(steps)
    job.ranks[unread].state.content = ""
    job.fault(1, "network")
    job.settle()
    job.train()
    assert [told["ranks"] for told in job.facts("copies_not_compared")] == [[unread]] * news
    assert job.machine._job.training.compared == (0 if news else steps)
