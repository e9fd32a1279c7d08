"""
Rounds of a recovery: reports, retries, doubts about copies, and the end of an incident.
"""

import pytest

from tests.core.lives import (
    strategies,
    trained,
    tried,
)
from tft.protocol.messages import (
    Fetch,
    Freeze,
    Kill,
    Load,
    NodeJoined,
    Regroup,
    Release,
    Restore,
    Resume,
    Save,
    Spawn,
    Trained,
)
from tft.testing.scripted import (
    ScriptedJob,
)

WITH_ROOM = {0: (0, 1, 2), 1: (3,), 2: ()}


def tries_on(job: ScriptedJob) -> None:
    """
    Run the recovery. Each time the job waits before another attempt, let the time pass and
    continue.
    """
    job.settle()
    while job.doing == "awaiting":
        job.wait()
        job.settle()


# ---------------------------------------------------------------- reports


def test_an_incident_is_told_from_its_fault_to_its_end() -> None:
    """
    When a rank dies, then the fault, the stop, the choice and the end are told, with their facts.
    """
    job = trained()
    job.kill(1)
    job.settle()
    job.train()
    assert job.facts("fault") == [{"incident": 1, "kind": "process", "rank": 1, "step": 4}]
    assert job.facts("stopped") == [{"incident": 1, "ranks": [1]}]
    (chosen,) = job.facts("strategy_chosen")
    assert (chosen["incident"], chosen["strategy"]) == (1, "recover")
    (closed,) = job.facts("incident_closed")
    assert (closed["incident"], closed["strategy"], closed["step"]) == (1, "recover", 4)


def test_several_faulty_ranks_are_told_in_order() -> None:
    """
    When several ranks fail, then they are told in the order of their numbers, once.
    """
    job = trained(8)
    for rank in (7, 2, 5):
        job.fault(rank, "memory")
    job.settle()
    assert job.facts("stopped") == [{"incident": 1, "ranks": [2, 5, 7]}]


def test_a_hang_is_told_with_the_silence_that_showed_it() -> None:
    """
    When the rank that does not even answer is ended, then the evidence says for how long nobody
    had moved, and the step is the one it was in.
    """
    job = trained(keeps=0)
    job.ranks[2].hung = True
    job.stall()
    job.settle()
    job.wait()
    job.settle()
    job.train()
    (fault,) = job.reports()[0]["faults"]
    assert fault["evidence"].startswith(
        "no rank has moved for 5.0 s; the job's own step times allow 3.0 s"
    )
    assert fault["step"] == 4


def test_a_process_that_is_found_stopped_is_said_to_have_been() -> None:
    """
    When the agent finds that the process it ends was stopped, then the evidence says so.
    """
    job = trained()
    job.ranks[2].hung = job.ranks[2].stopped = True
    job.stall()
    job.settle()
    job.wait()
    job.settle()
    job.train()
    assert "the process was stopped (SIGSTOP)" in job.reports()[0]["faults"][0]["evidence"]


def test_the_ranks_for_which_everyone_was_stopped_are_told_in_order() -> None:
    """
    When everyone stands still, then it is told for which ranks, in their order.
    """
    job = trained(9)
    job.fault(8, "memory")
    job.fault(1, "memory")
    job.settle()
    assert job.facts("stopped") == [{"incident": 1, "ranks": [1, 8]}]


def test_what_fails_again_and_again_is_given_more_time_each_time() -> None:
    """
    When the groups cannot be formed time and again, then they are formed anew at once the first
    time, and after a longer while each further time: what it needs may be on its way.
    """
    job = trained(attempts=5, backoff=2.0)
    job.script.failures[0, "regroup"] = ["no route to host"] * 4
    job.fault(1, "network")
    job.settle()
    for seconds in (2.0, 4.0, 6.0):
        assert job.doing == "awaiting"
        assert job.machine.next_deadline() == pytest.approx(job.now + seconds, abs=0.1)
        job.wait()
        job.settle()
    job.train()
    assert strategies(job) == ["retry"]
    assert len(job.orders(Regroup)) == 5


