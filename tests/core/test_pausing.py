"""
Pauses: everyone goes on to one step boundary, stands there, and goes on.
"""

from typing import Any

import pytest

from tests.core.lives import names, strategies, trained
from tft.protocol.messages import (
    Check,
    Commit,
    FaultKind,
    Fetch,
    Freeze,
    Hold,
    Kill,
    Position,
    RankOrder,
    Release,
    Save,
    Spawn,
)
from tft.testing.scripted import ScriptedJob

ALL = (0, 1, 2, 3)


def paused(**facts: Any) -> ScriptedJob:  # Any: as in `trained`
    """
    A job that stands still after step 3.
    """
    job = trained(**facts)
    job.pause()
    job.settle()
    assert job.doing == "paused"
    return job


# ---------------------------------------------------------------- into it, and out of it


def test_a_pause_holds_everyone_at_the_furthest_boundary() -> None:
    """
    When one rank is already in the update of step 4, then everyone goes on to the end of step 4
    and stands there: asked once where they stand, told once how far to go.
    """
    job = trained()
    job.window(2)
    job.pause()
    assert job.doing == "pausing"
    job.settle()
    (freeze,) = job.orders(Freeze)
    (hold,) = job.orders(Hold)
    assert (freeze.to, freeze.cause) == (ALL, "a switch is replaced")
    assert (hold.to, hold.step) == (ALL, 4)
    assert (freeze.incident, freeze.round) == (hold.incident, hold.round) == (0, 1)
    assert names(job.said) == ["Freeze", "Hold"]
    assert {r.step for r in job.ranks.values()} == {4}
    assert job.facts("pausing") == [{"why": "a switch is replaced", "check": ""}]
    assert job.facts("paused") == [{"step": 4, "check": ""}]
    assert job.doing == "paused"


def test_a_rank_that_is_a_step_ahead_sets_the_boundary() -> None:
    """
    When one rank has completed step 4 and the others have not, then step 4 is the boundary, not
    the one after it.
    """
    job = trained()
    job.window(1)
    job.close(1)
    job.pause()
    job.settle()
    assert [h.step for h in job.orders(Hold)] == [4]
    assert {r.step for r in job.ranks.values()} == {4}


def test_nobody_trains_in_a_pause() -> None:
    """
    When the job is paused, then no rank completes another step.
    """
    job = paused()
    job.train(3)
    assert {r.step for r in job.ranks.values()} == {3}
    assert job.doing == "paused"


def test_a_resume_lets_everyone_go_on_and_the_job_is_healthy_after_a_step() -> None:
    """
    When a pause is ended, then everyone is released, nothing is formed or copied anew, and the
    job is healthy when all have done one more step. A pause is no incident.
    """
    job = paused()
    job.said.clear()
    job.go_on()
    (release,) = job.orders(Release)
    assert (release.to, release.incident, release.round) == (ALL, 0, 2)
    assert job.doing == "resuming"
    job.settle()
    job.window(0)
    job.close(0)
    assert job.doing == "resuming"
    job.settle()
    for rank in (1, 2, 3):
        job.window(rank)
        job.close(rank)
    assert job.doing == "healthy"
    assert names(job.said) == ["Release"]
    assert job.reports() == []
    assert job.machine.next_deadline() is None


def test_a_pause_that_is_called_off_before_everyone_stands_is_over() -> None:
    """
    When the end of a pause comes while somebody is still on the way to the boundary, then
    everyone is released from where they are.
    """
    job = trained()
    job.script.muted = {(2, "hold")}
    job.pause()
    job.settle()
    assert job.doing == "pausing"
    job.go_on()
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert names(job.said) == ["Freeze", "Hold", "Release"]
    assert job.reports() == []


def test_a_pause_is_over_by_itself() -> None:
    """
    When whoever paused the job is never heard of again, then it goes on after the limit.
    """
    job = paused(pause=50.0)
    began = job.now
    job.wait()
    assert job.now == pytest.approx(began + 50.0, abs=0.1)
    assert job.facts("pause_over") == [{"seconds": 50.0}]
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert job.orders(Release)


