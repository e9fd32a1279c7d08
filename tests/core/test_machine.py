"""
The job machine under scripted events. Each test describes one behaviour as a sequence of events.
"""

import pytest

from tft.core.job.events import Received
from tft.core.job.policy import Policy
from tft.core.job.shutdown import FINISHED
from tft.core.job.transitions import TRANSITIONS, State
from tft.errors import InternalError
from tft.protocol.messages import (
    Commit,
    Compare,
    Complete,
    End,
    EndNode,
    Exited,
    Fetch,
    Finished,
    Freeze,
    Joined,
    Kill,
    Load,
    NodeJoined,
    OrderName,
    Position,
    Refused,
    Regroup,
    Resume,
    Rollback,
    Save,
    Spawn,
    Stop,
    StoreOpened,
)
from tft.testing.scripted import ScriptedJob


def trained(world: int = 4, steps: int = 3, **settings: object) -> ScriptedJob:
    """
    Return a healthy job that has trained `steps` steps. `settings` are limits of the policy.
    """
    job = ScriptedJob(world, Policy(**settings)).start()  # type: ignore[arg-type] # the limits have different types
    job.train(steps)
    assert job.state is State.HEALTHY
    return job


def test_job_starts_trains_and_completes() -> None:
    """When all ranks start, train and finish, then the outcome is `completed`, and there is no
    incident."""
    job = trained()
    job.finish()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("completed", 0)
    assert job.reports() == []
    assert len(job.orders(Spawn)) == 4
    assert len(job.orders(Complete)) == 1


@pytest.mark.parametrize("victim", range(4))
def test_killed_rank_is_replaced_and_fetches_its_state(victim: int) -> None:
    """When any rank dies between steps, then one new process is started for it. Only this rank
    fetches its state from the other ranks, and all ranks continue at the interrupted step."""
    job = trained()
    job.kill(victim)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert incident["strategy"] == "recover"
    assert (incident["step"], incident["steps_lost"]) == (4, 0)
    assert (incident["processes_started"], incident["pids_kept"]) == (1, True)
    (fetch,) = job.orders(Fetch)
    assert fetch.to == (victim,)
    assert {s.rank for s in fetch.transfers[0].sources} == {0, 1, 2, 3} - {victim}
    assert job.state is State.HEALTHY


def test_step_is_finished_when_a_rank_dies_in_its_update() -> None:
    """When a rank dies in the update of step 4, then all all-reduces of step 4 are complete. The
    other ranks finish step 4, and the job continues at step 5 with no step lost."""
    job = trained()
    job.window(2)
    job.kill(2)
    job.settle()
    (stop,) = job.orders(Stop)
    assert stop.finish == 4
    job.train()
    (incident,) = job.reports()
    assert (incident["step"], incident["steps_lost"]) == (5, 0)


def test_step_that_only_the_dead_rank_completed_is_lost() -> None:
    """When only the dead rank had completed step 4 and no other rank can complete it, then step 4
    is computed again, and one step is lost."""
    job = trained()
    job.window(2)
    job.close(2)
    job.script.stuck = {0, 1, 3}
    job.kill(2)
    job.settle()
    job.script.stuck = set()
    job.train()
    (incident,) = job.reports()
    assert (incident["step"], incident["steps_lost"]) == (4, 1)


def test_rank_that_cannot_finish_the_step_fetches_it() -> None:
    """When one survivor cannot finish a step that the other survivors finish, then it fetches the
    state, like the replacement of the dead rank. No rank goes back to an earlier step."""
    job = trained()
    job.window(2)
    job.script.stuck = {1}
    job.kill(2)
    job.settle()
    job.train()
    assert {f.to for f in job.orders(Fetch)} == {(1,), (2,)}
    (incident,) = job.reports()
    assert (incident["step"], incident["steps_lost"]) == (5, 0)


def test_memory_fault_is_repaired_without_a_new_process() -> None:
    """When a rank reports a device memory fault, then it fetches its state from other ranks. Every
    process is kept, and the strategy is `retry`."""
    job = trained()
    job.fault(1, "memory")
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert incident["strategy"] == "retry"
    assert (incident["processes_started"], incident["pids_kept"]) == (0, True)
    assert [f.to for f in job.orders(Fetch)] == [(1,)]
    assert len(job.orders(Spawn)) == 4


