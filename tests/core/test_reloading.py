"""
Checkpoints that the ranks keep themselves: when everyone loads one, and what becomes of it.
"""

from typing import Any

import pytest

from tests.core.lives import names, strategies, take_over, trained, tried
from tft.core.job.transitions import State
from tft.core.plan.offers import Offer
from tft.protocol.messages import (
    Fetch,
    Kill,
    Load,
    RankOrder,
    Regroup,
    Reload,
    Restore,
    Resume,
    Rollback,
    Save,
    Spawn,
)
from tft.testing.scripted import ScriptedJob

ALL = (0, 1, 2, 3)
OWN = {f"part{rank}": (rank,) for rank in ALL}
"""Each rank holds what no other has."""


def keeping(found: int = 2, **facts: Any) -> ScriptedJob:  # Any: those of `trained`
    """
    A job whose ranks keep a checkpoint of this step, after three steps.
    """
    return trained(**{"groups": OWN, "finds": dict.fromkeys(ALL, found), **facts})


def go_through(job: ScriptedJob) -> None:
    """
    Whatever is tried again after a while is.
    """
    while job.over is None and job.state is not State.RESUMING:
        job.wait()
        job.settle()


# ---------------------------------------------------------------- what is gone is found


def test_what_no_copy_is_left_of_is_found_by_the_ranks_themselves() -> None:
    """
    When the memory of the only holder of something fails, and all ranks keep checkpoints, then they form
    their groups, load what they find, and all go on from there: the steps since then are lost, and told.
    """
    job = keeping()
    job.fault(1, "memory")
    job.settle()
    assert names([o for o in job.said if isinstance(o, RankOrder)]) == [
        "Freeze", "Stop", "Regroup", "Reload", "Rebuild", "Rollback", "Resume",
    ]  # fmt: skip
    assert [(o.to, o.not_after) for o in job.orders(Reload)] == [(ALL, None)]
    assert [(r.to, r.step, r.derive) for r in job.orders(Rollback)] == [(ALL, 2, ())]
    assert [o.step for o in job.orders(Resume)] == [3]
    assert job.orders(Kill) == []
    job.train()
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"], incident["steps_lost"]) == ("retry", 3, 1)
    assert job.facts("checkpoint_found") == [{"incident": 1, "step": 2}]
    assert job.doing == "healthy"


def test_checkpoints_that_differ_are_not_searched_for_for_ever() -> None:
    """
    When what a rank finds is not what the others find, and it holds something that no other rank has, then all search
    once more, and then the rank gets another process.
    """
    job = keeping(groups={"dense": ALL, **OWN}, attempts=2)
    job.ranks[1].state.content = "wrong"
    job.fault(2, "memory")
    go_through(job)
    job.train()
    assert strategies(job) == ["recover"]
    assert "after a repair ranks [1] hold another copy" in tried(job)["retry"]
    assert len(job.orders(Reload)) == 3


def test_nobody_searches_before_the_groups_are_formed() -> None:
    """
    When one rank is not in the groups yet, then no rank is told to load: it may need the others for that.
    And nobody knows by then which step the groups are for.
    """
    job = keeping()
    job.script.muted = {(3, "regroup")}
    job.fault(1, "memory")
    job.settle()
    assert [o.step for o in job.orders(Regroup)] == [0]
    assert job.orders(Reload) == []
    job.script.muted = set()
    job.repeat()
    job.settle()
    assert [o.to for o in job.orders(Reload)] == [ALL]


def test_a_lost_process_is_replaced_and_finds_what_the_others_find() -> None:
    """
    When the only holder of something dies, then another process takes its place and loads with the others.
    """
    job = keeping()
    job.kill(2)
    job.settle()
    job.train()
    assert [o.rank for o in job.orders(Spawn)] == [2]
    assert [o.to for o in job.orders(Reload)] == [ALL]
    assert strategies(job) == ["recover"]
    assert [incident["steps_lost"] for incident in job.reports()] == [1]


def test_numbers_that_are_wrong_everywhere_are_left_for_what_was_kept_before() -> None:
    """
    When what is wrong may be in every copy there is, then everyone goes back to a checkpoint from before,
    where tft knows of none.
    """
    job = keeping(groups={})
    job.fault(2, "numeric", polluted=True)
    job.settle()
    job.train()
    assert [o.not_after for o in job.orders(Reload)] == [2]
    assert [o.step for o in job.orders(Rollback)] == [2]
    assert strategies(job) == ["retry"]


# ---------------------------------------------------------------- what comes first


