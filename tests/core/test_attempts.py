"""
A new round of an incident: what of the one before is kept, and what is not.
"""

from tests.core.lives import strategies, trained
from tft.protocol.messages import Fetch, Restore


def test_strategy_is_cleared_when_another_fault_joins() -> None:
    """When a fault comes while a strategy is followed, then the incident has no strategy until the
    next decision."""
    job = trained()
    job.script.muted = {(0, "regroup")}
    job.kill(1)
    job.settle()
    assert job.machine.incident.decision.strategy == "recover"
    job.fault(2, "memory")
    assert (job.doing, job.machine.incident.decision.strategy) == ("freezing", "")
    job.script.muted = set()
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]


def test_repeated_numeric_fault_rolls_all_ranks_back_to_step_0() -> None:
    """When step 2 has a numeric fault again after a retry, then all ranks restore their kept copy
    of step 0."""
    job = trained(steps=1, keeps=1)
    for _ in range(2):
        job.fault(2, "numeric")
        job.settle()
    job.train()
    assert [(f.to, f.step) for f in job.orders(Fetch)] == [((2,), 1)]
    assert [r.step for r in job.orders(Restore)] == [0]
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"]) == ("retry", 1)


def test_step_of_a_fault_comes_from_the_other_ranks_when_the_node_is_lost() -> None:
    """When a fault of a rank is noticed and its node is lost before the rank reports its step, then
    the fault has the step that the other ranks compute."""
    job = trained(placement={0: (0, 1), 1: (2, 3)}, steps=3)
    job.notice(3, "memory", "its memory is bad")
    job.lose_node(1)
    job.settle()
    faults = {(fault.kind, fault.rank): fault.step for fault in job.machine.incident.faults}
    assert faults["memory", 3] == 4