def test_faulty_rank_does_not_set_the_step() -> None:
    """When only the rank with the memory fault has completed step 4, then its state is not used,
    and step 4 is computed again."""
    job = trained()
    job.window(1)
    job.close(1)
    job.script.stuck = {0, 2, 3}
    job.fault(1, "memory")
    job.settle()
    job.script.stuck = set()
    job.train()
    (incident,) = job.reports()
    assert incident["step"] == 4
    (fetch,) = job.orders(Fetch)
    assert fetch.step == 3


def test_repeated_memory_fault_replaces_the_process() -> None:
    """When the same fault occurs again at the same step after `retry`, then the rank's process is
    replaced."""
    job = trained()
    job.fault(1, "memory")
    job.settle()
    job.fault(1, "memory")
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert incident["strategy"] == "recover"
    assert incident["processes_started"] == 1
    assert "occurred again" in str(incident["tried"])


def test_connection_errors_beside_a_dead_process_are_one_fault() -> None:
    """When the connection errors of the peers arrive before the report of the death, then there is
    one incident with one fault of kind `process`."""
    job = trained()
    job.fault(0, "network")
    job.fault(1, "network")
    job.ranks[3].hung = True
    job.settle()
    job.kill(3)
    job.settle()
    job.train()
    (incident,) = job.reports()
    faults = incident["faults"]
    assert isinstance(faults, list)
    assert [(f["kind"], f["rank"]) for f in faults] == [("process", 3)]
    assert incident["strategy"] == "recover"


def test_network_fault_alone_is_retried_without_a_copy() -> None:
    """When connections break and no process has died, then process groups are formed anew, no
    process is replaced, and no state is copied."""
    job = trained()
    job.fault(0, "network")
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert (incident["strategy"], incident["pids_kept"]) == ("retry", True)
    assert job.orders(Fetch) == []


@pytest.mark.parametrize("second", range(4))
@pytest.mark.parametrize("order", [Stop, Regroup, Rollback, Resume])
def test_second_death_joins_the_incident(order: type, second: int) -> None:
    """When another rank, or the replacement itself, dies at any moment of a recovery, then there is
    still one incident, and all ranks continue at the same step."""
    job = trained()
    job.kill(1)
    while not job.orders(order)[1 if order in (Regroup, Rollback, Resume) else 0 :]:
        job._obey(job._queue.popleft())
    started = 1 + job.ranks[second].alive  # a replacement of rank 1 may not be started yet
    job.kill(second)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"]) == ("recover", 4)
    assert incident["processes_started"] == started
    assert {fault["step"] for fault in incident["faults"]} == {4}
    assert job.state is State.HEALTHY


def test_each_round_has_a_new_name_for_its_groups() -> None:
    """When process groups are formed again, then they get a name that was never used before, so
    that new ranks do not find old keys in the rendezvous store."""
    job = trained()
    job.kill(1)
    job.script.failures[(2, "regroup")] = ["the store is gone"]
    job.settle()
    job.train()
    names = [r.name for r in job.orders(Regroup)]
    assert len(names) == len(set(names)) == 3


def test_replaced_store_during_a_regroup_begins_a_new_round() -> None:
    """When the rendezvous store is replaced while process groups are formed, then a new round
    begins with the new store."""
    job = trained()
    job.script.muted = {(r, "regroup") for r in range(4)}
    job.kill(1)
    job.settle()
    job.script.muted = set()
    job.report(StoreOpened(node=0, host="h", port=2, at=job.now))
    job.settle()
    job.train()
    last = job.orders(Regroup)[-1]
    assert last.port == 2
    assert job.state is State.HEALTHY


def test_replaced_store_during_training_sends_no_order() -> None:
    """When the rendezvous store is replaced while all ranks train, then no order is sent."""
    job = trained()
    said = len(job.said)
    job.report(StoreOpened(node=0, host="h", port=2, at=job.now))
    assert len(job.said) == said


def test_strategy_that_fails_three_times_is_given_up() -> None:
    """When `retry` fails three times, then the report lists it as tried with the reason, and the
    faulty rank gets a new process."""
    job = trained()
    job.fault(1, "memory")
    job.script.failures[(1, "fetch")] = ["digest differs"] * 3
    job.settle()
    job.wait()
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert incident["strategy"] == "recover"
    assert "digest differs" in str(incident["tried"])


