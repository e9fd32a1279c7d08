"""
Ends of processes: their causes, processes that cannot be killed, and ranks that remain or finish
last.
"""

import pytest

from tests.core.lives import (
    strategies,
    trained,
    tried,
)
from tft.core.job.policy import (
    STRATEGIES,
    Policy,
)
from tft.core.job.transitions import (
    State,
)
from tft.protocol.messages import (
    End,
    Exited,
    Fetch,
    Finished,
    Freeze,
    Kill,
    Load,
    NodeJoined,
    Position,
    Ready,
    Rollback,
    Save,
    ShardCopies,
    Spawn,
    Spawned,
    Stop,
    StoreOpened,
)
from tft.testing.scripted import (
    ScriptedJob,
)

# ---------------------------------------------------------------- causes of process exits


def starting(world: int = 2) -> ScriptedJob:
    """
    Return a job whose scripts have started but have not called `tft.init`.
    """
    job = ScriptedJob(world)
    job.script.slow = set(range(world))
    job.lead(1)
    job.come(0)
    job.settle()
    return job


def test_job_completes_when_all_scripts_end_without_calling_tft_init() -> None:
    """When all scripts end with code 0 and never call `tft.init`, then the job is completed when
    the last script has ended."""
    job = starting()
    job.kill(0, 0)
    assert job.doing == "awaiting"
    job.kill(1, 0)
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("completed", 0)
    assert job.over.why.startswith("every rank has ended, and no rank has called tft.init")


@pytest.mark.parametrize(("code", "how"), [(1, "left with code 1"), (-9, "was ended by signal 9")])
def test_failure_before_tft_init_names_the_rank_and_its_exit(code: int, how: str) -> None:
    """When a script that never called `tft.init` fails, then the job fails, and the reason names
    the rank and its exit code or signal."""
    job = starting()
    job.kill(1, code)
    job.wait()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert job.over.why == f"rank 1 {how} before any rank had joined the job"


@pytest.mark.parametrize("code", [0, 3])
def test_successor_that_exits_before_it_is_ready_is_not_started_again(code: int) -> None:
    """When the second process of a rank exits by itself before it is ready, then no third process
    is started. The remaining ranks save, and the report names a software fault."""
    job = trained()
    job.script.slow = {1}
    job.kill(1)
    job.settle()
    job.kill(1, code)
    job.settle()
    assert [s.incarnation for s in job.orders(Spawn)] == [1]
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)
    assert job.over.why.startswith(
        "rank 1 left with code 3 before it called session.run: its log says why"
        if code
        else "rank 1 left with code 0 and has not begun to train: it "
    )
    (incident,) = job.reports()
    assert [(f["kind"], f["evidence"]) for f in incident["faults"]] == [
        ("process", "was ended by signal 9"),
        ("software", f"left with code {code}"),
    ]


@pytest.mark.parametrize(
    ("joins", "missed"),
    [
        (False, "it did not call tft.init"),
        (True, "it called tft.init and did not come to session.run"),
    ],
)
def test_end_of_the_job_says_if_an_early_exit_had_called_tft_init(
    *, joins: bool, missed: str
) -> None:
    """When the second process of a rank exits with code 0 before it is ready, then the reason for
    the end of the job says whether the process had called `tft.init`."""
    job = trained()
    job.script.slow = {1}
    job.kill(1)
    job.settle()
    if joins:
        job.join(job.ranks[1])
    job.kill(1, 0)
    job.settle()
    assert job.over is not None
    assert job.over.why.startswith(f"rank 1 left with code 0 and has not begun to train: {missed};")


def test_process_end_that_is_reported_twice_is_one_fault() -> None:
    """When the end of a process is reported again before another process is started, then the
    report has one fault, and recovery plugins are asked once."""
    job = trained(advised=True, enable=frozenset({"retry", "scale_in", "dump"}))
    job.kill(3)
    job.settle()
    assert job.doing == "choosing"
    job.kill(3)
    job.settle()
    assert len(job.consulted) == 1
    assert len(job.facts("rank_gone")) == 1
    job.advise()
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert [(f["kind"], f["rank"]) for f in incident["faults"]] == [("process", 3)]