def test_nothing_is_begun_for_the_last_time_at_once() -> None:
    """
    When a strategy is given up after two attempts, then the second one waits: the store may be gone,
    and another one on its way.
    """
    job = trained(attempts=2, backoff=2.0)
    job.script.failures[0, "regroup"] = ["no store listens there"]
    job.fault(1, "network")
    job.settle()
    assert (job.doing, len(job.orders(Regroup))) == ("awaiting", 1)
    assert job.machine.next_deadline() == pytest.approx(job.now + 2.0, abs=0.1)
    job.reopen_store(2)
    job.settle()
    job.train()
    assert strategies(job) == ["retry"]
    assert [order.port for order in job.orders(Regroup)][-1] == 2


def test_the_reason_to_end_is_the_first_one() -> None:
    """
    When a user's bug has ended the job and somebody then asks for the end, then the bug is why.
    """
    job = trained()
    job.fault(1, "software", "ValueError: no such layer")
    job.stop(0)
    job.settle()
    assert job.over is not None
    assert job.over.why == (
        "a user's own bug is not retried; a last checkpoint of step 3 is written"
    )


def test_a_rank_behind_the_others_is_told_with_its_own_step() -> None:
    """
    When a rank dies while another one is already a step further, then its fault is in the step
    that it computed.
    """
    job = trained()
    job.window(2)
    job.close(2)
    job.kill(1)
    job.settle()
    job.train()
    assert [(f["rank"], f["step"]) for f in job.reports()[0]["faults"]] == [(1, 4)]


def test_a_fault_seen_in_a_pause_is_in_the_next_step() -> None:
    """
    When somebody outside sees a fault of a rank that stands still, then its step is known at once.
    """
    job = trained(steps=7)
    job.pause()
    job.settle()
    job.notice(3, "memory")
    assert [f["step"] for f in job.facts("fault")] == [8]
    job.settle()
    job.train()
    assert [f["step"] for f in job.reports()[0]["faults"]] == [8]


def test_a_pollution_seen_in_a_pause_goes_back_from_there() -> None:
    """
    When numbers are seen to be polluted while everyone stands still, then the step before is
    taken back.
    """
    job = trained(steps=7, keeps=1)
    job.pause()
    job.settle()
    job.notice(3, "numeric", polluted=True)
    job.settle()
    assert {r.step for r in job.orders(Restore)} == {6}


def test_a_fault_seen_before_everyone_stands_is_in_the_step_they_come_to() -> None:
    """
    When somebody outside sees a fault of a rank that has not said yet where it is on its way into
    a pause, then its step is the one it says then.
    """
    job = trained(steps=7)
    job.script.muted = {(3, "freeze")}
    job.pause()
    job.settle()
    assert job.doing == "pausing"
    job.script.muted = set()
    job.notice(3, "memory")
    job.settle()
    job.train()
    assert [f["step"] for f in job.reports()[0]["faults"]] == [8]


def test_a_new_process_does_not_say_where_the_lost_one_was() -> None:
    """
    When the process that replaces a lost one is ready before everyone has said where they are,
    then the lost one is not taken to have been at the beginning.
    """
    job = trained(steps=7, placement=WITH_ROOM, spare={2: 1})
    job.script.muted = {(0, "freeze")}
    job.lose_node(1)
    job.settle()
    job.script.muted = set()
    job.repeat()
    job.settle()
    job.train()
    assert [f["step"] for f in job.reports()[0]["faults"]] == [8]


def test_a_pollution_counts_once() -> None:
    """
    When another fault joins after everyone has gone back, then nobody goes back further for the
    pollution that was dealt with.
    """
    job = trained(keeps=3)
    job.notice(2, "numeric", polluted=True)
    job.settle()
    job.fault(1, "network")
    job.settle()
    job.train()
    assert {r.step for r in job.orders(Restore)} == {2}
    assert job.reports()[0]["step"] == 3


# ---------------------------------------------------------------- receivers of orders


def test_nobody_is_asked_who_is_about_to_be_ended() -> None:
    """
    When a rank is told to end, then it owes no answer, and what the others owe is said again to
    them alone.
    """
    job = trained()
    job.notice(3, "process", "its container is gone")
    frozen = [o.to for o in job.machine.outstanding() if isinstance(o, Freeze)]
    assert frozen == [(0, 1, 2)]
    assert [o.rank for o in job.machine.outstanding() if isinstance(o, Kill)] == [3]