def test_failed_attempt_is_in_the_report_when_a_later_one_succeeds() -> None:
    """When a rank could not carry out an order at first, and the second attempt succeeds, then the
    report says what had failed."""
    job = trained()
    job.fault(1, "memory")
    job.script.failures[(1, "fetch")] = ["digest differs"]
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert (incident["strategy"], incident["tried"]) == ("retry", [])
    assert incident["repeated"] == ["retry: rank 1 could not fetch: digest differs"]


def test_dead_process_ends_in_a_last_checkpoint_without_recover() -> None:
    """When `recover` is not enabled and a process dies, then the lowest remaining holder saves the
    shard, and a survivor saves the dead rank's rank-local state. The result of the job is `dumped`.
    """
    job = trained(enable=frozenset({"dump"}))
    job.kill(0)
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)
    saves = job.orders(Save)
    assert {s.to: s.shards for s in saves} == {(1,): ("dense",), (2,): (), (3,): ()}
    assert [s.local_state for s in saves if s.to == (1,)] == [{0: "00"}]
    (commit,) = job.orders(Commit)
    assert {f.name for f in commit.files} == {"dense", *(f"local-state-{r}" for r in range(4))}
    (incident,) = job.reports()
    assert (incident["strategy"], incident["pids_kept"]) == ("dump", None)
    assert {t["strategy"] for t in incident["tried"]} == {"retry", "recover", "scale_in"}


def test_savers_are_the_lowest_placed_holders() -> None:
    """When rank 1 of eight is lost and the optimizer shards are on ranks [0,4] [1,5] [2,6] [3,7],
    then ranks 0, 2, 3 and 5 save: the first remaining holder of each shard."""
    groups = {f"s{i}": (i, i + 4) for i in range(4)}
    job = ScriptedJob(8, Policy(enable=frozenset({"dump"})), groups=groups).start()
    job.train(2)
    job.kill(1)
    job.settle()
    saves = [s for s in job.orders(Save) if s.shards]
    assert sorted(s.to[0] for s in saves) == [0, 2, 3, 5]


def test_job_fails_when_both_holders_of_a_shard_are_lost() -> None:
    """When both holders of a shard are lost and no strategy can bring the shard back, then no
    checkpoint is begun. The job fails, and the reason names the shard."""
    groups = {"a": (0, 1), "b": (2, 3)}
    job = ScriptedJob(4, Policy(enable=frozenset({"dump"})), groups=groups).start()
    job.train(2)
    job.kill(2)
    job.kill(3)
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert "'b'" in job.over.why
    assert job.orders(Save) == []


def test_another_holder_saves_when_the_saver_dies() -> None:
    """When the rank that saves a shard dies while it writes, then another holder writes the shard."""
    job = trained(enable=frozenset({"dump"}))
    job.script.muted = {(1, "save")}
    job.kill(0)
    job.settle()
    job.script.muted = set()
    job.kill(1)
    job.settle()
    assert job.over is not None
    assert job.over.result == "dumped"
    last = [s for s in job.orders(Save) if s.shards][-1]
    assert last.to == (2,)
    assert set(last.local_state) == {0, 1}


def test_bug_of_the_script_is_not_retried() -> None:
    """When all ranks raise the same exception, then there is one fault of kind `software`. The job
    writes a last checkpoint of the last step that all ranks completed, and no rank is restarted."""
    job = trained()
    for rank in range(4):
        job.fault(rank, "software", "ValueError: no such layer")
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)
    (incident,) = job.reports()
    assert len(incident["faults"]) == 1
    assert incident["step"] == 4
    assert len(job.orders(Spawn)) == 4
    assert len([t for t in job.tells if t.event == "rank_faulted"]) == 1


def test_hanging_rank_is_ended_and_replaced() -> None:
    """When no rank makes progress and one rank does not wait for the others, then this rank is
    ended and replaced. The fault is a hang, with the stack that the process wrote before its end.
    """
    job = trained()
    job.ranks[2].loop.waiting = False
    job.stall()
    job.settle()
    job.train()
    (kill,) = job.orders(Kill)
    assert (kill.rank, kill.last_words) == (2, True)
    (incident,) = job.reports()
    (fault,) = incident["faults"]
    assert (fault["kind"], fault["rank"]) == ("hang", 2)
    assert "stuck.py" in fault["evidence"]
    assert incident["strategy"] == "recover"