def test_process_that_a_signal_ends_before_it_is_ready_is_replaced() -> None:
    """When a signal ends the second process of a rank before it is ready, then this is not a bug of
    the script, and a third process is started."""
    job = trained()
    job.script.slow = {1}
    job.kill(1)
    job.settle()
    job.kill(1, -11)
    job.script.slow = set()
    job.settle()
    job.train()
    assert [s.incarnation for s in job.orders(Spawn)] == [1, 2]
    assert strategies(job) == ["recover"]


def test_rank_that_exits_with_code_0_during_training_is_not_replaced() -> None:
    """When a rank exits with code 0 while the other ranks still train, then no process is started
    for it, and the other ranks write a last checkpoint."""
    job = trained()
    job.kill(1, 0)
    job.settle()
    assert job.orders(Spawn) == []
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)
    assert job.over.why.startswith("rank 1 left with code 0 before all ranks had finished")
    (incident,) = job.reports()
    assert [(f["kind"], f["rank"], f["step"], f["evidence"]) for f in incident["faults"]] == [
        ("software", 1, 4, "left with code 0")
    ]


def flappy(policy: Policy) -> ScriptedJob:
    """
    Return a starting job of two ranks in which the process of rank 1 has joined but is not ready
    yet.
    """
    job = ScriptedJob(2, policy)
    job.script.slow = {1}
    job.lead(1)
    job.come(0)
    job.report(StoreOpened(node=0, host="h", port=1, at=job.now))
    job.settle()
    job.join(job.ranks[1])
    return job


def test_process_death_during_the_start_counts_as_an_incident_of_its_rank() -> None:
    """When the policy allows a rank no incident and its process dies while the job starts, then it
    is not started again."""
    job = flappy(Policy(flaps=0))
    job.kill(1)
    job.settle()
    assert [s.incarnation for s in job.orders(Spawn)] == [0, 0]
    assert "rank 1 was the cause of 1 incidents" in tried(job)["recover"]


def test_slow_start_does_not_count_as_an_incident_of_its_rank() -> None:
    """When the policy allows a rank no incident and its process is ended because it is not ready in
    time, then another process is started."""
    job = flappy(Policy(flaps=0))
    job.wait()
    job.script.slow = set()
    job.settle()
    assert [s.incarnation for s in job.orders(Spawn)] == [0, 0, 1]
    job.train()
    assert job.doing == "healthy"


def test_report_names_a_process_that_could_not_be_stopped_or_ended() -> None:
    """When a rank fails to stop and its agent cannot end its process, then the report has one
    fault. The fault says that the process could not be ended within 10 s."""
    job = trained(placement={0: (0, 1), 1: (2, 3), 2: ()}, spare={2: 2})
    job.script.deaf = {1}
    job.script.failures[3, "stop"] = ["its card does not answer"]
    job.fault(0, "network")
    job.settle()
    job.wait()
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert [(f["kind"], f["rank"], f["evidence"]) for f in incident["faults"]] == [
        ("process", 3, "its process could not be ended within 10 s")
    ]
    assert incident["faults"][0]["step"] == 4
    assert job.facts("rank_not_ended") == [
        {
            "rank": 3,
            "incarnation": 0,
            "why": "its process could not be ended within 10 s",
        }
    ]
    assert strategies(job) == ["recover"]


def test_late_reports_of_an_ended_process_are_ignored() -> None:
    """When reports of a process arrive after its end, then its rank counts neither as ready nor as
    finished. The other ranks write the last checkpoint without it."""
    job = trained(enable=frozenset({"dump"}))
    job.kill(3)
    job.ready(job.ranks[3])
    job.report(Finished(rank=3, incarnation=0, step=7, at=job.now))
    job.settle()
    assert {rank for order in job.orders(Stop) for rank in order.to} == {0, 1, 2}
    assert [save.to for save in job.orders(Save)] == [(0,), (1,), (2,)]
    assert job.over is not None
    assert job.over.why.endswith("a last checkpoint of step 3 is written")
    assert job.machine.last_step == 3


def test_finished_rank_lost_with_its_node_has_its_fault_after_its_last_step() -> None:
    """When a rank that has finished training at step 3 is lost with its node, then its fault is
    recorded at step 4. No rank is ordered to finish step 4, because none has begun it."""
    job = trained(placement={0: (0, 1), 1: (2, 3)}, columns={2: (2, 3), 3: (2, 3)})
    job.finish(3)
    job.lose_node(1)
    job.settle()
    faults = {f["rank"]: f["step"] for f in job.facts("fault")}
    assert faults == {2: 0, 3: 4}
    assert [stop.finish for stop in job.orders(Stop)] == [3]


