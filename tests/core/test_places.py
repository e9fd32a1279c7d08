"""
Where processes are started: not before every node is there, on no node where one could not be ended,
and not where nobody has room.
"""

from tests.core.lives import strategies, trained
from tft.core.job.nodes import Nodes
from tft.protocol.messages import Kill, Regroup, Save, Spawn, StoreOpened
from tft.testing.scripted import ScriptedJob

TWO_NODES: dict[int, tuple[int, ...]] = {0: (0, 1), 1: (2, 3)}
WITH_ROOM = {0: (0, 1), 1: (2, 3), 2: (), 3: ()}


def test_groups_are_formed_only_when_the_ranks_of_all_nodes_are_ready() -> None:
    """When one of two nodes has joined and its ranks are ready, then no groups are formed until the
    ranks of the other node are ready."""
    job = ScriptedJob(4, placement=TWO_NODES)
    job.lead(1)
    job.report(StoreOpened(node=0, host="h", port=1, at=job.now))
    job.come(0)
    job.settle()
    assert (job.doing, job.orders(Regroup)) == ("awaiting", [])
    job.come(1)
    job.settle()
    assert [regroup.to for regroup in job.orders(Regroup)] == [(0, 1, 2, 3)]
    assert job.doing == "resuming"


def test_rank_does_not_return_to_a_node_where_its_process_may_still_run() -> None:
    """When a rank has moved because its process could not be ended, and its new node is lost, then
    the rank moves to a third node. The first node is not used, although it has room."""
    job = trained(placement=WITH_ROOM, spare={1: 1, 2: 1, 3: 1})
    job.script.deaf = {1}
    job.notice(3, "process", "its card is gone")
    job.settle()
    job.wait()
    job.settle()
    job.train()
    job.lose_node(2)
    job.settle()
    job.train()
    assert [(s.rank, s.node) for s in job.orders(Spawn)] == [(3, 2), (3, 3)]
    assert strategies(job) == ["recover", "recover"]


def test_node_has_room_for_one_rank_when_one_rank_has_moved_away() -> None:
    """When a rank has moved away from a node that still exists, then that node has room for exactly
    one other rank."""
    job = trained(
        6, placement={0: (0, 1), 1: (2, 3), 2: (4, 5), 3: ()}, spare={3: 1},
        groups={"a": (0, 2, 4), "b": (1, 3, 5)},
    )  # fmt: skip
    job.script.deaf = {1}
    job.notice(3, "process", "its card is gone")
    job.settle()
    job.wait()
    job.settle()
    job.train()
    job.lose_node(2)
    job.settle()
    job.train()
    assert [(s.rank, s.node) for s in job.orders(Spawn)] == [(3, 3), (4, 1)]
    assert strategies(job) == ["recover", "scale_in"]
    assert job.machine.members == {0, 1, 2, 3, 4}


def test_node_with_the_last_sound_copy_saves_before_it_is_excluded() -> None:
    """When a node is to be excluded and the memory of the only other holder is suspect, then its
    processes are not ended at once. First the node writes its part of a last checkpoint."""
    job = trained(placement=TWO_NODES, groups={"a": (0, 2), "b": (1, 3)})
    job.fault(0, "memory")
    job.notice(2, "node", "its fan has failed")
    job.settle()
    assert job.orders(Kill) == []
    assert [(s.to, s.shards) for s in job.orders(Save) if "a" in s.shards] == [((2,), ("a",))]
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)
    assert "no rank outside node 1 has shard 'a'" in job.over.why


def test_node_isolated_by_two_ranks_is_excluded_once() -> None:
    """When a check isolates the same node on both of its ranks, then both are ended with the first
    finding as the cause. The report names each rank once."""
    job = trained(placement=TWO_NODES, groups={"a": (0, 2), "b": (1, 3)})
    job.script.verdicts = {2: ("isolate", "a link drops packets"), 3: ("isolate", "it is hot")}
    job.pause("links")
    job.settle()
    job.train()
    why = "the check found: a link drops packets (rank 2)"
    assert [(k.rank, k.cause) for k in job.orders(Kill)] == [(2, why), (3, why)]
    (incident,) = job.reports()
    assert [(f["kind"], f["rank"]) for f in incident["faults"]] == [("node", 2), ("node", 3)]
    assert job.machine.checked == "a link drops packets (rank 2); it is hot (rank 3)"
    assert job.doing == "healthy"


def test_answer_of_one_process_does_not_answer_orders_of_another_process() -> None:
    """When one process of a rank answers its order, then orders for another process of that rank
    and orders of other kinds stay unanswered."""
    kill = Kill(epoch=1, node=0, rank=2, incarnation=0, last_words=False, cause="it hangs")
    first = Spawn(epoch=1, node=0, rank=2, incarnation=0, cause="the start")
    second = Spawn(epoch=1, node=0, rank=2, incarnation=1, cause="a kill")
    nodes = Nodes(orders={2: [kill, first, second]})
    nodes.forget(2, 0, Spawn)
    assert nodes.orders == {2: [kill, second]}
