"""
Rounds of a recovery: reports, retries, copies that are in doubt, and the end of an incident.
"""

import pytest

from tests.core.lives import (
    strategies,
    trained,
    tried,
)
from tft.core.job.incident import (
    Decision,
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


# ---------------------------------------------------------------- logs and reports of incidents


def test_log_has_an_incident_from_its_fault_to_its_end() -> None:
    """When a rank dies, then the log has one entry each for the fault, the stop of all ranks, the
    chosen strategy and the end of the incident."""
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
    assert (closed["steps_lost"], closed["processes_started"]) == (0, 1)


def test_log_lists_faulty_ranks_in_order() -> None:
    """When several ranks fail, then the log lists each once, in the order of the ranks."""
    job = trained(8)
    for rank in (7, 2, 5):
        job.fault(rank, "memory")
    job.settle()
    assert job.facts("stopped") == [{"incident": 1, "ranks": [2, 5, 7]}]


def test_hang_fault_states_the_silence_and_the_step() -> None:
    """When a rank that does not answer is ended, then the evidence states for how many seconds no
    rank made progress, and the step is the one that this rank was in."""
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


def test_evidence_states_that_a_process_was_stopped() -> None:
    """When the agent finds that the process it ends was stopped, then the evidence says so."""
    job = trained()
    job.ranks[2].hung = job.ranks[2].stopped = True
    job.stall()
    job.settle()
    job.wait()
    job.settle()
    job.train()
    assert "the process was stopped (SIGSTOP)" in job.reports()[0]["faults"][0]["evidence"]


def test_log_lists_the_ranks_that_caused_the_stop_in_order() -> None:
    """When all ranks have stopped, then the log lists the faulty ranks that caused the stop, in
    rank order."""
    job = trained(9)
    job.fault(8, "memory")
    job.fault(1, "memory")
    job.settle()
    assert job.facts("stopped") == [{"incident": 1, "ranks": [1, 8]}]


def test_wait_before_another_attempt_grows() -> None:
    """When process groups cannot be formed again and again, then the second attempt begins at once.
    The further attempts wait 2, 4 and 6 seconds."""
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


def test_last_attempt_waits() -> None:
    """When a strategy has only two attempts, then the second attempt waits, because the rendezvous
    store may be lost and another one may be opening."""
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


def test_first_reason_to_end_is_kept() -> None:
    """When a bug of the script has ended the job and an operator then requests the end, then the
    reason in the result is the bug."""
    job = trained()
    job.fault(1, "software", "ValueError: no such layer")
    job.stop(0)
    job.settle()
    assert job.over is not None
    assert job.over.why == (
        "a user's own bug is not retried; a last checkpoint of step 3 is written"
    )


def test_fault_has_the_step_of_its_own_rank() -> None:
    """When a rank dies while another rank is one step ahead, then its fault has the step that the
    dead rank computed."""
    job = trained()
    job.window(2)
    job.close(2)
    job.kill(1)
    job.settle()
    job.train()
    assert [(f["rank"], f["step"]) for f in job.reports()[0]["faults"]] == [(1, 4)]


def test_fault_noticed_in_a_pause_has_the_next_step() -> None:
    """When a fault of a rank is noticed in a pause after step 7, then the log and the report give
    step 8 as its step at once."""
    job = trained(steps=7)
    job.pause()
    job.settle()
    job.notice(3, "memory")
    assert [f["step"] for f in job.facts("fault")] == [8]
    job.settle()
    job.train()
    assert [f["step"] for f in job.reports()[0]["faults"]] == [8]


def test_pollution_noticed_in_a_pause_goes_back_one_step() -> None:
    """When polluted numbers are noticed in a pause, then all ranks go back to the step before."""
    job = trained(steps=7, keeps=1)
    job.pause()
    job.settle()
    job.notice(3, "numeric", polluted=True)
    job.settle()
    assert {r.step for r in job.orders(Restore)} == {6}


def test_fault_noticed_on_the_way_into_a_pause_gets_its_step_later() -> None:
    """When a pause begins and a fault is noticed of a rank that has not reported its position yet,
    then the fault gets the step that the rank reports later."""
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


def test_position_of_a_new_process_is_not_that_of_the_lost_one() -> None:
    """When the replacement of a lost rank is ready before all ranks have reported their positions,
    then its position, step 0, is not taken as the position of the lost process."""
    job = trained(steps=7, placement=WITH_ROOM, spare={2: 1})
    job.script.muted = {(0, "freeze")}
    job.lose_node(1)
    job.settle()
    job.script.muted = set()
    job.repeat()
    job.settle()
    job.train()
    assert [f["step"] for f in job.reports()[0]["faults"]] == [8]


def test_pollution_lowers_the_step_once() -> None:
    """When another fault joins after all ranks have gone back because of pollution, then they do
    not go back a second time for the same pollution."""
    job = trained(keeps=3)
    job.notice(2, "numeric", polluted=True)
    job.settle()
    job.fault(1, "network")
    job.settle()
    job.train()
    assert {r.step for r in job.orders(Restore)} == {2}
    assert job.reports()[0]["step"] == 3


# ---------------------------------------------------------------- ranks that receive orders


def test_terminating_rank_owes_no_answer() -> None:
    """When a rank is being ended, then the job waits for no answer of this rank, and open orders
    are repeated to the other ranks only."""
    job = trained()
    job.notice(3, "process", "its container is gone")
    frozen = [o.to for o in job.machine.outstanding() if isinstance(o, Freeze)]
    assert frozen == [(0, 1, 2)]
    assert [o.rank for o in job.machine.outstanding() if isinstance(o, Kill)] == [3]


def test_late_successor_is_ended_without_last_words() -> None:
    """When a successor is not ready in time, then its process is killed without a request to write
    its stacks first."""
    job = trained(placement=WITH_ROOM, spare={2: 1}, join=40.0)
    job.script.slow = {3}
    job.notice(3, "straggler")
    job.settle()
    job.wait()
    assert [(k.incarnation, k.last_words) for k in job.orders(Kill)] == [(1, False)]


# ---------------------------------------------------------------- repeated attempts of a strategy


def test_strategy_works_after_two_failures() -> None:
    """When a fetch fails twice and then works, then the strategy has succeeded and does not count
    as failed."""
    job = trained()
    job.fault(1, "memory")
    job.script.failures[1, "fetch"] = ["digest differs"] * 2
    tries_on(job)
    job.train()
    assert strategies(job) == ["retry"]
    assert tried(job) == {}
    assert [f.round for f in job.orders(Fetch)] == [1, 2, 3]


def test_attempts_are_counted_per_strategy() -> None:
    """When `retry` has failed three times and the fetch of the replacement fails twice, then
    `recover` is not given up."""
    job = trained()
    job.fault(1, "memory")
    job.script.failures[1, "fetch"] = ["digest differs"] * 5
    tries_on(job)
    job.train()
    assert strategies(job) == ["recover"]
    assert list(tried(job)) == ["retry"]


def test_failures_before_a_loss_do_not_count_for_the_replacement() -> None:
    """When forming process groups fails in `retry`, another rank is then lost, and forming fails
    once more in `recover`, then the attempts of `recover` are counted from zero."""
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


def test_joining_fault_resets_the_count_of_failures() -> None:
    """When a fetch has failed twice, another rank fails, and the fetch fails twice more, then
    `retry` still succeeds, because the new fault resets the count."""
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


def test_failed_first_groups_open_an_incident() -> None:
    """When forming the first process groups of a job fails, then they are formed again in an
    incident that has a number."""
    job = ScriptedJob(2)
    job.script.failures[1, "regroup"] = ["the store is gone"]
    job.start()
    job.train()
    assert job.doing == "healthy"
    assert [i.number for i in job.machine.incidents] == [1]
    assert strategies(job) == ["retry"]


@pytest.mark.parametrize("again", ["process", "hang", "node"])
def test_second_loss_of_a_replacement_is_recovered_again(again: str) -> None:
    """When the replacement of a rank is lost in the same way at the same step, then `recover` is
    used again."""
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


@pytest.mark.parametrize("victim", [2, 3])
def test_second_loss_is_recovered_when_a_survivor_notices_it_first(victim: int) -> None:
    """When a process is lost, and again one in the same step, and each time the same survivor reports
    a broken connection before the loss itself is known, then `recover` is used again: the lost
    process is the cause."""
    job = trained()
    for lost in (2, victim):
        job.fault(1, "network")
        job.kill(lost)
        job.settle()
        assert job.doing == "resuming"
    job.train()
    assert strategies(job) == ["recover"]
    assert job.doing == "healthy"
    assert "occurred again" not in str(tried(job))


def test_lost_process_does_not_lift_the_veto_of_a_plugin() -> None:
    """When a strategy has failed because of a network fault that occurred again, and then a plugin
    vetoes it, then a lost process does not allow the strategy again."""
    decision = Decision(base="recover")
    decision.fail("the network fault at step 4 occurred again", network=True)
    decision.failed["recover"] = "the plugin says no"
    decision.excuse()
    assert decision.failed == {"recover": "the plugin says no"}


def test_repeated_network_fault_without_a_lost_process_is_a_failure_of_the_strategy() -> None:
    """When the same step has the same network fault again and no process is lost, then `retry` is not
    tried once more."""
    job = trained()
    for _ in range(2):
        job.fault(1, "network")
        job.settle()
    assert "the network fault at step 4 occurred again" in str(job.machine.incident.decision.failed)


def test_repeated_report_of_a_fault_is_no_failure_of_the_strategy() -> None:
    """When a rank reports the same fault twice before any strategy was carried out, then no
    strategy has failed."""
    job = trained()
    job.fault(1, "memory")
    job.fault(1, "memory")
    job.settle()
    job.train()
    assert strategies(job) == ["retry"]


def test_repeated_numeric_fault_loads_an_earlier_checkpoint() -> None:
    """When the same step has a numeric fault again, no rank keeps copies and there is a checkpoint
    of an earlier step, then all ranks load this checkpoint."""
    job = trained()
    job.checkpointed(2)
    for _ in range(2):
        job.fault(2, "numeric")
        job.settle()
    assert [o.step for o in job.orders(Load)] == [2]


def test_repeated_memory_fault_does_not_go_back() -> None:
    """When a memory fault occurs again, then the process is replaced. No rank goes back to an
    earlier step, although the ranks keep copies of earlier steps."""
    job = trained(keeps=1)
    for _ in range(2):
        job.fault(2, "memory")
        job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert job.orders(Restore) == []


def test_numeric_fault_after_a_rollback_replaces_the_process() -> None:
    """When a numeric fault occurs again after all ranks have gone back one step, then no rank goes
    back again, and the process of the faulty rank is replaced."""
    job = trained(keeps=3)
    for _ in range(4):
        job.fault(2, "numeric")
        job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert {r.step for r in job.orders(Restore)} == {2}
    assert tried(job) == {"retry": "the numeric fault at step 3 occurred again"}


# ---------------------------------------------------------------- copies in doubt


def test_doubtful_copies_are_used_when_there_are_no_others() -> None:
    """When every rank reports wrong numbers and no earlier copy is kept, then training continues
    with the present state, and the log says so."""
    job = trained()
    for rank in range(4):
        job.fault(rank, "numeric")
    job.settle()
    job.train()
    assert strategies(job) == ["retry"]
    assert job.facts("doubt_dropped") == [{"ranks": [0, 1, 2, 3]}]
    assert job.orders(Fetch) == []
    assert job.doing == "healthy"


def test_doubtful_copies_of_the_living_ranks_are_used() -> None:
    """When every rank reports wrong numbers and one rank is lost, then the present copies of the
    other ranks are still used."""
    job = trained(enable={"scale_in", "dump"})
    for rank in range(4):
        job.fault(rank, "numeric")
    job.kill(3)
    job.settle()
    assert job.facts("doubt_dropped") == [{"ranks": [0, 1, 2]}]
    job.train()
    assert strategies(job) == ["scale_in"]


def test_damaged_memory_is_never_used() -> None:
    """When the memory of every rank has failed, then no rank continues from its state, and the
    state is not saved."""
    job = trained()
    for rank in range(4):
        job.fault(rank, "memory")
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert job.facts("doubt_dropped") == []
    assert job.orders(Save) == []
    assert job.reports()[-1]["strategy"] == "exit"
    alike: dict[str, list[str]] = {}
    for name, why in tried(job).items():
        alike.setdefault(why, []).append(name)
    reasons = "; ".join(f"{', '.join(names)}: {why}" for why, names in alike.items())
    assert job.over.why == f"no strategy is left ({reasons})"


def test_first_process_on_a_late_node_counts_once() -> None:
    """When a rank gets a place on a node that joins while plugins are asked, then its process there
    is the first of the new processes that the rank may have in this incident."""
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


def test_agent_without_ranks_and_room_changes_nothing() -> None:
    """When an agent without ranks and without free places joins, then no order is sent."""
    job = trained()
    job.report(NodeJoined(node=9, host="h", pid=1, ranks=(), at=job.now))
    assert job.said == []


# ---------------------------------------------------------------- the freeze


def test_freeze_names_all_causes_and_goes_to_ready_ranks() -> None:
    """When ranks fail one after the other, then each freeze names all causes so far, and is sent
    only to ranks that can receive orders."""
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


def test_report_lists_every_replaced_rank() -> None:
    """When other ranks are replaced together with a lost rank, then the report lists them with the
    reason. All ranks that are not listed have kept their processes."""
    job = trained(placement={0: (0, 1), 1: (2, 3)}, replace="node")
    job.kill(2)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert {f["rank"]: f["evidence"] for f in incident["faults"]} == {
        2: "was ended by signal 9", 3: "node 1 is replaced, because it has lost rank 2",
    }  # fmt: skip
    assert incident["pids_kept"] is True
    assert job.machine.incidents[0].turnover.kept == {0: True, 1: True, 3: False}


# ---------------------------------------------------------------- details of the advice of plugins


def test_plugin_that_is_silent_after_a_wait_is_not_asked_again() -> None:
    """When a plugin has asked for time and gives no answer when it is asked again, then it is not
    asked a third time."""
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


def test_advice_without_a_strategy_is_not_logged() -> None:
    """When a plugin names no strategy, then the log has no entry about advice that was not
    followed."""
    job = trained(advised=True)
    job.fault(2, "memory")
    job.settle()
    job.advise()
    assert job.facts("advice_not_followed") == []


def test_built_in_strategy_replaces_no_further_ranks() -> None:
    """When a plugin names a built-in strategy, then its list of further ranks to replace is
    ignored."""
    job = trained(advised=True)
    job.fault(2, "memory")
    job.settle()
    job.advise(strategy="recover", replace=(0,))
    assert [k.rank for k in job.orders(Kill)] == [2]


def test_only_the_ready_successor_takes_over() -> None:
    """When two ranks straggle and only one successor is ready, then this successor takes over. The
    other successor continues to start."""
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
    """When the node of a starting successor is excluded and its agent does not end the successor,
    then the successor does not take over when it is ready, and not in the next incident either."""
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
    """When a straggler dies after the node of its successor was excluded, then another process is
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
    """When a successor has taken over from a straggler whose end is not reported yet, and another
    rank is lost, then no strategy is chosen until this end is reported."""
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
    """When a straggler cannot be ended and its rank-local state cannot be made anew, then `migrate`
    fails with a reason. The other ranks write a last checkpoint."""
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