def test_a_copy_is_nearer_than_what_the_ranks_keep() -> None:
    """
    When everything is held once more, then it is copied, and nobody searches.
    """
    job = keeping(groups={})
    job.fault(2, "memory")
    job.settle()
    assert [f.to for f in job.orders(Fetch)] == [(2,)]
    assert job.orders(Reload) == []


def test_a_checkpoint_that_is_known_comes_before_one_that_is_found() -> None:
    """
    When there is a checkpoint of the job, then that one is loaded, and nobody searches; when it cannot be
    read and there is no other, then the ranks search.
    """
    job = keeping()
    job.checkpointed(1)
    job.script.failures[0, "load"] = ["the disk is away"] * 3
    job.fault(1, "memory")
    job.settle()
    go_through(job)
    kinds = [type(o) for o in job.said if isinstance(o, Load | Reload)]
    assert kinds == [Load, Load, Reload]
    chosen = [fact["why"] for fact in job.facts("strategy_chosen")]
    known, found = "after step 1", "from a checkpoint that the ranks find themselves"
    assert chosen == [
        f"every process is kept; training goes on {how}" for how in (known, known, found)
    ]
    job.train()
    assert [incident["step"] for incident in job.reports()] == [3]


@pytest.mark.parametrize("without", [1, 3])
def test_where_one_rank_keeps_nothing_nobody_searches(without: int) -> None:
    """
    When one rank keeps no checkpoints, then the others' are no help: the job ends with the reason.
    """
    job = keeping(finds={rank: 2 for rank in ALL if rank != without})
    job.fault(0, "memory")
    job.settle()
    assert job.orders(Reload) == []
    assert job.over is not None
    assert (job.over.code, tried(job)["retry"]) == (
        4, "no sound copy of shard 'part0' is left on ranks [0]",
    )  # fmt: skip


def test_a_job_that_has_shrunk_does_not_load_what_is_of_all() -> None:
    """
    When not all ranks take part any more, then a checkpoint of all of them is not what the rest can go on
    from.
    """
    pairs = {"first": (0, 2), "second": (1, 3)}
    job = keeping(
        groups=pairs, placement={0: (0, 1), 1: (2, 3)}, columns={0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)},
    )  # fmt: skip
    job.lose_node(1)
    job.settle()
    job.train()
    assert strategies(job) == ["scale_in"]
    job.fault(0, "memory")
    job.settle()
    assert job.orders(Reload) == []
    assert job.over is not None


def test_nobody_leaves_for_the_sake_of_a_checkpoint() -> None:
    """
    When `retry` is not enabled and nobody has lost its process, then the rank that is at fault gets another
    one, and everyone loads; no strategy for which ranks leave or come does.
    """
    job = keeping(enable=frozenset({"recover", "scale_in", "migrate", "scale_out", "dump"}))
    job.fault(1, "memory")
    job.settle()
    job.train()
    assert [k.rank for k in job.orders(Kill)] == [1]
    assert strategies(job) == ["recover"]
    assert [o.to for o in job.orders(Reload)] == [ALL]


def test_nothing_that_can_be_saved_is_given_up_for_what_may_be_found() -> None:
    """
    When a link fails again and again, and to replace its rank would lose what only that one has, then the
    survivors save it: what they would find nobody knows.
    """
    job = keeping()
    for _ in range(2):
        job.fault(1, "network")
        job.settle()
    assert job.over is not None
    assert (job.over.result, job.orders(Reload), job.orders(Kill)) == ("dumped", [], [])
    assert tried(job)["recover"] == (
        "with ranks [1] replaced, no sound copy of shard 'part1' is left on ranks [1]"
    )


def test_what_only_a_lost_node_had_is_no_reason_to_search() -> None:
    """
    When the state is all there, but what was a lost rank's own is not, then it is saved as it is.
    """
    job = keeping(
        groups={}, derives=False, placement={0: (0, 1, 2), 1: (3,)}, spare={0: 1},
        enable=frozenset({"recover", "dump"}),
    )  # fmt: skip
    job.lose_node(1)
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.orders(Reload)) == ("dumped", [])


def test_what_a_process_takes_with_it_that_was_taken_over_from_is_no_reason_to_search() -> None:
    """
    When a process that another has taken over from ends without saying what was its own, then the state is
    all there, and it is saved.
    """
    job = keeping(
        groups={}, derives=False, placement={0: (0, 1, 2, 3), 1: ()}, spare={1: 1},
        enable=frozenset({"migrate", "retry", "recover", "dump"}),
    )  # fmt: skip
    take_over(job, private={})
    assert job.over is not None
    assert (job.over.result, job.orders(Reload)) == ("dumped", [])
    assert "the RNG and data position of rank 1" in tried(job)["retry"]


