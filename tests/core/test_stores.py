"""
Which rendezvous store the groups are formed at: every node has one, and each may be lost.
"""

from tft.protocol.messages import Regroup, StoreOpened
from tft.testing.scripted import ScriptedJob

TWO_NODES: dict[int, tuple[int, ...]] = {0: (0, 1), 1: (2, 3)}


def last_regroup(job: ScriptedJob) -> Regroup:
    """
    The last order to form groups.
    """
    return [order for order in job.said if isinstance(order, Regroup)][-1]


def test_groups_are_not_formed_at_the_store_of_a_lost_node() -> None:
    """When the node whose store was opened last is lost, then the remaining ranks form their groups
    at the store of another node."""
    strategies = ("retry", "recover", "scale_in", "dump")
    job = ScriptedJob(4, placement=TWO_NODES, strategies=strategies)
    job.report(StoreOpened(node=1, host="h1", port=7, at=job.now))
    job.start()
    job.report(StoreOpened(node=1, host="h1", port=8, at=job.now))
    job.train(2)
    job.lose_node(1)
    job.settle()
    assert job.over is None
    assert (last_regroup(job).host, last_regroup(job).port) == ("h", 1)


def test_groups_are_formed_at_the_store_that_was_opened_last() -> None:
    """When a store is replaced, then the next groups are formed at the new store."""
    job = ScriptedJob(2).start()
    job.train(2)
    job.reopen_store(port=9)
    job.kill(1)
    job.settle()
    assert last_regroup(job).port == 9


def test_store_replaced_during_group_formation_is_logged() -> None:
    """When the store is replaced while groups are formed at it, then the log says that the store
    was replaced."""
    job = ScriptedJob(4).start()
    job.train(2)
    job.script.muted = {(2, "regroup")}
    job.kill(1)
    job.settle()
    job.reopen_store(port=2)
    assert job.facts("store_replaced") == [{"port": 2}]
