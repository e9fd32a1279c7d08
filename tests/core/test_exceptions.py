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


def test_same_exception_on_two_ranks_is_one_fault() -> None:
    """When two ranks raise the same exception in the same step, with different tracebacks, then the
    report has one fault."""
    job = trained()
    raised(job, 0)
    raised(job, 1, traceback="Traceback\n  File b\n  File c\nBoom: it broke")
    job.settle()
    assert told(job) == [0]
    (incident,) = job.reports()
    assert len(incident["faults"]) == 1


def test_different_exceptions_on_two_ranks_are_two_faults() -> None:
    """When the second exception has another step, kind or text, then the log names both ranks."""
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


def test_software_fault_ends_the_job_when_a_memory_fault_has_the_same_text() -> None:
    """When one rank has a memory fault and another rank has a software fault with the same text,
    then both are logged, and the job is dumped."""
    job = trained()
    raised(job, 0, kind="memory")
    raised(job, 1)
    job.settle()
    assert told(job) == [0, 1]
    assert job.over is not None
    assert job.over.result == "dumped"


def test_exception_without_a_traceback_is_reported_by_its_summary() -> None:
    """When an exception is reported without a traceback, then the report has its summary as
    evidence."""
    job = trained()
    raised(job, 1, kind="network", traceback="")
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert [f["evidence"] for f in incident["faults"]] == ["Boom: it broke"]


@pytest.mark.parametrize("kind", ["software", "memory"])
def test_exception_of_a_successor_is_not_a_fault_of_the_job(kind: FaultKind) -> None:
    """When a successor raises before it takes over, then no fault is logged, and the ranks that
    train get no order."""
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


def test_lost_rank_has_the_step_of_its_last_exception() -> None:
    """When a rank has raised and its node is lost before it answers, then the node fault has the
    step that the exception named."""
    job = trained(placement=TWO_NODES)
    raised(job, 3, kind="network")
    job.report(NodeLost(node=1, why="its agent has ended", at=job.now))
    steps = {f["rank"]: f["step"] for f in job.facts("fault") if f["kind"] == "node"}
    assert steps == {2: 0, 3: 4}


def test_kept_copies_of_a_rank_with_corrupt_memory_are_not_used() -> None:
    """When a rank has a polluted corruption fault, then its kept copies are not used, and it
    fetches from the other ranks."""
    job = trained(keeps=1)
    job.fault(1, "corruption", polluted=True)
    job.settle()
    job.train()
    assert [f.to for f in job.orders(Fetch)] == [(1,)]
    assert job.doing == "healthy"