@pytest.mark.parametrize("why", ["not enabled", "no adaptor can"])
def test_what_cannot_be_saved_either_is_left_for_what_the_ranks_keep(why: str) -> None:
    """
    When the state is all there, but what was a lost rank's own is not, and no last checkpoint can be
    written, then everyone goes on from what the ranks find.
    """
    able = ["retry", "recover", *(["dump"] if why == "not enabled" else [])]
    enabled = ["recover", *(["dump"] if why == "no adaptor can" else [])]
    job = keeping(
        groups={}, derives=False, placement={0: (0, 1, 2), 1: (3,)}, spare={0: 1},
        enable=frozenset(enabled), strategies=tuple(able),
    )  # fmt: skip
    job.lose_node(1)
    job.settle()
    job.train()
    assert [o.to for o in job.orders(Reload)] == [ALL]
    assert [(r.step, r.derive) for r in job.orders(Rollback)] == [(2, ())]
    assert strategies(job) == ["recover"]


def test_those_who_stay_do_not_search_for_what_is_of_all() -> None:
    """
    When nothing but to go on with fewer ranks is enabled, and no copy is sound, then the job ends: what the
    ranks keep is of the whole world.
    """
    pairs = {"first": (0, 2), "second": (1, 3)}
    columns = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    job = keeping(
        groups=pairs, placement={0: (0, 1), 1: (2, 3)}, columns=columns,
        enable=frozenset({"scale_in", "dump"}),
    )  # fmt: skip
    job.fault(0, "numeric", polluted=True)
    job.lose_node(1)
    job.settle()
    assert job.over is not None
    assert (job.over.code, job.orders(Reload)) == (4, [])
    assert "no sound copy of shard 'first'" in tried(job)["scale_in"]


# ---------------------------------------------------------------- what does not fit


def test_ranks_that_find_different_steps_do_not_go_on_from_them() -> None:
    """
    When one rank finds another step than the rest, then that way has failed, with a sentence that names
    both, and so has the next; nobody trains on, and what was loaded is not saved as if it were one state.
    """
    job = keeping(finds={0: 2, 1: 2, 2: 1, 3: 2})
    job.fault(1, "memory")
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert tried(job)["retry"] == (
        "rank 2 has found a checkpoint of step 1, rank 0 one of step 2: the ranks cannot go on "
        "from different steps"
    )
    assert tried(job)["recover"] == tried(job)["retry"]
    assert [len(job.orders(kind)) for kind in (Reload, Rollback, Save)] == [1, 0, 0]


def test_ranks_that_find_different_steps_have_copies_of_none() -> None:
    """
    When those who find one step hold everything between them, then it is not pieced together from them:
    what is each rank's own at that step the others do not have.
    """
    job = keeping(groups={}, finds={0: 2, 1: 2, 2: 1, 3: 2})
    job.fault(2, "numeric", polluted=True)
    job.settle()
    assert job.over is not None
    assert [len(job.orders(kind)) for kind in (Fetch, Restore, Save)] == [0, 0, 0]


def test_what_is_found_too_late_to_be_sound_is_not_gone_on_from() -> None:
    """
    When what is found is from after the numbers went wrong, then the way has failed, and says so.
    """
    job = keeping(3, groups={})
    job.fault(2, "numeric", polluted=True)
    job.settle()
    assert job.over is not None
    assert tried(job)["retry"] == (
        "the ranks have found a checkpoint of step 3, and all state after step 2 may be wrong"
    )
    assert job.orders(Rollback) == []


def test_what_nobody_can_have_written_in_this_run_is_not_gone_on_from() -> None:
    """
    When what is found is further than any rank had come, then it was left there by another run.
    """
    job = keeping(40)
    job.fault(1, "memory")
    job.settle()
    assert job.over is not None
    assert tried(job)["retry"] == (
        "the ranks have found a checkpoint of step 40, and no rank had completed a step after 3: "
        "the checkpoint is not of this run"
    )


def test_where_nobody_is_left_to_say_how_far_they_were_what_is_found_counts() -> None:
    """
    When all ranks are lost with their node, and had come further than anybody has heard, then they go on from
    what they find.
    """
    job = keeping(3, placement={0: ALL, 1: ()}, spare={1: 4})
    job.lose_node(0)
    job.reopen_store(2)
    job.settle()
    job.train()
    assert [r.step for r in job.orders(Rollback)] == [3]
    assert strategies(job) == ["recover"]


