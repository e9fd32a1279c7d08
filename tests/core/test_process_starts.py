"""
Starts of processes: claims on ranks, unknown processes and agents, and the nodes that ranks are started on.
"""

import pytest

from tests.core.lives import (
    strategies,
    trained,
    tried,
)
from tft.core.job.nodes import (
    Nodes,
)
from tft.core.job.policy import (
    Policy,
)
from tft.protocol.messages import (
    Answered,
    Faulted,
    Joined,
    Kill,
    NodeJoined,
    NodeLost,
    Position,
    Ready,
    Refused,
    Regroup,
    Rollback,
    Save,
    ShardCopies,
    Spawn,
    Spawned,
    StoreOpened,
)
from tft.testing.scripted import (
    ScriptedJob,
)

# ---------------------------------------------------------------- claims of processes on ranks


def claim(job: ScriptedJob, rank: int, pid: int, incarnation: int = 0) -> None:
    """
    Report that a process that the controller did not start claims `rank`.
    """
    job.report(
        Joined(
            rank=rank, incarnation=incarnation, world=job.world, pid=pid, started=5, host="h",
            address="h:9", adaptor="fake", strategies=(), at=job.now,
        ),
        sender=f"stranger.{pid}",
    )  # fmt: skip


def refusals(job: ScriptedJob) -> list[str]:
    """
    Return the reasons in all orders that refuse a process.
    """
    return [refused.why for refused in job.orders(Refused)]


def starting(*slow: int) -> ScriptedJob:
    """
    Return a starting job of two ranks. The ranks in `slow` are not ready yet.
    """
    job = ScriptedJob(2)
    job.script.slow = set(slow)
    job.lead(1)
    job.come(0)
    job.report(StoreOpened(node=0, host="h", port=1, at=job.now))
    job.settle()
    return job


def test_second_claim_of_a_rank_is_refused_before_the_first_process_is_ready() -> None:
    """When a second process claims a rank whose own process is not ready, then the claim is
    refused. The refusal names the process that holds the rank."""
    job = starting(1)
    job.join(job.ranks[1])
    claim(job, 1, 77)
    assert refusals(job) == [
        "rank 1 is held by process 1001 (incarnation 0); process 77 (incarnation 0) was not "
        "ordered by the controller"
    ]
    job.ready(job.ranks[1])
    job.settle()
    job.train()
    assert job.doing == "healthy"


def test_refusal_names_the_started_process_before_it_claims_its_rank() -> None:
    """When an unrequested process claims a rank, and the process that the controller ordered has
    started but not joined, then the refusal names the ordered process."""
    job = starting(1)
    claim(job, 1, 77, incarnation=3)
    assert "held by process 1001 (incarnation 0)" in refusals(job)[0]


def test_claim_from_a_lost_node_is_refused() -> None:
    """When a node was reported lost and one of its processes claims its rank again, then the claim
    is refused, so that the process does not wait forever."""
    job = trained(placement={0: (0, 1), 1: (2, 3)}, enable=frozenset({"scale_in", "dump"}))
    lost = job.ranks[3]
    job.report(NodeLost(node=1, why="it is not heard any more", at=job.now))
    job.join(lost)
    assert [refused.rank for refused in job.orders(Refused)] == [3]


def test_claim_is_refused_when_the_job_has_ended() -> None:
    """When an unrequested process claims a rank of a job that has ended, then the claim is refused,
    so that the process does not carry out the last order to that rank."""
    job = trained()
    job.finish()
    assert job.doing == "ended"
    claim(job, 1, 77)
    assert len(refusals(job)) == 1
    assert list(job.machine.refused) == ["stranger.77"]


def test_second_start_report_does_not_extend_the_deadline() -> None:
    """When an agent reports the start of a process twice, then the deadline of the process does not
    move."""
    job = starting(1)
    job.join(job.ranks[0])
    limit = job.machine.next_deadline()
    assert limit is not None
    job.now += 100.0
    job.report(Spawned(node=0, rank=1, incarnation=0, pid=1001, at=job.now))
    assert job.machine.next_deadline() == limit


