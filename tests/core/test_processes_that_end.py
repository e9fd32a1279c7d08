"""
What the end of a process is taken for: a fault of the machine, a bug of the script, or its good right.
"""

import pytest

from tests.core.lives import strategies, trained
from tft.protocol.messages import Finished, Kill, NodeJoined, Save, Spawn, Stop
from tft.testing.scripted import ScriptedJob


def starting(world: int = 2) -> ScriptedJob:
    """
    A job whose scripts have been started and have not called `tft.init`.
    """
    job = ScriptedJob(world)
    job.slow = set(range(world))
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
    assert job.over.why == "every rank has ended"


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
    assert job.over.why == f"rank 1 {how} and no rank has called tft.init"


def test_a_script_that_leaves_before_it_took_an_order_is_not_started_again() -> None:
    """
    When the next process of a rank leaves by itself before it is ready, then that is a bug of the
    script: no third one is started, the others save, and the report says where to look.
    """
    job = trained()
    job.slow = {1}
    job.kill(1)
    job.settle()
    job.kill(1, 3)
    job.settle()
    assert [s.incarnation for s in job.orders(Spawn)] == [1]
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)
    assert job.over.why.startswith(
        "rank 1 left with code 3 before it took any order: its log says why"
    )
    (incident,) = job.reports()
    assert [(f["kind"], f["evidence"]) for f in incident["faults"]] == [
        ("process", "was ended by signal 9"),
        ("software", "left with code 3"),
    ]


def test_a_process_that_is_ended_while_it_starts_is_replaced() -> None:
    """
    When the next process of a rank is ended by a signal before it is ready, then that is no bug of
    the script, and a third one is started.
    """
    job = trained()
    job.slow = {1}
    job.kill(1)
    job.settle()
    job.kill(1, -11)
    job.slow = set()
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


def test_a_process_that_cannot_be_ended_is_named_though_nothing_was_known_against_it() -> None:
    """
    When a rank could not be frozen and its agent cannot end it either, then what stands in the
    report is that.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3), 2: ()}, spare={2: 2})
    job.deaf = {1}
    job.failures[3, "stop"] = ["its card does not answer"]
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


def test_an_agent_that_comes_anew_has_nothing_to_end() -> None:
    """
    When an agent is replaced by another one on its node, then what was ordered of the one before
    is not repeated to it.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3)})
    job.deaf = {1}
    job.notice(3, "process", "its card is gone")
    job.report(NodeJoined(node=1, host="h", pid=2, ranks=(2, 3), at=job.now))
    kills = [k for k in job.machine.outstanding() if isinstance(k, Kill)]
    assert kills == []