def test_before_any_step_nothing_that_is_found_is_of_this_run() -> None:
    """
    When memory fails before a step is complete, then what is found was left there by another run.
    """
    job = ScriptedJob(4, groups=OWN, finds=dict.fromkeys(ALL, 5)).start()
    job.fault(1, "memory")
    job.settle()
    assert job.over is not None
    assert "no rank had completed a step after 0" in tried(job)["retry"]


def test_what_was_the_newest_step_of_all_may_be_what_is_found() -> None:
    """
    When the checkpoint is of the very step that everyone had completed, then nothing is lost.
    """
    job = keeping(3)
    job.fault(1, "memory")
    job.settle()
    job.train()
    assert [(i["step"], i["steps_lost"]) for i in job.reports()] == [(4, 0)]


def test_a_step_that_is_finished_on_the_way_out_is_one_that_was_reached() -> None:
    """
    When some have begun the update of a step and all finish it before they stop, then a checkpoint of that
    step is of this run, however often it is begun to load it.
    """
    job = keeping(4)
    job.window(0)
    job.script.failures[3, "reload"] = ["the disk is away"]
    job.fault(1, "memory")
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"], incident["steps_lost"]) == ("retry", 5, 0)


def test_a_rank_that_does_not_say_what_it_holds_has_found_nothing() -> None:
    """
    When a job that was resumed finds what it began with, then that is no step that anybody can go on from.
    """
    job = keeping(0, resume=("/old/7", 7))
    job.checkpointed(8)
    job.script.failures[0, "load"] = ["the disk is away"] * 9
    job.fault(1, "memory")
    job.settle()
    go_through(job)
    assert job.over is not None
    assert "rank 0 has not reported the step of the checkpoint that it has found" in job.over.why


def test_what_is_found_is_not_given_up_for_a_guess() -> None:
    """
    When a fault came back, and how far to go back is only guessed, then a checkpoint that the ranks find is gone on
    from, though it is later than the guess.
    """
    groups = {"own": (0,), "rest": (1, 2, 3)}
    job = keeping(3, groups=groups, keeps=1, strategies=("retry", "dump"))
    for _ in range(2):
        job.fault(2, "numeric")
        if job.machine.incident.spread.ceiling is not None:
            job.ranks[0].state.backups = ()
        job.settle()
    job.train()
    assert [order.not_after for order in job.orders(Reload)] == [2]
    assert [order.step for order in job.orders(Rollback)] == [3, 3]
    assert strategies(job) == ["retry"]


def test_a_successor_that_starts_will_find_what_its_rank_keeps() -> None:
    """
    When a straggler is lost that alone has a shard, and the process that follows it still starts, then all wait for it,
    and load what they find.
    """
    job = keeping(placement={0: (0, 1), 1: (2, 3), 2: ()}, spare={2: 1})
    job.script.slow = {3}
    job.notice(3, "straggler")
    job.settle()
    job.kill(3)
    job.settle()
    assert job.doing == "awaiting"
    job.arrive(3)
    job.settle()
    job.train()
    assert [order.to for order in job.orders(Reload)] == [ALL]
    assert strategies(job) == ["recover"]


def test_what_is_found_has_no_tail_that_was_cut_off() -> None:
    """
    When all that were left had been cut off in the tail of a step, and then all load an earlier checkpoint that they
    find, then the report says nothing of that tail.
    """
    job = keeping(groups={"first": (0, 2), "second": (1, 3)})
    for rank in (0, 1, 2):
        job.ranks[rank].loop.tail = job.ranks[rank].loop.cut = True
    job.kill(3)
    job.settle()
    assert len(job.machine.incident.exactness.sentences) == 1
    job.kill(1)
    job.kill(3)
    job.settle()
    job.train()
    assert len(job.orders(Reload)) == 1
    (incident,) = job.reports()
    assert (incident["step"], incident["inexact"]) == (3, [])


# ---------------------------------------------------------------- what goes wrong meanwhile


def test_a_rank_that_cannot_load_says_why_and_it_is_tried_again() -> None:
    """
    When a rank could not read its checkpoint, then everyone begins anew; when it never can, then the next
    strategy is tried, and the end says why.
    """
    job = keeping()
    job.script.failures[3, "reload"] = ["the disk is away"]
    job.fault(1, "memory")
    job.settle()
    job.train()
    assert strategies(job) == ["retry"]
    assert len(job.orders(Reload)) == 2
    job.script.failures[3, "reload"] = ["the disk is away"] * 6
    job.fault(1, "memory")
    job.settle()
    go_through(job)
    assert job.over is not None
    assert tried(job)["retry"] == "rank 3 could not load a checkpoint of its own: the disk is away"