def test_a_successor_that_is_late_is_ended_without_last_words() -> None:
    """
    When a successor does not get ready, then its stacks are of no interest to anyone.
    """
    job = trained(placement=WITH_ROOM, spare={2: 1}, join=40.0)
    job.script.slow = {3}
    job.notice(3, "straggler")
    job.settle()
    job.wait()
    assert [(k.incarnation, k.last_words) for k in job.orders(Kill)] == [(1, False)]


# ---------------------------------------------------------------- retries


def test_an_order_that_fails_twice_is_no_reason_to_give_up() -> None:
    """
    When copying fails twice and then works, then the strategy has worked.
    """
    job = trained()
    job.fault(1, "memory")
    job.script.failures[1, "fetch"] = ["digest differs"] * 2
    tries_on(job)
    job.train()
    assert strategies(job) == ["retry"]
    assert tried(job) == {}
    assert [f.round for f in job.orders(Fetch)] == [1, 2, 3]


def test_every_strategy_has_its_own_attempts() -> None:
    """
    When a retry has failed three times and the replacement fails twice, then it is not given up.
    """
    job = trained()
    job.fault(1, "memory")
    job.script.failures[1, "fetch"] = ["digest differs"] * 5
    tries_on(job)
    job.train()
    assert strategies(job) == ["recover"]
    assert list(tried(job)) == ["retry"]


def test_what_had_failed_before_a_process_was_lost_is_not_held_against_its_replacement() -> None:
    """
    When forming groups fails in a retry, whoever is the cause turns out to be lost, and forming them
    fails once more when it is replaced, then the replacement has not been tried as often as it may be.
    """
    job = trained(attempts=2)
    job.script.failures[0, "regroup"] = ["a peer has closed its connection"] * 2
    job.fault(1, "network")
    while not job.orders(Regroup):
        job._obey(job._queue.popleft())
    job.script.muted = {(2, "freeze")}
    job.settle()
    assert job.doing == "freezing"
    job.script.muted = set()
    job.kill(2)
    tries_on(job)
    job.train()
    assert strategies(job) == ["recover"]
    assert [order.round for order in job.orders(Regroup)] == [1, 2, 3]


def test_a_fault_that_joins_begins_the_count_anew() -> None:
    """
    When copying has failed twice, another rank fails, and it fails twice more, then nothing has
    failed three times for the same reason.
    """
    job = trained()
    job.fault(1, "memory")
    job.script.failures[1, "fetch"] = ["digest differs"] * 2
    tries_on(job)
    assert job.doing == "resuming"
    job.script.failures[1, "fetch"] = ["digest differs"] * 2
    job.ranks[1].state.spoiled = True
    job.fault(0, "memory")
    job.fault(1, "corruption")
    tries_on(job)
    job.train()
    assert strategies(job) == ["retry"]


def test_a_start_whose_groups_fail_to_form_becomes_an_incident() -> None:
    """
    When forming the first groups fails, then it is tried again, as an incident with a number.
    """
    job = ScriptedJob(2)
    job.script.failures[1, "regroup"] = ["the store is gone"]
    job.start()
    job.train()
    assert job.doing == "healthy"
    assert [i.number for i in job.machine.incidents] == [1]
    assert strategies(job) == ["retry"]


@pytest.mark.parametrize("again", ["process", "hang", "node"])
def test_a_process_that_is_lost_again_is_another_process(again: str) -> None:
    """
    When the replacement of a rank is lost in the same way at the same step, then that is no sign
    that replacing does not help: it is done again.
    """
    job = trained(placement={**WITH_ROOM, 3: ()}, spare={2: 1, 3: 1})
    for node in (1, 2):
        if again == "node":
            job.lose_node(node)
        elif again == "hang":
            job.notice(3, "hang")
        else:
            job.kill(3)
        job.settle()
        assert job.doing == "resuming"
    job.train()
    assert strategies(job) == ["recover"]
    assert [s.incarnation for s in job.orders(Spawn)] == [1, 2]
    assert "occurred again" not in str(tried(job))


