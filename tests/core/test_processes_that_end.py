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


def test_scripts_without_tft_are_over_when_the_last_has_ended() -> None:
    """
    When scripts end well that never call `tft.init`, then the job is over with the last of them.
    """
    job = starting()
    job.kill(0, 0)
    assert job.doing == "awaiting"
    job.kill(1, 0)
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("completed", 0)
    assert job.over.why.startswith("every rank has ended, and no rank has called tft.init")


@pytest.mark.parametrize(("code", "how"), [(1, "left with code 1"), (-9, "was ended by signal 9")])
def test_a_script_without_tft_that_fails_is_told_by_its_rank(code: int, how: str) -> None:
    """
    When a script fails that never called `tft.init`, then the job has failed, and which rank it was
    and how it went is said.
    """
    job = starting()
    job.kill(1, code)
    job.wait()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert job.over.why == f"rank 1 {how} before any rank had joined the job"


@pytest.mark.parametrize("code", [0, 3])
def test_a_script_that_leaves_before_it_took_an_order_is_not_started_again(code: int) -> None:
    """
    When the next process of a rank leaves by itself before it is ready, then that is a bug of the
    script: no third one is started, the others save, and the report says where to look.
    """
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
def test_a_script_that_leaves_early_is_told_how_far_it_came(*, joins: bool, missed: str) -> None:
    """
    When the next process of a rank leaves with code 0 before it is ready, then the end of the job says whether it had
    called `tft.init`.
    """
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


def test_an_end_that_is_told_twice_is_one_fault() -> None:
    """
    When the end of a process is reported again before another one is started, then the report has one fault, and
    recovery plugins are asked once.
    """
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


def test_a_process_that_is_ended_while_it_starts_is_replaced() -> None:
    """
    When the next process of a rank is ended by a signal before it is ready, then that is no bug of
    the script, and a third one is started.
    """
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


def test_a_script_that_leaves_with_code_0_in_the_middle_is_not_started_again() -> None:
    """
    When the script of a rank leaves the loop as if all were done and others go on, then nobody is
    started in its place, and the others save.
    """
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


def test_a_process_that_dies_while_the_job_starts_counts_against_its_rank() -> None:
    """
    When a rank may cause no incident and its process dies while the job starts, then it is not
    started again.
    """
    job = flappy(Policy(flaps=0))
    job.kill(1)
    job.settle()
    assert [s.incarnation for s in job.orders(Spawn)] == [0, 0]
    assert "rank 1 was the cause of 1 incidents" in tried(job)["recover"]


def test_a_process_that_was_ended_because_it_was_slow_does_not_count_against_its_rank() -> None:
    """
    When a process is not ready in time and is ended for that, then another one is started though
    the rank may cause no incident: a slow file system is not its fault.
    """
    job = flappy(Policy(flaps=0))
    job.wait()
    job.script.slow = set()
    job.settle()
    assert [s.incarnation for s in job.orders(Spawn)] == [0, 0, 1]
    job.train()
    assert job.doing == "healthy"


def test_a_process_that_cannot_be_ended_is_named_though_nothing_was_known_against_it() -> None:
    """
    When a rank could not be frozen and its agent cannot end it either, then what stands in the
    report is that.
    """
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


def test_what_a_process_says_after_its_end_is_absorbed() -> None:
    """
    When a process is gone, and what it had said last comes after that, then it is not taken for one
    that takes orders, or that has finished: the others save without it.
    """
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


def test_a_rank_that_has_finished_and_is_lost_with_its_node_stood_at_its_last_step() -> None:
    """
    When a rank has finished and its node is lost before the others have, then the fault is one of
    the step after its last, and nobody is asked to finish a step that it never began.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3)}, columns={2: (2, 3), 3: (2, 3)})
    job.finish(3)
    job.lose_node(1)
    job.settle()
    faults = {f["rank"]: f["step"] for f in job.facts("fault")}
    assert faults == {2: 0, 3: 4}
    assert [stop.finish for stop in job.orders(Stop)] == [3]


def test_who_has_died_already_is_not_lost_once_more_with_its_node() -> None:
    """
    When a rank has died and its node is lost after that, then it is one fault, and only those who
    still ran there are ended, should they be heard again.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3)}, enable=frozenset({"scale_in", "dump"}))
    job.kill(3)
    job.lose_node(1)
    job.settle()
    job.train()
    assert [(f["kind"], f["rank"]) for f in job.facts("fault")] == [("process", 3), ("node", 2)]
    assert [k.rank for k in job.orders(Kill)] == [2]


def test_what_a_lost_process_had_captured_is_not_forgotten_when_its_end_is_told_again() -> None:
    """
    When the end of a process is told once more, by somebody who does not know what it left, then
    that is in the last checkpoint all the same.
    """
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


def test_the_place_of_a_process_that_was_to_take_over_is_free_again_once() -> None:
    """
    When a process that was to take over has died, then its place is there for the next one, and
    for one only.
    """
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


def test_a_process_that_somebody_ended_while_it_was_stopped_was_ended() -> None:
    """
    When a process is ended from outside, then that is what stands in the report, whatever state
    it was in: nobody had taken it for one that hangs.
    """
    job = trained()
    job.ranks[1].stopped = True
    job.kill(1)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert [f["evidence"] for f in incident["faults"]] == ["was ended by signal 9"]


def test_a_copy_that_went_with_its_process_is_nothing_to_go_back_to() -> None:
    """
    When numbers go wrong again at the same step, and the only earlier copy was that of a process
    that is gone, then the same is not tried a third time.
    """
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


def test_an_agent_that_comes_anew_has_nothing_to_end() -> None:
    """
    When an agent is replaced by another one on its node, then what was ordered of the one before
    is not repeated to it.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3)})
    job.script.deaf = {1}
    job.notice(3, "process", "its card is gone")
    job.report(NodeJoined(node=1, host="h", pid=2, ranks=(2, 3), at=job.now))
    kills = [k for k in job.machine.outstanding() if isinstance(k, Kill)]
    assert kills == []


def test_a_node_lost_while_everyone_leaves_starts_nobody() -> None:
    """
    When nothing is left but the end and a node is lost while everyone leaves, then no process is started
    for those that ran there, though another node has room, and nobody is ended who leaves anyway.
    """
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
