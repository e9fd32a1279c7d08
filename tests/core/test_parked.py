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


def test_a_parked_process_is_taken_back_when_its_failures_are_forgotten() -> None:
    """
    When a rank has left for failing too often, and the window for that has passed, then the process
    that it still has takes part again.
    """
    job = parked("scale_out")
    job.checkpointed(3)  # any event will do
    job.settle()
    job.train()
    assert strategies(job)[-1] == "scale_out"
    assert job.machine.members == {0, 1, 2, 3}


def test_nobody_is_stopped_for_a_process_that_is_not_to_come_back() -> None:
    """
    When a parked process could come back, but that is not enabled, then everyone else trains on.
    """
    job = parked()
    job.checkpointed(3)
    job.settle()
    job.train()
    assert [order for order in job.said if isinstance(order, RankOrder)] == []
    assert job.doing == "healthy"


def test_a_parked_process_that_does_not_save_is_ended_and_is_no_fault_of_the_job() -> None:
    """
    When a parked process does not answer while a last checkpoint is written, then it is ended, and
    the report has no fault of it: it had no part in the job.
    """
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


def test_a_parked_process_on_a_node_that_is_given_up_is_ended_and_is_no_fault_of_the_job() -> None:
    """
    When a node is given up on which one rank takes part and another one is parked, then both are
    ended, and the report names the one that took part.
    """
    job = parked("dump", placement={0: (0, 2), 1: (1, 3)})
    job.notice(3, "node", "its fan has failed")
    job.settle()
    job.train()
    assert [kill.rank for kill in job.orders(Kill)] == [1, 3]
    assert [(f["kind"], f["rank"]) for f in job.reports()[-1]["faults"]] == [("node", 3)]
    assert strategies(job)[-1] == "scale_in"


def test_a_process_that_gets_ready_after_it_was_given_up_is_not_taken_in() -> None:
    """
    When a rank outside was given another process, and that gets ready only after it was told to end,
    then nobody is stopped for it.
    """
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