def test_rank_that_does_not_answer_a_freeze_is_reported_as_hanging() -> None:
    """When no rank makes progress and one rank does not answer the freeze, then the fault is a hang
    of this rank. Its step comes from its last recorded position."""
    job = trained()
    job.ranks[2].hung = True
    job.stall()
    job.settle()
    job.wait()
    job.settle()
    job.train()
    (incident,) = job.reports()
    (fault,) = incident["faults"]
    assert (fault["kind"], fault["rank"], fault["step"]) == ("hang", 2, 4)
    assert job.state is State.HEALTHY


def test_stall_without_a_suspect_is_retried() -> None:
    """When every rank waits in a collective, then no rank is killed, and process groups are formed
    anew."""
    job = trained()
    job.stall()
    job.settle()
    job.train()
    assert job.orders(Kill) == []
    (incident,) = job.reports()
    assert incident["strategy"] == "retry"


def test_repeated_deaths_of_the_replacement_end_in_a_last_checkpoint() -> None:
    """When the replacement of a rank dies again and again, then the job writes a last checkpoint
    and ends."""
    job = trained()
    for _ in range(4):
        job.kill(1)
        job.settle()
    assert job.over is not None
    assert job.over.result == "dumped"
    assert "died" in str(job.reports()[-1]["tried"])


def test_incident_beyond_the_limit_ends_in_a_last_checkpoint() -> None:
    """When the limit of incidents is reached, then the next incident ends in a last checkpoint."""
    job = trained(max_incidents=1)
    job.kill(1)
    job.settle()
    job.train()
    job.kill(2)
    job.settle()
    assert job.over is not None
    assert job.over.result == "dumped"
    assert "limit" in str(job.reports()[-1]["tried"])


def test_requested_stop_writes_a_last_checkpoint() -> None:
    """When the launcher gets SIGTERM, then a last checkpoint is committed. The job ends as
    `cancelled` with exit code 143."""
    job = trained()
    job.stop()
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("cancelled", 143)
    assert len(job.orders(Commit)) == 1


def test_stop_before_any_rank_is_ready_cancels_the_job() -> None:
    """When a stop is requested before any rank is ready, then there is nothing to save, and the job
    is cancelled."""
    job = ScriptedJob(2)
    job.stop(2)
    assert job.machine.outcome is not None
    assert (job.machine.outcome.result, job.machine.outcome.code) == ("cancelled", 130)


def test_loss_of_the_only_node_fails_the_job() -> None:
    """When the only node is lost, then no holder of any shard is left, and the job fails."""
    job = trained()
    job.lose_node(0)
    job.settle()
    assert job.machine.outcome is not None
    assert (job.machine.outcome.result, job.machine.outcome.code) == ("failed", 4)


def test_ranks_of_the_other_node_save_when_a_node_is_lost() -> None:
    """When one of two nodes is lost, then the ranks of the other node write a last checkpoint."""
    job = ScriptedJob(4, placement={0: (0, 1), 1: (2, 3)}).start()
    job.train(2)
    job.lose_node(1)
    job.settle()
    assert job.over is not None
    assert job.over.result == "dumped"


def test_second_process_for_a_rank_is_refused() -> None:
    """When a second process claims a rank, then it is refused with a reason that names both
    processes, and the job continues unchanged."""
    job = trained()
    job.report(
        Joined(
            rank=2,
            incarnation=0,
            world=4,
            pid=77,
            started=5,
            host="h",
            address="h:9",
            adaptor="fake",
            strategies=(),
            at=job.now,
        )
    )
    (refused,) = job.orders(Refused)
    assert refused.pid == 77
    assert "77" in refused.why
    assert "1002" in refused.why
    assert job.state is State.HEALTHY


def test_late_report_of_a_replaced_process_is_ignored() -> None:
    """When the end of a process that was already replaced is reported again, then no order is sent,
    and the job stays healthy."""
    job = trained()
    job.kill(1)
    job.settle()
    job.train()
    said = len(job.said)
    old = Exited(
        node=0, rank=1, incarnation=0, code=-9, position=Position(step=3, window=False),
        stack="", local_state={}, at=job.now,
    )  # fmt: skip
    job.report(old)
    assert len(job.said) == said
    assert job.state is State.HEALTHY


def test_unanswered_orders_are_repeated_to_the_missing_ranks() -> None:
    """When one rank has not answered an order, then the order is repeated to this rank only, in the
    present epoch."""
    job = trained()
    job.script.muted = {(0, "freeze")}
    job.kill(1)
    job.settle()
    (freeze,) = [o for o in job.machine.outstanding() if isinstance(o, Freeze)]
    assert freeze.to == (0,)
    assert freeze.epoch == 1


