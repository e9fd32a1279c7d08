"""
Orders that fail: who is to blame, what is tried then, and the sentence that says so.
"""

import pytest

from tests.core.lives import strategies, trained, tried
from tft.core.job.commands import JobOver
from tft.core.job.incident_report import job_report, missed_report
from tft.core.job.policy import Policy
from tft.protocol.messages import (
    CheckpointFailed,
    Fetch,
    Hold,
    Kill,
    Load,
    Regroup,
    Release,
    Spawn,
    StoreOpened,
)
from tft.testing.scripted import ScriptedJob


def test_a_rank_whose_state_has_not_come_in_a_rebuild_fetches_it_again() -> None:
    """
    When a rebuild fails on a rank whose state was to come in it, then that rank has no copy: it fetches again, and is
    nobody's source.
    """
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


def test_a_rank_that_cannot_hold_is_why_there_is_no_pause() -> None:
    """
    When one rank cannot come to the boundary, then the pause is given up with its words, and
    everyone goes on.
    """
    job = trained()
    job.script.failures[2, "hold"] = ["it has left the loop"]
    job.pause()
    job.settle()
    job.train()
    assert job.facts("pause_given_up") == [{"why": "rank 2 could not hold: it has left the loop"}]
    assert len(job.orders(Hold)) == 1
    assert job.doing == "healthy"
    assert strategies(job) == []


def test_a_rank_that_cannot_be_released_is_an_incident() -> None:
    """
    When one rank cannot go on after a pause, then groups are formed anew, and the report has the
    step, the kind and the words, and nobody's name: which of them is to blame is not known.
    """
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


def test_an_older_checkpoint_is_tried_where_one_cannot_be_read() -> None:
    """
    When ranks cannot load the newest checkpoint twice, then everyone loads the one before it.
    """
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


def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_read_again() -> None:
    """
    When no rank can load the checkpoint that a job begins with, and all can the third time, then the job
    begins with it.
    """
    job = ScriptedJob(2, resume=RESUME)
    job.script.failures = {(rank, "load"): ["OSError: the disk is away"] * 2 for rank in range(2)}
    job.start()
    job.wait()
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert [load.step for load in job.orders(Load)] == [5, 5, 5]


def test_who_cannot_read_the_checkpoint_takes_it_from_those_who_can() -> None:
    """
    When one rank cannot load the checkpoint that a job begins with, however often it is tried, then it
    is given the state by one that has loaded it.
    """
    job = ScriptedJob(2, resume=RESUME)
    job.script.failures[1, "load"] = ["a digest differs"] * 9
    job.start()
    job.wait()
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert len(job.orders(Load)) == 2
    assert [(fetch.to, fetch.step) for fetch in job.orders(Fetch)] == [((1,), 5)]


def test_a_checkpoint_that_nobody_can_read_ends_the_job_with_the_reason() -> None:
    """
    When no rank can load the checkpoint that a job begins with, then the job fails, and a rank and its
    reason are told.
    """
    job = ScriptedJob(2, resume=RESUME)
    job.script.failures = {(rank, "load"): ["a digest differs"] * 9 for rank in range(2)}
    job.start()
    job.wait()
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert "could not load the checkpoint: a digest differs" in job.over.why


def test_a_resumed_job_does_not_begin_anew_when_its_checkpoint_cannot_be_read() -> None:
    """
    When a rank cannot load the checkpoint that a job begins with, and another one is lost, then the job
    fails: it was not to begin from nothing.
    """
    job = ScriptedJob(2, policy=Policy(attempts=1), resume=RESUME)
    job.script.muted = {(1, "load")}
    job.script.failures[0, "load"] = ["a digest differs"]
    job.start()
    job.kill(1)
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert all(spawn.rank == 1 for spawn in job.orders(Spawn) if spawn.incarnation)


def test_what_a_rank_could_not_load_is_why_the_next_is_tried() -> None:
    """
    When loading has failed as often as is tried, then the report says why that strategy was
    passed over.
    """
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


def test_what_a_rank_could_not_take_back_is_why_the_next_is_tried() -> None:
    """
    When a rank cannot take back the copy it keeps, and that was the last attempt, then the report
    says so of the strategy.
    """
    job = trained(keeps=1, attempts=1, enable=frozenset({"retry", "dump"}))
    job.script.failures[1, "restore"] = ["its digest is another"]
    job.fault(2, "numeric", polluted=True)
    job.settle()
    assert tried(job)["retry"] == "rank 1 could not restore: its digest is another"


def test_who_has_finished_does_not_hang() -> None:
    """
    When nobody moves, one rank has finished and another does not wait for the others, then the
    latter is the one that hangs.
    """
    job = trained()
    job.finish(0)
    job.ranks[0].loop.waiting = job.ranks[2].loop.waiting = False
    job.stall()
    job.settle()
    job.train()
    assert [k.rank for k in job.orders(Kill)] == [2]
    assert job.doing == "healthy"


def test_a_rank_that_cannot_leave_does_not_keep_the_others() -> None:
    """
    When a rank answers that it could not end, then the job is over all the same when it has left.
    """
    job = trained()
    job.script.failures[1, "end"] = ["a thread does not end"]
    job.stop()
    job.settle()
    assert job.facts("order_failed") == [
        {"rank": 1, "order": "end", "why": "a thread does not end"}
    ]
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("cancelled", 143)


def test_what_a_script_begins_with_is_no_copy_of_what_the_checkpoint_holds() -> None:
    """
    When a job that was resumed breaks before anybody has loaded the checkpoint, then it is loaded
    all the same: everyone holds step 0, which is not where the job was.
    """
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


def test_a_new_process_of_a_resumed_job_has_nothing_to_go_on_from() -> None:
    """
    When all processes of a resumed job were lost and its checkpoint cannot be read, then the job
    fails: what the new processes begin with is no step of it.
    """
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


def test_a_check_that_passes_with_a_remark_has_passed() -> None:
    """
    When a rank passes and says something about it, then the check has passed.
    """
    job = trained()
    job.script.verdicts = {1: ("pass", "all links are fine")}
    job.pause("links")
    job.settle()
    assert job.machine.checked == "passed"


def test_a_rank_that_went_back_to_a_copy_of_its_own_is_a_source_again() -> None:
    """
    When bad numbers took everyone back to what each had kept, and a rank dies later, then it is
    given its state by the one whose numbers had been bad: what that has now is sound.
    """
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
def test_a_checkpoint_that_has_been_removed_is_not_gone_back_to(
    keep: int, steps: list[int]
) -> None:
    """
    When ranks keep no more than so many checkpoints, then those before, which they have removed, are
    not tried; without a limit all are, whatever the order in which they are heard of.
    """
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


def test_checkpoints_that_could_not_be_written_are_told_and_change_nothing() -> None:
    """
    When ranks cannot write their parts of periodic checkpoints, then that is told once for each reason,
    the report has them all, and the job trains on.
    """
    job = trained()
    job.said.clear()
    for rank, step, why in ((1, 2, "full"), (1, 4, "full"), (2, 4, "full"), (1, 6, "a bug")):
        job.report(CheckpointFailed(rank=rank, incarnation=0, step=step, why=why, at=job.now))
    assert job.facts("checkpoint_failed") == [
        {"rank": 1, "step": 2, "why": "full"},
        {"rank": 2, "step": 4, "why": "full"},
        {"rank": 1, "step": 6, "why": "a bug"},
    ]
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
