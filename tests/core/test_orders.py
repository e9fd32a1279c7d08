"""
Orders: the ranks and incarnations that they name, and what the job does when an order fails.
"""

from dataclasses import replace

import pytest

from tests.core.lives import (
    names,
    strategies,
    trained,
    tried,
)
from tft.core.job.commands import (
    JobOver,
)
from tft.core.job.incident_report import (
    job_report,
    missed_report,
)
from tft.core.job.policy import (
    Policy,
)
from tft.core.job.training import UNFINISHED
from tft.protocol.messages import (
    CheckpointFailed,
    Fetch,
    Hold,
    Kill,
    Load,
    RankOrder,
    Rebuild,
    Regroup,
    Release,
    Resume,
    Rollback,
    Spawn,
    StoreOpened,
)
from tft.testing.scripted import (
    ScriptedJob,
)

# ---------------------------------------------------------------- ranks that an order names


def test_orders_name_ranks_in_order() -> None:
    """When only ranks 1 and 8 are left, then every order names them in this order."""
    others = (0, 2, 3, 4, 5, 6, 7)
    job = trained(9, placement={0: (1, 8), 1: others})
    job.lose_node(1)
    job.settle()
    job.train()
    assert strategies(job) == ["scale_in"]
    formed = [o for o in job.said if isinstance(o, Regroup | Rebuild | Rollback | Resume)]
    job.said.clear()
    job.pause("links")
    job.settle()
    job.train()
    paused = [order for order in job.said if isinstance(order, RankOrder)]
    assert names([*formed, *paused]) == [
        "Regroup", "Rebuild", "Rollback", "Resume", "Freeze", "Hold", "Check", "Release",
    ]  # fmt: skip
    assert {order.to for order in (*formed, *paused)} == {(1, 8)}


def test_job_without_a_leader_waits_for_nothing() -> None:
    """When a job is created and no event has come yet, then no order is open, there is no deadline,
    and the epoch is 0."""
    machine = ScriptedJob(2).machine
    assert (machine.epoch, machine.outstanding(), machine.next_deadline()) == (0, [], None)


# ---------------------------------------------------------------- failed orders


def test_rank_whose_rebuild_failed_fetches_its_state_again() -> None:
    """When a rank gets state in a rebuild and the rebuild fails, then that rank fetches its state
    again and is not a source for other ranks."""
    job = trained(promises=True)
    job.script.failures[1, "rebuild"] = ["its sender raised"]
    job.fault(1, "memory")
    job.settle()
    job.train()
    assert strategies(job) == ["retry"]
    fetches = job.orders(Fetch)
    assert [fetch.to for fetch in fetches] == [(1,), (1,)]
    sources = {s.rank for fetch in fetches for moved in fetch.transfers for s in moved.sources}
    assert 1 not in sources
    assert job.ranks[1].held == job.ranks[0].held


def test_pause_is_given_up_when_a_rank_cannot_hold() -> None:
    """When one rank cannot wait at the step boundary of a pause, then the pause is given up with
    that rank's reason, and all ranks continue."""
    job = trained()
    job.script.failures[2, "hold"] = ["it has left the loop"]
    job.pause()
    job.settle()
    job.train()
    assert job.facts("pause_given_up") == [{"why": "rank 2 could not hold: it has left the loop"}]
    assert len(job.orders(Hold)) == 1
    assert job.doing == "healthy"
    assert strategies(job) == []


def test_failed_release_of_a_rank_is_a_network_fault_without_a_rank() -> None:
    """When one rank cannot continue after a pause, then the job follows `retry`. The fault in the
    report has a step, a kind and the reason, but no rank, because the cause is unknown."""
    job = trained()
    job.script.failures[2, "release"] = ["a peer has closed the connection"]
    job.pause()
    job.settle()
    job.go_on()
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert [(f["kind"], f["rank"], f["step"]) for f in incident["faults"]] == [("network", None, 4)]
    assert incident["faults"][0]["evidence"] == (
        "rank 2 could not release: a peer has closed the connection"
    )
    assert strategies(job) == ["retry"]
    assert len(job.orders(Release)) == 1
    assert job.orders(Kill) == []
    assert job.doing == "healthy"


def test_older_checkpoint_is_loaded_when_the_newest_cannot_be_read() -> None:
    """When the ranks fail twice to load the newest checkpoint, then all ranks load the checkpoint
    before it."""
    job = trained(groups={f"s{rank}": (rank,) for rank in range(4)})
    job.checkpointed(1)
    job.checkpointed(2)
    job.script.failures = {(rank, "load"): ["a file is damaged"] * 2 for rank in range(4)}
    job.kill(0)
    job.settle()
    job.wait()
    job.settle()
    job.train()
    assert [(load.step, load.directory) for load in job.orders(Load)] == [
        (2, "/periodic/2"), (2, "/periodic/2"), (1, "/periodic/1"),
    ]  # fmt: skip
    assert strategies(job) == ["recover"]
    assert job.doing == "healthy"


RESUME = ("/run/checkpoints/step-00000005", 5)