def test_rank_killed_before_the_first_step_is_replaced() -> None:
    """When a rank dies before any step is done, then its replacement fetches the initial state of
    the other ranks, and all ranks begin at step 1."""
    job = ScriptedJob(4).start()
    job.kill(3)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"]) == ("recover", 1)
    assert job.state is State.HEALTHY


def test_resumed_job_continues_after_its_checkpoint() -> None:
    """When a job is resumed from a checkpoint of step 7, then every rank loads the checkpoint, and
    the first step is 8."""
    job = ScriptedJob(2, resume=("/run/checkpoints/step-00000007", 7)).start()
    (load,) = job.orders(Load)
    assert load.to == (0, 1)
    (resume,) = job.orders(Resume)
    assert resume.step == 8


def test_script_without_tft_sets_the_outcome() -> None:
    """When no rank ever calls `tft.init`, then exit codes of 0 complete the job, and other exit
    codes fail it."""
    for code, result in ((0, "completed"), (1, "failed")):
        job = ScriptedJob(1)
        job.report(NodeJoined(node=0, host="h", pid=1, ranks=(0,), at=job.now))
        job.kill(0, code=code)
        assert job.machine.outcome is not None
        assert job.machine.outcome.result == result
        # no rank is left that could receive the orders
        assert (job.orders(Complete), job.orders(End)) == ([], [])


def test_end_of_the_job_is_sent_to_ranks_and_agents() -> None:
    """When a job ends with a last checkpoint, then the ranks get the order to leave with exit code
    3, and the agents get the order to end."""
    job = trained(enable=frozenset({"dump"}))
    job.kill(0)
    job.settle()
    (end,) = job.orders(End)
    assert (end.to, end.code) == ((1, 2, 3), 3)
    assert job.orders(EndNode)


def test_script_that_fails_after_training_fails_the_job() -> None:
    """When all steps are done and a script then fails, then the job fails with exit code 4."""
    job = trained(world=1)
    job.script.muted = {(0, "complete")}
    job.finish()
    job.kill(0, code=1)
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)


def test_signal_after_the_end_of_the_script_changes_no_result() -> None:
    """When all steps are done, and a process is ended by a signal after its script has ended, then
    the job is completed, and the reason says so."""
    job = trained(world=2)
    job.script.muted = {(0, "complete")}
    job.finish()
    job.kill(0, script_ended=True)
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("completed", 0)
    assert job.over.why == (
        "every rank has finished; rank 0 was ended by signal 9 after its script had ended: only files "
        "that the script left open may lack their end"
    )


def test_signal_before_the_end_of_the_script_fails_the_job() -> None:
    """When all steps are done, and a process is ended by a signal while its script saves something,
    then the job fails, because what the script saves may be missing."""
    job = trained(world=2)
    job.script.muted = {(0, "complete")}
    job.finish()
    job.kill(0)
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert job.over.why == (
        "all steps are done, but then rank 0 was ended by signal 9 before its script had ended: what "
        "the script saves after session.run may be missing or damaged"
    )


@pytest.mark.parametrize(("signal", "result", "code"), [(15, "cancelled", 143), (0, "failed", 4)])
def test_script_that_waits_after_training_is_ended_after_a_stop_request(
    signal: int, result: str, code: int
) -> None:
    """When all steps are done, and a script does not end within a minute after a request to end the
    job, then its process is ended, and the reason says so. Without a request it has no limit."""
    job = trained(world=2)
    job.script.muted = {(0, "complete")}
    job.finish()
    assert job.machine._job.timing.deadline is None
    job.stop(signal)
    job.let_pass(59.0)
    assert not job.orders(EndNode)
    job.let_pass(2.0)
    assert job.over is not None
    assert (job.over.result, job.over.code) == (result, code)
    why = "SIGTERM came" if signal else "an operator asks for it"
    assert job.over.why == (
        f"all steps are done, but then {why}, and ranks [0] had not ended 60 s later: what the script "
        "saves after session.run may be missing or damaged"
    )
    assert job.orders(EndNode)


def test_script_that_ends_after_a_stop_request_completes_the_job() -> None:
    """When all steps are done, and a script ends within a minute after a request to end the job,
    then the job is completed."""
    job = trained(world=2)
    job.script.muted = {(0, "complete")}
    job.finish()
    job.stop()
    job.let_pass(59.0)
    job.kill(0, code=0)
    assert job.over is not None
    assert (job.over.result, job.over.code, job.over.why) == ("completed", 0, FINISHED)