def test_rank_that_died_before_its_node_was_lost_is_one_fault() -> None:
    """When a rank dies and its node is lost after that, then the rank has one fault. Only the ranks
    that still ran on that node are told to end."""
    job = trained(placement={0: (0, 1), 1: (2, 3)}, enable=frozenset({"scale_in", "dump"}))
    job.kill(3)
    job.lose_node(1)
    job.settle()
    job.train()
    assert [(f["kind"], f["rank"]) for f in job.facts("fault")] == [("process", 3), ("node", 2)]
    assert [k.rank for k in job.orders(Kill)] == [2]


def test_captured_state_is_kept_when_a_process_end_is_reported_again() -> None:
    """When the end of a process is reported again, this time without the rank-local state captured
    from it, then the last checkpoint still contains this rank-local state."""
    job = trained(enable=frozenset({"dump"}))
    job.kill(3)
    job.report(
        Exited(
            node=0, rank=3, incarnation=0, code=-9, position=Position(step=0, window=False),
            stack="", local_state={}, at=job.now,
        )
    )  # fmt: skip
    job.settle()
    assert [dict(save.local_state) for save in job.orders(Save)] == [{3: "00"}, {}, {}]


def test_room_of_a_dead_successor_can_be_used_by_one_successor() -> None:
    """When a successor dies before it takes over, then its place is free for exactly one further
    successor."""
    job = trained(placement={0: (0, 1), 1: (2, 3), 2: ()}, spare={2: 1})
    job.script.slow = {2, 3}
    job.notice(3, "straggler")
    job.settle()
    job.kill_successor(3)
    job.notice(3, "straggler")
    job.settle()
    job.notice(2, "straggler")
    job.settle()
    assert [(s.rank, s.node) for s in job.orders(Spawn)] == [(3, 2), (3, 2)]
    assert job.facts("rank_straggles")[-1]["why_not"] == "no other node has room"


def test_stopped_process_that_a_signal_ends_is_reported_as_ended() -> None:
    """When a stopped process is ended from outside, then the report says that a signal ended it,
    and does not report a hang."""
    job = trained()
    job.ranks[1].stopped = True
    job.kill(1)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert [f["evidence"] for f in incident["faults"]] == ["was ended by signal 9"]


def test_copy_that_was_lost_with_its_process_is_no_rollback_target() -> None:
    """When a numeric fault occurs again at the same step and the only earlier copy was lost with
    its process, then `retry` is not tried again. The job ends with `dump`."""
    job = trained(enable=frozenset({"scale_in", "retry", "dump"}))
    job.ranks[3].state.keeps = 1
    job.train(2)
    job.pause()
    job.settle()
    job.go_on()
    job.settle()
    job.train()
    job.kill(3)
    job.settle()
    job.train()
    job.fault(0, "numeric")
    job.settle()
    job.fault(0, "numeric")
    job.settle()
    assert strategies(job) == ["scale_in", "dump"]


def test_new_agent_on_a_node_gets_no_kill_orders_of_the_old_agent() -> None:
    """When a new agent replaces another agent on its node, then the `Kill` orders to the old agent
    are not repeated to the new one."""
    job = trained(placement={0: (0, 1), 1: (2, 3)})
    job.script.deaf = {1}
    job.notice(3, "process", "its card is gone")
    job.report(NodeJoined(node=1, host="h", pid=2, ranks=(2, 3), at=job.now))
    kills = [k for k in job.machine.outstanding() if isinstance(k, Kill)]
    assert kills == []


def test_node_lost_while_the_job_exits_starts_and_ends_no_process() -> None:
    """When a node is lost while all ranks leave at the end of the job, then no process is started
    on another node, and no process is ended."""
    groups = {"a": (0, 1), "b": (2,), "c": (3,)}
    job = trained(placement={0: (0, 1), 1: (2, 3), 2: ()}, spare={2: 4}, groups=groups)
    job.script.muted = {(rank, "end") for rank in range(4)}
    job.kill(3)
    job.settle()
    assert job.doing == "exiting"
    job.said.clear()
    job.lose_node(0)
    assert job.orders(Spawn) == []
    assert job.orders(Kill) == []