def test_a_fault_counts_as_come_back_only_when_all_were_in_the_loop_again() -> None:
    """
    When a rank reports the same fault twice before anything was done about it, then nothing has
    failed yet.
    """
    job = trained()
    job.fault(1, "memory")
    job.fault(1, "memory")
    job.settle()
    job.train()
    assert strategies(job) == ["retry"]


def test_numbers_that_go_wrong_again_take_everyone_back_to_a_checkpoint() -> None:
    """
    When the same step fails again, nobody keeps copies, but a checkpoint is early enough, then it
    is loaded by all.
    """
    job = trained()
    job.checkpointed(2)
    for _ in range(2):
        job.fault(2, "numeric")
        job.settle()
    assert [o.step for o in job.orders(Load)] == [2]


def test_a_memory_that_fails_again_takes_nobody_back() -> None:
    """
    When it is the memory that fails again, then the others' state is as good as before: the
    process is replaced, though earlier copies are kept.
    """
    job = trained(keeps=1)
    for _ in range(2):
        job.fault(2, "memory")
        job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert job.orders(Restore) == []


def test_numbers_that_go_wrong_further_back_get_a_new_process() -> None:
    """
    When going one step back has not helped either, then nobody goes back again for it: the rank's
    process is replaced.
    """
    job = trained(keeps=3)
    for _ in range(4):
        job.fault(2, "numeric")
        job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert {r.step for r in job.orders(Restore)} == {2}
    assert tried(job) == {"retry": "the numeric fault at step 3 occurred again"}


# ---------------------------------------------------------------- doubted copies


def test_doubtful_numbers_are_better_than_none() -> None:
    """
    When every rank reports wrong numbers and nothing earlier is kept, then it is not the memory of
    all that is bad: training goes on with what they have, and that is told.
    """
    job = trained()
    for rank in range(4):
        job.fault(rank, "numeric")
    job.settle()
    job.train()
    assert strategies(job) == ["retry"]
    assert job.facts("doubt_dropped") == [{"ranks": [0, 1, 2, 3]}]
    assert job.orders(Fetch) == []
    assert job.doing == "healthy"


def test_the_numbers_of_a_rank_that_is_lost_are_not_among_the_doubtful() -> None:
    """
    When every rank reports wrong numbers and one of them is lost, then the numbers of the others
    are taken all the same: its own are not there any more.
    """
    job = trained(enable={"scale_in", "dump"})
    for rank in range(4):
        job.fault(rank, "numeric")
    job.kill(3)
    job.settle()
    assert job.facts("doubt_dropped") == [{"ranks": [0, 1, 2]}]
    job.train()
    assert strategies(job) == ["scale_in"]


def test_a_damaged_memory_is_not_better_than_none() -> None:
    """
    When the memory of every rank has failed, then nothing of it is trained on or saved.
    """
    job = trained()
    for rank in range(4):
        job.fault(rank, "memory")
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert job.facts("doubt_dropped") == []
    assert job.orders(Save) == []
    assert job.reports()[-1]["strategy"] == "exit"
    reasons = "; ".join(f"{name}: {why}" for name, why in tried(job).items())
    assert job.over.why == f"no strategy is left ({reasons})"


def test_a_place_that_comes_late_is_counted_like_any_other() -> None:
    """
    When a rank had no place at first and gets one while advice is awaited, then its process there
    is the first of those it may have in this incident.
    """
    job = trained(advised=True, placement={0: (0, 1, 2), 1: (3,)}, respawns=1)
    job.lose_node(1)
    job.settle()
    job.advise(wait=30.0)
    job.spare[5] = 1
    job.come(5)
    job.settle()
    job.wait()
    job.advise(strategy="recover")
    assert [(s.rank, s.node, s.cause) for s in job.orders(Spawn)] == [
        (3, 5, "rank 3 has lost its process")
    ]
    job.settle()
    job.kill(3)
    job.settle()
    recover = next(o for o in job.consulted[-1].offers if o.strategy == "recover")
    assert recover.why_not == "rank 3 has died 2 times in this incident"