def test_resume_checkpoint_is_loaded_at_the_third_try() -> None:
    """When all ranks of a resumed job fail twice to load the checkpoint, and succeed at the third
    try, then the job continues from it."""
    job = ScriptedJob(2, resume=RESUME)
    job.script.failures = {(rank, "load"): ["OSError: the disk is away"] * 2 for rank in range(2)}
    job.start()
    job.wait()
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert [load.step for load in job.orders(Load)] == [5, 5, 5]


def test_rank_that_cannot_load_the_checkpoint_fetches_it_from_another_rank() -> None:
    """When one rank cannot load the checkpoint of a resumed job, then it fetches the state from a
    rank that has loaded it."""
    job = ScriptedJob(2, resume=RESUME)
    job.script.failures[1, "load"] = ["a digest differs"] * 9
    job.start()
    job.wait()
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert len(job.orders(Load)) == 2
    assert [(fetch.to, fetch.step) for fetch in job.orders(Fetch)] == [((1,), 5)]


def test_job_fails_when_no_rank_can_load_the_resume_checkpoint() -> None:
    """When no rank can load the checkpoint of a resumed job, then the job fails, and the reason of
    one rank is reported."""
    job = ScriptedJob(2, resume=RESUME)
    job.script.failures = {(rank, "load"): ["a digest differs"] * 9 for rank in range(2)}
    job.start()
    job.wait()
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert "could not load the checkpoint: a digest differs" in job.over.why


def test_resumed_job_does_not_start_from_step_0_when_loading_fails() -> None:
    """When one rank of a resumed job cannot load the checkpoint and another rank is lost, then the
    job fails instead of starting from step 0."""
    job = ScriptedJob(2, policy=Policy(attempts=1), resume=RESUME)
    job.script.muted = {(1, "load")}
    job.script.failures[0, "load"] = ["a digest differs"]
    job.start()
    job.kill(1)
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert all(spawn.rank == 1 for spawn in job.orders(Spawn) if spawn.incarnation)


def test_report_gives_the_failed_load_as_the_reason_against_the_strategy() -> None:
    """When loading a checkpoint has failed in every attempt, then the report names the rank and its
    error as the reason why `recover` was not followed."""
    job = trained(groups={f"s{rank}": (rank,) for rank in range(4)}, attempts=1)
    job.checkpointed(2)
    job.script.failures[2, "load"] = ["a file is damaged"]
    job.kill(0)
    job.settle()
    (incident,) = job.machine.incidents
    assert (
        dict(incident.decision.tried)["recover"]
        == "rank 2 could not load the checkpoint: a file is damaged"
    )


def test_report_gives_the_failed_restore_as_the_reason_against_the_strategy() -> None:
    """When a rank cannot restore its kept copy in the last attempt, then the report names the rank
    and its error as the reason why `retry` was not followed."""
    job = trained(keeps=1, attempts=1, enable=frozenset({"retry", "dump"}))
    job.script.failures[1, "restore"] = ["its digest is another"]
    job.fault(2, "numeric", polluted=True)
    job.settle()
    assert tried(job)["retry"] == "rank 1 could not restore: its digest is another"


def test_finished_rank_does_not_count_as_hung() -> None:
    """When no rank makes progress, one rank has finished and one other rank does not wait for the
    others, then only the rank that has not finished counts as hung and is ended."""
    job = trained()
    job.finish(0)
    job.ranks[0].loop.waiting = job.ranks[2].loop.waiting = False
    job.stall()
    job.settle()
    job.train()
    assert [k.rank for k in job.orders(Kill)] == [2]
    assert job.doing == "healthy"


def test_job_ends_when_a_rank_fails_the_order_to_end() -> None:
    """When a rank reports that it could not carry out the order to end, then the job still ends
    after its process has left."""
    job = trained()
    job.script.failures[1, "end"] = ["a thread does not end"]
    job.stop()
    job.settle()
    assert job.facts("order_failed") == [
        {"rank": 1, "order": "end", "why": "a thread does not end"}
    ]
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("cancelled", 143)


def test_resume_checkpoint_is_loaded_again_after_a_fault_during_the_first_load() -> None:
    """When a resumed job has a fault before any rank has loaded the checkpoint, then the checkpoint
    is loaded again. The initial states of the script are not used."""
    job = ScriptedJob(4, resume=("/run/checkpoints/step-00000005", 5))
    job.script.muted = {(rank, "load") for rank in range(4)}
    job.lead(1)
    job.come(0)
    job.report(StoreOpened(node=0, host="h", port=1, at=job.now))
    job.settle()
    job.script.muted = set()
    job.fault(1, "network")
    job.settle()
    job.train()
    assert [load.step for load in job.orders(Load)] == [5, 5]
    assert [regroup.step for regroup in job.orders(Regroup)] == [6, 6]
    assert {rank.step for rank in job.ranks.values()} == {6}


