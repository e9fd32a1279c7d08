"""
What is the same in all orders: whom they name, and how.
"""

from tests.core.lives import names, strategies, trained
from tft.protocol.messages import RankOrder, Rebuild, Regroup, Resume, Rollback
from tft.testing.scripted import ScriptedJob


def test_ranks_are_named_in_order_whoever_is_left() -> None:
    """
    When ranks 1 and 8 are all that is left, then every order names them in this order.
    """
    others = (0, 2, 3, 4, 5, 6, 7)
    job = trained(9, placement={0: (1, 8), 1: others})
    job.lose_node(1)
    job.settle()
    job.train()
    assert strategies(job) == ["scale_in"]
    formed = [o for o in job.said if isinstance(o, Regroup | Rebuild | Rollback | Resume)]
    job.said.clear()
    job.pause("links")
    job.settle()
    job.train()
    paused = [order for order in job.said if isinstance(order, RankOrder)]
    assert names([*formed, *paused]) == [
        "Regroup", "Rebuild", "Rollback", "Resume", "Freeze", "Hold", "Check", "Release",
    ]  # fmt: skip
    assert {order.to for order in (*formed, *paused)} == {(1, 8)}


def test_a_job_that_nobody_has_led_waits_for_nothing() -> None:
    """
    When a job is set up and nothing has happened, then nothing is owed and no deadline is named, and
    whoever leads first is in the first epoch.
    """
    machine = ScriptedJob(2).machine
    assert (machine.epoch, machine.outstanding(), machine.next_deadline()) == (0, [], None)
