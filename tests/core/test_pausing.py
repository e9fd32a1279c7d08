"""
Pauses at a step boundary, and checks of all ranks during a pause.
"""

from typing import (
    Any,
)

import pytest

from tests.core.lives import (
    names,
    strategies,
    trained,
)
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
from tft.testing.scripted import (
    ScriptedJob,
)

ALL = (0, 1, 2, 3)


def paused(**facts: Any) -> ScriptedJob:  # Any: as in `trained`
    """
    Return a job that is paused after step 3.
    """
    job = trained(**facts)
    job.pause()
    job.settle()
    assert job.doing == "paused"
    return job


# ---------------------------------------------------------------- begin and end of a pause


def test_pause_holds_all_ranks_at_the_boundary_of_the_furthest_rank() -> None:
    """When a pause is requested while one rank is already in the update of step 4, then all ranks
    stop at the end of step 4. Each rank gets one `Freeze` and one `Hold`."""
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


def test_boundary_is_the_step_of_the_rank_that_is_one_step_ahead() -> None:
    """When one rank has completed step 4 and the other ranks have not, then all ranks pause at the
    end of step 4 and not of step 5."""
    job = trained()
    job.window(1)
    job.close(1)
    job.pause()
    job.settle()
    assert [h.step for h in job.orders(Hold)] == [4]
    assert {r.step for r in job.ranks.values()} == {4}


def test_no_rank_trains_during_a_pause() -> None:
    """When the job is paused, then no rank completes another step."""
    job = paused()
    job.train(3)
    assert {r.step for r in job.ranks.values()} == {3}
    assert job.doing == "paused"


def test_job_is_healthy_one_step_after_a_pause_ends() -> None:
    """When a pause ends, then all ranks are released, no process group is formed and no state is
    copied. After one more step the job is healthy, and no incident is reported."""
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


def test_pause_that_ends_before_all_ranks_hold_releases_all_ranks() -> None:
    """When a pause is ended while a rank is still training on to the step boundary of the pause,
    then all ranks continue from where they are."""
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


def test_pause_ends_at_its_time_limit() -> None:
    """When no request to end the pause comes, then the job resumes after the time limit."""
    job = paused(pause=50.0)
    began = job.now
    job.wait()
    assert job.now == pytest.approx(began + 50.0, abs=0.1)
    assert job.facts("pause_over") == [{"seconds": 50.0}]
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert job.orders(Release)


def test_pause_continues_before_its_time_limit() -> None:
    """When the time limit of the pause has not passed, then the job stays paused."""
    job = paused(pause=50.0)
    deadline = job.machine.next_deadline()
    assert deadline is not None
    job.now = deadline - 1.0
    job.lead(2)
    later = job.machine.next_deadline()
    assert later == job.now + 50.0
    assert job.doing == "paused"


def test_second_pause_request_sends_no_further_orders() -> None:
    """When a pause is requested again, before or after all ranks stand still, then no further
    orders are sent."""
    job = trained()
    job.pause()
    job.pause("links")
    job.settle()
    job.pause("links")
    job.settle()
    assert names(job.said) == ["Freeze", "Hold"]
    assert job.doing == "paused"


def test_resume_request_without_a_pause_changes_nothing() -> None:
    """When a resume is requested and the job is not paused, then nothing changes."""
    job = trained()
    job.go_on()
    assert job.said == []
    assert job.doing == "healthy"


def test_new_controller_repeats_hold_to_ranks_that_have_not_answered() -> None:
    """When a new controller takes over while the ranks train on to the step boundary of a pause,
    then `Hold` is repeated only to the ranks that have not answered."""
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


# ---------------------------------------------------------------- requests kept for later


@pytest.mark.parametrize("state", ["freezing", "awaiting", "repairing", "resuming"])
def test_pause_requested_during_an_incident_begins_after_recovery(state: str) -> None:
    """When a pause is requested during an incident, then the incident is handled first, and the
    pause begins when the job is healthy."""
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


def test_pending_pause_can_be_cancelled_in_the_same_incident() -> None:
    """When a pause is requested during an incident and ended in the same incident, then the job
    continues without a pause."""
    job = trained()
    job.kill(1)
    job.pause()
    job.go_on()
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert job.orders(Hold) == []


def test_first_of_two_pauses_requested_in_an_incident_is_used() -> None:
    """When two pauses are requested during an incident, then the first one is carried out."""
    job = trained()
    job.kill(1)
    job.pause("links")
    job.pause()
    job.settle()
    job.train()
    assert [c.name for c in job.orders(Check)] == ["links"]