def test_resumed_job_fails_when_all_processes_are_lost_and_loading_fails() -> None:
    """When all processes of a resumed job are lost and the checkpoint cannot be read, then the job
    fails. The initial states of the new processes are not used."""
    resume = ("/run/checkpoints/step-00000005", 5)
    job = ScriptedJob(2, policy=Policy(attempts=1), resume=resume).start()
    job.train(2)
    job.said.clear()
    job.script.failures[0, "load"] = ["a file is damaged"]
    job.script.muted = {(1, "load")}
    job.kill(0)
    job.kill(1)
    job.settle()
    assert job.orders(Fetch) == []
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)


def test_check_passes_when_a_rank_adds_a_remark() -> None:
    """When a rank passes a check and adds a remark, then the result of the check is `passed`."""
    job = trained()
    job.script.verdicts = {1: ("pass", "all links are fine")}
    job.pause("links")
    job.settle()
    assert job.machine.checked == "passed"


def test_rank_that_restored_its_own_copy_is_a_source_again() -> None:
    """When all ranks have restored their kept copies after a numeric fault of one rank, and another
    rank dies later, then the rank of the numeric fault can be the source of its state."""
    job = trained(keeps=1, groups={"a": (0, 1), "b": (2, 3)})
    job.fault(2, "numeric", polluted=True)
    job.settle()
    job.train()
    job.kill(3)
    job.settle()
    job.train()
    (fetch,) = job.orders(Fetch)
    assert fetch.step == 3
    assert [(t.shard, [s.rank for s in t.sources]) for t in fetch.transfers] == [("b", [2])]
    assert job.facts("doubt_dropped") == []
    assert strategies(job) == ["retry", "recover"]
    assert tried(job).keys() <= {"retry"}


@pytest.mark.parametrize(
    ("keep", "steps"), [(0, [3, 3, 2, 2, 1, 1]), (2, [3, 3, 2, 2]), (1, [3, 3])]
)
def test_removed_checkpoints_are_not_loaded(keep: int, steps: list[int]) -> None:
    """When the job keeps only a limited number of checkpoints, then older, removed checkpoints are
    not loaded. Without a limit all checkpoints are tried, the newest step first."""
    groups = {"own": (0,), "rest": (1, 2, 3)}
    job = trained(groups=groups, keep_checkpoints=keep, attempts=9, enable=frozenset({"recover"}))
    for step in (1, 3, 2):
        job.checkpointed(step)
    job.script.failures[0, "load"] = ["a digest differs"] * 20
    job.kill(0)
    job.settle()
    while job.over is None:
        job.wait()
        job.settle()
    assert [load.step for load in job.orders(Load)] == steps


def test_failed_periodic_checkpoints_are_reported_and_the_job_trains_on() -> None:
    """When ranks cannot write periodic checkpoints, then the log has each rank and reason once, and
    each checkpoint once. The report counts all failures. The job trains on."""
    job = trained()
    job.said.clear()
    for rank, step, why in ((1, 2, "full"), (1, 4, "full"), (2, 4, "full"), (1, 6, "a bug")):
        job.report(CheckpointFailed(rank=rank, incarnation=0, step=step, why=why, at=job.now))
    assert job.facts("checkpoint_failed") == [
        {"rank": 1, "step": 2, "why": "full"},
        {"rank": 2, "step": 4, "why": "full"},
        {"rank": 1, "step": 6, "why": "a bug"},
    ]
    assert [facts["step"] for facts in job.facts("checkpoint_missed")] == [2, 4, 6]
    assert missed_report(job.machine.missed) == [
        {"rank": 1, "why": "full", "step": 2, "times": 2},
        {"rank": 2, "why": "full", "step": 4, "times": 1},
        {"rank": 1, "why": "a bug", "step": 6, "times": 1},
    ]
    assert (job.said, job.doing) == ([], "healthy")
    outcome = JobOver(result="completed", code=0, why="")
    assert job_report(outcome, 3, [], missed_report(job.machine.missed))["missed"] == (
        missed_report(job.machine.missed)
    )


def test_checkpoints_that_ranks_did_not_finish_are_reported_when_a_later_one_is_complete() -> None:
    """When a periodic checkpoint was never completed, then the report lists its step once a later
    checkpoint is complete. If a rank reports why the checkpoint failed, then the step is counted
    once, with that reason. A checkpoint that is completed late is not counted."""
    job = trained(checkpoint_every=2)
    job.checkpointed(2)
    full = CheckpointFailed(rank=1, incarnation=0, step=4, why="full", at=job.now)
    job.report(full)
    job.checkpointed(10)
    late = {"rank": None, "why": UNFINISHED}
    assert job.facts("checkpoint_failed")[1:] == [{**late, "step": 6}]
    assert missed_report(job.machine.missed)[1:] == [{**late, "step": 6, "times": 2}]
    job.report(replace(full, step=6))
    assert missed_report(job.machine.missed) == [
        {"rank": 1, "why": "full", "step": 4, "times": 2},
        {**late, "step": 8, "times": 1},
    ]
    job.checkpointed(8)
    assert missed_report(job.machine.missed)[1:] == []
