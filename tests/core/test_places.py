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


def test_a_job_starts_when_the_last_node_has_joined() -> None:
    """
    When one of two nodes has joined and its ranks are ready, then no groups are formed before those
    of the other node are ready, too.
    """
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


def test_nothing_is_started_again_where_a_process_could_not_be_ended() -> None:
    """
    When the node that a rank was moved to is lost, then the rank does not come back to the one where
    a process of it may still sit, though that has room: it goes to a third one.
    """
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


def test_who_moves_leaves_its_place_to_one_other() -> None:
    """
    When a rank has moved away from a node that is still there, then there is room for one other
    there, and not for two.
    """
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


def test_the_last_sound_copy_is_saved_before_its_node_is_given_up() -> None:
    """
    When a node is to be given up while the memory of the only other holder is suspect, then what it
    has is sound nowhere else: it is not ended before it has written its part of a last checkpoint.
    """
    job = trained(placement=TWO_NODES, groups={"a": (0, 2), "b": (1, 3)})
    job.fault(0, "memory")
    job.notice(2, "node", "its fan has failed")
    job.settle()
    assert job.orders(Kill) == []
    assert [(s.to, s.shards) for s in job.orders(Save) if "a" in s.shards] == [((2,), ("a",))]
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)
    assert "no rank outside node 1 has shard 'a'" in job.over.why


def test_a_node_that_two_ranks_complain_of_is_given_up_once() -> None:
    """
    When a check isolates the same node on both ranks there, then both are ended for what was found
    first, and the report names each of them once.
    """
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


def test_an_order_for_another_process_of_the_rank_stays_unanswered() -> None:
    """
    When one process of a rank answers its order, then the order for another process of that rank
    still waits for its answer, and so do orders of other kinds.
    """
    kill = Kill(epoch=1, node=0, rank=2, incarnation=0, last_words=False, cause="it hangs")
    first = Spawn(epoch=1, node=0, rank=2, incarnation=0, cause="the start")
    second = Spawn(epoch=1, node=0, rank=2, incarnation=1, cause="a kill")
    nodes = Nodes(orders={2: [kill, first, second]})
    nodes.forget(2, 0, Spawn)
    assert nodes.orders == {2: [kill, second]}
