"""
The job machine under scripted events. Each test describes one behaviour as a sequence of events.
"""

import pytest

from tft.core.job.events import Received
from tft.core.job.policy import Policy
from tft.core.job.transitions import TRANSITIONS, State
from tft.errors import InternalError
from tft.protocol.messages import (
    Commit,
    Complete,
    End,
    EndNode,
    Exited,
    Fetch,
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
    job = ScriptedJob(world, Policy(**settings)).start()  # type: ignore[arg-type] # limits by name
    job.train(steps)
    assert job.state is State.HEALTHY
    return job


def test_a_job_starts_trains_and_completes() -> None:
    """
    When all ranks come up, train and finish, then the outcome is `completed` and nothing else
    was ever an incident.
    """
    job = trained()
    job.finish()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("completed", 0)
    assert job.reports() == []
    assert len(job.orders(Spawn)) == 4
    assert len(job.orders(Complete)) == 1


@pytest.mark.parametrize("victim", range(4))
def test_a_killed_rank_is_replaced_and_its_state_copied(victim: int) -> None:
    """
    When any rank dies between steps, then one process is started, it alone fetches, from the
    others, and everyone goes on at the step that was interrupted.
    """
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


def test_a_victim_that_had_begun_its_update_lets_the_others_finish_theirs() -> None:
    """
    When a rank dies in the update of step 4, all all-reduces of step 4 are complete: then the others
    are told to finish step 4 and the job goes on at step 5 with nothing lost.
    """
    job = trained()
    job.window(2)
    job.kill(2)
    job.settle()
    (stop,) = job.orders(Stop)
    assert stop.finish == 4
    job.train()
    (incident,) = job.reports()
    assert (incident["step"], incident["steps_lost"]) == (5, 0)


def test_a_step_that_only_the_dead_had_completed_is_computed_again_and_counted() -> None:
    """
    When the victim alone completed step 4 and nobody else can, then step 4 is the agreed one
    and one step counts as lost.
    """
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


def test_a_rank_cut_off_from_a_step_the_others_finish_fetches_it() -> None:
    """
    When one survivor cannot finish the step that the others finish, then it is not the step of
    all that goes back: that survivor fetches, too.
    """
    job = trained()
    job.window(2)
    job.script.stuck = {1}
    job.kill(2)
    job.settle()
    job.train()
    assert {f.to for f in job.orders(Fetch)} == {(1,), (2,)}
    (incident,) = job.reports()
    assert (incident["step"], incident["steps_lost"]) == (5, 0)


def test_a_memory_fault_is_repaired_without_a_new_process() -> None:
    """
    When a rank reports a device memory fault, then its state is copied anew, every process is
    kept, and the strategy is `retry`.
    """
    job = trained()
    job.fault(1, "memory")
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert incident["strategy"] == "retry"
    assert (incident["processes_started"], incident["pids_kept"]) == (0, True)
    assert [f.to for f in job.orders(Fetch)] == [(1,)]
    assert len(job.orders(Spawn)) == 4


def test_a_faulty_rank_never_sets_the_step() -> None:
    """
    When the rank with the memory fault is the only one that has done step 4, then its word
    counts for nothing and step 4 is computed again.
    """
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


def test_a_memory_fault_that_comes_back_is_answered_with_a_new_process() -> None:
    """
    When the same fault returns at the same step after a retry, then retry has failed and the
    rank's process is replaced.
    """
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


def test_broken_connections_beside_a_dead_process_are_one_fault() -> None:
    """
    When the peers' connection errors arrive before the news of the death, then it is one
    incident with one fault: the process.
    """
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


def test_a_network_fault_alone_is_retried_with_everybody_kept() -> None:
    """
    When connections break and no process is gone, then groups are formed anew and nothing is
    copied.
    """
    job = trained()
    job.fault(0, "network")
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert (incident["strategy"], incident["pids_kept"]) == ("retry", True)
    assert job.orders(Fetch) == []


@pytest.mark.parametrize("second", range(4))
@pytest.mark.parametrize("order", [Stop, Regroup, Rollback, Resume])
def test_a_second_death_joins_the_incident(order: type, second: int) -> None:
    """
    When another rank, or the replacement itself, dies at any moment of a recovery, then it is
    still one incident, and everyone goes on at the same step.
    """
    job = trained()
    job.kill(1)
    while not job.orders(order)[1 if order in (Regroup, Rollback, Resume) else 0 :]:
        job._obey(job._queue.popleft())
    started = 1 + job.ranks[second].alive  # the replacement may not have been started yet
    job.kill(second)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"]) == ("recover", 4)
    assert incident["processes_started"] == started
    assert {fault["step"] for fault in incident["faults"]} == {4}
    assert job.state is State.HEALTHY


def test_each_round_has_a_name_of_its_own_for_its_groups() -> None:
    """
    When groups are formed again, then never under a name that was used before: old keys in the
    store must not meet new ranks.
    """
    job = trained()
    job.kill(1)
    job.script.failures[(2, "regroup")] = ["the store is gone"]
    job.settle()
    job.train()
    names = [r.name for r in job.orders(Regroup)]
    assert len(names) == len(set(names)) == 3


def test_a_store_that_comes_back_elsewhere_while_groups_form_starts_a_new_round() -> None:
    """
    When the rendezvous store is replaced during a regroup, then the ranks are called back and
    sent to the new one.
    """
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


def test_a_store_that_is_replaced_between_incidents_costs_nothing() -> None:
    """
    When the store comes back elsewhere while everyone trains, then nobody is told anything.
    """
    job = trained()
    said = len(job.said)
    job.report(StoreOpened(node=0, host="h", port=2, at=job.now))
    assert len(job.said) == said


def test_a_strategy_that_keeps_failing_gives_way_to_the_next() -> None:
    """
    When a retry fails three times, then it is recorded as tried, with the reason, and the
    faulty rank gets a new process.
    """
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


def test_recovery_that_is_not_enabled_ends_in_a_last_checkpoint() -> None:
    """
    When `recover` is not enabled and a process dies, then each shard is saved once by the
    lowest-placed holder, the dead rank's rank-local state by a survivor, and the job is `dumped`.
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


def test_savers_are_the_lowest_placed_holders_of_each_shard() -> None:
    """
    When rank 1 of eight is gone and the optimizer's shards live on [0,4] [1,5] [2,6] [3,7], then
    ranks 0, 2, 3 and 5 save.
    """
    groups = {f"s{i}": (i, i + 4) for i in range(4)}
    job = ScriptedJob(8, Policy(enable=frozenset({"dump"})), groups=groups).start()
    job.train(2)
    job.kill(1)
    job.settle()
    saves = [s for s in job.orders(Save) if s.shards]
    assert sorted(s.to[0] for s in saves) == [0, 2, 3, 5]


def test_a_shard_without_a_holder_cannot_be_dumped() -> None:
    """
    When both holders of a shard are gone and nothing can bring them back, then no checkpoint is
    begun, the shard is named and the job has failed.
    """
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


def test_a_saver_that_dies_is_replaced_by_another_holder() -> None:
    """
    When the saver dies while it writes, then another holder writes the shard.
    """
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


def test_a_users_own_bug_is_not_retried() -> None:
    """
    When the same exception comes from all ranks, then it is one fault of kind `software`, the
    job is dumped at the last agreed step, and nobody is restarted.
    """
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


def test_a_rank_that_hangs_is_named_killed_and_replaced() -> None:
    """
    When nobody moves and one rank does not wait for the others, then it is that rank that is
    ended, with its last words, and replaced; the fault is a hang with its stack.
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


def test_a_rank_that_does_not_even_answer_is_the_one_that_hangs() -> None:
    """
    When a rank is stopped, or holds the interpreter, then it does not answer where it stands,
    and after the limit that is answer enough; the page it left behind says in which step.
    """
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


def test_a_stall_that_nobody_can_be_blamed_for_is_retried() -> None:
    """
    When every rank waits in a collective, then nobody is killed: groups are formed anew.
    """
    job = trained()
    job.stall()
    job.settle()
    job.train()
    assert job.orders(Kill) == []
    (incident,) = job.reports()
    assert incident["strategy"] == "retry"


def test_a_crash_loop_ends_in_a_last_checkpoint() -> None:
    """
    When the replacement dies again and again, then the job does not restart it for ever.
    """
    job = trained()
    for _ in range(4):
        job.kill(1)
        job.settle()
    assert job.over is not None
    assert job.over.result == "dumped"
    assert "died" in str(job.reports()[-1]["tried"])


def test_the_incident_after_the_last_allowed_one_ends_in_dump() -> None:
    """
    When the limit of incidents is reached, then the next one is not recovered.
    """
    job = trained(max_incidents=1)
    job.kill(1)
    job.settle()
    job.train()
    job.kill(2)
    job.settle()
    assert job.over is not None
    assert job.over.result == "dumped"
    assert "limit" in str(job.reports()[-1]["tried"])


def test_a_requested_stop_saves_first() -> None:
    """
    When the launcher gets SIGTERM, then a last checkpoint is written and the code says why.
    """
    job = trained()
    job.stop()
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("cancelled", 143)
    assert len(job.orders(Commit)) == 1


def test_a_stop_before_anyone_is_ready_just_ends() -> None:
    """
    When nothing has been built yet, then there is nothing to save and the job is cancelled.
    """
    job = ScriptedJob(2)
    job.stop(2)
    assert job.machine.outcome is not None
    assert (job.machine.outcome.result, job.machine.outcome.code) == ("cancelled", 130)


def test_a_lost_node_with_every_rank_ends_the_job() -> None:
    """
    When the only agent is gone, then no holder is left and the job has failed.
    """
    job = trained()
    job.lose_node(0)
    job.settle()
    assert job.machine.outcome is not None
    assert (job.machine.outcome.result, job.machine.outcome.code) == ("failed", 4)


def test_a_lost_node_among_others_leaves_a_last_checkpoint() -> None:
    """
    When one of two nodes is gone, then the ranks of the other save what they hold.
    """
    job = ScriptedJob(4, placement={0: (0, 1), 1: (2, 3)}).start()
    job.train(2)
    job.lose_node(1)
    job.settle()
    assert job.over is not None
    assert job.over.result == "dumped"


def test_a_second_process_for_a_rank_is_refused_with_both_named() -> None:
    """
    When another process claims a rank that is held, then it is told who holds it, and the job
    goes on as if nothing had been.
    """
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


def test_what_a_replaced_process_still_says_is_absorbed() -> None:
    """
    When the end of an incarnation that is long replaced comes in once more, nothing follows.
    """
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


def test_unanswered_orders_are_said_again_to_those_who_owe_the_answer() -> None:
    """
    When one rank has not answered, then only it is asked again, under the present epoch.
    """
    job = trained()
    job.script.muted = {(0, "freeze")}
    job.kill(1)
    job.settle()
    (freeze,) = [o for o in job.machine.outstanding() if isinstance(o, Freeze)]
    assert freeze.to == (0,)
    assert freeze.epoch == 1


def test_a_rank_killed_before_the_first_step_is_replaced() -> None:
    """
    When a rank dies after the start and before any step is done, then its replacement copies
    the others' initial state and everyone begins at step 1.
    """
    job = ScriptedJob(4).start()
    job.kill(3)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"]) == ("recover", 1)
    assert job.state is State.HEALTHY


def test_a_resumed_job_loads_everywhere_and_goes_on_after_the_checkpoint() -> None:
    """
    When a job is resumed, then every rank loads and the first step is the one after.
    """
    job = ScriptedJob(2, resume=("/run/checkpoints/step-00000007", 7)).start()
    (load,) = job.orders(Load)
    assert load.to == (0, 1)
    (resume,) = job.orders(Resume)
    assert resume.step == 8


def test_a_script_that_never_joins_ends_as_it_ends() -> None:
    """
    When no rank ever calls `tft.init`, then clean exits complete the job and others fail it.
    """
    for code, result in ((0, "completed"), (1, "failed")):
        job = ScriptedJob(1)
        job.report(NodeJoined(node=0, host="h", pid=1, ranks=(0,), at=job.now))
        job.kill(0, code=code)
        assert job.machine.outcome is not None
        assert job.machine.outcome.result == result
        assert (job.orders(Complete), job.orders(End)) == ([], [])  # nobody would hear it


def test_the_end_is_said_to_ranks_and_agents() -> None:
    """
    When a job is dumped, then the ranks leave with 3 and the agents are told to end.
    """
    job = trained(enable=frozenset({"dump"}))
    job.kill(0)
    job.settle()
    (end,) = job.orders(End)
    assert (end.to, end.code) == ((1, 2, 3), 3)
    assert job.orders(EndNode)


def test_a_rank_that_fails_after_all_is_done_is_told() -> None:
    """
    When training is complete and a script then fails on its own, the job did not complete.
    """
    job = trained(world=1)
    job.script.muted = {(0, "complete")}
    job.finish()
    job.kill(0, code=1)
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)