def test_process_counts_as_running_without_a_start_report() -> None:
    """When a process has claimed its rank and its agent never reported the start, then the job ends
    only after that process has ended."""
    job = ScriptedJob(1)
    job.lead(1)
    job.come(0)
    job._queue.clear()
    job.ranks[0].alive = True
    job.join(job.ranks[0])
    job.ready(job.ranks[0])
    job.report(StoreOpened(node=0, host="h", port=1, at=job.now))
    job.settle()
    job.train()
    job.script.muted = {(0, "complete")}
    job.finish()
    job.lead(2)
    assert job.doing == "exiting"
    job.kill(0, 0)
    assert job.doing == "ended"


def test_resumed_job_saves_no_checkpoint_before_it_has_loaded_one() -> None:
    """When a stop request comes while a rank of a resumed job still starts, then no checkpoint is
    saved, because the initial states are not a step of the job."""
    job = ScriptedJob(2, Policy(), resume=("/run/checkpoints/step-00000005", 5))
    job.script.slow = {1}
    job.lead(1)
    job.come(0)
    job.report(StoreOpened(node=0, host="h", port=1, at=job.now))
    job.settle()
    job.stop(0)
    job.settle()
    assert job.orders(Save) == []
    assert job.doing in ("exiting", "ended")


@pytest.mark.parametrize("node", [1, 2])
def test_second_store_does_not_change_where_groups_are_formed(node: int) -> None:
    """When another node opens its rendezvous store while process groups are formed, then the groups
    are formed at the first store."""
    job = trained(placement={0: (0, 1), 1: (2, 3), 2: ()})
    job.script.muted = {(0, "regroup")}
    job.fault(0, "network")
    job.settle()
    job.report(StoreOpened(node=node, host="h", port=9, at=job.now))
    job.settle()
    assert [(r.port, r.round) for r in job.orders(Regroup)] == [(1, 1)]
    assert job.facts("store_replaced") == []


def test_reopened_store_of_another_node_does_not_change_where_groups_are_formed() -> None:
    """When a node opens its rendezvous store again while process groups are formed at the store of
    another node, then the groups are still formed at that other store."""
    job = ScriptedJob(4, placement={0: (0, 1), 1: (2, 3)}, strategies=("retry", "dump"))
    job.report(StoreOpened(node=1, host="h1", port=1, at=job.now))
    job.start()
    job.script.muted = {(0, "regroup")}
    job.fault(0, "network")
    job.settle()
    job.report(StoreOpened(node=1, host="h1", port=9, at=job.now))
    job.settle()
    assert [(r.host, r.port, r.round) for r in job.orders(Regroup)] == [("h", 1, 0), ("h", 1, 1)]
    assert job.facts("store_replaced") == []


def test_report_says_the_store_was_lost_while_groups_were_formed() -> None:
    """When the rendezvous store reopens at another port while process groups are formed in the last
    attempt, then the report gives the lost store as the reason against `retry`."""
    job = trained(attempts=1, enable=frozenset({"retry", "dump"}))
    job.script.muted = {(0, "regroup")}
    job.fault(0, "network")
    job.settle()
    job.reopen_store(9)
    job.settle()
    assert tried(job)["retry"] == "the rendezvous store was lost while process groups were formed"


# ---------------------------------------------------------------- unknown processes and agents


STRANGER = "rank.2/0.77"


def second_claim(job: ScriptedJob) -> Joined:
    """
    Return the message of a second process that claims rank 2.

    A user has started the script again with the same environment variables.
    """
    return Joined(
        rank=2, incarnation=0, world=4, pid=77, started=5, host="h", address="h:9", adaptor="fake",
        strategies=(), at=job.now,
    )  # fmt: skip


