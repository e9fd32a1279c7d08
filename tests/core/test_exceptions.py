"""
Exceptions that leave the loop: which of them are one fault, and what becomes of whoever raised one.
"""

import pytest

from tests.core.lives import trained
from tft.protocol.messages import Faulted, FaultKind, Fetch, NodeLost, Position
from tft.testing.scripted import ScriptedJob

TWO_NODES = {0: (0, 1), 1: (2, 3)}


def raised(
    job: ScriptedJob,
    rank: int,
    *,
    kind: FaultKind = "software",
    step: int = 4,
    traceback: str = "Traceback\n  File a\nBoom: it broke",
    incarnation: int = 0,
) -> None:
    """
    An exception leaves the loop of a rank, and its traceback says so.
    """
    job.report(
        Faulted(
            rank=rank, incarnation=incarnation, kind=kind, step=step, summary="Boom: it broke",
            traceback=traceback, position=Position(step=3, window=False), at=job.now,
        )
    )  # fmt: skip


def told(job: ScriptedJob) -> list[object]:
    """
    The ranks whose exceptions are in the log.
    """
    return [facts["rank"] for facts in job.facts("rank_faulted")]


def test_the_same_exception_on_all_ranks_is_one_fault() -> None:
    """
    When the script raises the same on two ranks, whichever way it came there, then that is one
    fault.
    """
    job = trained()
    raised(job, 0)
    raised(job, 1, traceback="Traceback\n  File b\n  File c\nBoom: it broke")
    job.settle()
    assert told(job) == [0]
    (incident,) = job.reports()
    assert len(incident["faults"]) == 1


def test_another_exception_is_another_fault() -> None:
    """
    When the second one is of another step, of another kind or says something else, then both stand
    in the report.
    """
    for change in (
        {"step": 5},
        {"traceback": "Traceback\n  File a\nCrack: it broke"},
        {"kind": "memory"},
    ):
        job = trained()
        raised(job, 0)
        raised(job, 1, **change)
        job.settle()
        assert told(job) == [0, 1], change


def test_a_bug_is_told_though_a_device_failed_with_the_same_words() -> None:
    """
    When the script raises with the words that a fault of another kind had on another rank, then
    it is a bug all the same, and the job ends.
    """
    job = trained()
    raised(job, 0, kind="memory")
    raised(job, 1)
    job.settle()
    assert told(job) == [0, 1]
    assert job.over is not None
    assert job.over.result == "dumped"


def test_an_exception_without_a_traceback_is_told_by_its_summary() -> None:
    """
    When no traceback came with an exception, then its summary stands in the report.
    """
    job = trained()
    raised(job, 1, kind="network", traceback="")
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert [f["evidence"] for f in incident["faults"]] == ["Boom: it broke"]


@pytest.mark.parametrize("kind", ["software", "memory"])
def test_an_exception_of_one_that_is_to_take_over_is_no_fault_of_the_job(kind: FaultKind) -> None:
    """
    When a process that is to take over raises, then those who train are not disturbed.
    """
    job = trained(placement={**TWO_NODES, 2: ()}, spare={2: 1})
    job.script.slow = {3}
    job.notice(3, "straggler")
    job.settle()
    job.said.clear()
    job.join(job.successors[3])
    raised(job, 3, kind=kind, incarnation=1)
    assert told(job) == []
    assert job.said == []
    assert job.doing == "healthy"


def test_a_rank_that_raised_and_is_lost_was_where_it_said() -> None:
    """
    When the node of a rank that has raised is lost before it could be asked, then the fault is one
    of the step that it said.
    """
    job = trained(placement=TWO_NODES)
    raised(job, 3, kind="network")
    job.report(NodeLost(node=1, why="its agent has ended", at=job.now))
    steps = {f["rank"]: f["step"] for f in job.facts("fault") if f["kind"] == "node"}
    assert steps == {2: 0, 3: 4}


def test_a_rank_whose_memory_is_corrupt_keeps_no_copy_that_is_used() -> None:
    """
    When what a rank has sent out was wrong, then what it keeps besides is not trusted either: it
    takes all of it from another.
    """
    job = trained(keeps=1)
    job.fault(1, "corruption", polluted=True)
    job.settle()
    job.train()
    assert [f.to for f in job.orders(Fetch)] == [(1,)]
    assert job.doing == "healthy"