def test_a_pause_that_has_just_begun_is_not_over() -> None:
    """
    When time passes, but not the limit, then the job stands.
    """
    job = paused(pause=50.0)
    deadline = job.machine.next_deadline()
    assert deadline is not None
    job.now = deadline - 1.0
    job.lead(2)
    later = job.machine.next_deadline()
    assert later == job.now + 50.0
    assert job.doing == "paused"


def test_a_second_request_to_pause_changes_nothing() -> None:
    """
    When a pause is asked for twice, before and after everyone stands, then nobody is told more.
    """
    job = trained()
    job.pause()
    job.pause("links")
    job.settle()
    job.pause("links")
    job.settle()
    assert names(job.said) == ["Freeze", "Hold"]
    assert job.doing == "paused"


def test_a_resume_without_a_pause_changes_nothing() -> None:
    """
    When nobody has paused and somebody asks to go on, then nothing follows.
    """
    job = trained()
    job.go_on()
    assert job.said == []
    assert job.doing == "healthy"


def test_unanswered_holds_are_said_again_to_those_who_owe_them() -> None:
    """
    When a controller is started again while the job comes to a boundary, then whoever does not
    stand there is told again.
    """
    job = trained()
    job.script.muted = {(2, "hold")}
    job.pause()
    job.settle()
    job.lead(2)
    job.script.muted = set()
    (hold,) = job.machine.outstanding()
    assert isinstance(hold, Hold)
    assert (hold.to, hold.step, hold.epoch) == ((2,), 3, 2)
    job.repeat()
    job.settle()
    assert job.doing == "paused"


# ---------------------------------------------------------------- kept for later


@pytest.mark.parametrize("state", ["freezing", "awaiting", "repairing", "resuming"])
def test_a_pause_asked_for_during_an_incident_is_kept(state: str) -> None:
    """
    When a pause is asked for while an incident is dealt with, then the incident goes its way and
    the pause begins once the job is healthy.
    """
    job = trained()
    job.script.slow = {1}
    job.kill(1)
    while job.doing != state:
        if not job._queue:
            job.arrive(1)
        job._obey(job._queue.popleft())
    job.pause()
    assert job.doing == state
    job.settle()
    if job.script.slow:
        job.arrive(1)
        job.settle()
    assert job.doing == "resuming"
    assert job.orders(Hold) == []
    job.train()
    assert job.doing == "paused"
    assert [h.step for h in job.orders(Hold)] == [4]
    assert strategies(job) == ["recover"]


def test_a_pause_that_is_kept_can_be_called_off() -> None:
    """
    When the pause that was asked for in an incident is ended in the same incident, then the job
    just goes on.
    """
    job = trained()
    job.kill(1)
    job.pause()
    job.go_on()
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert job.orders(Hold) == []


def test_the_first_of_several_pauses_that_are_kept_counts() -> None:
    """
    When two pauses are asked for during an incident, then the first is carried out.
    """
    job = trained()
    job.kill(1)
    job.pause("links")
    job.pause()
    job.settle()
    job.train()
    assert [c.name for c in job.orders(Check)] == ["links"]


def test_a_pause_asked_for_before_the_start_comes_after_it() -> None:
    """
    When a job is paused while it starts, then it starts, and pauses.
    """
    job = ScriptedJob(2)
    job.lead(1)
    job.pause()
    job.start()
    assert job.doing == "resuming"
    job.train()
    assert job.doing == "paused"
    assert {r.step for r in job.ranks.values()} == {1}


# ---------------------------------------------------------------- checks


def test_a_check_that_everyone_passes_ends_the_pause() -> None:
    """
    When a check is asked for and finds nothing, then everyone goes on by itself.
    """
    job = trained()
    job.pause("links")
    job.settle()
    (check,) = job.orders(Check)
    assert (check.name, check.to) == ("links", ALL)
    assert names(job.said) == ["Freeze", "Hold", "Check", "Release"]
    assert job.machine.checked == "passed"
    assert job.facts("paused") == [{"step": 3, "check": "links"}]
    assert job.facts("checked") == [{"what": "passed"}]
    job.train()
    assert job.doing == "healthy"
    assert job.reports() == []