def test_reports_of_a_refused_process_are_ignored() -> None:
    """When the claim of a process on a rank was refused and the process continues to send reports
    for that rank, then these reports change nothing."""
    job = trained()
    held = job.machine._job.ranks.states[2].holdings.held
    job.report(second_claim(job), sender=STRANGER)
    job.said.clear()
    shards = (ShardCopies(shard="other", ranks=(2,)),)
    job.report(Ready(rank=2, incarnation=0, shards=shards, at=job.now), sender=STRANGER)
    job.report(
        Faulted(
            rank=2, incarnation=0, kind="software", step=1, summary="Boom", traceback="Boom",
            position=Position(step=0, window=False), at=job.now,
        ),
        sender=STRANGER,
    )  # fmt: skip
    assert job.said == []
    assert job.doing == "healthy"
    assert job.machine._job.ranks.states[2].holdings.held == held
    assert "other" not in job.machine._job.ranks.topology().groups


def test_report_of_an_unordered_process_is_ignored() -> None:
    """When a report comes from an incarnation of a rank that the controller has never ordered, then
    it changes nothing."""
    job = trained()
    fault = Faulted(
        rank=2, incarnation=9, kind="software", step=1, summary="Boom", traceback="Boom",
        position=Position(step=0, window=False), at=job.now,
    )  # fmt: skip
    job.report(fault, sender="rank.2/9.77")
    assert job.said == []
    assert job.doing == "healthy"


def test_answer_of_an_unknown_process_does_not_count_for_the_rank() -> None:
    """When a process that does not hold the rank answers an order, then the controller still waits
    for the answer of the process that holds the rank."""
    job = trained()
    job.script.muted = {(2, "freeze")}
    job.kill(1)
    job.settle()
    incident = job.machine.incident
    answer = Answered(
        rank=2, incarnation=0, incident=incident.number, round=incident.round, order="freeze",
        position=Position(step=0, window=False), held=0, began=job.now, at=job.now,
    )  # fmt: skip
    job.report(answer, sender=STRANGER)
    assert job.doing == "freezing"
    job.report(answer)
    assert job.doing == "clearing"


def test_refusal_is_repeated_and_the_refused_process_is_remembered() -> None:
    """When a second process claims a rank, then the refusal is repeated for a limited time. The
    controller remembers the refused process after that."""
    job = trained()
    job.report(second_claim(job), sender=STRANGER)
    assert list(job.machine.refused) == [STRANGER]
    (refused,) = job.machine.outstanding()
    assert isinstance(refused, Refused)
    assert refused.pid == 77
    job.now += 60.0
    job.train()
    job.lead(2)
    assert job.machine.outstanding() == []
    assert list(job.machine.refused) == [STRANGER]


def test_new_agent_on_a_node_means_its_ranks_are_lost() -> None:
    """When a new agent joins for a node, then the ranks of that node are lost and started again
    there. A repeated join of the same agent changes nothing."""
    job = trained(placement={0: (0, 1), 1: (2, 3)})
    joined = NodeJoined(node=1, host="h", pid=1, ranks=(2, 3), at=job.now)
    job.report(joined)
    assert job.said == []
    job.ranks[2].alive = job.ranks[3].alive = False
    again = NodeJoined(node=1, host="h", pid=2, ranks=(2, 3), at=job.now)
    job.report(again)
    assert job.doing == "freezing"
    job.settle()
    assert [(s.rank, s.node, s.incarnation) for s in job.orders(Spawn)] == [(2, 1, 1), (3, 1, 1)]
    job.train()
    assert strategies(job) == ["recover"]
    faults = job.machine.incidents[-1].faults
    assert {fault.evidence for fault in faults} == {"another agent has come up on node 1"}


