"""
A new round of an incident: what of the one before is kept, and what is not.
"""

from tests.core.lives import strategies, trained
from tft.protocol.messages import Fetch, Restore


def test_nothing_is_followed_while_it_is_not_known_where_everyone_stands() -> None:
    """
    When a strategy is followed and another fault comes, then nothing is followed any more before
    it is decided anew.
    """
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


def test_numbers_that_go_wrong_again_may_take_everyone_back_to_the_beginning() -> None:
    """
    When the second step fails again after a retry, then the beginning is what is before the first
    one, and everyone who keeps it goes back there.
    """
    job = trained(steps=1, keeps=1)
    for _ in range(2):
        job.fault(2, "numeric")
        job.settle()
    job.train()
    assert [(f.to, f.step) for f in job.orders(Fetch)] == [((2,), 1)]
    assert [r.step for r in job.orders(Restore)] == [0]
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"]) == ("retry", 1)


def test_where_a_rank_was_that_is_lost_is_known_by_the_others() -> None:
    """
    When a fault is seen of a rank that trains, and its node is lost before it has said where it was, then
    the fault is in the step that the others compute.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3)}, steps=3)
    job.notice(3, "memory", "its memory is bad")
    job.lose_node(1)
    job.settle()
    faults = {(fault.kind, fault.rank): fault.step for fault in job.machine.incident.faults}
    assert faults["memory", 3] == 4
