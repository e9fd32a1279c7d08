"""
The arrival of nodes, their rendezvous stores, and the start of a job from a checkpoint.
"""

import pytest

from tests.core.lives import (
    names,
    strategies,
    trained,
)
from tft.core.job.policy import (
    STRATEGIES,
    Policy,
)
from tft.protocol.messages import (
    End,
    Fetch,
    Joined,
    Load,
    NodeJoined,
    NodeLost,
    Refused,
    Regroup,
    Rollback,
    Spawn,
    StoreOpened,
)
from tft.testing.scripted import (
    ScriptedJob,
)

# ---------------------------------------------------------------- nodes


NODES: dict[int, tuple[int, ...]] = {0: (0, 1), 1: (2, 3), 2: (4, 5)}


def gathering(**facts: object) -> ScriptedJob:
    """
    Return a job of three nodes with two ranks each, of which only the first node has arrived.
    """
    job = ScriptedJob(6, placement=NODES, **facts)  # type: ignore[arg-type] # the fields have different types
    job.lead(1)
    assert job.machine.next_deadline() is None
    job.come(0)
    job.report(StoreOpened(node=0, host="h", port=1, at=job.now))
    job.settle()
    return job


def test_job_fails_when_no_other_node_joins_for_an_hour() -> None:
    """When a node never joins, then the job waits 3600 s after the last node that joined. Then the
    job fails, and the reason names the ranks without a place."""
    job = gathering()
    job.now += 3500.0
    job.come(1)
    came = job.now
    job.settle()
    job.now += 3500.0
    assert job.doing == "awaiting"
    job.wait()
    assert job.now == pytest.approx(came + 3600.0)
    assert job.doing == "exiting"
    # the ranks have 5 s to leave
    assert job.machine.next_deadline() == pytest.approx(job.now + 5.0)
    assert {order.to for order in job.orders(End)} == {(0, 1, 2, 3)}
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert job.over.why == (
        "ranks [4, 5] have no node: no other node has joined the job within 3600 s after the last "
        "one"
    )
    assert job.machine.next_deadline() is None


def test_new_controller_waits_another_hour_for_the_nodes() -> None:
    """When a controller takes over while nodes have not joined, then the 3600 s begin again."""
    job = gathering()
    job.now += 3000.0
    job.lead(2)
    assert job.machine.next_deadline() == pytest.approx(job.now + 3600.0)


def test_late_process_is_replaced_while_nodes_have_not_joined() -> None:
    """When a process is not ready in time while nodes have not joined, then it is replaced. The job
    still waits for the nodes."""
    job = ScriptedJob(6, placement=NODES)
    job.script.slow = {1}
    job.lead(1)
    job.come(0)
    job.report(StoreOpened(node=0, host="h", port=1, at=job.now))
    job.settle()
    job.wait()
    job.arrive(1)
    job.settle()
    assert job.doing == "awaiting"
    for node in (1, 2):
        job.come(node)
        job.settle()
    job.train()
    assert job.doing == "healthy"


def test_node_deadline_ends_when_all_ranks_have_a_place() -> None:
    """When all ranks have a place, then there is no deadline for nodes any more."""
    job = gathering()
    for node in (1, 2):
        job.come(node)
        job.settle()
    job.train()
    assert job.doing == "healthy"
    assert job.machine.next_deadline() is None
    job.now += 7200.0
    job.script.slow = {1}
    job.kill(1)
    job.settle()
    assert job.doing == "awaiting"
    assert job.machine.next_deadline() == pytest.approx(job.now + 300.0, abs=0.1)


def test_job_fails_at_once_when_a_node_is_lost_before_it_joins() -> None:
    """When an agent that never joined is reported as ended while ranks have no place, then the job
    fails at once with that reason."""
    job = gathering()
    job.report(NodeLost(node=2, pid=7, why="the agent of node 2 has ended", at=job.now))
    assert job.doing == "exiting"
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert job.over.why == "the agent of node 2 has ended"


def test_job_ends_when_a_node_is_lost_before_it_joins_while_plugins_are_asked() -> None:
    """When plugins are asked about a dead rank and a node is lost before it joins, then the job
    ends without waiting for advice."""
    job = gathering(policy=Policy(advised=True))
    job.kill(1)
    assert job.doing == "choosing"
    job.report(NodeLost(node=2, pid=7, why="the agent of node 2 has ended", at=job.now))
    assert job.doing == "exiting"