def test_new_agent_is_known_by_its_name_if_host_and_pid_are_the_same() -> None:
    """When a new agent joins for a node with the host and the pid of the earlier agent, as in a
    container that was started again, then the ranks of the node are lost and started again."""
    job = trained(placement={0: (0, 1), 1: (2, 3)})
    joined = NodeJoined(node=1, host="h", pid=1, ranks=(2, 3), at=job.now)
    job.ranks[2].alive = job.ranks[3].alive = False
    job.report(joined, sender="node.1/3f9a2c51")
    assert job.doing == "freezing"
    job.settle()
    job.train()
    assert [(s.rank, s.node, s.incarnation) for s in job.orders(Spawn)] == [(2, 1, 1), (3, 1, 1)]
    assert strategies(job) == ["recover"]


@pytest.mark.parametrize(("node", "ranks"), [(0, (0, 1)), (1, (2, 3))])
def test_captured_state_is_recreated_when_the_agent_of_its_ranks_is_new(
    node: int, ranks: tuple[int, ...]
) -> None:
    """When a new agent joins for a node, then the captured rank-local state of its ranks is lost,
    and the ranks make it anew."""
    job = trained(placement={0: (0, 1), 1: (2, 3)})
    for rank in ranks:
        job.ranks[rank].alive = False
    job.report(NodeJoined(node=node, host="h", pid=2, ranks=ranks, at=job.now))
    job.settle()
    job.train()
    assert job.orders(Rollback)[-1].derive == ranks


def test_new_agent_while_a_successor_is_awaited_does_not_end_the_job() -> None:
    """When a new agent joins for a node while a new process starts there, then all ranks of the
    node are started there again. No last checkpoint is written."""
    job = trained(placement={0: (0, 1), 1: (2, 3)}, enable=frozenset({"retry", "recover", "dump"}))
    job.script.slow = {3}
    job.kill(3)
    job.settle()
    assert job.doing == "awaiting"
    job.script.slow = set()
    job.ranks[2].alive = job.ranks[3].alive = False
    job.report(NodeJoined(node=1, host="h", pid=2, ranks=(2, 3), at=job.now))
    assert job.doing == "awaiting"
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert job.orders(Save) == []


@pytest.mark.parametrize(("pid", "derived"), [(1, ()), (9, (2, 3))])
def test_returning_node_has_its_captured_state_only_with_the_same_agent(
    pid: int, derived: tuple[int, ...]
) -> None:
    """When a node that was lost returns with the same agent, then the captured rank-local state of
    its ranks is used. With another agent the ranks make it anew."""
    job = trained(placement={0: (0, 1), 1: (2, 3)}, enable=frozenset({"recover"}), advised=True)
    job.lose_node(1)
    job.settle()
    assert job.doing == "choosing"
    job.script.gone = set()
    job.report(NodeJoined(node=1, host="h", pid=pid, ranks=(2, 3), at=job.now))
    job.advise()
    job.settle()
    job.train()
    assert job.orders(Rollback)[-1].derive == derived


def test_node_that_joins_after_the_end_starts_no_process() -> None:
    """When a job ends before all of its nodes have joined and a further node joins after that, then
    no process is started on this node."""
    job = ScriptedJob(4, placement={0: (0, 1), 1: (2, 3)})
    job.lead(1)
    job.come(0)
    job.settle()
    job.script.muted = {(rank, "end") for rank in range(2)}
    job.stop()
    job.said.clear()
    job.come(1)
    assert job.orders(Spawn) == []


def test_strategy_is_chosen_again_when_a_second_rank_of_the_node_is_lost() -> None:
    """When one process of a node is to be replaced and a new agent joins for the node, then the
    strategy is chosen again for both ranks of the node."""
    job = trained(placement={0: (0, 1), 1: (2, 3)}, enable=frozenset({"recover", "dump"}))
    job.script.deaf = {1}
    job.fault(2, "memory")
    job.settle()
    assert job.doing == "awaiting"
    job.script.deaf = set()
    job.said.clear()
    job.ranks[2].alive = job.ranks[3].alive = False
    job.report(NodeJoined(node=1, host="h", pid=9, ranks=(2, 3), at=job.now))
    job.settle()
    assert "ranks [2, 3]" in str(job.facts("strategy_chosen")[-1]["why"])
    job.train()
    assert strategies(job) == ["recover"]