# ---------------------------------------------------------------- processes that cannot be killed


def test_job_continues_without_a_process_that_does_not_end_in_ten_seconds() -> None:
    """When an agent does not report within ten seconds that a process has ended, then the job does
    not wait longer for its last report. The rank moves to another node."""
    job = trained(placement={0: (0, 1), 1: (2, 3), 2: ()}, spare={2: 1})
    job.script.deaf = {1}
    job.notice(3, "process", "its card is gone")
    job.settle()
    assert job.state is State.FREEZING
    assert job.machine.next_deadline() == pytest.approx(job.now + 10.0, abs=0.1)
    job.wait()
    assert job.facts("rank_not_ended")[0]["rank"] == 3
    assert [(s.rank, s.node) for s in job.orders(Spawn)][-1] == (3, 2)
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert [k.rank for k in job.machine.outstanding() if isinstance(k, Kill)] == [3]


def test_strategy_is_chosen_again_when_a_process_cannot_be_ended() -> None:
    """When a process that is to be replaced cannot be ended and no other node has room, then the
    job does not wait, and the strategy is chosen again."""
    job = trained(placement={0: (0, 1), 1: (2, 3)})
    job.script.deaf = {1}
    for _ in range(2):
        job.fault(2, "memory")
        job.settle()
    assert job.machine.incident.decision.strategy == "recover"
    job.wait()
    job.settle()
    job.train()
    assert strategies(job) == ["scale_in"]
    assert job.machine.members == {0, 1, 3}


def test_last_checkpoint_is_written_without_a_process_that_cannot_be_ended() -> None:
    """When a process cannot be ended while a last checkpoint is written, then the other ranks write
    the checkpoint without this process."""
    job = trained(placement={0: (0, 1), 1: (2, 3)})
    job.script.deaf = {1}
    job.stop(0)
    job.notice(3, "process", "its card is gone")
    job.settle()
    job.wait()
    job.settle()
    assert job.over is not None
    assert job.over.result == "dumped"


def test_captured_state_of_a_process_that_ends_late_is_saved() -> None:
    """When a process ends only after its time limit, then the rank-local state captured from it is
    still saved in the last checkpoint."""
    job = trained(placement={0: (0, 1), 1: (2, 3)}, enable={"dump"})
    job.script.deaf = {1}
    job.notice(3, "process", "its card is gone")
    job.settle()
    job.wait()
    assert job.state is State.CLEARING
    job.kill(3)
    job.settle()
    assert [s.local_state for s in job.orders(Save) if s.local_state] == [{3: "00"}]


def test_process_that_ends_late_makes_its_node_available_again() -> None:
    """When a process did not end in time and its end is reported before the strategy is chosen,
    then its rank can start on the same node again."""
    job = trained(placement={0: (0, 1), 1: (2, 3)}, enable={"recover", "dump"})
    job.script.deaf = {1}
    job.notice(3, "process", "its card is gone")
    job.settle()
    job.wait()
    assert job.state is State.CLEARING
    job.script.deaf = set()
    job.kill(3)
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert [(s.rank, s.node) for s in job.orders(Spawn)][-1] == (3, 1)


def test_moved_rank_can_return_to_its_first_node_after_a_late_process_end() -> None:
    """When a process ends only after its rank has moved to another node, and that other node is
    lost later, then the rank returns to its first node."""
    job = trained(placement={0: (0, 1), 1: (2, 3), 2: ()}, spare={2: 1})
    job.script.deaf = {1}
    job.notice(3, "process", "its card is gone")
    job.settle()
    former = job.ranks[3]
    job.wait()
    job.settle()
    job.train()
    assert job.ranks[3].node == 2
    job.script.deaf = set()
    job._ends(former, -9)
    job.lose_node(2)
    job.settle()
    job.train()
    assert strategies(job) == ["recover", "recover"]
    assert job.ranks[3].node == 1


