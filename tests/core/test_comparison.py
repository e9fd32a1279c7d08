"""
Copies that differ: who is at fault for it, and what everyone goes on from.
"""

import pytest

from tests.core.lives import strategies, trained
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
    setattr(job.ranks[1], what, "wrong")
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
    assert {one.content for one in job.ranks.values()} == {"right"}


def test_what_a_wrong_copy_has_given_to_all_reduces_is_not_exact() -> None:
    """
    When a copy is found to be wrong in a step after the last comparison, then the report says from which step on that
    rank may have given wrong numbers to all; there is nothing to say when they were compared at the end of that very step.
    """
    job = trained()
    job.kill(3)
    job.settle()
    job.train(2)
    job.ranks[1].content = "wrong"
    job.kill(3)
    job.settle()
    job.ranks[2].content = "wrong, too"
    job.kill(3)
    job.settle()
    job.train()
    assert [incident["inexact"] for incident in job.reports()] == [
        [],
        [
            "ranks [1] hold another copy of model of shard 'dense' at the end of step 5 than ranks [0, 2]; since when "
            "is not known: what ranks [1] have given to all-reduces in steps 4 to 5 may be in the state of all"
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
    job.ranks[1].content = "wrong"
    job.fault(2, "numeric", polluted=True)
    job.settle()
    job.train()
    assert [(order.to, order.step) for order in job.orders(Restore)] == [((0, 1, 2, 3), 2)]
    assert fetched(job.orders(Fetch)) == [(1, 2, {0, 2, 3})]
    assert [(f["kind"], f["rank"]) for f in job.reports()[0]["faults"]] == [
        ("numeric", 2),
        ("corruption", 1),
    ]


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
    job.ranks[2].content = "wrong"
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
    job.ranks[2].settings = "wrong"
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
    job.ranks[2].content = "wrong"
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
    job.slow = {2}
    job.start()
    for rank, one in job.ranks.items():
        one.content = f"of rank {rank}"
    job.failures[0, "regroup"] = ["no route to the store"]
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
    job.slow = {2}
    job.start()
    job.ranks[1].settings = "another learning rate"
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
    job.slow = {3}
    job.start()
    for rank in odd:
        job.ranks[rank].content = "of its own"
    job.arrive(3)
    job.ranks[3].content = "of its own" if 3 in odd else "right"
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
    job.slow = {2}
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
    job.slow = {2}
    job.start()
    job.ranks[1].settings = "another learning rate"
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
    job.ranks[2].content = "wrong"
    job.kill(3)
    job.settle()
    job.train()
    incidents = len(job.machine.incidents)
    not_checkpointed(job, 3, 2)
    job.settle()
    assert len(job.machine.incidents) == incidents
    assert job.doing == "healthy"


# ---------------------------------------------------------------- after a repair


def test_what_was_fetched_is_compared_too() -> None:
    """
    When what a rank has fetched is not what the others hold, then it fetches once more, and is given up when that
    does not help.
    """
    job = trained()
    job.miscopied = {3: 1}
    job.kill(3)
    job.settle()
    job.train()
    assert [order.to for order in job.orders(Fetch)] == [(3,), (3,)]
    assert {one.content for one in job.ranks.values()} == {"right"}
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
    job.ranks[0].content = "wrong"
    job.muted = {(1, "regroup")}
    job.settle()
    assert job.ranks[2].content == "wrong"
    job.muted = set()
    job.fault(1, "network")
    job.settle()
    assert job.over is not None
    assert job.over.result == "failed"
    assert [tell["right"] for tell in job.facts("copies_differ")] == [[]]


# ---------------------------------------------------------------- tails


def test_a_new_process_is_told_that_steps_end_behind_their_windows() -> None:
    """
    When the loops that are left say where their steps end, then whoever goes on after the incident is told so: a new
    process cannot know it in its first step.
    """
    job = trained()
    for one in job.ranks.values():
        one.tails = True
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
        job.ranks[rank].tail = job.ranks[rank].cut = True
        job.ranks[rank].settings = "of the tail"
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
        job.ranks[rank].tail = job.ranks[rank].cut = True
        job.ranks[rank].settings = "of the tail"
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
        job.ranks[rank].tail = job.ranks[rank].cut = True
        job.ranks[rank].settings = "of the tail"
    job.kill(3)
    while not job.orders(Rebuild):
        job.obey_next()
    job.kill(4)
    job.settle()
    job.train()
    assert job.facts("copies_differ") == []
    assert job.doing == "healthy"
    assert job.machine.members == {0, 1}
    assert {job.ranks[rank].settings for rank in (0, 1)} == {"right"}
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"], incident["inexact"]) == ("scale_in", 4, [])


def test_where_nobody_has_ended_the_step_the_report_says_so() -> None:
    """
    When all that are left were cut off in the tail, and they differ, then what most hold counts, nobody is at fault,
    and the incident is not exact: the report names the lines.
    """
    job = trained()
    for rank in (0, 1, 2):
        job.ranks[rank].tail = job.ranks[rank].cut = True
        job.ranks[rank].line = "train.py:57"
    job.ranks[1].settings, job.ranks[1].line = "of the tail", "train.py:61"
    job.kill(3)
    job.settle()
    job.train()
    assert sorted(fetched(job.orders(Fetch))) == [(1, 3, {0, 2}), (3, 3, {0, 2})]
    (incident,) = job.reports()
    assert [fault["kind"] for fault in incident["faults"]] == ["process"]
    assert incident["inexact"] == [
        "ranks [0, 2] were cut off in the tail of step 3 at train.py:57, and none is left that has ended it: what "
        "stands behind that line was not done for this step"
    ]
    assert [order.step for order in job.orders(Rollback)] == [3]


def test_a_last_checkpoint_of_a_tail_says_so_when_who_had_ended_the_step_cannot_write() -> None:
    """
    When the one rank that has ended the step cannot write, then what the others hold of its tail is saved, and the report
    names the line.
    """
    job = trained(enable=frozenset({"dump"}))
    for rank in (1, 2, 3):
        job.ranks[rank].tail = job.ranks[rank].cut = True
        job.ranks[rank].line = "train.py:57"
    job.failures[0, "save"] = ["the disk is full"]
    job.fault(3, "network")
    job.settle()
    assert job.over is not None
    assert job.over.result == "dumped"
    (incident,) = job.reports()
    assert incident["inexact"] == [
        "ranks [1, 2, 3] were cut off in the tail of step 3 at train.py:57, and none is left that has ended it: what "
        "stands behind that line was not done for this step"
    ]


def test_a_second_round_does_not_forget_what_the_first_has_cut_off() -> None:
    """
    When all that are left were cut off in the tail, and another rank is lost before the incident is over, then the
    report still says that the incident is not exact; what is computed again from an earlier step is exact.
    """
    job = trained(keeps=2)
    for rank in (0, 1, 2):
        job.ranks[rank].tail = job.ranks[rank].cut = True
        job.ranks[rank].line = "train.py:57"
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
        "ranks [0, 1, 2] were cut off in the tail of step 3 at train.py:57, and none is left that has ended it: what "
        "stands behind that line was not done for this step"
    ]


def test_a_tail_that_is_computed_again_is_exact() -> None:
    """
    When all that are left were cut off in the tail, and go back to an earlier step in a second round, then
    the report says nothing of that tail: it is computed again.
    """
    job = trained(keeps=2)
    for rank in (0, 1, 2):
        job.ranks[rank].tail = job.ranks[rank].cut = True
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
        job.ranks[rank].tail = job.ranks[rank].cut = True
        job.ranks[rank].line, job.ranks[rank].settings = f"train.py:{line}", f"at {line}"
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
        job.ranks[rank].tail = job.ranks[rank].cut = True
        job.ranks[rank].line = "train.py:57"
    job.kill(2)
    job.settle()
    assert job.doing == "resuming"
    job.fault(0, "network")
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert incident["inexact"] == [
        "ranks [0, 1] were cut off in the tail of step 3 at train.py:57, and none is left that has ended it: what "
        "stands behind that line was not done for this step"
    ]


def test_whose_copy_of_one_shard_is_outrun_still_gives_its_others() -> None:
    """
    When two are left in the tail that differ in the shard that both hold, then the one that came less far takes that from
    the other, and is still the one that gives the shard that nobody else has.
    """
    job = trained(world=3, groups={"dense": (0, 1, 2), "expert.0": (0, 2), "expert.1": (1,)})
    for rank, line in ((0, 57), (1, 61)):
        job.ranks[rank].tail = job.ranks[rank].cut = True
        job.ranks[rank].line, job.ranks[rank].settings = f"train.py:{line}", f"at {line}"
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
        job.ranks[rank].tail = job.ranks[rank].cut = True
        job.ranks[rank].line = "train.py:57"
    job.kill(3)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert incident["inexact"] == [
        "ranks [1] were cut off in the tail of step 3 at train.py:57, and none is left that has ended it of all that "
        "hold the same: what stands behind that line was not done for this step"
    ]


def test_an_incident_after_tails_that_draw_is_not_exact() -> None:
    """
    When the loops of some ranks draw random numbers in their tails, then the report says so, once for all of them.
    """
    job = trained()
    for rank in (0, 2):
        job.ranks[rank].inexact = ("the loop draws",)
    job.kill(3)
    job.settle()
    job.train()
    assert job.reports()[0]["inexact"] == ["ranks [0, 2]: the loop draws"]


# ---------------------------------------------------------------- the rule itself


def copies(*digests: str, tail: bool = False, brought: tuple[int, ...] = ()) -> dict[int, Copy]:
    """
    One for each rank, of one shard with one part.
    """
    return {
        rank: Copy(
            rank=rank,
            step=7,
            shards={"dense": {"model": digest}},
            tail=tail,
            brought=rank in brought,
        )
        for rank, digest in enumerate(digests)
    }


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
        rank: Copy(rank=rank, step=7, shards={"dense": {"model": "a", "model.mean": mean}})
        for rank, mean in enumerate(("", "b", "c"))
    }
    assert differences({"dense": (0, 1, 2)}, held) == []