def test_returning_node_starts_only_the_rank_outside_the_shrunk_job() -> None:
    """When a shrunk job has lost another rank and plugins are asked about it, then a node that
    returns starts only the rank that is outside the job."""
    shape = {0: (0, 1), 1: (2,), 2: (3,)}
    enable = frozenset({"recover", "scale_in", "scale_out"})
    job = trained(placement=shape, spare={2: 1}, advised=True, enable=enable)
    job.lose_node(2)
    job.settle()
    job.advise()
    job.settle()
    job.train()
    job.lose_node(1)
    job.settle()
    assert job.doing == "choosing"
    job.said.clear()
    job.come(2)
    assert [spawn.rank for spawn in job.orders(Spawn)] == [3]


# ---------------------------------------------------------------- the node of a rank


TWO_NODES: dict[int, tuple[int, ...]] = {0: (0, 1), 1: (2, 3)}
WITH_ROOM = {0: (0, 1), 1: (2, 3), 2: (), 3: ()}


def test_groups_are_formed_only_when_the_ranks_of_all_nodes_are_ready() -> None:
    """When one of two nodes has joined and its ranks are ready, then no process groups are formed
    until the ranks of the other node are ready."""
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
    """When a node is to be excluded and the memory of the only holder on another node is suspect,
    then the processes of the node are not ended at once. They first write their part of a last
    checkpoint."""
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
    """When a check demands on both ranks of a node to isolate the node, then both are ended with
    the first finding as the cause. The report names each rank once."""
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


# ---------------------------------------------------------------- a node with room that joins late


TOO_FEW = "no node has a free place left for rank 3"


def stranded(*, lost: bool = True, room: int = 1, **facts: int) -> ScriptedJob:
    """
    Return a job that has lost the node of ranks 2 and 3 and asks its recovery plugins.

    With `lost=False`, the node is alive, but its agent does not end processes. Another node has
    room for `room` ranks. `facts` are limits of the policy.
    """
    job = trained(
        placement=TWO_NODES, spare={1: 2, 2: room}, advised=True, **facts,
        enable={"recover", "dump"},
    )  # fmt: skip
    if lost:
        job.lose_node(1)
    else:
        job.script.deaf = {1}
        for rank in (2, 3):
            job.notice(rank, "process", "its card is gone")
    while job.doing != "choosing":
        job.settle()
        if job.doing != "choosing":
            job.wait()
    job.come(2)
    return job


def test_places_of_a_lost_node_do_not_count() -> None:
    """When a lost node had free places and a new node has a place for only one of the two lost
    ranks, then `recover` is refused and no process is started."""
    job = stranded()
    job.advise(strategy="recover")
    job.settle()
    assert job.facts("advice_not_followed")[-1]["why_not"] == TOO_FEW
    assert job.orders(Spawn) == []


def test_places_of_a_node_with_unkillable_ranks_do_not_count_for_them() -> None:
    """When an agent cannot end the processes of two ranks and a new node has a place for one rank,
    then the free places of the old node do not count for these ranks. `recover` is refused."""
    job = stranded(lost=False)
    job.advise(strategy="recover")
    job.settle()
    assert job.facts("advice_not_followed")[-1]["why_not"] == TOO_FEW
    assert job.orders(Spawn) == []


def test_late_started_rank_has_the_usual_number_of_restarts() -> None:
    """When a rank gets a place only after the freeze, then each death of its processes counts once.
    With the limit `respawns=2`, `recover` is refused after three deaths."""
    job = stranded(room=2, respawns=2)
    for _ in range(2):
        job.advise(strategy="recover")
        job.script.slow = {2}
        job.settle()
        assert job.machine.incident.decision.strategy == "recover"
        job.kill(2)
        job.settle()
    job.advise()
    job.settle()
    assert tried(job)["recover"] == "rank 2 has died 3 times in this incident"
    assert strategies(job) == ["dump"]