def test_report_says_that_a_process_may_still_run_on_the_node() -> None:
    """When a rank cannot be started on its node because its process may still run there, then the
    report gives this as the reason against `recover`."""
    job = trained(placement={0: (0, 1), 1: (2, 3)}, enable={"recover", "dump"})
    job.script.deaf = {1}
    job.notice(3, "process", "its card is gone")
    job.settle()
    job.wait()
    job.settle()
    assert "a process of rank 3 may still run on node 1" in tried(job)["recover"]


def test_step_ceiling_ends_when_all_ranks_have_rolled_back() -> None:
    """When all ranks have rolled back because of pollution and a rank dies before the incident is
    over, then the steps trained since the rollback do not count as polluted."""
    job = trained(steps=6, keeps=2)
    job.fault(1, "memory", polluted=True)
    job.settle()
    for one in job.ranks.values():
        one.loop.announce = False  # the announcements of success do not reach the controller
    job.train(5)
    held = job.ranks[0].step
    job.kill(2)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"]) == ("recover", held + 1)


def test_all_ranks_can_be_lost_and_a_successor_can_die_before_it_joins() -> None:
    """When all processes are lost and a new process dies before it joins, then it is started again.
    The job does not treat its script as one that never calls `tft.init`."""
    job = ScriptedJob(2, resume=("/checkpoints/step-4", 4)).start()
    job.train(2)
    job.script.slow = {0, 1}
    job.kill(0)
    job.kill(1)
    job.settle()
    assert job.state is State.CHOOSING or job.state is State.AWAITING
    assert job.machine.next_deadline() is not None
    job.script.slow = set()
    job.kill(0)
    job.settle()
    assert job.over is None
    assert len(job.orders(Spawn)) == 5


def test_stop_after_a_rollback_uses_the_step_of_the_rollback() -> None:
    """When all ranks rolled back from step 9 to the checkpoint of step 4 and another fault occurs,
    then the next order to stop names step 4 as the step to finish, and not step 9."""
    job = trained(steps=9, groups={"a": (0, 1), "b": (2,), "c": (3,)})
    job.checkpointed(4)
    job.kill(3)
    job.settle()
    assert [load.step for load in job.orders(Load)] == [4]
    job.fault(1, "network")
    job.settle()
    assert [stop.finish for stop in job.orders(Stop)] == [9, 4]


def test_sigterm_during_a_last_checkpoint_does_not_start_a_second_one() -> None:
    """When SIGTERM arrives while a last checkpoint is written, then no second checkpoint is begun.
    The job ends as `cancelled`."""
    job = trained()
    job.script.muted = {(0, "save")}
    job.fault(1, "software")
    job.settle()
    job.stop(15)
    job.settle()
    assert len(job.orders(Save)) == 4
    job.script.muted = set()
    job.repeat()
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("cancelled", 143)


def test_ended_process_is_not_ended_again_with_its_node() -> None:
    """When a faulty node is excluded and the process of one of its ranks has already ended, then
    only the other rank is told to end. The job does not wait for the ended process."""
    enable = frozenset({"retry", "scale_in", "dump"})
    job = trained(placement={0: (0, 1), 1: (2, 3)}, enable=enable)
    job.kill(3)
    job.settle()
    job.train()
    job.notice(2, "node", "its fan has failed")
    job.settle()
    job.train()
    assert [kill.rank for kill in job.orders(Kill)] == [2]
    assert strategies(job) == ["scale_in", "scale_in"]
    assert job.machine.members == {0, 1}


def test_terminating_process_is_not_told_to_end_again_with_its_node() -> None:
    """When a process was told to end and its faulty node is excluded after that, then only the
    other processes of the node are told to end. The job continues when all have ended."""
    job = trained(placement={0: (0, 1), 1: (2, 3)}, groups={"a": (0, 2), "b": (1, 3)})
    job.notice(3, "process", "its card is gone")
    job.notice(2, "node", "its fan has failed")
    job.settle()
    job.train()
    assert [(k.rank, k.cause) for k in job.orders(Kill)] == [
        (3, "its card is gone"), (2, "its fan has failed"),
    ]  # fmt: skip
    assert strategies(job) == ["scale_in"]
    assert job.machine.members == {0, 1}