@pytest.mark.parametrize("fails_first", [False, True])
def test_stop_request_and_failed_script_leave_the_shorter_limit(fails_first: bool) -> None:
    """When all steps are done, one script fails and another one waits, then a request to end the
    job leaves it a minute, whichever comes first."""
    job = trained(world=2)
    job.script.muted = {(0, "complete"), (1, "complete")}
    job.finish()
    for fails in (fails_first, not fails_first):
        job.kill(1, code=1) if fails else job.stop()
    job.let_pass(61.0)
    assert job.over is not None
    assert job.over.result == ("failed" if fails_first else "cancelled")
    assert "rank 1 left with code 1" in job.over.why


def test_every_state_has_a_row_and_leads_to_the_end() -> None:
    """When the table of transitions is read, then every state has a row, and the state `ended` can
    be reached from every state."""
    assert set(TRANSITIONS) == set(State)
    for state in State:
        seen, todo = {state}, [state]
        while todo:
            todo += [s for s in TRANSITIONS[todo.pop()] if s not in seen and not seen.add(s)]  # type: ignore[func-returns-value] # `add` returns None, and marks `s` as seen
        assert State.ENDED in seen


def test_move_outside_the_table_raises_and_changes_nothing() -> None:
    """When the code tries a transition that the table does not have, then `InternalError` is
    raised, and the state stays the same."""
    job = trained()
    with pytest.raises(
        InternalError, match="the state machine has no transition from healthy to repairing"
    ):
        job.machine._job.move(State.REPAIRING)
    assert job.state is State.HEALTHY


def test_same_events_give_the_same_orders() -> None:
    """When the same sequence of events is run twice, then the orders are the same."""
    said = []
    for _ in range(2):
        job = trained()
        job.kill(1)
        job.settle()
        job.train()
        said.append(job.said)
    assert said[0] == said[1]
    assert isinstance(Received(at=0.0, sender="s", number=1, message=_store()), Received)


def _store() -> StoreOpened:
    return StoreOpened(node=0, host="h", port=1, at=0.0)


def test_rank_that_fails_in_its_update_saves_only_its_rank_local_state() -> None:
    """When a bug of the script raises an exception in the update of one rank, then this rank saves
    no shard. It saves its RNG and data position, because a job cannot be resumed without them."""
    job = trained(world=3)
    for rank in range(3):
        job.window(rank)
    job.fault(2, "software")
    job.settle()
    saves = {s.to: s.shards for s in job.orders(Save)}
    assert saves == {(0,): ("dense",), (1,): (), (2,): ()}
    (commit,) = job.orders(Commit)
    assert {f.name for f in commit.files} == {
        "dense",
        "local-state-0",
        "local-state-1",
        "local-state-2",
    }


def test_commit_waits_for_the_end_of_a_hanging_saver() -> None:
    """When a rank that saves a shard does not answer, then another holder writes the shard. The
    checkpoint is committed only after the process of the first rank has ended."""
    groups: dict[str, tuple[int, ...]] = {"a": (0, 1), "b": (2, 3)}
    job = ScriptedJob(4, groups=groups).start()
    job.train(3)
    job.script.muted = {(2, "save")}
    job.stop()
    job.settle()
    job.wait()
    assert job.orders(Commit) == []
    job.settle()
    (commit,) = job.orders(Commit)
    assert {"a", "b"} <= {f.name for f in commit.files}


def test_all_ranks_with_broken_links_are_saved_instead_of_replaced() -> None:
    """When every rank has reported a broken link, then no rank is replaced, because that would lose
    all state. The job writes a last checkpoint instead."""
    job = trained()
    for rank in (0, 1, 2, 3, 0):
        job.fault(rank, "network")
        job.settle()
    assert job.orders(Kill) == []
    assert job.over is not None
    assert job.over.result == "dumped"


def test_ranks_are_asked_again_by_a_new_controller() -> None:
    """When the controller was away for longer than the limit of an order, then the ranks get the
    order again and are not killed, because no rank could have answered."""
    job = trained()
    job.script.muted = {(r, "freeze") for r in range(4)}
    job.kill(1)
    job.settle()
    job.now += 60.0
    job.lead(2)
    deadline = job.machine.next_deadline()
    assert deadline is not None
    assert deadline > job.now
    assert job.orders(Kill) == []