def test_every_state_has_its_row_and_can_be_left_for_the_end() -> None:
    """
    The table is whole: every state has a row, and from each the end can be reached.
    """
    assert set(TRANSITIONS) == set(State)
    for state in State:
        seen, todo = {state}, [state]
        while todo:
            todo += [s for s in TRANSITIONS[todo.pop()] if s not in seen and not seen.add(s)]  # type: ignore[func-returns-value] # set.add as a mark
        assert State.ENDED in seen


def test_a_move_that_is_not_in_the_table_is_our_bug_and_changes_nothing() -> None:
    """
    When the code tries a move the table does not have, it raises and stays where it was.
    """
    job = trained()
    with pytest.raises(InternalError, match="no way leads from healthy to repairing"):
        job.machine._job.move(State.REPAIRING)
    assert job.state is State.HEALTHY


def test_the_same_events_give_the_same_orders() -> None:
    """
    The machine has no will of its own: two runs of one script say the same.
    """
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


def test_a_torn_rank_still_writes_its_own_rank_local_state() -> None:
    """
    When a user's bug strikes inside the update window of one rank, then that rank saves no shard
    but its RNG and data position, without which nothing could be resumed.
    """
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


def test_nothing_is_committed_before_a_saver_that_hangs_is_gone() -> None:
    """
    When a saver does not answer, then the commit waits for its end, and another holder writes
    its shard first.
    """
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