def test_process_that_starts_after_its_kill_order_is_still_ended() -> None:
    """When a process is to be ended because its start took too long, and its agent reports the
    start after that, then the kill order is still repeated."""
    job = trained()
    job.script.gone = {0}  # the agent of node 0 receives no orders
    job.kill(1)
    job.settle()
    job.wait()
    (spawn,) = job.orders(Spawn)
    (kill,) = job.orders(Kill)
    assert (kill.rank, kill.incarnation) == (spawn.rank, spawn.incarnation) == (1, 1)
    job.report(Spawned(node=0, rank=1, incarnation=1, pid=7, at=job.now))
    assert job.machine.outstanding() == [kill]


# ---------------------------------------------------------------- the last ranks of a job


PAIRS = {"a": (0, 2, 4), "b": (1, 3, 5)}


def test_free_place_of_a_node_is_used_once() -> None:
    """When two ranks have lost their node and another node has a place for one of them, then the
    job does not wait for a second place. It continues without the other rank."""
    job = trained(
        placement={0: (0, 1), 1: (2, 3), 2: ()}, spare={2: 1}, groups={"a": (0, 2), "b": (1, 3)}
    )
    job.lose_node(1)
    job.settle()
    job.train()
    assert strategies(job) == ["scale_in"]
    assert tried(job)["recover"] == "node 1 is lost, and no other node has room for its ranks"
    assert job.machine.members == {0, 1, 2}
    assert [(s.rank, s.node) for s in job.orders(Spawn)] == [(2, 2)]


def test_ranks_that_do_not_answer_are_ended_together() -> None:
    """When two of four ranks do not answer in time, then both are ended at once, and only the other
    two ranks are frozen again."""
    job = trained()
    job.script.muted = {(1, "freeze"), (2, "freeze")}
    job.pause()
    job.settle()
    job.wait()
    assert job.orders(Freeze)[-1].to == (0, 3)
    assert [kill.rank for kill in job.orders(Kill)] == [1, 2]


def test_last_ranks_get_the_time_of_functions_after_the_last_step() -> None:
    """When a rank calls a function after its last step and another rank has finished, then the time
    announced for this function is added to the limit for the remaining ranks."""
    job = ScriptedJob(3, Policy(tail=50.0), strategies=STRATEGIES)
    job.script.slow = {0}
    job.start()
    job.join(job.ranks[0])
    job.ranks[0].state.shards = ("dense",)
    dense = ShardCopies(shard="dense", ranks=(0, 1, 2))
    job.report(Ready(rank=0, incarnation=0, shards=(dense,), after=60.0, at=job.now))
    job.settle()
    job.train(2)
    job.finish(1)
    deadline = job.machine.next_deadline()
    assert deadline is not None
    assert deadline - job.now == pytest.approx(110.0, abs=0.1)


def test_rank_that_hangs_after_its_last_step_is_found() -> None:
    """When a rank hangs after its last step and has not reported that it finished, then all ranks
    are frozen after a limit. The rank does not answer and is replaced."""
    job = trained(tail=50.0)
    job.ranks[1].training, job.ranks[1].loop.done, job.ranks[1].hung = False, True, True
    job.finish()
    assert job.doing == "healthy"
    assert job.machine.next_deadline() is not None
    job.wait()
    assert job.orders(Freeze)[0].cause == (
        "ranks [1] have not finished training 50 s after the first rank"
    )
    job.settle()
    job.wait()
    job.settle()
    assert [(s.rank, s.incarnation) for s in job.orders(Spawn)] == [(1, 1)]
    job.train()
    assert strategies(job) == ["recover"]


def test_rank_that_hangs_after_the_only_step_since_the_resume_is_found() -> None:
    """When the first step after an incident is the last step of the job, and a rank hangs after it,
    then all ranks are frozen after a limit."""
    job = trained(tail=50.0)
    job.kill(2)
    job.settle()
    job.ranks[1].training, job.ranks[1].hung = False, True
    for rank in (0, 2, 3):
        job.ranks[rank].training = False
        job.report(Finished(rank=rank, incarnation=job.ranks[rank].incarnation, step=4, at=job.now))
    assert job.doing == "resuming"
    job.wait()
    assert job.doing == "freezing"