def test_new_controller_repeats_the_end_of_the_job() -> None:
    """When the controller is killed while it ends the job, then the next controller repeats the
    orders to end."""
    job = trained()
    job.finish()
    job.over = None
    job.lead(2)
    assert job.over is not None


def test_third_attempt_waits_for_two_seconds_or_the_store() -> None:
    """When process groups cannot be formed twice in a row, then the third attempt waits for two
    seconds, or until the rendezvous store is open again."""
    for comes_back in (False, True):
        job = trained()
        job.fault(1, "memory")
        job.script.failures[(1, "regroup")] = ["connection refused"] * 2
        job.settle()
        assert (job.state, len(job.orders(Regroup))) == (State.AWAITING, 3)
        assert job.machine.next_deadline() == pytest.approx(job.now + 2.0)
        if comes_back:
            job.reopen_store(2)
        else:
            job.wait()
        job.settle()
        job.train()
        assert job.state is State.HEALTHY
        assert [order.port for order in job.orders(Regroup)][-1] == (2 if comes_back else 1)


@pytest.mark.parametrize("order", ["freeze", "stop"])
@pytest.mark.parametrize("late", [(0, 1, 2, 3), (1, 2, 3)])
def test_missing_answers_of_most_ranks_end_no_rank(order: OrderName, late: tuple[int, ...]) -> None:
    """When most ranks do not answer a freeze or a stop, then the ranks are ended only after four
    times the limit, because the bus or the controller may have been away."""
    job = trained()
    job.script.muted = {(rank, order) for rank in late}
    job.fault(1, "network")
    job.settle()
    began = job.now
    for _ in range(3):
        job.wait()
        assert job.orders(Kill) == []
        owed = job.machine.outstanding()
        assert [type(each) for each in owed] == (
            [Freeze] if order == "freeze" else [Stop, Compare, Regroup]
        )
        assert all(
            isinstance(each, Freeze | Stop | Compare | Regroup) and each.to == late for each in owed
        )
    job.wait()
    limit = {"freeze": 2.0, "stop": 10.0}[order]
    assert job.now - began == pytest.approx(4 * limit, abs=0.1)
    assert [kill.rank for kill in job.orders(Kill)] == [*late]


def test_short_loss_of_the_bus_ends_no_process() -> None:
    """When the bus is lost after the first rank has answered and is back soon, then the other ranks
    answer the repeated order, and every process is kept."""
    job = trained()
    job.script.muted = {(rank, "freeze") for rank in (1, 2, 3)}
    job.fault(1, "network")
    job.settle()
    job.wait()
    job.script.muted = set()
    job.repeat()
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert (incident["strategy"], incident["pids_kept"]) == ("retry", True)
    assert job.orders(Kill) == []


@pytest.mark.parametrize(("world", "late"), [(4, (3,)), (4, (2, 3)), (2, (1,)), (1, (0,))])
def test_missing_answers_of_at_most_half_of_the_ranks_end_them(
    world: int, late: tuple[int, ...]
) -> None:
    """When at least half of the ranks answer a freeze, or only one rank was asked, then the other
    ranks are ended when the limit is over."""
    job = trained(world)
    job.script.muted = {(rank, "freeze") for rank in late}
    job.fault(0, "network")
    job.settle()
    job.wait()
    assert [kill.rank for kill in job.orders(Kill)] == [*late]


def test_node_with_most_ranks_that_hangs_is_replaced_later() -> None:
    """When all ranks of a node hang and they are most ranks of the job, then their limit is
    restarted several times. After that they are ended and replaced, and the job continues."""
    job = ScriptedJob(4, Policy(), placement={0: (0, 1, 2), 1: (3,)}).start()
    job.train(3)
    for rank in (0, 1, 2):
        job.ranks[rank].hung = True
    job.stall()
    job.settle()
    for _ in range(4):
        assert job.orders(Kill) == []
        job.wait()
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert incident["strategy"] == "recover"
    assert {(f["kind"], f["rank"]) for f in incident["faults"]} == {("hang", r) for r in range(3)}
    assert job.state is State.HEALTHY


def test_repeated_stall_without_a_suspect_ends_in_a_last_checkpoint() -> None:
    """When the job stalls again after each retry and no rank can be suspected, then the job writes
    a last checkpoint and ends."""
    job = trained()
    for _ in range(10):
        if job.over is None:
            job.stall()
            job.settle()
            if job.state is State.AWAITING:
                job.wait()
                job.settle()
    assert job.over is not None
    assert job.over.result == "dumped"