def test_a_paused_job_waits_for_every_verdict() -> None:
    """
    When one rank has not said what it found, then nobody goes on, and the limit of a pause
    without a check does not count.
    """
    job = trained(pause=1.0, check=70.0)
    job.script.muted = {(3, "check")}
    job.pause("links")
    job.settle()
    assert job.doing == "paused"
    assert job.orders(Release) == []
    deadline = job.machine.next_deadline()
    assert deadline is not None
    assert deadline > job.now + 60.0


def test_a_check_that_isolates_moves_the_ranks_of_that_node_to_one_with_room() -> None:
    """
    When the check finds one rank's node wanting, then all processes of that node are ended, new
    ones are started where there is room, and they copy the others' state at the boundary. The
    check has been run, and the pause is over.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3), 2: ()}, spare={2: 2})
    job.script.verdicts = {2: ("isolate", "a link drops packets")}
    job.pause("links")
    job.settle()
    finding = "the check found: a link drops packets (rank 2)"
    assert [(k.rank, k.node, k.last_words) for k in job.orders(Kill)] == [
        (2, 1, False), (3, 1, False),
    ]  # fmt: skip
    assert {k.cause for k in job.orders(Kill)} == {finding}
    assert [(s.rank, s.node, s.incarnation) for s in job.orders(Spawn)] == [(2, 2, 1), (3, 2, 1)]
    assert {f.to for f in job.orders(Fetch)} == {(2,), (3,)}
    assert {f.step for f in job.orders(Fetch)} == {3}
    job.train()
    assert len(job.orders(Check)) == 1
    assert job.machine.checked == "a link drops packets (rank 2)"
    (incident,) = job.reports()
    assert [(f["kind"], f["rank"], f["step"]) for f in incident["faults"]] == [
        ("node", 2, 4), ("node", 3, 4),
    ]  # fmt: skip
    assert all(finding in f["evidence"] for f in incident["faults"])
    assert (incident["strategy"], incident["steps_lost"]) == ("recover", 0)
    assert job.doing == "healthy"


def test_a_node_that_was_isolated_is_not_taken_back() -> None:
    """
    When the agent of an isolated node comes again, then nothing is started there.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3), 2: ()}, spare={2: 1})
    job.notice(2, "node", "its fan has failed")
    job.settle()
    before = len(job.said)
    job.come(1)
    job.settle()
    assert [o for o in job.said[before:] if isinstance(o, Spawn) and o.node == 1] == []