def test_a_node_that_was_never_there_changes_nothing() -> None:
    """
    When an agent without ranks and without room joins, then nobody is told anything.
    """
    job = trained()
    job.report(NodeJoined(node=9, host="h", pid=1, ranks=(), at=job.now))
    assert job.said == []


# ---------------------------------------------------------------- the freeze


def test_a_freeze_says_why_and_goes_to_those_who_can_answer() -> None:
    """
    When ranks fail one after the other, then each freeze names every cause, and is said to those
    who have a process that takes orders.
    """
    job = trained(placement={0: (0, 1, 2, 3)})
    job.script.slow = {1, 2}
    job.kill(1)
    job.settle()
    job.arrive(1)
    while job.doing != "repairing":
        job._obey(job._queue.popleft())
    job.kill(2)
    job.settle()
    assert [(f.to, f.cause) for f in job.orders(Freeze)] == [
        ((0, 2, 3), "process at rank 1"),
        ((0, 1, 3), "process at rank 1, process at rank 2"),
    ]
    job.arrive(2)
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]


def test_everyone_whose_process_was_ended_is_named() -> None:
    """
    When others are replaced with the lost one, then they are named beside it, with the reason:
    everyone who is not named has kept their process.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3)}, replace="node")
    job.kill(2)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert {f["rank"]: f["evidence"] for f in incident["faults"]} == {
        2: "was ended by signal 9", 3: "its node is replaced with rank 2",
    }  # fmt: skip
    assert incident["pids_kept"] is True
    assert job.machine.incidents[0].turnover.kept == {0: True, 1: True, 3: False}


# ---------------------------------------------------------------- details of advice


def test_silence_after_a_wait_means_the_default() -> None:
    """
    When a plugin asked for time and then says nothing, then it is asked once more and no further.
    """
    job = trained(advised=True)
    job.fault(2, "memory")
    job.settle()
    job.advise(wait=10.0)
    job.wait()
    job.wait()
    assert len(job.consulted) == 2
    job.settle()
    job.train()
    assert strategies(job) == ["retry"]


def test_having_nothing_to_say_is_not_advice_that_was_not_followed() -> None:
    """
    When a plugin names no strategy, then nothing is told of it.
    """
    job = trained(advised=True)
    job.fault(2, "memory")
    job.settle()
    job.advise()
    assert job.facts("advice_not_followed") == []


def test_only_a_strategy_of_its_own_replaces_more() -> None:
    """
    When a plugin names one of ours, then what it says of other processes is not heeded.
    """
    job = trained(advised=True)
    job.fault(2, "memory")
    job.settle()
    job.advise(strategy="recover", replace=(0,))
    assert [k.rank for k in job.orders(Kill)] == [2]


def test_only_the_successor_that_is_ready_takes_over() -> None:
    """
    When two ranks straggle and one successor is ready, then it takes over, and the other one warms on.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3), 2: ()}, spare={2: 2})
    job.script.slow = {2}
    job.notice(2, "straggler")
    job.settle()
    job.notice(3, "straggler")
    job.settle()
    job.train()
    assert strategies(job) == ["migrate"]
    assert [(k.rank, k.incarnation) for k in job.orders(Kill)] == [(3, 0)]
    assert job.ranks[2].incarnation == 0
    assert job.successors[2].alive
    job.arrive(2)
    job.settle()
    job.train()
    assert strategies(job) == ["migrate", "migrate"]
    assert {job.ranks[r].incarnation for r in (2, 3)} == {1}


# ---------------------------------------------------------------- the end of an incident


TWO_NODES_WITH_ROOM = {0: (0, 1), 1: (2, 3), 2: ()}


def test_step_report_before_the_resume_answer_does_not_end_the_incident() -> None:
    """When a rank reports a step before its answer to `Resume`, then the job is healthy only after
    the answer arrives."""
    job = trained()
    job.script.muted = {(2, "resume")}
    job.kill(1)
    job.settle()
    job.train()
    late = job.ranks[2]
    job.report(Trained(rank=2, incarnation=0, step=4, at=job.now))
    assert job.doing == "resuming"
    (resume,) = job.orders(Resume)
    job.report(late.answer(resume, "resume", None, found=("pass", ""), at=job.now))
    assert job.doing == "healthy"