def test_a_link_that_keeps_breaking_does_not_cost_the_last_holders() -> None:
    """
    When every rank has reported a broken link, then replacing them all would lose the state:
    it is saved instead.
    """
    job = trained()
    for rank in (0, 1, 2, 3, 0):
        job.fault(rank, "network")
        job.settle()
    assert job.orders(Kill) == []
    assert job.over is not None
    assert job.over.result == "dumped"


def test_limits_begin_anew_with_a_new_controller() -> None:
    """
    When the controller was away for longer than a limit, then nobody could have answered: the
    ranks are asked again, not killed.
    """
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


def test_a_controller_that_is_started_again_after_the_end_says_the_end_again() -> None:
    """
    When the controller is killed while it says goodbye, then the next one does so.
    """
    job = trained()
    job.finish()
    job.over = None
    job.lead(2)
    assert job.over is not None


def test_what_fails_twice_is_given_time_before_the_third_attempt() -> None:
    """
    When groups cannot be formed twice in a row, then the third attempt waits for two seconds, or
    for the store to come back, which may be what was missing.
    """
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
def test_when_most_do_not_answer_it_is_not_the_ranks(
    order: OrderName, late: tuple[int, ...]
) -> None:
    """
    When nobody answers a freeze or a stop, or one did and then most did not, then the bus is away,
    or we are: nobody is ended for it, until it has been so several times.
    """
    job = trained()
    job.script.muted = {(rank, order) for rank in late}
    job.fault(1, "network")
    job.settle()
    began = job.now
    for _ in range(3):
        job.wait()
        assert job.orders(Kill) == []
        (owed,) = job.machine.outstanding()
        assert isinstance(owed, Freeze | Stop)
        assert owed.to == late
    job.wait()
    limit = {"freeze": 2.0, "stop": 10.0}[order]
    assert job.now - began == pytest.approx(4 * limit, abs=0.1)
    assert [kill.rank for kill in job.orders(Kill)] == [*late]