def test_a_fault_in_the_middle_of_it_has_everyone_search_anew() -> None:
    """
    When a rank dies when some have loaded and others have not, then it is replaced, and all load again: what
    some have loaded by then is not copied to the others.
    """
    job = keeping(groups={})
    job.script.muted = {(1, "reload")}
    job.fault(2, "numeric", polluted=True)
    job.settle()
    assert job.doing == "repairing"
    job.script.muted = set()
    job.kill(1)
    job.settle()
    job.train()
    assert len(job.orders(Reload)) == 2
    assert job.orders(Fetch) == []
    assert strategies(job) == ["recover"]
    assert [r.step for r in job.orders(Rollback)] == [2]


def test_a_rank_that_hangs_in_it_is_ended_and_replaced() -> None:
    """
    When a rank never says that it has loaded, then its process is ended at the limit for repairs.
    """
    job = keeping()
    job.script.muted = {(1, "reload")}
    job.fault(0, "memory")
    job.settle()
    job.script.muted = set()
    job.ranks[1].hung = True
    job.wait()
    job.settle()
    job.train()
    assert [k.rank for k in job.orders(Kill)] == [1]
    assert strategies(job) == ["recover"]


def test_a_device_that_is_lost_in_it_costs_the_process() -> None:
    """
    When the device takes no more work from a process that is to load, then another one takes its place.
    """
    job = keeping()
    job.ranks[3].context_lost = True
    job.fault(1, "memory")
    job.settle()
    job.train()
    assert [k.rank for k in job.orders(Kill)] == [3]
    assert strategies(job) == ["recover"]


def test_what_was_loaded_is_as_good_as_any_state() -> None:
    """
    When everyone has trained on from what was found, then the next fault is repaired from copies, and those
    from before are not.
    """
    job = keeping(groups={}, keeps=2)
    job.fault(2, "numeric")
    job.settle()
    job.said.clear()
    job = keeping(1, groups={"own": (0,), "rest": (1, 2, 3)}, keeps=1)
    job.fault(0, "memory")
    job.settle()
    assert {rank.step for rank in job.ranks.values()} == {1}
    job.train(2)
    job.fault(3, "memory")
    job.settle()
    assert [(f.to, f.step) for f in job.orders(Fetch)] == [((3,), 3)]
    assert len(job.orders(Reload)) == 1


def test_a_later_checkpoint_of_the_job_is_given_up_with_the_steps_since() -> None:
    """
    When everyone goes back to what was found, then a checkpoint of the job that is later is of a way that
    nobody goes on.
    """
    job = keeping(1, groups={})
    job.checkpointed(3)
    job.fault(2, "numeric", polluted=True)
    job.settle()
    job.train()
    assert [r.step for r in job.orders(Rollback)] == [1]
    assert job.machine._job.checkpoints.known == {}


# ---------------------------------------------------------------- what is offered


def offered(job: ScriptedJob) -> dict[str, Offer]:
    """
    What the recovery plugins were asked about last.
    """
    return {offer.strategy: offer for offer in job.consulted[-1].offers}


def test_plugins_are_told_that_the_step_is_not_known() -> None:
    """
    When recovery plugins are asked, then they see that everyone would go on from what the ranks find.
    """
    job = keeping(advised=True)
    job.fault(1, "memory")
    job.settle()
    offer = offered(job)["retry"]
    assert (offer.why_not, offer.step, offer.reload) == (None, None, True)
    assert offer.why == (
        "every process is kept; training goes on from a checkpoint that the ranks find themselves"
    )
    assert not offered(job)["dump"].reload


def test_whoever_is_replaced_on_advice_may_be_anybody() -> None:
    """
    When a plugin has all processes replaced and everyone loads what is found, then nobody is left who holds
    anything, and that is no reason not to follow it.
    """
    job = keeping(advised=True)
    job.fault(1, "memory")
    job.settle()
    job.advise(strategy="anew", base="retry", replace=ALL)
    job.settle()
    job.train()
    assert sorted(k.rank for k in job.orders(Kill)) == [0, 1, 2, 3]
    assert strategies(job)[-1:] != []
    assert {r.incarnation for r in job.ranks.values()} == {1}


def test_advice_to_go_back_further_counts_for_what_is_found() -> None:
    """
    When a plugin wants nothing later than some step, then what is found later is not gone on from.
    """
    job = keeping(advised=True)
    job.fault(1, "memory")
    job.settle()
    job.advise(strategy="further", base="retry", not_after=1)
    job.settle()
    assert job.orders(Rollback) == []