def test_step_report_before_the_release_answer_does_not_end_the_pause() -> None:
    """When a rank reports a step before its answer to `Release`, then the job is healthy only after
    the answer arrives."""
    job = trained()
    job.pause()
    job.settle()
    job.script.muted = {(2, "release")}
    job.go_on()
    job.settle()
    job.train()
    late = job.ranks[2]
    job.report(Trained(rank=2, incarnation=0, step=4, at=job.now))
    assert job.doing == "resuming"
    (release,) = job.orders(Release)
    job.report(late.answer(release, "release", None, found=("pass", ""), at=job.now))
    assert job.doing == "healthy"


def test_successor_on_an_excluded_node_does_not_take_over_when_it_is_ready() -> None:
    """When the node of a starting successor is excluded and its agent does not end it, then the
    successor does not take over when it is ready. The next incident does not include it either."""
    job = trained(5, placement={0: (0, 1), 1: (2, 3), 2: (4,)}, spare={2: 1})
    job.script.slow = {3}
    job.notice(3, "straggler")
    job.settle()
    job.script.deaf = {2}
    job.notice(4, "node", "its fan has failed")
    job.settle()
    job.wait()
    job.settle()
    job.train()
    assert job.doing == "healthy"
    job.arrive(3)
    assert job.doing == "healthy"
    job.fault(0, "network")
    job.settle()
    job.train()
    assert strategies(job) == ["scale_in", "retry"]


def test_straggler_gets_another_successor_when_the_first_is_excluded() -> None:
    """When a straggler dies after its successor was excluded with its node, then another process is
    started for the rank."""
    job = trained(5, placement={0: (0, 1), 1: (2, 3), 2: (4,)}, spare={2: 1})
    job.script.slow = {3}
    job.notice(3, "straggler")
    job.settle()
    job.script.deaf = {2}
    job.notice(4, "node", "its fan has failed")
    job.kill(3)
    assert [(s.rank, s.node, s.incarnation) for s in job.orders(Spawn)] == [(3, 2, 1), (3, 1, 2)]


def test_freeze_cause_names_returning_ranks_in_order() -> None:
    """When several ranks that had left are ready to return, then the cause of the freeze names them
    in rank order."""
    job = trained(9, placement={0: (0, 2, 3, 4, 5, 6, 7), 1: (8, 1)})
    job.lose_node(1)
    job.settle()
    job.train()
    job.said.clear()
    job.pause()
    job.settle()
    job.come(1)
    job.settle()
    job.go_on()
    job.settle()
    job.train()
    assert [f.cause for f in job.orders(Freeze)][-1] == "ranks [1, 8] are ready to come back"


def test_decision_waits_for_the_end_of_a_replaced_straggler() -> None:
    """When a rank is lost before the end of a replaced straggler is reported, then no strategy is
    chosen until this end is reported."""
    job = trained(placement=TWO_NODES_WITH_ROOM, spare={2: 1})
    job.script.deaf = {1}
    job.notice(3, "straggler")
    job.settle()
    assert job.doing == "awaiting"
    job.kill(0)
    job.settle()
    assert job.machine.incident.decision.strategy == ""
    job.kill(3)
    assert job.machine.incident.decision.strategy == "recover"
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert job.doing == "healthy"


def test_migration_fails_when_the_captured_state_of_a_straggler_is_lost() -> None:
    """When a replaced straggler cannot be ended and its captured state cannot be recreated, then
    `migrate` fails with a reason. The other ranks write a last checkpoint."""
    job = trained(placement=TWO_NODES_WITH_ROOM, spare={2: 1}, derives=False)
    job.script.deaf = {1}
    job.notice(3, "straggler")
    job.settle()
    assert job.doing == "awaiting"
    job.wait()
    job.settle()
    assert tried(job)["migrate"] == (
        "the RNG and data position of rank 3 at the end of step 3 were lost with its node"
    )
    assert job.over is not None
    assert job.over.result == "dumped"