def test_a_bus_that_comes_back_costs_nobody_its_process() -> None:
    """
    When the bus goes away after the first rank has answered, and comes back soon, then the others
    answer what is repeated to them, and everyone keeps its process.
    """
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
def test_when_no_more_than_half_do_not_answer_it_is_them(world: int, late: tuple[int, ...]) -> None:
    """
    When at least half of the ranks answer a freeze, or nobody else was asked, then the others are
    ended as soon as their time is over.
    """
    job = trained(world)
    job.script.muted = {(rank, "freeze") for rank in late}
    job.fault(0, "network")
    job.settle()
    job.wait()
    assert [kill.rank for kill in job.orders(Kill)] == [*late]


def test_a_node_with_most_of_the_job_that_hangs_is_found_out_all_the_same() -> None:
    """
    When all ranks of a node hang, and they are most of the job, then they are given their time
    again, and in the end they are ended and replaced: the job goes on.
    """
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


def test_a_stall_that_comes_back_ends() -> None:
    """
    When nobody moves, nobody can be blamed and a retry does not help, then it is not retried
    for ever.
    """
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


def test_a_suspicion_does_not_outlive_what_it_was_about() -> None:
    """
    When a hung rank has been replaced and another one is killed, then a rank that merely
    computes is not taken for one that hangs.
    """
    job = trained()
    job.ranks[1].loop.waiting = False
    job.stall()
    job.settle()
    job.ranks[0].loop.waiting = False
    job.kill(2)
    job.settle()
    assert [k.rank for k in job.orders(Kill)] == [1]


