"""
Those who are parked since the job has shrunk: when they come back, and what is asked of them.
"""

from typing import Any

from tests.core.lives import strategies, trained
from tft.protocol.messages import Kill, RankOrder, Save
from tft.testing.scripted import ScriptedJob


def parked(*enable: str, **facts: Any) -> ScriptedJob:  # Any: as in `trained`
    """
    A job whose rank 1 has left with its process alive, since its memory had failed twice; that is
    long ago.
    """
    job = trained(
        flaps=1, flap_window=100.0, enable=frozenset({"retry", "scale_in", *enable}), **facts
    )
    for _ in range(2):
        job.fault(1, "memory")
        job.settle()
        job.train()
    assert strategies(job) == ["retry", "scale_in"]
    assert job.machine.members == {0, 2, 3}
    job.said.clear()
    job.now += 200.0
    return job


def test_parked_rank_rejoins_when_its_failure_window_has_passed() -> None:
    """When a rank has left the job after too many failures and the failure window has passed, then
    its parked process takes part again."""
    job = parked("scale_out")
    job.checkpointed(3)  # any event will do
    job.settle()
    job.train()
    assert strategies(job)[-1] == "scale_out"
    assert job.machine.members == {0, 1, 2, 3}


def test_no_rank_is_stopped_for_a_parked_process_when_scale_out_is_disabled() -> None:
    """When a parked process could rejoin but `scale_out` is not enabled, then no order is sent and
    the other ranks keep training."""
    job = parked()
    job.checkpointed(3)
    job.settle()
    job.train()
    assert [order for order in job.said if isinstance(order, RankOrder)] == []
    assert job.doing == "healthy"


def test_parked_process_that_does_not_save_is_ended_without_a_fault() -> None:
    """When a parked process does not answer `Save` during a last checkpoint, then it is ended and
    the report names no fault, because the process was not a member."""
    job = parked("dump")
    job.script.muted = {(1, "save")}
    job.stop(0)
    job.settle()
    assert 1 in {rank for save in job.orders(Save) for rank in save.to}
    job.wait()
    job.settle()
    assert [(k.rank, k.last_words, k.cause) for k in job.orders(Kill)] == [
        (1, True, "no answer to save in time")
    ]
    assert job.reports()[-1]["faults"] == []
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)


def test_parked_process_on_an_excluded_node_is_ended_without_a_fault() -> None:
    """When a node with one member and one parked rank is excluded, then both processes are ended,
    and the report names only the member."""
    job = parked("dump", placement={0: (0, 2), 1: (1, 3)})
    job.notice(3, "node", "its fan has failed")
    job.settle()
    job.train()
    assert [kill.rank for kill in job.orders(Kill)] == [1, 3]
    assert [(f["kind"], f["rank"]) for f in job.reports()[-1]["faults"]] == [("node", 3)]
    assert strategies(job)[-1] == "scale_in"


def test_process_that_is_ready_after_it_was_told_to_end_does_not_rejoin() -> None:
    """When a new process of a rank outside the job becomes ready after it was told to end, then no
    order is sent and the job stays healthy."""
    job = trained(placement={0: (0, 1), 1: (2, 3)})
    job.lose_node(1)
    job.settle()
    job.train()
    assert job.machine.members == {0, 1}
    job.script.slow, job.script.deaf = {2, 3}, {1}
    job.come(1)
    job.settle()
    for _ in (2, 3):
        job.wait()
    assert [kill.rank for kill in job.machine.outstanding() if isinstance(kill, Kill)] == [2, 3]
    job.said.clear()
    job.arrive(2)
    job.arrive(3)
    job.settle()
    assert (job.said, job.doing) == ([], "healthy")