def test_a_check_that_isolates_without_a_place_to_go_ends_in_a_last_checkpoint() -> None:
    """
    When there is no room elsewhere and the job cannot shrink, then the others save.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3)}, enable=frozenset({"recover", "dump"}))
    job.script.verdicts = {3: ("isolate", "memory is worn out")}
    job.pause("memory")
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)
    assert job.orders(Spawn) == []
    saves = {s.to: s.shards for s in job.orders(Save)}
    assert saves == {(0,): ("dense",), (1,): ()}
    (incident,) = job.reports()
    assert incident["strategy"] == "dump"
    assert "node 1 is gone" in str(incident["tried"])


def test_a_node_that_alone_has_a_shard_saves_it_before_it_is_given_up() -> None:
    """
    When the check isolates the node that alone has a piece of the state, then it is not ended at
    once: it writes its part of a last checkpoint first.
    """
    groups = {"a": (0, 1), "b": (2, 3)}
    job = trained(placement={0: (0, 1), 1: (2, 3)}, groups=groups)
    job.script.verdicts = {2: ("isolate", "a link drops packets")}
    job.pause("links")
    job.settle()
    assert job.orders(Kill) == []
    assert {s.to: s.shards for s in job.orders(Save) if s.shards} == {(0,): ("a",), (2,): ("b",)}
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)
    assert "no rank outside node 1 has shard 'b'" in job.over.why
    assert "a last checkpoint of step 3 is written" in job.over.why


def test_a_check_that_ends_the_job_saves_first() -> None:
    """
    When the verdict of a check is to end the job, then a last checkpoint is written and the
    finding is the reason.
    """
    job = trained()
    job.script.verdicts = {
        1: ("end", "the model has diverged"),
        2: ("isolate", "a link drops packets"),
    }
    job.pause("model")
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)
    assert "the check ends the job: the model has diverged (rank 1)" in job.over.why
    assert job.machine.checked == ("the model has diverged (rank 1); a link drops packets (rank 2)")
    assert job.orders(Kill) == []
    assert len(job.orders(Commit)) == 1


def test_a_verdict_counts_though_nothing_is_said_for_it() -> None:
    """
    When a check ends the job and does not say why, then the job ends, and the rank is named.
    """
    job = trained()
    job.script.verdicts = {1: ("end", "")}
    job.pause("model")
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)
    assert "(rank 1)" in job.machine.checked


def test_a_check_that_cannot_be_run_keeps_nobody() -> None:
    """
    When a check raises on one rank, then that says nothing of the rank: the job goes on, and
    whoever asked reads why.
    """
    job = trained()
    job.script.failures[2, "check"] = ["no plugin offers a check named 'links'"]
    job.pause("links")
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert job.reports() == []
    assert job.machine.checked == (
        "it could not be run: no plugin offers a check named 'links' (rank 2)"
    )


def test_the_verdict_of_an_earlier_check_does_not_count_again() -> None:
    """
    When a check could not be run and the next one passes, then the next one has passed.
    """
    job = trained()
    job.script.failures[2, "check"] = ["it broke"]
    for _ in range(2):
        job.pause("links")
        job.settle()
        job.train()
    assert job.machine.checked == "passed"


def test_a_pause_without_a_check_says_nothing_of_an_earlier_one() -> None:
    """
    When a check has passed, and then somebody pauses without one, then nothing was checked.
    """
    job = trained()
    job.pause("links")
    job.settle()
    job.train()
    assert job.machine.checked == "passed"
    job.pause()
    job.settle()
    assert (job.doing, job.machine.checked) == ("paused", "")


def test_a_rank_that_never_says_what_it_found_hangs() -> None:
    """
    When a check does not come back in time, then the rank in which it hangs is ended and
    replaced, and the others are kept.
    """
    job = trained(check=30.0)
    job.script.muted = {(3, "check")}
    job.pause("links")
    job.settle()
    job.wait()
    assert [(k.rank, k.last_words, k.cause) for k in job.orders(Kill)] == [
        (3, True, "no answer to check in time")
    ]
    job.script.muted = set()
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert [(f["kind"], f["rank"]) for f in incident["faults"]] == [("hang", 3)]


# ---------------------------------------------------------------- faults on the way


@pytest.mark.parametrize("kind", ["process", "memory", "network", "software"])
@pytest.mark.parametrize("state", ["pausing", "paused"])
def test_a_fault_in_a_pause_is_an_incident_like_any_other(state: str, kind: FaultKind) -> None:
    """
    When something breaks while everyone comes to a boundary, or stands there, then it is dealt
    with; after that, the pause that was asked for begins.
    """
    job = trained()
    job.script.muted = {(3, "hold")} if state == "pausing" else set()
    job.pause()
    job.settle()
    assert job.doing == state
    job.script.muted = set()
    if kind == "process":
        job.kill(1)
    else:
        job.fault(1, kind)
    job.settle()
    if kind == "software":
        assert job.over is not None
        assert (job.over.result, job.over.code) == ("dumped", 3)
        return
    job.train()
    assert strategies(job) == ["recover" if kind == "process" else "retry"]
    assert [i.progress.step for i in job.machine.incidents] == [4]
    assert job.doing == "paused"
    assert job.orders(Hold)[-1].step == 4
    job.go_on()
    job.settle()
    job.train()
    assert job.doing == "healthy"


def test_a_rank_that_cannot_say_where_it_stands_hangs() -> None:
    """
    When a rank does not answer at the beginning of a pause, then it is the one that hangs.
    """
    job = trained()
    job.ranks[2].hung = True
    job.pause()
    job.settle()
    job.wait()
    job.settle()
    assert [(k.rank, k.cause) for k in job.orders(Kill)] == [(2, "no answer to freeze in time")]
    job.train()
    assert strategies(job) == ["recover"]
    assert job.doing == "paused"


def test_a_rank_that_cannot_be_held_back_is_ended_before_anyone_is_told_where_to_stand() -> None:
    """
    When a rank answers at the beginning of a pause that it cannot freeze, then it is ended, and the
    others hear of no boundary that it would not come to: the pause begins when it was replaced.
    """
    job = trained()
    job.script.failures[1, "freeze"] = ["its lock is broken"]
    job.pause()
    job.settle()
    assert [(k.rank, k.cause) for k in job.orders(Kill)] == [
        (1, "could not freeze: its lock is broken")
    ]
    assert job.orders(Hold) == []
    job.train()
    assert strategies(job) == ["recover"]
    assert [hold.step for hold in job.orders(Hold)] == [4]
    assert job.doing == "paused"


def test_nobody_moving_while_a_boundary_is_awaited_is_a_hang() -> None:
    """
    When the watch says that nobody moves while everyone should come to the boundary, then the
    rank that does not wait for others is ended, and the job pauses after that.
    """
    job = trained()
    job.script.muted = {(r, "hold") for r in range(4)}
    job.ranks[1].loop.waiting = False
    job.pause()
    job.settle()
    job.stall()
    assert job.doing == "freezing"
    assert job.orders(Freeze)[-1].cause == (
        "no rank has moved for 5.0 s; the job's own step times allow 3.0 s"
    )
    job.settle()
    assert [(k.rank, k.last_words) for k in job.orders(Kill)] == [(1, True)]
    job.script.muted = set()
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert [(f["kind"], f["rank"]) for f in incident["faults"]] == [("hang", 1)]
    assert job.doing == "paused"


def test_a_boundary_that_is_not_reached_in_time_is_given_up() -> None:
    """
    When the limit for coming to the boundary passes, then there is no pause: everyone goes on, the
    reason is told, and nobody is ended or loses a step for it. A real hang is noticed as one.
    """
    job = trained(hold=20.0)
    job.window(0)
    job.close(0)
    job.script.stuck = {3}
    job.pause()
    job.settle()
    assert job.doing == "pausing"
    job.wait()
    assert job.facts("order_overdue") == [{"order": "hold", "ranks": [3]}]
    assert job.facts("pause_given_up") == [{"why": "ranks [3]: no answer to hold in time"}]
    job.script.stuck = set()
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert job.orders(Kill) == []
    assert job.reports() == []


def test_ranks_that_are_not_released_are_dealt_with() -> None:
    """
    When a rank does not answer that it goes on, then the job does not stand for ever.
    """
    job = paused()
    job.script.muted = {(2, "release")}
    job.go_on()
    job.settle()
    job.wait()
    job.script.muted = set()
    assert job.doing == "freezing"
    job.settle()
    job.train()
    assert job.doing == "healthy"
    (incident,) = job.reports()
    assert incident["strategy"] == "retry"
    assert "no answer to release in time" in str(incident["faults"])


def test_who_trains_while_another_is_not_released_is_not_suspected() -> None:
    """
    When a rank does not answer that it goes on, or is not heard, and some of the others compute when
    everyone is frozen for that, then none of these is taken for one that hangs, and nobody is ended.
    """
    job = paused()
    job.script.muted = {(2, "release")}
    job.go_on()
    job.settle()
    for rank in (0, 2):
        job.ranks[rank].loop.waiting = False
    job.wait()
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert job.orders(Kill) == []
    (incident,) = job.reports()
    assert incident["strategy"] == "retry"
    assert [(f["kind"], f["rank"], f["step"]) for f in incident["faults"]] == [("network", None, 4)]


def test_who_hears_nothing_when_everyone_is_released_is_ended() -> None:
    """
    When a rank does not answer that it goes on, since it does not run, then it does not answer the
    freeze that follows, and is the one that is ended.
    """
    job = paused()
    job.ranks[2].hung = True
    job.ranks[0].loop.waiting = False
    job.go_on()
    job.settle()
    for _ in ("release", "freeze"):
        job.wait()
        job.settle()
    job.train()
    assert job.doing == "healthy"
    assert [kill.rank for kill in job.orders(Kill)] == [2]
    assert strategies(job) == ["recover"]


def test_a_step_that_is_lost_after_a_pause_is_an_incident() -> None:
    """
    When a rank dies after the release and before its first step, then an incident opens; what
    the pause had asked for is over.
    """
    job = paused()
    job.go_on()
    job.settle()
    job.kill(2)
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert strategies(job) == ["recover"]
    assert len(job.orders(Hold)) == 1


def test_a_request_to_stop_ends_a_pause() -> None:
    """
    When the end of the job is asked for while it is paused, then a last checkpoint is written
    from where everyone stands.
    """
    job = paused()
    job.stop()
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("cancelled", 143)
    assert job.orders(Release) == []
    assert {s.step for s in job.orders(Save)} == {3}
    assert len(job.orders(Commit)) == 1


# ---------------------------------------------------------------- at the end of training


def test_a_rank_that_finishes_on_the_way_stands_as_still_as_can_be() -> None:
    """
    When `train` returns on the furthest rank while everyone comes to its last step, then the job
    pauses all the same, and completes after it.
    """
    job = trained()
    job.window(0)
    job.close(0)
    job.script.stuck = {1, 2, 3}
    job.pause()
    job.settle()
    job.finish(0)
    job.script.stuck = set()
    job.repeat()
    job.settle()
    assert job.doing == "paused"
    job.go_on()
    job.settle()
    assert job.doing == "resuming"
    job.finish()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("completed", 0)


def test_no_pause_begins_while_ranks_are_finishing() -> None:
    """
    When some have finished and the others are about to, then a pause that was kept is not begun
    any more.
    """
    job = trained()
    job.kill(1)
    job.pause()
    job.settle()
    for rank in range(4):
        job.window(rank)
        if rank == 3:
            job.finish(0, 1, 2)
        job.close(rank)
    assert job.doing == "healthy"
    job.finish()
    assert job.orders(Hold) == []
    assert job.over is not None
    assert job.over.result == "completed"


def test_a_rank_that_has_left_the_loop_too_early_cannot_hold() -> None:
    """
    When a rank left the loop before the boundary that the furthest one sets, then it cannot hold
    there: the pause is given up, and says why. What it left the loop for comes on its own.
    """
    job = trained()
    job.window(0)
    job.close(0)
    job.ranks[3].training = False
    job.pause()
    job.settle()
    why = "rank 3 could not hold: it has left the loop at step 3, before the end of 4"
    assert job.facts("pause_given_up") == [{"why": why}]
    assert job.reports() == []


def test_everything_a_pause_needs_is_asked_of_those_who_take_part() -> None:
    """
    When a job has shrunk, then a pause holds, checks and releases its members only.
    """
    job = trained(
        placement={0: (0, 1), 1: (2, 3)},
        columns={r: (r // 2 * 2, r // 2 * 2 + 1) for r in range(4)},
    )
    job.lose_node(1)
    job.settle()
    job.train()
    job.said.clear()
    job.pause("links")
    job.settle()
    job.train()
    assert {o.to for o in job.said if isinstance(o, RankOrder)} == {(0, 1)}
    assert names(job.said) == ["Freeze", "Hold", "Check", "Release"]
    assert job.doing == "healthy"


def test_a_position_says_where_a_hold_is_answered_from() -> None:
    """
    When everyone stands still, then no update window is open anywhere.
    """
    job = trained()
    for rank in range(4):
        job.window(rank)
    job.pause()
    job.settle()
    assert {r.position for r in job.ranks.values()} == {Position(step=4, window=False)}
    assert names(job.said) == ["Freeze", "Hold"]


def test_a_resume_during_a_check_waits_for_its_end() -> None:
    """
    When somebody asks a job to go on while a check runs, then nobody does before all have ended
    it: the all-reduces of the check of some would meet those of the step of others.
    """
    job = trained()
    job.script.muted = {(2, "check")}
    job.pause("links")
    job.settle()
    job.go_on()
    job.settle()
    assert job.doing == "paused"
    assert job.orders(Release) == []
    assert job.facts("check_not_over") == [{}]
    job.script.muted = set()
    job.repeat()
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert job.reports() == []


def test_a_check_that_ends_in_a_fault_is_not_begun_again() -> None:
    """
    When a check takes a process down, then that is an incident, and the job goes on after it: the
    check would end like that the next time, too.
    """
    job = trained()
    job.script.muted = {(2, "check")}
    job.pause("links")
    job.settle()
    job.kill(2)
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert strategies(job) == ["recover"]
    assert len(job.orders(Check)) == 1
