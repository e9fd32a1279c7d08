"""
Checkpoints that the ranks keep themselves: when all ranks load one, and how the job continues.
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
"""Each rank holds a shard that no other rank has."""


def keeping(found: int = 2, **facts: Any) -> ScriptedJob:  # Any: as in `trained`
    """
    Return a job after three steps whose ranks keep a checkpoint of step `found` themselves.
    """
    return trained(**{"groups": OWN, "finds": dict.fromkeys(ALL, found), **facts})


def go_through(job: ScriptedJob) -> None:
    """
    Run the recovery, with all its waits between attempts, until the job resumes or ends.
    """
    while job.over is None and job.state is not State.RESUMING:
        job.wait()
        job.settle()


# ---------------------------------------------------------------- lost state


def test_ranks_load_their_own_checkpoints_when_the_only_copy_is_lost() -> None:
    """When the memory of the only holder of a shard fails and all ranks keep checkpoints of their
    own, then the ranks form process groups and load them. The report gives the number of lost
    steps."""
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


def test_rank_with_a_differing_checkpoint_is_replaced_after_two_attempts() -> None:
    """When a rank loads a checkpoint with another copy than the other ranks, then all ranks load
    once more. After the second failure, `recover` replaces the rank."""
    job = keeping(groups={"dense": ALL, **OWN}, attempts=2)
    job.ranks[1].state.content = "wrong"
    job.fault(2, "memory")
    go_through(job)
    job.train()
    assert strategies(job) == ["recover"]
    assert "after a repair ranks [1] hold another copy" in tried(job)["retry"]
    assert len(job.orders(Reload)) == 3


def test_no_rank_loads_its_own_checkpoint_before_the_groups_are_formed() -> None:
    """When one rank has not formed its process groups yet, then no rank is told to load, because a
    load may need the other ranks. The order to form groups names step 0, because the step is not
    known yet."""
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


def test_successor_of_the_only_holder_loads_its_own_checkpoint() -> None:
    """When the only holder of a shard dies, then its successor loads a checkpoint together with the
    other ranks."""
    job = keeping()
    job.kill(2)
    job.settle()
    job.train()
    assert [o.rank for o in job.orders(Spawn)] == [2]
    assert [o.to for o in job.orders(Reload)] == [ALL]
    assert strategies(job) == ["recover"]
    assert [incident["steps_lost"] for incident in job.reports()] == [1]


def test_ranks_load_an_earlier_own_checkpoint_after_a_polluted_fault() -> None:
    """When every copy in memory may be polluted and tft knows no earlier checkpoint, then all ranks
    load a checkpoint of their own from before the fault."""
    job = keeping(groups={})
    job.fault(2, "numeric", polluted=True)
    job.settle()
    job.train()
    assert [o.not_after for o in job.orders(Reload)] == [2]
    assert [o.step for o in job.orders(Rollback)] == [2]
    assert strategies(job) == ["retry"]


# ------------------------------------------------------- own checkpoints among the other strategies


def test_copy_in_memory_is_used_before_own_checkpoints() -> None:
    """When another sound copy of the state exists, then it is fetched, and no rank loads its own
    checkpoint."""
    job = keeping(groups={})
    job.fault(2, "memory")
    job.settle()
    assert [f.to for f in job.orders(Fetch)] == [(2,)]
    assert job.orders(Reload) == []


def test_job_checkpoint_is_loaded_before_own_checkpoints() -> None:
    """When a checkpoint written by tft exists, then it is loaded first. When it cannot be read and
    there is no other, then the ranks load their own checkpoints."""
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
def test_no_own_checkpoint_is_loaded_when_one_rank_keeps_none(without: int) -> None:
    """When one rank keeps no checkpoints of its own, then no rank loads its own checkpoint. The job
    ends with the reason for which it cannot continue."""
    job = keeping(finds={rank: 2 for rank in ALL if rank != without})
    job.fault(0, "memory")
    job.settle()
    assert job.orders(Reload) == []
    assert job.over is not None
    assert (job.over.code, tried(job)["retry"]) == (
        4, "no sound copy of shard 'part0' is left on ranks [0]",
    )  # fmt: skip


def test_shrunk_job_does_not_load_own_checkpoints() -> None:
    """When the job has shrunk, then its members do not load their own checkpoints, because these
    checkpoints need all ranks of the first size. The job ends."""
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


def test_faulty_rank_is_replaced_for_own_checkpoints_without_retry() -> None:
    """When `retry` is not enabled and no process is lost, then `recover` replaces the faulty rank,
    and all ranks load their own checkpoints. No rank leaves the job."""
    job = keeping(enable=frozenset({"recover", "scale_in", "migrate", "scale_out", "dump"}))
    job.fault(1, "memory")
    job.settle()
    job.train()
    assert [k.rank for k in job.orders(Kill)] == [1]
    assert strategies(job) == ["recover"]
    assert [o.to for o in job.orders(Reload)] == [ALL]


def test_last_checkpoint_is_preferred_to_own_checkpoints_of_unknown_step() -> None:
    """When a link fails repeatedly, and replacing its rank would lose the only copy of a shard,
    then a last checkpoint is written. No rank loads its own checkpoint."""
    job = keeping()
    for _ in range(2):
        job.fault(1, "network")
        job.settle()
    assert job.over is not None
    assert (job.over.result, job.orders(Reload), job.orders(Kill)) == ("dumped", [], [])
    assert tried(job)["recover"] == (
        "with ranks [1] replaced, no sound copy of shard 'part1' is left on ranks [1]"
    )


def test_loss_of_captured_state_alone_ends_in_a_last_checkpoint() -> None:
    """When all shards have a copy but the rank-local state of a lost rank is gone, then a last
    checkpoint is written. No rank loads its own checkpoint."""
    job = keeping(
        groups={}, derives=False, placement={0: (0, 1, 2), 1: (3,)}, spare={0: 1},
        enable=frozenset({"recover", "dump"}),
    )  # fmt: skip
    job.lose_node(1)
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.orders(Reload)) == ("dumped", [])


def test_replaced_process_without_captured_state_ends_in_a_last_checkpoint() -> None:
    """When a successor takes over a rank, the first process ends without its captured rank-local
    state and all shards have a copy, then a last checkpoint is written. No rank loads its own
    checkpoint."""
    job = keeping(
        groups={}, derives=False, placement={0: (0, 1, 2, 3), 1: ()}, spare={1: 1},
        enable=frozenset({"migrate", "retry", "recover", "dump"}),
    )  # fmt: skip
    take_over(job, local_state={})
    assert job.over is not None
    assert (job.over.result, job.orders(Reload)) == ("dumped", [])
    assert "the RNG and data position of rank 1" in tried(job)["retry"]


@pytest.mark.parametrize("why", ["not enabled", "no adaptor can"])
def test_ranks_load_own_checkpoints_when_no_last_checkpoint_is_possible(why: str) -> None:
    """When the rank-local state of a lost rank is gone and no last checkpoint can be written, then
    all ranks load their own checkpoints."""
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


def test_job_ends_when_scale_in_would_need_own_checkpoints() -> None:
    """When only `scale_in` and `dump` are enabled and no usable copy of a shard is left, then the
    job ends. The ranks do not load their own checkpoints, because these need all ranks."""
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


# ------------------------------------------------------------- checkpoints that do not fit together


def test_job_fails_when_the_ranks_find_checkpoints_of_different_steps() -> None:
    """When one rank finds a checkpoint of another step than the other ranks, then `retry` and
    `recover` fail with a message that names both steps. No rank resumes and no last checkpoint is
    written."""
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


def test_no_state_is_copied_when_the_ranks_find_different_steps() -> None:
    """When the ranks find checkpoints of different steps, then no rank copies state from another
    rank. A rank that copies would still lack its own rank-local state of that step."""
    job = keeping(groups={}, finds={0: 2, 1: 2, 2: 1, 3: 2})
    job.fault(2, "numeric", polluted=True)
    job.settle()
    assert job.over is not None
    assert [len(job.orders(kind)) for kind in (Fetch, Restore, Save)] == [0, 0, 0]


def test_own_checkpoint_from_after_a_polluted_fault_is_refused() -> None:
    """When the ranks find a checkpoint of a step whose numbers may be polluted, then `retry` fails
    with a message that says this."""
    job = keeping(3, groups={})
    job.fault(2, "numeric", polluted=True)
    job.settle()
    assert job.over is not None
    assert tried(job)["retry"] == (
        "the ranks have found a checkpoint of step 3, and all state after step 2 may be wrong"
    )
    assert job.orders(Rollback) == []


def test_own_checkpoint_beyond_the_reached_step_is_refused() -> None:
    """When the ranks find a checkpoint of a later step than any rank has reached, then it is
    refused as a checkpoint of another run."""
    job = keeping(40)
    job.fault(1, "memory")
    job.settle()
    assert job.over is not None
    assert tried(job)["retry"] == (
        "the ranks have found a checkpoint of step 40, and no rank had completed a step after 3: "
        "the checkpoint is not of this run"
    )


def test_own_checkpoint_beyond_the_known_step_is_used_when_all_ranks_are_lost() -> None:
    """When all ranks are lost with their node before they reported their last step, then they
    resume from the checkpoint that they find themselves."""
    job = keeping(3, placement={0: ALL, 1: ()}, spare={1: 4})
    job.lose_node(0)
    job.reopen_store(2)
    job.settle()
    job.train()
    assert [r.step for r in job.orders(Rollback)] == [3]
    assert strategies(job) == ["recover"]


def test_own_checkpoint_is_refused_before_the_first_step_is_complete() -> None:
    """When memory fails before a step is complete and the ranks find a checkpoint, then it is
    refused as a checkpoint of another run."""
    job = ScriptedJob(4, groups=OWN, finds=dict.fromkeys(ALL, 5)).start()
    job.fault(1, "memory")
    job.settle()
    assert job.over is not None
    assert "no rank had completed a step after 0" in tried(job)["retry"]


def test_own_checkpoint_of_the_last_complete_step_loses_no_step() -> None:
    """When the ranks find a checkpoint of the last step that all ranks completed, then no step is
    lost."""
    job = keeping(3)
    job.fault(1, "memory")
    job.settle()
    job.train()
    assert [(i["step"], i["steps_lost"]) for i in job.reports()] == [(4, 0)]


def test_own_checkpoint_of_a_step_finished_during_the_stop_is_used() -> None:
    """When the ranks finish a step during the stop, then their own checkpoint of that step is
    accepted, even at the second attempt to load it."""
    job = keeping(4)
    job.window(0)
    job.script.failures[3, "reload"] = ["the disk is away"]
    job.fault(1, "memory")
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"], incident["steps_lost"]) == ("retry", 5, 0)


def test_own_checkpoint_without_a_reported_step_is_refused() -> None:
    """When a rank loads its own checkpoint and does not report the step of this checkpoint, then
    the job ends with a reason that says this."""
    job = keeping(0, resume=("/old/7", 7))
    job.checkpointed(8)
    job.script.failures[0, "load"] = ["the disk is away"] * 9
    job.fault(1, "memory")
    job.settle()
    go_through(job)
    assert job.over is not None
    assert "rank 0 has not reported the step of the checkpoint that it has found" in job.over.why


def test_own_checkpoint_is_used_although_it_is_later_than_a_guessed_step() -> None:
    """When a fault occurs again and the step to return to is only a guess, then the checkpoint that
    the ranks find is used, even if it is later than the guess."""
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


def test_ranks_wait_for_a_starting_successor_before_they_load() -> None:
    """When a straggler with the only copy of a shard is lost while its successor starts, then all
    ranks wait for the successor. Then they load the checkpoints that they find themselves."""
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


def test_report_omits_a_cut_tail_after_own_checkpoints_are_loaded() -> None:
    """When the remaining ranks were cut off in the tail of a step and then load an earlier
    checkpoint, then the report does not mention this tail."""
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


# --------------------------------------------------------- further faults during and after the load


def test_failed_load_of_an_own_checkpoint_is_repeated_and_reported() -> None:
    """When a rank fails once to read its own checkpoint, then all ranks load again. When it fails
    every time, then the strategy fails, and the report gives the reason."""
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


def test_all_ranks_load_again_when_a_rank_dies_during_the_load() -> None:
    """When a rank dies after only some ranks have loaded their own checkpoints, then it is replaced
    and all ranks load again. The loaded state is not copied to other ranks."""
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


def test_rank_that_hangs_in_the_load_is_replaced() -> None:
    """When a rank does not answer the order to load its own checkpoint, then its process is ended
    at the time limit for repairs and replaced."""
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


def test_process_that_lost_its_device_during_the_load_is_replaced() -> None:
    """When a process is to load its own checkpoint and its device context is lost, then the process
    is ended and replaced."""
    job = keeping()
    job.ranks[3].context_lost = True
    job.fault(1, "memory")
    job.settle()
    job.train()
    assert [k.rank for k in job.orders(Kill)] == [3]
    assert strategies(job) == ["recover"]


def test_loaded_state_is_a_source_for_the_next_repair() -> None:
    """When the ranks have loaded their own checkpoints and trained on, then the next memory fault
    is repaired from copies of the new steps. No rank loads again."""
    job = keeping(1, groups={"own": (0,), "rest": (1, 2, 3)}, keeps=1)
    job.fault(0, "memory")
    job.settle()
    assert {rank.step for rank in job.ranks.values()} == {1}
    job.train(2)
    job.fault(3, "memory")
    job.settle()
    assert [(f.to, f.step) for f in job.orders(Fetch)] == [((3,), 3)]
    assert len(job.orders(Reload)) == 1


def test_later_job_checkpoint_is_removed_after_own_checkpoints_are_loaded() -> None:
    """When all ranks roll back to a checkpoint that they found themselves, then a checkpoint of a
    later step that tft has written is no longer used."""
    job = keeping(1, groups={})
    job.checkpointed(3)
    job.fault(2, "numeric", polluted=True)
    job.settle()
    job.train()
    assert [r.step for r in job.orders(Rollback)] == [1]
    assert job.machine._job.checkpoints.known == {}


# ---------------------------------------------------------------- strategies offered to plugins


def offered(job: ScriptedJob) -> dict[str, Offer]:
    """
    Return the offers about which the recovery plugins were asked last, by strategy.
    """
    return {offer.strategy: offer for offer in job.consulted[-1].offers}


def test_offer_to_plugins_says_that_the_step_is_not_known() -> None:
    """When the ranks would load their own checkpoints, then the offer to recovery plugins has no
    step. It says that training continues from a checkpoint that the ranks find themselves."""
    job = keeping(advised=True)
    job.fault(1, "memory")
    job.settle()
    offer = offered(job)["retry"]
    assert (offer.why_not, offer.step, offer.reload) == (None, None, True)
    assert offer.why == (
        "every process is kept; training goes on from a checkpoint that the ranks find themselves"
    )
    assert not offered(job)["dump"].reload


def test_plugin_may_replace_all_ranks_when_they_load_own_checkpoints() -> None:
    """When a plugin advises to replace all processes and all ranks load their own checkpoints, then
    the advice is followed, although no process with a copy in memory is left."""
    job = keeping(advised=True)
    job.fault(1, "memory")
    job.settle()
    job.advise(strategy="anew", base="retry", replace=ALL)
    job.settle()
    job.train()
    assert sorted(k.rank for k in job.orders(Kill)) == [0, 1, 2, 3]
    assert strategies(job) == ["anew"]
    assert {r.incarnation for r in job.ranks.values()} == {1}


def test_own_checkpoint_later_than_the_advised_step_is_refused() -> None:
    """When a plugin allows no step later than step 1, and the ranks find a checkpoint of a later
    step, then this checkpoint is not used."""
    job = keeping(advised=True)
    job.fault(1, "memory")
    job.settle()
    job.advise(strategy="further", base="retry", not_after=1)
    job.settle()
    assert job.orders(Rollback) == []