def test_copies_of_different_steps_are_not_compared() -> None:
    """
    When ranks hold different steps, then their copies are not compared.
    """
    held = {
        rank: Copy(rank=rank, step=rank, shards={"dense": {"model": str(rank)}}) for rank in (0, 1)
    }
    assert differences({"dense": (0, 1)}, held) == []


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
    job.ranks[1].content = "wrong"
    not_checkpointed(job, 3, 1)
    job.settle()
    job.train()
    assert fetched(job.orders(Fetch)) == [(1, 3, {0, 2, 3})]
    assert {f["rank"] for f in job.reports()[0]["faults"]} == {1}
    assert strategies(job) == ["retry"]


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
    job.ranks[2].content = "wrong"
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
    job.ranks[1].odd = {2: "it sent no byte for 5 s"}
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


# ---------------------------------------------------------------- an order of its own


def test_a_comparison_has_the_time_of_a_repair() -> None:
    """
    When a state takes long to be read, then nobody is taken for one that hangs because of it: what ranks have to leave
    their loops is one limit, and what they have to say what they hold is another.
    """
    job = trained()
    job.muted = {(rank, "compare") for rank in range(4)}
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


def test_what_is_fetched_from_the_only_one_that_is_left_is_compared_with_it() -> None:
    """
    When one holder of a shard is left, then it says what it holds, and a copy that came damaged is fetched once more.
    """
    job = trained(groups=PAIRS)
    job.miscopied = {2: 1}
    job.kill(2)
    job.settle()
    job.train()
    assert {order.to for order in job.orders(Compare)} == {(0, 1, 3)}
    assert [order.to for order in job.orders(Fetch)] == [(2,), (2,)]
    assert {one.content for one in job.ranks.values()} == {"right"}