@pytest.mark.parametrize("comes", [False, True])
def test_second_node_lost_before_it_joins_does_not_change_the_end(comes: bool) -> None:
    """When the job already ends because of one lost node and a second node is lost, then no new
    order is sent. The first reason stays."""
    job = gathering()
    job.report(NodeLost(node=2, pid=7, why="the agent of node 2 has ended", at=job.now))
    said = len(job.said)
    if comes:
        job.come(1)
    job.report(NodeLost(node=1, pid=1, why="the agent of node 1 has ended", at=job.now))
    assert (job.doing, len(job.said)) == ("exiting", said)
    job.settle()
    assert job.over is not None
    assert job.over.why == "the agent of node 2 has ended"


def test_lost_spare_node_that_never_joined_is_ignored() -> None:
    """When every rank has a place and a node that never joined is lost, then the job continues."""
    job = gathering()
    for node in (1, 2):
        job.come(node)
    assert job.doing == "awaiting"
    job.report(NodeLost(node=3, why="the agent of node 3 has ended", at=job.now))
    job.settle()
    job.train()
    assert job.doing == "healthy"
    job.report(NodeLost(node=4, why="the agent of node 4 has ended", at=job.now))
    assert job.doing == "healthy"


def test_ranks_move_when_a_joined_node_is_lost_during_the_start() -> None:
    """When a joined node is lost while other nodes have not joined, then its ranks start on a node
    with room. The job begins when the other nodes have joined."""
    job = gathering(spare={3: 2})
    job.come(3)
    job.lose_node(0)
    job.settle()
    assert job.doing == "awaiting"
    for node in (1, 2):
        job.come(node)
        job.settle()
    job.train()
    assert {job.ranks[rank].node for rank in (0, 1)} == {3}
    assert job.doing == "healthy"


def test_node_starts_only_the_ranks_of_the_job() -> None:
    """When an agent names ranks beyond the size of the job, then no process is started for these
    ranks."""
    job = ScriptedJob(2)
    job.lead(1)
    job.report(NodeJoined(node=0, host="h", pid=1, ranks=(0, 1, 2, 3), at=job.now))
    assert [s.rank for s in job.orders(Spawn)] == [0, 1]


@pytest.mark.parametrize(
    ("rank", "world", "why"),
    [
        (2, 8, "rank 2 of 8 has no place in a job of 4 ranks"),
        (5, 4, "rank 5 of 4 has no place in a job of 4 ranks"),
    ],
)
def test_claim_with_a_wrong_rank_or_world_size_is_refused(rank: int, world: int, why: str) -> None:
    """When a process claims a rank that does not exist, or names another world size, then its claim
    is refused with the reason. The job stays healthy."""
    job = trained()
    job.report(
        Joined(
            rank=rank, incarnation=0, world=world, pid=77, started=5, host="h", address="h:9",
            adaptor="fake", strategies=(), at=job.now,
        )
    )  # fmt: skip
    assert names(job.said) == ["Refused"]
    assert [r.why for r in job.orders(Refused)] == [why]
    assert job.facts("claim_refused") == [{"rank": rank, "pid": 77, "why": why}]
    assert job.doing == "healthy"


# ---------------------------------------------------------------- rendezvous stores


TWO_NODES: dict[int, tuple[int, ...]] = {0: (0, 1), 1: (2, 3)}


def last_regroup(job: ScriptedJob) -> Regroup:
    """
    Return the last order to form process groups.
    """
    return [order for order in job.said if isinstance(order, Regroup)][-1]


def test_groups_are_not_formed_at_the_store_of_a_lost_node() -> None:
    """When a node is lost whose rendezvous store was opened last, then the remaining ranks form
    their process groups at the store of another node."""
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
    """When a rendezvous store is replaced, then the next process groups are formed at the new
    store."""
    job = ScriptedJob(2).start()
    job.train(2)
    job.reopen_store(port=9)
    job.kill(1)
    job.settle()
    assert last_regroup(job).port == 9


def test_store_replaced_during_group_formation_is_logged() -> None:
    """When the rendezvous store is replaced while process groups are formed at it, then the log
    says that the store was replaced."""
    job = ScriptedJob(4).start()
    job.train(2)
    job.script.muted = {(2, "regroup")}
    job.kill(1)
    job.settle()
    job.reopen_store(port=2)
    assert job.facts("store_replaced") == [{"port": 2}]


# ---------------------------------------------------------------- a job that starts from a checkpoint