def test_rank_outside_is_a_source_until_the_members_go_back() -> None:
    """When ranks have left the job and a member loses its shard before training continues, then the
    shard is fetched from a rank outside the job."""
    columns = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    job = trained(
        placement={0: (0, 1), 1: (2,), 2: (3,)}, columns=columns, groups={"a": (0, 2), "b": (1, 3)}
    )
    job.lose_node(2)
    job.settle()
    assert job.machine.members == {0, 1}
    job.fault(0, "memory")
    job.settle()
    job.train()
    (fetch,) = job.orders(Fetch)
    assert [(t.shard, [s.rank for s in t.sources]) for t in fetch.transfers] == [("a", [2])]
    assert job.doing == "healthy"


def test_rank_outside_is_no_source_after_a_rollback() -> None:
    """When ranks have left the job, and the members have rolled back and trained the same steps
    again, then no member fetches from a rank outside the job, because its state is out of date."""
    columns = {rank: ((0, 1), (2, 3), (4, 5))[rank // 2] for rank in range(6)}
    enable = frozenset({"retry", "scale_in", "dump"})
    job = trained(6, 3, groups=PAIRS, columns=columns, keeps=3, enable=enable)
    job.kill(5)
    job.settle()
    assert job.machine.members == {0, 1, 2, 3}
    # no rank has trained a further step yet, so all ranks go back to step 2
    job.fault(0, "numeric", polluted=True)
    job.settle()
    job.train()
    assert job.orders(Rollback)[-1].step == 2
    assert job.doing == "healthy"
    assert (job.ranks[4].step, job.ranks[0].step) == (3, 3)
    job.fault(0, "memory")
    job.settle()
    (fetch,) = job.orders(Fetch)
    assert fetch.step == 3
    assert {s.rank for transfer in fetch.transfers for s in transfer.sources} == {2}


def test_kept_copy_outside_is_no_source_after_an_earlier_rollback() -> None:
    """When the members roll back before the step of a copy that a rank outside the job keeps, and
    train that step again, then this copy is not used either."""
    columns = {rank: ((0, 1), (2, 3), (4, 5))[rank // 2] for rank in range(6)}
    enable = frozenset({"retry", "scale_in", "dump"})
    job = trained(6, 4, groups=PAIRS, columns=columns, keeps=3, enable=enable)
    job.kill(5)
    job.settle()
    for _ in range(2):
        job.fault(0, "numeric", polluted=True)
        job.settle()
    job.train()
    assert [r.step for r in job.orders(Rollback)] == [4, 3, 2]
    assert 3 in job.ranks[4].state.backups
    job.fault(0, "memory")
    job.settle()
    (fetch,) = job.orders(Fetch)
    assert fetch.step == 3
    assert {s.rank for transfer in fetch.transfers for s in transfer.sources} == {2}


def test_finished_rank_must_finish_again_after_an_incident() -> None:
    """When a rank has finished and all ranks go back because another rank was lost, then the job is
    complete only when the first rank has finished again."""
    job = trained()
    job.finish(1)
    job.kill(2)
    job.settle()
    job.train()
    job.finish(0, 2, 3)
    assert job.doing == "healthy"
    job.finish(1)
    assert job.over is not None
    assert job.over.result == "completed"


def test_finished_rank_is_awaited_after_an_incident_and_a_pause() -> None:
    """When a rank that had finished trains again after an incident, then the job is healthy after a
    later pause only when this rank too has done a step."""
    job = trained()
    job.finish(1)
    job.kill(2)
    job.settle()
    job.train()
    job.pause()
    job.settle()
    job.go_on()
    job.settle()
    for rank in (0, 2, 3):
        job.window(rank)
        job.close(rank)
    assert job.doing == "resuming"
    job.window(1)
    job.close(1)
    assert job.doing == "healthy"


def test_process_that_joins_after_the_last_checkpoint_is_ended() -> None:
    """When a process joins after the last checkpoint was written, then it gets the same order to
    end as the other ranks."""
    job = trained()
    job.script.slow = {3}
    job.kill(3)
    job.settle()
    job.script.muted = {(0, "end")}  # rank 0 does not answer, so the job waits for it to leave
    job.stop()
    job.settle()
    assert job.doing == "exiting"
    before = job.orders(End)
    job.arrive(3)
    late = job.orders(End)[len(before) :]
    assert [order.to for order in late] == [(0, 3)]
    assert {(order.code, order.why) for order in late} == {(before[0].code, before[0].why)}
    job.settle()
    owed = [order.to for order in job.machine.outstanding() if isinstance(order, End)]
    assert owed == [(0,)]
