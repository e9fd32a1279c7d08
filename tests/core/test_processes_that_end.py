"""
What the end of a process is taken for: a fault of the machine, a bug of the script, or its good right.
"""

import pytest

from tests.core.lives import strategies, trained, tried
from tft.core.job.policy import Policy
from tft.protocol.messages import (
    Exited,
    Finished,
    Kill,
    NodeJoined,
    Position,
    Save,
    Spawn,
    Stop,
    StoreOpened,
)
from tft.testing.scripted import ScriptedJob


def starting(world: int = 2) -> ScriptedJob:
    """
    A job whose scripts have been started and have not called `tft.init`.
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
        "rank 1 left with code 3 before it took any order: its log says why"
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
    the end says whether it had called `tft.init`."""
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
    A job that starts, in which the process of rank 1 has joined and gets no further.
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
    """When no incident is allowed for a rank and its process dies while the job starts, then it is
    not started again."""
    job = flappy(Policy(flaps=0))
    job.kill(1)
    job.settle()
    assert [s.incarnation for s in job.orders(Spawn)] == [0, 0]
    assert "rank 1 was the cause of 1 incidents" in tried(job)["recover"]


def test_slow_start_does_not_count_as_an_incident_of_its_rank() -> None:
    """When no incident is allowed for a rank and its process is ended because it is not ready in
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
    """When reports of a process arrive after its end, then the rank counts neither as ready nor as
    finished. The other ranks save without it."""
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
    """When a finished rank is lost with its node, then its fault is at the step after its last one.
    The other ranks are not told to finish a step that no rank began."""
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
    """When the end of a process is reported again without its captured state, then the last
    checkpoint still contains this captured state."""
    job = trained(enable=frozenset({"dump"}))
    job.kill(3)
    job.report(
        Exited(
            node=0, rank=3, incarnation=0, code=-9, position=Position(step=0, window=False),
            stack="", private={}, at=job.now,
        )
    )  # fmt: skip
    job.settle()
    assert [dict(save.private) for save in job.orders(Save)] == [{3: "00"}, {}, {}]


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
    its process, then no third attempt is made. The job ends with `dump`."""
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
    are not repeated to it."""
    job = trained(placement={0: (0, 1), 1: (2, 3)})
    job.script.deaf = {1}
    job.notice(3, "process", "its card is gone")
    job.report(NodeJoined(node=1, host="h", pid=2, ranks=(2, 3), at=job.now))
    kills = [k for k in job.machine.outstanding() if isinstance(k, Kill)]
    assert kills == []


def test_node_lost_while_the_job_exits_starts_and_ends_no_process() -> None:
    """When a node is lost while all ranks leave at the end of the job, then no process is started
    on a node with room, and no process is ended."""
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