def test_pause_requested_during_the_start_begins_after_the_start() -> None:
    """When a pause is requested while the job starts, then the job completes its start and then
    pauses."""
    job = ScriptedJob(2)
    job.lead(1)
    job.pause()
    job.start()
    assert job.doing == "resuming"
    job.train()
    assert job.doing == "paused"
    assert {r.step for r in job.ranks.values()} == {1}


# ---------------------------------------------------------------- checks


def test_check_that_all_ranks_pass_ends_the_pause() -> None:
    """When a pause with a check is requested and all ranks pass the check, then the job resumes
    without a further request."""
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


def test_pause_with_a_check_waits_for_the_verdict_of_every_rank() -> None:
    """When one rank has not reported its verdict on a check, then no rank resumes. The time limit
    of a pause without a check does not apply."""
    job = trained(pause=1.0, check=70.0)
    job.script.muted = {(3, "check")}
    job.pause("links")
    job.settle()
    assert job.doing == "paused"
    assert job.orders(Release) == []
    deadline = job.machine.next_deadline()
    assert deadline is not None
    assert deadline > job.now + 60.0


def test_check_that_isolates_a_node_moves_its_ranks_to_a_spare_node() -> None:
    """When a check demands to isolate the node of one rank, then all ranks of that node move to a
    node with room and copy the state of the step boundary. The check runs once, and the pause is
    over."""
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


def test_isolated_node_is_not_used_again() -> None:
    """When a node is excluded because it is faulty and its agent joins again, then no process is
    started on that node."""
    job = trained(placement={0: (0, 1), 1: (2, 3), 2: ()}, spare={2: 1})
    job.notice(2, "node", "its fan has failed")
    job.settle()
    before = len(job.said)
    job.come(1)
    job.settle()
    assert [o for o in job.said[before:] if isinstance(o, Spawn) and o.node == 1] == []
    job.lose_node(1)
    assert job.machine.silent == []


def test_isolation_without_room_elsewhere_ends_in_a_last_checkpoint() -> None:
    """When a check demands to isolate a node, no other node has room and the job cannot shrink,
    then the remaining ranks write a last checkpoint."""
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
    assert "node 1 is lost" in str(incident["tried"])


def test_isolated_node_with_the_only_copy_of_a_shard_saves_it_first() -> None:
    """When a check demands to isolate the only node that holds a shard, then the processes of that
    node write their part of a last checkpoint before they are ended."""
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


def test_check_that_ends_the_job_writes_a_last_checkpoint_first() -> None:
    """When the verdict of a check is to end the job, then a last checkpoint is written, and the
    finding of the check is the reason."""
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


def test_check_that_ends_the_job_without_a_reason_names_the_rank() -> None:
    """When the verdict of a check is to end the job and gives no reason, then the job ends with a
    last checkpoint, and the finding names the rank."""
    job = trained()
    job.script.verdicts = {1: ("end", "")}
    job.pause("model")
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)
    assert "(rank 1)" in job.machine.checked


def test_job_resumes_when_a_check_raises_on_one_rank() -> None:
    """When a check raises an error on one rank, then the job resumes without an incident, and the
    check result gives the error."""
    job = trained()
    job.script.failures[2, "check"] = ["no plugin offers a check named 'links'"]
    job.pause("links")
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert job.reports() == []
    assert job.machine.checked == (
        "the check could not be run: no plugin offers a check named 'links' (rank 2)"
    )


def test_result_of_a_failed_check_does_not_affect_the_next_check() -> None:
    """When one check could not be run and the next check passes, then the result is `passed`."""
    job = trained()
    job.script.failures[2, "check"] = ["it broke"]
    for _ in range(2):
        job.pause("links")
        job.settle()
        job.train()
    assert job.machine.checked == "passed"


def test_pause_without_a_check_has_no_check_result() -> None:
    """When a check has passed and the next pause has no check, then the result of the earlier check
    is not reported again."""
    job = trained()
    job.pause("links")
    job.settle()
    job.train()
    assert job.machine.checked == "passed"
    job.pause()
    job.settle()
    assert (job.doing, job.machine.checked) == ("paused", "")