@pytest.mark.parametrize("tail", [True, False])
def test_copies_that_are_used_after_all_are_compared_first(tail: bool) -> None:
    """
    When the copies of a rank are in doubt, and it alone holds a shard, so that they are used after all, then they are
    compared with those of the others like any.
    """
    groups = {"dense": (0, 1, 2), "own": (0,)}
    job = trained(world=3, groups=groups, enable=frozenset({"retry", "dump"}))
    job.ranks[0].content = "unlike"
    for one in job.ranks.values():
        one.tail = one.cut = tail
    job.fault(0, "numeric")
    job.settle()
    job.train()
    assert job.facts("doubt_dropped")
    assert {tell["shard"] for tell in job.facts("copies_differ")} >= {"dense"}
    if tail:  # a difference of tails is no fault, and what most hold counts
        assert fetched(job.orders(Fetch)) == [(0, 3, {1, 2})]
        assert {one.content for one in job.ranks.values()} == {"right"}
    else:  # its memory is bad, and nobody else has its own shard
        assert job.over is not None
        assert job.over.result == "failed"


def test_a_rank_that_cannot_say_what_it_holds_is_compared_with_nobody() -> None:
    """
    When a rank cannot read its state, then the others are compared without it.
    """
    job = trained()
    job.failures[2, "compare"] = ["the device is lost"]
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
        job.ranks[rank].tail = job.ranks[rank].cut = True
        job.ranks[rank].line, job.ranks[rank].settings = f"train.py:{line}", f"at {line}"
    job.slow = {2}
    job.kill(2)
    job.settle()
    assert job.doing == "awaiting"
    job.kill(1)
    job.settle()
    job.arrive(2)
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert {one.settings for one in job.ranks.values()} == {"at 57"}


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
    job.ranks[2].content = ""
    job.kill(1)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert incident["inexact"] == [
        "the copies of ranks [2] could not be read, so they were compared with no others"
    ]
    assert job.facts("copies_not_compared")[0]["ranks"] == [2]
    assert job.machine._job.training.compared == 0