def test_a_rank_that_never_leaves_after_the_end_is_ended() -> None:
    """
    When all is done and a rank does not even hear it, then it does not keep the job.
    """
    job = trained()
    job.script.muted = {(2, "complete")}
    job.finish()
    job.wait()
    job.settle()
    assert job.over is not None
    assert job.over.result == "failed"


def test_a_node_that_is_lost_before_anything_was_trained_ends_the_job_once() -> None:
    """
    When a node with several ranks is lost while the job starts, then the first of them ends the
    job, and the others are no faults any more.
    """
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


def test_the_outcome_stays_once_it_was_announced() -> None:
    """
    When the job is over as completed, then the end of a process that is reported later does not
    change the exit code behind the report.
    """
    job = trained(world=2)
    job.script.muted = {(0, "complete")}
    job.finish()
    job.machine._job.processes.running.clear()  # as after a failover, which forgets the process
    job.let_pass(1.0)
    assert job.over is not None
    job.kill(0, code=-15)
    assert (job.over.result, job.over.code) == ("completed", 0)
    assert job.machine.outcome == job.over


def test_a_rank_that_cannot_be_ended_after_all_is_done_does_not_hold_up_the_end() -> None:
    """
    When a rank does not leave after all is done, and its agent cannot end it either, then the job
    ends in time, and not as completed.
    """
    job = trained(world=2)
    job.script.muted = {(0, "complete")}
    job.finish()
    job.script.deaf = {0}
    for _ in range(2):  # the limit of `complete`, and then the limit of the kill
        job.wait()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert job.over.why == (
        "all steps are done, but then rank 0 did not leave, and its process could not be ended "
        "within 10 s"
    )


def test_a_node_that_is_lost_after_all_is_done_is_not_passed_over() -> None:
    """
    When all steps are done and a node is lost before its ranks have left, then the job did not
    complete: these ranks may have had a model to save.
    """
    job = ScriptedJob(4, placement={0: (0, 1), 1: (2, 3)}).start()
    job.script.muted = {(2, "complete"), (3, "complete")}
    job.finish()
    job.lose_node(1)
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert "ranks [2, 3] were lost with their node" in job.over.why


@pytest.mark.parametrize("lost", ["rank", "node"])
def test_a_loss_after_all_is_done_does_not_let_the_others_wait_for_ever(lost: str) -> None:
    """
    When a rank or a node is lost after all steps are done, and the scripts of the other ranks wait
    for the lost one, then the job ends within a limit.
    """
    job = ScriptedJob(4, placement={0: (0, 1), 1: (2, 3)}).start()
    job.train()
    job.script.stuck = {0, 1, 2, 3}  # in their scripts, behind the last step
    job.finish()
    if lost == "rank":
        job.kill(2)
    else:
        job.lose_node(1)
    assert job.doing == "exiting"
    job.wait()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