def test_rank_that_does_not_answer_a_check_in_time_is_replaced() -> None:
    """When a rank does not answer a check in time, then its process is ended and replaced, and the
    other processes are kept."""
    job = trained(check=30.0)
    job.script.muted = {(3, "check")}
    job.pause("links")
    job.settle()
    job.wait()
    assert [(k.rank, k.last_words, k.cause) for k in job.orders(Kill)] == [
        (3, True, "no answer to the order check in time")
    ]
    job.script.muted = set()
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert [(f["kind"], f["rank"]) for f in incident["faults"]] == [("hang", 3)]


# ---------------------------------------------------------------- faults on the way into a pause


@pytest.mark.parametrize("kind", ["process", "memory", "network", "software"])
@pytest.mark.parametrize("state", ["pausing", "paused"])
def test_fault_during_a_pause_is_recovered_and_then_the_pause_begins(
    state: str, kind: FaultKind
) -> None:
    """When a fault occurs while the ranks train on to the step boundary of a pause, or stand still
    there, then the incident is handled first. The requested pause begins after that."""
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


def test_rank_that_does_not_answer_freeze_at_a_pause_is_replaced() -> None:
    """When a rank does not answer `Freeze` at the beginning of a pause, then it is ended and
    replaced, and the job pauses after that."""
    job = trained()
    job.ranks[2].hung = True
    job.pause()
    job.settle()
    job.wait()
    job.settle()
    assert [(k.rank, k.cause) for k in job.orders(Kill)] == [
        (2, "no answer to the order freeze in time")
    ]
    job.train()
    assert strategies(job) == ["recover"]
    assert job.doing == "paused"


def test_rank_that_cannot_freeze_is_replaced_before_any_hold_is_sent() -> None:
    """When a rank answers at the beginning of a pause that it cannot freeze, then it is ended and
    no `Hold` is sent. The pause begins after the rank is replaced."""
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


def test_stall_on_the_way_to_the_boundary_is_handled_as_a_hang() -> None:
    """When no rank makes progress on the way to the step boundary of a pause, then the rank that
    does not wait for others is ended. The job pauses after that."""
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


def test_pause_is_cancelled_when_the_boundary_is_not_reached_in_time() -> None:
    """When the ranks do not reach the step boundary of a pause in time, then the pause is cancelled
    with a reason, and all ranks continue. No process is ended and no step is lost."""
    job = trained(hold=20.0)
    job.window(0)
    job.close(0)
    job.script.stuck = {3}
    job.pause()
    job.settle()
    assert job.doing == "pausing"
    job.wait()
    assert job.facts("order_overdue") == [{"order": "hold", "ranks": [3]}]
    assert job.facts("pause_given_up") == [
        {"why": "ranks [3]: no answer to the order hold in time"}
    ]
    job.script.stuck = set()
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert job.orders(Kill) == []
    assert job.reports() == []


def test_missing_answer_to_release_is_recovered_by_a_retry() -> None:
    """When a rank does not answer `Release` in time, then an incident with the strategy `retry`
    makes the job healthy again."""
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
    assert "no answer to the order release in time" in str(incident["faults"])


def test_rank_that_computes_while_a_release_is_unanswered_is_not_suspected() -> None:
    """When one rank does not answer `Release` and some ranks compute during the freeze that
    follows, then no rank is suspected of a hang and no process is ended."""
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


def test_rank_that_answers_neither_release_nor_freeze_is_ended() -> None:
    """When a rank hangs and answers neither `Release` nor the `Freeze` that follows, then only this
    rank is ended."""
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


def test_rank_that_dies_after_the_release_opens_an_incident() -> None:
    """When a rank dies after the release from a pause and before its first step, then an incident
    opens, and the job does not pause again."""
    job = paused()
    job.go_on()
    job.settle()
    job.kill(2)
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert strategies(job) == ["recover"]
    assert len(job.orders(Hold)) == 1


def test_stop_request_during_a_pause_writes_a_last_checkpoint() -> None:
    """When the end of the job is requested during a pause, then a last checkpoint is written of the
    step after which the ranks stand still."""
    job = paused()
    job.stop()
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("cancelled", 143)
    assert job.orders(Release) == []
    assert {s.step for s in job.orders(Save)} == {3}
    assert len(job.orders(Commit)) == 1


# ---------------------------------------------------------------- at the end of training


def test_job_pauses_when_a_rank_finishes_training_at_the_boundary() -> None:
    """When a pause is requested and `train` returns on the furthest rank while the others train its
    last step, then the job still pauses, and completes after the pause."""
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


def test_pending_pause_does_not_begin_when_ranks_have_finished() -> None:
    """When a pause is pending and some ranks have already finished training, then the pause does
    not begin and the job completes."""
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