SEVEN = ("/run/checkpoints/step-00000007", 7)


@pytest.mark.parametrize("derives", [True, False])
def test_rank_lost_during_the_first_load_gets_its_state_from_the_checkpoint(
    *, derives: bool
) -> None:
    """When a rank dies while all ranks load the checkpoint, then all ranks load it again. Only the
    checkpoint has the rank-local state of the lost rank."""
    job = ScriptedJob(2, resume=SEVEN, derives=derives, strategies=STRATEGIES)
    job.script.muted = {(1, "load")}
    job.start()
    job.script.muted = set()
    job.kill(1)
    job.machine._job.ranks.states[1].local_state.reported = {}  # rank 1 had captured nothing
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert [load.to for load in job.orders(Load)] == [(0, 1), (0, 1)]
    assert job.orders(Fetch) == []
    assert job.orders(Rollback)[-1].derive == ()


def test_initial_state_of_the_script_does_not_replace_the_checkpoint() -> None:
    """When an incident occurs before all ranks of a resumed job have loaded the checkpoint, then
    all ranks load the checkpoint again. The initial state that the script has made is not used."""
    job = ScriptedJob(2, resume=SEVEN, strategies=STRATEGIES)
    job.script.muted = {(0, "load"), (1, "load")}
    job.start()
    job.script.muted = set()
    job.notice(0, "numeric", polluted=True)
    job.settle()
    job.train()
    assert strategies(job) == ["retry"]
    assert [load.step for load in job.orders(Load)] == [7, 7]
    assert {rank.step for rank in job.ranks.values()} == {8}


def test_captured_state_from_a_loaded_checkpoint_is_not_recreated() -> None:
    """When the ranks of a lost node move and all ranks load a checkpoint because no copy is left,
    then their rank-local state comes from the checkpoint. No rank derives it anew."""
    job = ScriptedJob(
        2, placement={0: (0,), 1: (1,)}, groups={"a": (0,), "b": (1,)}, spare={0: 1},
        strategies=STRATEGIES,
    ).start()  # fmt: skip
    job.train(3)
    job.checkpointed(2)
    job.lose_node(1)
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert [(load.step, load.to) for load in job.orders(Load)] == [(2, (0, 1))]
    assert job.orders(Rollback)[-1].derive == ()


@pytest.mark.parametrize(
    "older", [(), (("/run/checkpoints/step-00000005", 5), ("/elsewhere/3", 3))]
)
def test_resumed_job_loads_an_older_checkpoint_when_its_first_is_unreadable(
    older: tuple[tuple[str, int], ...],
) -> None:
    """When the checkpoint of a resumed job cannot be read, then all ranks load the older checkpoint
    and train from there. Without an older one the job fails."""
    job = ScriptedJob(2, resume=SEVEN, older=older, strategies=STRATEGIES)
    job.script.failures = {
        (rank, "load"): ["a digest differs"] * (2 if older else 9) for rank in range(2)
    }
    job.start()
    while older and job.doing != "healthy" and job.machine.next_deadline() is not None:
        job.wait()
        job.settle()
        job.train()
    if older:
        assert [load.directory for load in job.orders(Load)] == [SEVEN[0], SEVEN[0], older[0][0]]
        assert {rank.step for rank in job.ranks.values()} == {6}
        return
    while job.over is None:
        job.wait()
        job.settle()
    assert {load.directory for load in job.orders(Load)} == {SEVEN[0]}
    assert job.over.result == "failed"


def test_resumed_job_rolls_back_to_a_checkpoint_before_its_first() -> None:
    """When the loaded state may already be polluted, then a resumed job loads the checkpoint before
    the one that it started from."""
    job = ScriptedJob(2, resume=SEVEN, older=(("/elsewhere/3", 3),), strategies=STRATEGIES).start()
    job.checkpointed(8)
    job.notice(0, "numeric", polluted=True)
    job.settle()
    assert [load.step for load in job.orders(Load)] == [7, 3]


def test_steps_that_only_heartbeats_have_told_count_as_lost() -> None:
    """When a node is lost whose ranks had completed steps that no remaining rank has, as when all
    nodes are lost, then these steps are in the report."""
    job = trained(steps=9, placement={0: (0, 1), 1: (2, 3)}, spare={0: 2})
    job.report(NodeLost(node=1, why="its agent has ended", at=job.now, step=12))
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert (incident["strategy"], incident["steps_lost"]) == ("recover", 3)