def test_suspicion_ends_when_the_hanging_rank_is_replaced() -> None:
    """When a hanging rank is being replaced and another rank is killed, then a rank that computes
    is not suspected of a hang and is not ended."""
    job = trained()
    job.ranks[1].loop.waiting = False
    job.stall()
    job.settle()
    job.ranks[0].loop.waiting = False
    job.kill(2)
    job.settle()
    assert [k.rank for k in job.orders(Kill)] == [1]


def test_job_fails_when_a_rank_does_not_answer_complete() -> None:
    """When all steps are done and a rank does not answer the order `complete` in time, then the job
    fails."""
    job = trained()
    job.script.muted = {(2, "complete")}
    job.finish()
    job.wait()
    job.settle()
    assert job.over is not None
    assert job.over.result == "failed"


def test_node_lost_during_the_start_ends_the_job_once() -> None:
    """When a node with several ranks is lost while the job starts, then the loss of its first rank
    ends the job. The loss of its other ranks changes nothing."""
    job = ScriptedJob(4, placement={0: (0, 1), 1: (2, 3)}).start()
    job.lose_node(1)
    job.settle()
    assert job.machine.outcome is not None
    lonely = ScriptedJob(4, placement={0: (0, 1), 1: (2, 3)})
    for node, ranks in lonely.nodes.items():
        lonely.report(NodeJoined(node=node, host="h", pid=1, ranks=ranks, at=lonely.now))
    lonely.settle()
    lonely.lose_node(1)
    assert lonely.machine.outcome is not None
    assert lonely.machine.outcome.result == "failed"


def test_announced_outcome_does_not_change() -> None:
    """When the job is over as `completed` and the end of a process is reported later, then the exit
    code does not change."""
    job = trained(world=2)
    job.script.muted = {(0, "complete")}
    job.finish()
    # as for a new leader, which does not know the process
    job.machine._job.processes.running.clear()
    job.let_pass(1.0)
    assert job.over is not None
    job.kill(0, code=-15)
    assert (job.over.result, job.over.code) == ("completed", 0)
    assert job.machine.outcome == job.over


def test_unkillable_rank_after_training_does_not_block_the_end() -> None:
    """When a rank does not leave after training and its agent cannot end its process, then the job
    still ends within the limits, and it has failed."""
    job = trained(world=2)
    job.script.muted = {(0, "complete")}
    job.finish()
    job.script.deaf = {0}
    for _ in range(2):  # the first wait passes the limit of `complete`, the second that of the kill
        job.wait()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert job.over.why == (
        "all steps are done, but then rank 0 did not leave, and its process could not be ended "
        "within 10 s"
    )


def test_node_lost_after_training_fails_the_job() -> None:
    """When all steps are done and a node is lost before its ranks have left, then the job fails,
    because the scripts of these ranks may still have had a model to save."""
    job = ScriptedJob(4, placement={0: (0, 1), 1: (2, 3)}).start()
    job.script.muted = {(2, "complete"), (3, "complete")}
    job.finish()
    job.lose_node(1)
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert "ranks [2, 3] were lost with their node" in job.over.why


@pytest.mark.parametrize("lost", ["rank", "node"])
def test_loss_after_training_ends_the_job_within_a_limit(lost: str) -> None:
    """When a rank or node is lost after all steps are done, and the scripts of the other ranks do
    not end, then the job fails when a limit is over."""
    job = ScriptedJob(4, placement={0: (0, 1), 1: (2, 3)}).start()
    job.train()
    job.script.stuck = {0, 1, 2, 3}  # the scripts are still running after the last step
    job.finish()
    if lost == "rank":
        job.kill(2)
    else:
        job.lose_node(1)
    assert job.doing == "exiting"
    job.wait()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)


def test_ranks_that_finish_at_different_steps_are_named() -> None:
    """When a rank finishes training earlier than the others, and none waits for it, then the reason
    of the end names the steps."""
    job = trained(2, steps=3)
    job.report(Finished(rank=0, incarnation=0, step=3, at=job.now))
    job.report(Finished(rank=1, incarnation=0, step=5, at=job.now))
    job.settle()
    assert job.over is not None
    assert job.over.why == (
        "every rank has finished; the ranks have finished at different steps: ranks [0] after step "
        "3, ranks [1] after step 5"
    )