def test_pause_is_cancelled_when_a_rank_left_the_loop_before_the_boundary() -> None:
    """When a rank has left its loop before the step boundary of a pause, then the pause is
    cancelled. The reason names the rank and the step, and no incident is reported."""
    job = trained()
    job.window(0)
    job.close(0)
    job.ranks[3].training = False
    job.pause()
    job.settle()
    why = "rank 3 could not hold: it has left the loop after step 3, before step 4 ended"
    assert job.facts("pause_given_up") == [{"why": why}]
    assert job.reports() == []


def test_pause_in_a_shrunk_job_sends_orders_to_members_only() -> None:
    """When the job has shrunk, then a pause sends its hold, check and release orders to the members
    only."""
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


def test_no_update_window_is_open_when_all_ranks_hold() -> None:
    """When all ranks stand still for a pause, then every rank is at the same step and no update
    window is open."""
    job = trained()
    for rank in range(4):
        job.window(rank)
    job.pause()
    job.settle()
    assert {r.position for r in job.ranks.values()} == {Position(step=4, window=False)}
    assert names(job.said) == ["Freeze", "Hold"]


def test_resume_requested_during_a_check_waits_for_all_verdicts() -> None:
    """When a resume is requested during a check, then no rank resumes before all ranks have
    completed the check. Otherwise all-reduces of the check would mix with all-reduces of the step.
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


def test_check_that_ends_in_a_fault_is_not_repeated() -> None:
    """When a process is lost during a check, then an incident opens. After it the job continues
    without a second run of the check."""
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


# ---------------------------------------------------------------- checks that a fault interrupts


FOUND = "the check found: a link drops packets (rank 2)"


def checking(**facts: Any) -> ScriptedJob:  # Any: as in `trained`
    """
    Return a paused job on two nodes, with a third node that has room, during a check of all ranks.

    The check has found rank 2 unfit. Rank 1 has not finished the check.
    """
    placement = {0: (0, 1), 1: (2, 3), 2: ()}
    job = trained(**{"placement": placement, "spare": {2: 4}, **facts})
    job.script.verdicts = {2: ("isolate", "a link drops packets")}
    job.script.muted = {(1, "check")}
    job.pause("links")
    job.settle()
    assert job.doing == "paused"
    job.script.muted = set()
    return job


def started(job: ScriptedJob) -> list[tuple[int, int]]:
    """
    Return the rank and the node of every process that the job ordered to start.
    """
    return sorted((spawn.rank, spawn.node) for spawn in job.orders(Spawn))


def test_unfit_rank_is_isolated_when_a_fault_interrupts_the_check() -> None:
    """When a rank dies in a check that has found another rank unfit, then the node of the unfit
    rank is excluded in the same incident, and its ranks move. The check does not run again."""
    job = checking()
    job.kill(0)
    job.settle()
    job.train()
    assert [(k.rank, k.node, k.cause) for k in job.orders(Kill)] == [(2, 1, FOUND), (3, 1, FOUND)]
    assert started(job) == [(0, 0), (2, 2), (3, 2)]
    (incident,) = job.reports()
    assert [(f["kind"], f["rank"]) for f in incident["faults"]] == [
        ("process", 0), ("node", 2), ("node", 3),
    ]  # fmt: skip
    assert FOUND in incident["faults"][1]["evidence"]
    assert strategies(job) == ["recover"]
    assert job.doing == "healthy"
    assert job.machine.checked == "a link drops packets (rank 2); a fault has interrupted the check"
    assert job.facts("checked") == [{"what": job.machine.checked}]
    assert len(job.orders(Check)) == 1


def test_unfit_rank_that_dies_in_the_check_moves_to_another_node() -> None:
    """When a rank reports that it is unfit and dies before the check ends, then all ranks of its
    node move. The job does not wait for the end of the dead process."""
    job = checking()
    job.kill(2)
    began = job.now
    job.settle()
    job.train()
    assert [(k.rank, k.cause) for k in job.orders(Kill)] == [(3, FOUND)]
    assert started(job) == [(2, 2), (3, 2)]
    assert job.doing == "healthy"
    assert job.now < began + 1.0


def test_lost_node_of_an_unfit_rank_is_not_used_again() -> None:
    """When a check has found a rank unfit and its node is lost before the check ends, then no
    process is started on that node when its agent returns."""
    job = checking()
    job.lose_node(1)
    job.settle()
    job.train()
    job.come(1)
    job.settle()
    assert started(job) == [(2, 2), (3, 2)]
    assert 1 not in job.machine.nodes
    assert job.doing == "healthy"


def test_hung_rank_is_ended_and_the_node_of_an_unfit_rank_is_excluded() -> None:
    """When a check has found one rank unfit and another rank never answers, then the rank that does
    not answer is ended, and the node of the unfit rank is excluded."""
    job = checking(check=30.0)
    job.wait()
    job.settle()
    job.train()
    assert [(k.rank, k.node) for k in job.orders(Kill)] == [(2, 1), (3, 1), (1, 0)]
    assert started(job) == [(1, 0), (2, 2), (3, 2)]
    assert job.doing == "healthy"


def test_check_is_cut_off_without_a_kill_when_most_ranks_do_not_answer() -> None:
    """When most ranks do not answer a check in time, then the check is cut off and no rank is
    ended. All ranks continue from their step."""
    job = trained()
    job.script.muted = {(rank, "check") for rank in range(3)}
    job.pause("links")
    job.settle()
    job.wait()
    assert job.doing == "freezing"
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert job.orders(Kill) == []
    (incident,) = job.reports()
    assert (incident["strategy"], incident["steps_lost"]) == ("retry", 0)
    assert [(f["kind"], f["rank"], f["step"]) for f in incident["faults"]] == [("network", None, 4)]
    assert (
        incident["faults"][0]["evidence"] == "ranks [0, 1, 2]: no answer to the order check in time"
    )
    assert job.machine.checked == "a fault has interrupted the check"


def test_node_of_an_unfit_rank_is_excluded_when_most_ranks_do_not_answer() -> None:
    """When a check has found one rank unfit and most other ranks do not answer, then the node of
    the unfit rank is excluded. The other ranks keep their processes."""
    job = trained(placement={0: (0, 1), 1: (2,), 2: (3,), 3: ()}, spare={3: 4})
    job.script.verdicts = {2: ("isolate", "a link drops packets")}
    job.script.muted = {(rank, "check") for rank in (0, 1, 3)}
    job.pause("links")
    job.settle()
    job.wait()
    job.settle()
    job.train()
    assert [(k.rank, k.cause) for k in job.orders(Kill)] == [(2, FOUND)]
    assert started(job) == [(2, 3)]
    assert job.doing == "healthy"


def test_ranks_without_an_answer_are_ended_when_they_are_at_most_half() -> None:
    """When at most half of the ranks do not answer a check in time, then these ranks count as hung
    and are ended."""
    job = trained()
    job.script.muted = {(rank, "check") for rank in (0, 1)}
    job.pause("links")
    job.settle()
    job.wait()
    job.settle()
    job.train()
    assert [kill.rank for kill in job.orders(Kill)] == [0, 1]
    assert job.doing == "healthy"


def test_check_verdict_to_end_the_job_applies_when_the_check_is_cut_off() -> None:
    """When a rank reports in a check that the job must end, and another rank dies before the check
    ends, then the job writes a last checkpoint and ends."""
    job = trained()
    job.script.verdicts = {2: ("end", "the model has diverged")}
    job.script.muted = {(1, "check")}
    job.pause("model")
    job.settle()
    job.kill(3)
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)
    assert "the check ends the job: the model has diverged (rank 2)" in job.over.why
    assert job.orders(Spawn) == []


def test_verdict_of_an_earlier_check_does_not_exclude_the_new_node() -> None:
    """When a rank has moved after a check found it unfit, and dies in the next check without an
    answer, then the rank restarts on its new node."""
    job = checking()
    job.kill(0)
    job.settle()
    job.train()
    job.said.clear()
    job.script.muted = {(2, "check")}
    job.pause("links")
    job.settle()
    job.script.muted = set()
    job.kill(2)
    job.settle()
    job.train()
    assert job.orders(Kill) == []
    assert started(job) == [(2, 2)]
    assert job.doing == "healthy"


def test_unfit_ranks_without_a_reason_are_isolated() -> None:
    """When a check finds ranks unfit and gives no reason, then their processes are ended, and the
    result names the ranks."""
    job = trained(placement={0: (0, 1), 1: (2, 3), 2: ()}, spare={2: 4})
    job.script.verdicts = {2: ("isolate", ""), 3: ("isolate", "")}
    job.pause("links")
    job.settle()
    assert [k.rank for k in job.orders(Kill)] == [2, 3]
    assert "(rank 2, 3)" in job.machine.checked
