"""
Scale-in, scale-out and migration: which ranks take part, and in which processes.
"""

from typing import (
    Any,
)

import pytest

from tests.core.lives import (
    names,
    strategies,
    trained,
    tried,
)
from tft.core.job.policy import (
    STRATEGIES,
    Policy,
)
from tft.core.job.training import RANKS_AWAY, UNFINISHED
from tft.protocol.messages import (
    Commit,
    Fetch,
    Freeze,
    Hold,
    Kill,
    NodeJoined,
    NodeLost,
    RankOrder,
    Rebuild,
    Regroup,
    Resume,
    Rollback,
    Save,
    Spawn,
    Stop,
)
from tft.testing.scripted import (
    ScriptedJob,
)

TWO_NODES = {0: (0, 1), 1: (2, 3)}
MIGRATE_OR_RECOVER = frozenset({"migrate", "recover", "dump"})
WITH_ROOM = {0: (0, 1), 1: (2, 3), 2: ()}
COLUMNS = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
"""The ranks of each rank's model replica: two replicas of two ranks."""
SHARDS = {"first": (0, 2), "second": (1, 3)}


def elastic(**facts: Any) -> ScriptedJob:  # Any: as in `trained`
    """
    Return a healthy job on two nodes, each with one model replica.
    """
    return trained(**{"placement": TWO_NODES, "columns": COLUMNS, "groups": SHARDS, **facts})


def shrunk(**facts: Any) -> ScriptedJob:  # Any: as in `trained`
    """
    Return a job on two nodes that has lost node 1 and has trained one step without it.
    """
    job = elastic(**facts)
    job.lose_node(1)
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert job.machine.members == {0, 1}
    job.said.clear()
    job.tells.clear()
    return job


# ---------------------------------------------------------------- scale in


@pytest.mark.parametrize("left_before", [True, False])
def test_state_of_a_rank_that_left_before_training_began_is_no_source(left_before: bool) -> None:
    """When a rank left before the wrappers were built, and all ranks must go back to the start, then
    its copies are not used: each rank may have an initial state of its own, which the wrappers make
    equal. The copies of a rank that left later are used."""
    job = ScriptedJob(
        4, Policy(), strategies=STRATEGIES, columns=COLUMNS, placement={0: (0, 1), 1: (2,), 2: (3,)}
    )
    job.script.slow = {1}
    job.start()
    job.arrive(1)
    while not job.orders(Rebuild if left_before else Rollback):
        job.obey_next()
    job.lose_node(2)
    job.settle()
    job.train(3)
    assert job.machine.members == {0, 1}
    assert job.ranks[2].alive
    job.fault(1, "numeric", polluted=True, not_after=0)
    job.settle()
    assert bool(job.orders(Fetch)) == (not left_before)
    assert (job.over is not None) == left_before


def test_column_of_a_lost_node_leaves_and_the_other_ranks_continue() -> None:
    """When a node is lost and its ranks have no other place, then these ranks leave the job. The
    other ranks form process groups without them and continue at the interrupted step. No state is
    copied."""
    job = elastic()
    job.lose_node(1)
    job.settle()
    assert names([o for o in job.said if isinstance(o, RankOrder)]) == [
        "Freeze", "Stop", "Compare", "Regroup", "Rebuild", "Rollback", "Resume",
    ]  # fmt: skip
    assert {o.to for o in job.said[3:] if isinstance(o, RankOrder)} == {(0, 1)}
    (regroup,) = job.orders(Regroup)
    assert (regroup.without, regroup.step) == ((2, 3), 4)
    assert job.machine.members == {0, 1}
    job.train()
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"], incident["steps_lost"]) == ("scale_in", 4, 0)
    assert tried(job) == {
        "retry": "ranks [2, 3] have lost their process",
        "recover": "node 1 is lost, and no other node has room for its ranks",
    }
    assert job.facts("strategy_chosen")[0]["why"] == (
        "ranks [2, 3] leave, 2 go on; training goes on after step 3"
    )
    assert job.doing == "healthy"


def test_rank_that_leaves_with_a_lost_rank_is_parked() -> None:
    """When one rank of a model replica is lost, then the other rank of the replica leaves the job
    too. Its process leaves the loop but stays alive, and gets no more orders."""
    job = elastic(placement={0: (0, 1), 1: (2,), 2: (3,)})
    job.lose_node(2)
    job.settle()
    assert job.machine.members == {0, 1}
    assert [s.to for s in job.orders(Stop)] == [(0, 1, 2)]
    assert [o.to for o in job.orders(Regroup)] == [(0, 1)]
    assert [o.to for o in job.orders(Resume)] == [(0, 1)]
    assert [(k.rank, k.cause) for k in job.orders(Kill)] == [(3, "node 2 was given up")]
    assert job.ranks[2].alive
    assert not job.ranks[2].training
    job.train()
    assert job.doing == "healthy"
    assert job.ranks[2].step == 3


def test_lost_rank_without_a_column_leaves_alone() -> None:
    """When a rank is lost that shares no model replica with other ranks, then only that rank leaves
    the job."""
    job = trained(placement={0: (0, 1, 2), 1: (3,)})
    job.lose_node(1)
    job.settle()
    assert job.machine.members == {0, 1, 2}
    assert [r.without for r in job.orders(Regroup)] == [(3,)]


def test_job_does_not_shrink_when_no_rank_would_be_left() -> None:
    """When all ranks form one model replica and one of them is lost, then `scale_in` would leave no
    rank. The job writes a last checkpoint and ends instead."""
    job = trained(columns=dict.fromkeys(range(4), (0, 1, 2, 3)), placement={0: (0, 1, 2), 1: (3,)})
    job.lose_node(1)
    job.settle()
    assert job.over is not None
    assert job.over.result == "dumped"
    assert tried(job)["scale_in"] == "no rank would be left"


def test_job_does_not_shrink_when_only_leaving_ranks_hold_a_shard() -> None:
    """When the only holder of a shard would have to leave the job, then `scale_in` is not followed.
    The job writes a last checkpoint and ends."""
    job = elastic(groups={"first": (0, 2), "second": (1, 3), "own": (2,)}, placement={
        0: (0, 1), 1: (2,), 2: (3,)})  # fmt: skip
    job.lose_node(2)
    job.settle()
    assert tried(job)["scale_in"] == "shard 'own' is held only by ranks that leave"
    assert job.over is not None
    assert job.over.result == "dumped"


def test_job_does_not_shrink_when_an_adaptor_excludes_it_at_ready() -> None:
    """When the adaptor of one rank reports at `Ready` that it does not support `scale_in`, then
    `scale_in` is not followed. The job writes a last checkpoint and ends."""
    job = elastic(settled={0: ("retry", "recover", "dump")})
    job.lose_node(1)
    job.settle()
    assert (
        tried(job)["scale_in"] == "the adaptor of ranks [0] does not support the strategy scale_in"
    )
    assert job.over is not None
    assert job.over.result == "dumped"


@pytest.mark.parametrize("cannot", ["policy", "adaptor"])
def test_job_does_not_shrink_when_the_policy_or_the_adaptor_excludes_it(cannot: str) -> None:
    """When the policy does not enable `scale_in` or the adaptor does not support it, then the job
    writes a last checkpoint and ends."""
    job = (
        elastic(enable=frozenset({"retry", "recover", "dump"}))
        if cannot == "policy"
        else elastic(strategies=("retry", "recover", "dump"))
    )
    job.lose_node(1)
    job.settle()
    assert job.over is not None
    assert job.over.result == "dumped"
    assert tried(job)["scale_in"] == (
        "scale_in is not enabled"
        if cannot == "policy"
        else "the adaptor of ranks [0, 1] does not support the strategy scale_in"
    )


def test_node_of_rank_0_can_leave() -> None:
    """When the node of rank 0 is lost, then the model replica of rank 0 leaves the job, and the
    other ranks continue."""
    job = elastic()
    job.lose_node(0)
    job.settle()
    job.train()
    assert job.machine.members == {2, 3}
    assert strategies(job) == ["scale_in"]


# ---------------------------------------------------------------- faults while scaled in


def test_fault_after_scale_in_involves_only_the_members() -> None:
    """When a process dies after the job has shrunk, then it is replaced and fetches from the
    members. Ranks outside the job get no orders."""
    job = trained(placement={0: (0, 1, 2), 1: (3,)})
    job.lose_node(1)
    job.settle()
    job.train()
    job.said.clear()
    job.kill(2)
    job.settle()
    job.train()
    assert strategies(job) == ["scale_in", "recover"]
    assert {o.to for o in job.said if isinstance(o, Regroup | Rebuild | Rollback | Resume)} == {
        (0, 1, 2)
    }
    (fetch,) = job.orders(Fetch)
    assert (fetch.to, fetch.step) == ((2,), 4)
    assert {s.rank for t in fetch.transfers for s in t.sources} == {0, 1}
    assert [r.without for r in job.orders(Regroup)] == [(3,)]
    assert job.doing == "healthy"


def test_memory_fault_after_scale_in_is_retried() -> None:
    """When the memory of a member fails after the job has shrunk, then the job follows `retry` and
    is healthy again."""
    job = trained(placement={0: (0, 1, 2), 1: (3,)})
    job.lose_node(1)
    job.settle()
    job.train()
    job.fault(0, "memory")
    job.settle()
    job.train()
    assert strategies(job) == ["scale_in", "retry"]
    assert job.doing == "healthy"


def test_job_shrinks_again_when_another_node_is_lost() -> None:
    """When another node is lost after the job has shrunk, then the ranks of that node leave, too."""
    job = trained(placement={0: (0, 1), 1: (2,), 2: (3,)})
    for node, left in ((2, {0, 1, 2}), (1, {0, 1})):
        job.lose_node(node)
        job.settle()
        job.train()
        assert job.machine.members == left
    assert strategies(job) == ["scale_in", "scale_in"]
    assert [r.without for r in job.orders(Regroup)] == [(3,), (2, 3)]


def test_shrunk_job_fails_when_the_last_holder_of_a_shard_is_lost() -> None:
    """When only one model replica is left, and one of its ranks is lost and cannot be replaced,
    then the job fails. The reason names the shard that is lost."""
    job = shrunk(respawns=0)
    job.kill(1)
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert "shard 'second'" in job.over.why


def test_shrunk_job_saves_all_shards_at_a_stop_request() -> None:
    """When a stop request comes after the job has shrunk, then the members save all shards."""
    job = shrunk()
    job.stop(0)
    job.settle()
    assert job.over is not None
    assert job.over.result == "dumped"
    assert {s.to: s.shards for s in job.orders(Save)} == {(0,): ("first",), (1,): ("second",)}


def test_shrunk_job_completes_when_its_members_have_finished() -> None:
    """When all members of a shrunk job have finished, then the job is complete, even if the process
    of a rank outside the job is still alive."""
    job = elastic(placement={0: (0, 1), 1: (2,), 2: (3,)})
    job.lose_node(2)
    job.settle()
    job.train()
    job.finish()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("completed", 0)


def test_end_of_a_parked_process_is_not_a_fault() -> None:
    """When the process of a rank outside the job dies, then the members get no order, and the job
    stays healthy. Another process is started, so that the rank can come back, unless its processes
    end again and again."""
    job = elastic(placement={0: (0, 1), 1: (2,), 2: (3,)}, flaps=2)
    job.lose_node(2)
    job.settle()
    job.train()
    job.said.clear()
    for _ in range(5):
        job.kill(2)
        job.settle()
    assert {type(order) for order in job.said} == {Spawn}
    assert len(job.orders(Spawn)) == 2
    assert job.doing == "healthy"
    assert job.facts("rank_gone")[-1] == {"rank": 2, "code": -9, "outside": True}
    job.finish()
    job.settle()
    assert job.over is not None
    assert "ranks [2, 3] had left and did not come back" in job.over.why


# ---------------------------------------------------------------- scale out


def test_ranks_rejoin_when_their_node_returns() -> None:
    """When the node of ranks that left returns, then their processes start while the members train.
    When all ranks of the model replica are ready, the job stops once, and these ranks fetch the
    current state."""
    job = shrunk()
    job.script.slow = {2, 3}
    job.come(1)
    assert [(s.rank, s.node, s.incarnation, s.cause) for s in job.orders(Spawn)] == [
        (2, 1, 1, "rank 2 is to come back"), (3, 1, 1, "rank 3 is to come back"),
    ]  # fmt: skip
    job.settle()
    job.train(2)
    job.arrive(2)
    assert job.doing == "healthy"
    assert job.orders(Freeze) == []
    job.arrive(3)
    assert job.doing == "freezing"
    job.settle()
    assert [f.to for f in job.orders(Freeze)] == [(0, 1)]
    assert [f.cause for f in job.orders(Freeze)] == ["ranks [2, 3] are ready to come back"]
    (regroup,) = job.orders(Regroup)
    assert (regroup.to, regroup.without, regroup.step) == ((0, 1, 2, 3), (), 7)
    fetches = {
        f.to: [(t.shard, {s.rank for s in t.sources}) for t in f.transfers]
        for f in job.orders(Fetch)
    }
    assert fetches == {(2,): [("first", {0})], (3,): [("second", {1})]}
    assert [r.to for r in job.orders(Resume)] == [(0, 1, 2, 3)]
    job.train()
    assert job.machine.members == {0, 1, 2, 3}
    assert strategies(job) == ["scale_in", "scale_out"]
    report = job.reports()[-1]
    assert (report["faults"], report["step"], report["steps_lost"]) == ([], 7, 0)
    assert job.facts("strategy_chosen")[-1]["why"] == (
        "ranks [2, 3] come back; training goes on after step 6"
    )
    assert job.doing == "healthy"
    assert {r.step for r in job.ranks.values()} == {7}


def test_silent_node_may_join_again_until_the_job_ends() -> None:
    """When a node is silent, then its agent is told so until it joins the job again. When the job
    ends, then no node is told so."""
    job = shrunk()
    assert job.machine.silent == [1]
    job.come(1)
    job.settle()
    job.train()
    assert job.machine.silent == []
    assert job.machine.members == {0, 1, 2, 3}
    job.lose_node(1)
    assert job.machine.silent == [1]
    job.stop()
    job.settle()
    assert job.machine.silent == []


def test_shrunk_job_says_at_once_that_it_writes_no_periodic_checkpoint() -> None:
    """When ranks leave a job with periodic checkpoints, then the operator is told when it trains on,
    once. When the ranks are back, the operator is told that checkpoints are written again."""
    job = elastic(checkpoint_every=100)
    job.lose_node(1)
    job.settle()
    job.train()
    assert job.facts("checkpoints_suspended") == [{"ranks": [2, 3], "step": 3}]
    job.fault(0, "network")
    job.settle()
    job.train()
    assert len(job.facts("checkpoints_suspended")) == 1
    assert job.facts("checkpoints_resumed") == []
    job.come(1)
    job.settle()
    job.train()
    assert job.machine.members == {0, 1, 2, 3}
    assert [facts["step"] for facts in job.facts("checkpoints_resumed")] == [job.ranks[0].step - 1]
    assert shrunk().facts("checkpoints_suspended") == []


@pytest.mark.parametrize("back", [False, True])
def test_checkpoints_that_a_shrunk_job_does_not_write_have_that_reason(back: bool) -> None:
    """When ranks have left a job with periodic checkpoints, then those that it misses until its end,
    or until the ranks are back, are reported with that reason."""
    job = elastic(checkpoint_every=2)
    job.lose_node(1)
    job.settle()
    job.train(4)
    if back:
        job.come(1)
        job.settle()
        job.train()
    else:
        job.finish()
        job.settle()
    assert job.machine.missed == {(None, UNFINISHED): [2], (None, RANKS_AWAY): [4, 6]}


def test_node_that_was_given_up_on_purpose_is_not_asked_to_join() -> None:
    """When a node was asked to leave the job, and its agent is silent afterwards, then the agent is
    not told to join again."""
    job = trained(placement={0: (0, 1, 2), 1: (3,), 2: ()}, spare={2: 1})
    job.switch(3)
    job.stop(node=1)
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert job.machine.nodes == [0, 2]
    job.lose_node(1)
    assert job.machine.silent == []


def test_parked_process_rejoins_with_its_column() -> None:
    """When one rank of a model replica was lost and is ready again, then the other rank of that
    replica, whose process stayed alive outside the job, rejoins in that process."""
    job = elastic(placement={0: (0, 1), 1: (2,), 2: (3,)})
    job.lose_node(2)
    job.settle()
    job.train()
    job.said.clear()
    job.come(2)
    job.settle()
    job.train()
    assert [s.rank for s in job.orders(Spawn)] == [3]
    assert {f.to for f in job.orders(Fetch)} == {(2,), (3,)}
    assert job.ranks[2].incarnation == 0
    assert job.machine.members == {0, 1, 2, 3}


def test_ranks_that_left_rejoin_on_a_new_node_with_room() -> None:
    """When a new node with room joins, then the ranks that left start there and rejoin."""
    job = shrunk()
    job.spare[5] = 2
    job.come(5)
    job.settle()
    job.train()
    assert [(s.rank, s.node) for s in job.orders(Spawn)] == [(2, 5), (3, 5)]
    assert job.machine.members == {0, 1, 2, 3}


def test_incomplete_column_does_not_rejoin() -> None:
    """When a new node has room for only one of the two ranks of a model replica that left, then
    that rank starts, but neither rank rejoins the job."""
    job = shrunk()
    job.spare[5] = 1
    job.come(5)
    job.settle()
    job.train()
    assert [s.rank for s in job.orders(Spawn)] == [2]
    assert job.machine.members == {0, 1}
    assert job.orders(Freeze) == []


def test_no_rank_rejoins_when_scale_out_is_disabled() -> None:
    """When `scale_out` is not enabled, then no process is started on a node that returns."""
    job = shrunk(enable=frozenset({"retry", "recover", "scale_in", "dump"}))
    job.come(1)
    job.settle()
    assert job.said == []
    assert job.doing == "healthy"


def test_ranks_stay_outside_when_their_random_state_cannot_be_derived() -> None:
    """When the adaptor cannot make the RNG and data position of a rank anew, then the ranks that
    left do not rejoin. The members continue."""
    job = shrunk(derives=False)
    job.come(1)
    job.settle()
    job.train()
    assert job.machine.members == {0, 1}
    assert strategies(job) == ["scale_in", "retry"]
    assert len(job.orders(Regroup)) == 1
    assert job.doing == "healthy"


def test_rejoining_rank_derives_its_random_state_again() -> None:
    """When a rank rejoins at a step at which its earlier process had captured RNG and data
    position, then it makes them anew, because it has not trained on the batches of that step."""
    job = trained(enable=frozenset({"retry", "scale_in", "scale_out", "dump"}))
    job.kill(3)
    job.settle()
    job.train(2)
    assert job.machine.members == {0, 1, 2, 3}
    back = job.orders(Rollback)[-1]
    assert (back.step, back.derive) == (4, (3,))
    assert job.facts("local_state_derived") == [{"ranks": [3], "step": 4}]


@pytest.mark.parametrize("steps", [0, 1])
def test_derived_random_state_is_reported_only_after_the_first_step(steps: int) -> None:
    """When a node is lost, then its ranks make their RNG and data position anew on another node.
    The log says so only if a step was trained before."""
    job = ScriptedJob(4, placement=WITH_ROOM, spare={2: 2}).start()
    job.train(steps)
    job.lose_node(1)
    job.settle()
    back = job.orders(Rollback)[-1]
    assert (back.step, back.derive) == (steps, (2, 3))
    assert job.facts("local_state_derived") == [{"ranks": [2, 3], "step": 1}][:steps]


def test_lost_member_is_replaced_before_other_ranks_rejoin() -> None:
    """When a member dies while the job stops to let ranks rejoin, then the member is replaced
    first. The ranks that wanted to rejoin stay outside meanwhile."""
    job = shrunk(groups={"dense": (0, 1, 2, 3)})
    job.script.slow = {1, 2, 3}
    job.come(1)
    job.settle()
    job.arrive(2)
    job.arrive(3)
    assert job.doing == "freezing"
    job.kill(1)
    job.settle()
    assert job.doing == "awaiting"
    assert job.machine.incident.decision.tried == [("retry", "ranks [1] have lost their process")]
    assert job.machine.members == {0, 1}
    job.arrive(1)
    job.settle()
    job.train()
    assert strategies(job)[:2] == ["scale_in", "recover"]
    assert job.doing == "healthy"


def test_members_continue_when_a_rejoining_process_dies() -> None:
    """When a process dies while the job stops to let it rejoin, then the members continue as
    before. The rank rejoins when its next process is ready."""
    job = shrunk()
    job.come(1)
    while job.doing == "healthy":
        job._obey(job._queue.popleft())
    assert job.doing == "freezing"
    job.script.slow = {3}
    job.kill(3)
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert job.machine.members == {0, 1}
    assert strategies(job) == ["scale_in", "retry"]
    job.arrive(3)
    job.settle()
    job.train()
    assert job.machine.members == {0, 1, 2, 3}


def test_rejoined_rank_that_dies_in_the_repair_is_replaced() -> None:
    """When a process dies after its rank has become a member again, while the job still forms
    groups, then it is replaced like the process of any member."""
    job = shrunk()
    job.come(1)
    while not job.orders(Regroup):
        job._obey(job._queue.popleft())
    job.kill(3)
    job.settle()
    job.train()
    assert job.machine.members == {0, 1, 2, 3}
    assert strategies(job) == ["scale_in", "recover"]
    assert job.doing == "healthy"


def test_ranks_that_are_ready_during_a_pause_rejoin_after_it() -> None:
    """When all ranks of a model replica become ready to rejoin while the job is paused, then they
    rejoin after the pause."""
    job = shrunk()
    job.pause()
    job.settle()
    job.come(1)
    job.settle()
    assert job.doing == "paused"
    job.go_on()
    job.settle()
    job.train(2)
    assert job.machine.members == {0, 1, 2, 3}
    assert job.doing == "healthy"


def test_ranks_do_not_rejoin_when_the_incident_limit_is_reached() -> None:
    """When the limit of incidents is reached, then the job does not stop to let ranks rejoin,
    because the next incident would be its last."""
    job = shrunk(max_incidents=1)
    job.come(1)
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert job.orders(Freeze) == []
    assert job.machine.members == {0, 1}


# ---------------------------------------------------------------- migrate


def until(job: ScriptedJob, state: str) -> None:
    """
    Let the ranks carry out their orders, one at a time, until the job is in `state`.
    """
    while job.doing != state:
        job.obey_next()


def test_successor_starts_while_the_straggler_trains_and_then_takes_its_rank() -> None:
    """When a rank is slow, then a successor starts on a node with room. When the successor is
    ready, all ranks stop at one step boundary, the successor fetches the state, and the slow
    process is ended."""
    job = trained(placement=WITH_ROOM, spare={2: 1})
    job.script.slow = {3}
    job.notice(3, "straggler", "its clock is throttled")
    assert [(s.rank, s.node, s.incarnation) for s in job.orders(Spawn)] == [(3, 2, 1)]
    assert [s.cause for s in job.orders(Spawn)] == [
        "rank 3 holds the others up: its clock is throttled"
    ]
    assert job.facts("rank_straggles") == [
        {"rank": 3, "why": "its clock is throttled", "why_not": ""}
    ]
    job.settle()
    job.train(2)
    assert job.doing == "healthy"
    assert job.ranks[3].step == 5
    job.arrive(3)
    assert job.doing == "pausing"
    job.settle()
    assert [(h.to, h.step) for h in job.orders(Hold)] == [((0, 1, 2, 3), 5)]
    assert [(f.to, f.incarnations) for f in job.orders(Freeze)] == [((0, 1, 2, 3), {})] * 2
    assert [(s.to, s.incarnations) for s in job.orders(Stop)] == [((0, 1, 2, 3), {})]
    assert [o.incarnations for o in job.orders(Regroup)] == [{3: 1}]
    assert [o.incarnations for o in job.orders(Resume)] == [{3: 1}]
    assert [(k.rank, k.incarnation, k.node, k.cause, k.last_words) for k in job.orders(Kill)] == [
        (3, 0, 1, "another process has taken the rank over", False)
    ]
    assert [(f.to, f.step) for f in job.orders(Fetch)] == [((3,), 5)]
    assert (job.ranks[3].incarnation, job.ranks[3].node) == (1, 2)
    assert [one.alive for one in job.former] == [False]
    job.train()
    (incident,) = job.reports()
    assert (incident["strategy"], incident["step"], incident["steps_lost"]) == ("migrate", 6, 0)
    assert [(f["kind"], f["rank"], f["step"], f["evidence"]) for f in incident["faults"]] == [
        ("straggler", 3, 6, "its clock is throttled")
    ]
    assert job.facts("strategy_chosen")[0]["why"] == (
        "ranks [3] are taken over by processes that are ready; training goes on after step 5"
    )
    assert tried(job) == {}
    assert job.doing == "healthy"


def test_successor_carries_out_no_order_before_it_holds_the_rank() -> None:
    """When orders go to a rank that has a successor, then only the process that holds the rank
    carries them out."""
    job = trained(placement=WITH_ROOM, spare={2: 1})
    job.script.slow = {3}
    job.notice(3, "straggler")
    job.settle()
    job.kill(1)
    job.arrive(3)
    while not job.orders(Stop):
        job._obey(job._queue.popleft())
    successor = job.successors[3]
    assert successor.orders.names == set()
    assert (successor.orders.key, successor.step) == ((-1, 0), 0)
    job.settle()
    job.train()
    assert job.doing == "healthy"


def test_answer_of_a_successor_that_does_not_hold_the_rank_is_ignored() -> None:
    """When a successor answers an order before it holds the rank, then the controller still waits
    for the answer of the process that holds the rank."""
    job = trained(placement=WITH_ROOM, spare={2: 1})
    job.script.slow = {3}
    job.notice(3, "straggler")
    job.settle()
    job.script.slow = set()
    successor = job.successors[3]
    job.join(successor)
    job.script.muted = {(3, "freeze")}
    job.kill(1)
    job.settle()
    (freeze,) = job.orders(Freeze)
    job.report(successor.answer(freeze, "freeze", None, found=("pass", ""), at=job.now))
    (still,) = (o for o in job.machine.outstanding() if isinstance(o, Freeze))
    assert still.to == (3,)
    assert job.doing == "freezing"


def test_straggler_trains_on_when_its_successor_dies_before_it_is_ready() -> None:
    """When a successor dies before it is ready, then the straggler trains on. When the rank is
    reported as slow again, another successor starts."""
    job = trained(placement=WITH_ROOM, spare={2: 1})
    job.script.slow = {3}
    job.notice(3, "straggler")
    job.settle()
    job.kill_successor(3)
    job.train()
    assert job.doing == "healthy"
    assert job.orders(Freeze) == []
    job.notice(3, "straggler")
    assert [(s.incarnation, s.node) for s in job.orders(Spawn)] == [(1, 2), (2, 2)]


def test_job_retries_when_a_successor_dies_during_the_takeover() -> None:
    """When a successor dies while all ranks stop for it, then all ranks continue in their processes
    with `retry`."""
    job = trained(placement=WITH_ROOM, spare={2: 1})
    job.notice(3, "straggler")
    until(job, "freezing")
    job.kill_successor(3)
    job.settle()
    job.train()
    assert strategies(job) == ["retry"]
    assert job.orders(Kill) == []
    assert job.ranks[3].incarnation == 0
    assert job.doing == "healthy"


def test_ranks_continue_when_a_successor_dies_before_the_boundary() -> None:
    """When a successor dies while all ranks train on to the step boundary of its takeover, then no
    rank is stopped, and no incident is reported."""
    job = trained(placement=WITH_ROOM, spare={2: 1})
    job.notice(3, "straggler")
    until(job, "pausing")
    job.kill_successor(3)
    job.settle()
    job.train()
    assert job.orders(Stop) == []
    assert job.reports() == []
    assert job.doing == "healthy"


def test_job_can_be_paused_after_a_takeover_was_given_up() -> None:
    """When a successor has died before the step boundary of its takeover, and a pause is requested
    later, then the job pauses at the next step boundary."""
    job = trained(placement=WITH_ROOM, spare={2: 1})
    job.notice(3, "straggler")
    until(job, "pausing")
    job.kill_successor(3)
    job.settle()
    job.train()
    job.pause()
    job.settle()
    assert job.doing == "paused"


def test_job_completes_when_a_successor_fails_after_the_last_step() -> None:
    """When all steps are done and a successor then fails, then the job is complete, because the
    successor held no rank."""
    job = trained(placement=WITH_ROOM, spare={2: 1})
    job.script.slow = {3}
    job.notice(3, "straggler", "its clock is throttled")
    job.script.muted = {(0, "complete")}
    job.settle()
    assert 3 in job.successors
    job.finish()
    job.kill_successor(3)
    job.kill(0, code=0)
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("completed", 0)


def test_successor_is_ended_when_the_boundary_is_not_reached_in_time() -> None:
    """When the ranks do not reach the step boundary of a takeover within the limit, then all ranks
    continue, and the successor is ended."""
    job = trained(placement=WITH_ROOM, spare={2: 1})
    job.script.muted = {(1, "hold")}
    job.notice(3, "straggler")
    job.settle()
    job.wait()
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert [(k.rank, k.incarnation) for k in job.orders(Kill)] == [(3, 1)]
    assert job.orders(Stop) == []


def test_pause_requested_during_a_takeover_begins_after_it() -> None:
    """When a pause is requested while all ranks train on to the step boundary of a takeover, then
    the pause begins after the takeover. A request to resume does not stop the takeover."""
    job = trained(placement=WITH_ROOM, spare={2: 1})
    job.notice(3, "straggler")
    until(job, "pausing")
    job.pause()
    job.settle()
    job.train()
    job.settle()
    assert strategies(job) == ["migrate"]
    assert job.doing == "paused"
    again = trained(placement=WITH_ROOM, spare={2: 1})
    again.notice(3, "straggler")
    until(again, "pausing")
    again.go_on()
    again.settle()
    again.train()
    assert strategies(again) == ["migrate"]


def test_successor_takes_over_after_a_fault_on_the_way_to_the_boundary() -> None:
    """When a process dies while all ranks train on to the step boundary of a takeover, then this
    process is replaced first. The successor takes over afterwards."""
    job = trained(placement=WITH_ROOM, spare={2: 1})
    job.notice(3, "straggler")
    until(job, "pausing")
    job.script.slow = {1}
    job.kill(1)
    job.settle()
    job.arrive(1)
    job.settle()
    job.train()
    job.settle()
    job.train()
    assert strategies(job) == ["recover", "migrate"]
    assert (job.ranks[1].incarnation, job.ranks[3].incarnation) == (1, 1)
    assert job.doing == "healthy"


# ---------------------------------------------------------------- migrate on request


def test_switched_ranks_move_together_when_all_successors_are_ready() -> None:
    """When an orchestrator asks to switch two ranks to other processes, then each rank gets a
    successor. The first successor that is ready waits, and both take over in one incident."""
    job = trained(placement=WITH_ROOM, spare={2: 2})
    job.script.slow = {2, 3}
    job.switch(2, 3)
    spawns = [(s.rank, s.node, s.successor, s.cause) for s in job.orders(Spawn)]
    assert spawns == [
        (r, 2, True, f"rank {r} is to be switched: its pod is switched") for r in (2, 3)
    ]
    job.settle()
    job.arrive(3)
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert job.orders(Freeze) == []
    job.arrive(2)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert incident["strategy"] == "migrate"
    assert {(f["kind"], f["rank"]) for f in incident["faults"]} == {
        ("straggler", 2),
        ("straggler", 3),
    }
    assert [(job.ranks[r].incarnation, job.ranks[r].node) for r in (2, 3)] == [(1, 2)] * 2
    assert job.machine.switch == frozenset()


def test_requested_switches_do_not_count_against_a_rank() -> None:
    """When an orchestrator asks to switch a rank to another process more often than a rank may
    cause incidents, then each switch is carried out."""
    job = trained(placement=WITH_ROOM, spare={2: 8}, flaps=1)
    for _ in range(3):
        job.script.slow = {2}
        job.switch(2)
        job.settle()
        job.arrive(2)
        job.settle()
        job.train()
    assert [report["strategy"] for report in job.reports()] == ["migrate"] * 3
    assert job.doing == "healthy"


def test_switch_waits_for_a_node_with_room() -> None:
    """When no node has room for the successor of a rank that is to be switched, then the job trains
    on. When a node with room joins, the successor starts there and takes over."""
    job = trained(placement=TWO_NODES)
    job.switch(3)
    job.settle()
    job.train()
    assert job.orders(Spawn) == []
    job.spare[2] = 1
    job.come(2)
    job.settle()
    job.train()
    assert strategies(job) == ["migrate"]
    assert (job.ranks[3].incarnation, job.ranks[3].node) == (1, 2)


def test_rank_is_not_switched_to_the_node_of_another_switched_rank() -> None:
    """When two ranks are to be switched, and the only node with room is that of one of them, then
    no successor is started there."""
    job = trained(placement=TWO_NODES, spare={0: 1})
    job.switch(1, 3)
    job.settle()
    assert job.orders(Spawn) == []


@pytest.mark.parametrize("state", ["healthy", "pausing", "freezing", "clearing"])
def test_cancelled_switch_ends_the_successor_and_keeps_all_processes(state: str) -> None:
    """When the switch of a rank to another process is cancelled before the successor has taken
    over, then the successor is ended, and the job continues with its present processes."""
    job = trained(placement=WITH_ROOM, spare={2: 1})
    job.script.slow = {3} if state == "healthy" else set()
    job.switch(3)
    until(job, state)
    job.settle() if state == "healthy" else None
    job.switch()
    job.settle()
    job.train()
    assert strategies(job) == ([] if state in ("healthy", "pausing") else ["retry"])
    assert [(k.rank, k.incarnation, k.cause) for k in job.orders(Kill)] == [
        (3, 1, "its pod is switched")
    ]
    assert job.ranks[3].incarnation == 0
    assert job.successors == {}
    assert job.doing == "healthy"


def test_plugins_are_asked_again_when_a_switch_is_cancelled() -> None:
    """When the switch of a rank is cancelled while recovery plugins are asked about it, then they
    are asked again, and `migrate` cannot be chosen any more."""
    job = trained(placement=WITH_ROOM, spare={2: 1}, advised=True)
    job.switch(3)
    job.settle()
    assert job.doing == "choosing"
    job.switch()
    job.settle()
    (migrate,) = [o for o in job.consulted[-1].offers if o.strategy == "migrate"]
    assert migrate.why_not == "no process is ready to take over"
    job.advise()
    job.settle()
    job.train()
    assert strategies(job) == ["retry"]


def test_switched_ranks_are_reported_and_started_in_rank_order() -> None:
    """When the switch of several ranks is requested, refused or cancelled, then the log names the
    ranks in rank order. Their successors start in rank order."""
    facts: dict[str, Any] = {"world": 9, "placement": {0: tuple(range(9)), 1: ()}, "spare": {1: 2}}
    job = trained(**facts)
    job.script.slow = {1, 8}
    job.switch(8, 1)
    job.settle()
    assert [order.rank for order in job.orders(Spawn)] == [1, 8]
    assert job.facts("switch_asked") == [{"ranks": [1, 8], "why": "its pod is switched"}]
    job.switch()
    assert job.facts("switch_called_off") == [{"ranks": [1, 8], "why": "its pod is switched"}]
    job = trained(**facts, enable=frozenset({"retry"}))
    job.switch(8, 1)
    job.switch(16, 9)
    assert job.facts("switch_called_off") == [
        {"ranks": [1, 8], "why": "migrate is not enabled"},
        {"ranks": [9, 16], "why": "ranks [9, 16] do not take part in training"},
    ]


def test_second_switch_request_continues_for_the_ranks_it_names() -> None:
    """When two ranks are to be switched and a second request names only one of them, then the
    switch of the other rank is cancelled. The successor of the named rank continues."""
    job = trained(placement=WITH_ROOM, spare={2: 2})
    job.script.slow = {2, 3}
    job.switch(2, 3)
    job.settle()
    job.switch(3)
    job.settle()
    assert [order.rank for order in job.orders(Kill)] == [2]
    assert [told["ranks"] for told in job.facts("switch_called_off")] == [[2]]
    assert [told["ranks"] for told in job.facts("switch_asked")] == [[2, 3]]
    job.arrive(3)
    job.settle()
    job.train()
    assert strategies(job) == ["migrate"]
    assert len(job.orders(Spawn)) == 2


def test_cancelled_switch_keeps_the_successor_of_a_straggler() -> None:
    """When the switch of one rank is cancelled while the successor of a straggler starts, then the
    successor of the straggler continues."""
    job = trained(placement=WITH_ROOM, spare={2: 2})
    job.script.slow = {2, 3}
    job.notice(2, "straggler")
    job.switch(3)
    job.settle()
    job.switch()
    job.settle()
    assert [order.rank for order in job.orders(Kill)] == [3]
    assert job.successors.keys() == {2}


def test_cancel_request_without_a_switch_is_accepted() -> None:
    """When no rank is to be switched and a request to cancel comes, then the request is not
    refused, even if the job does not enable `migrate`."""
    job = trained(enable=frozenset({"retry"}))
    job.switch()
    assert job.facts("switch_called_off") == []


@pytest.mark.parametrize("joined", [True, False])
def test_impossible_switch_is_refused_only_after_all_processes_have_joined(*, joined: bool) -> None:
    """When the switch of a rank is requested before all processes have called `tft.init`, then the
    request is kept. When all have called it, an impossible switch is refused, even before training.
    """
    adaptor = ("retry",) if joined else STRATEGIES
    job = ScriptedJob(3, Policy(), strategies=adaptor)
    job.script.slow = {2}
    job.start()
    if joined:
        job.join(job.ranks[2])
    job.switch(1)
    assert job.machine.switch == (frozenset() if joined else {1})
    refused = [told["why"] for told in job.facts("switch_called_off")]
    why = "the adaptor of ranks [0, 1, 2] does not support the strategy migrate"
    assert refused == ([why] if joined else [])


def test_plugins_are_not_asked_again_when_a_switch_is_cancelled_before_ready() -> None:
    """When plugins are asked about a fault of another rank, and a switch is cancelled whose
    successor is not ready, then the plugins are not asked again."""
    job = trained(placement=WITH_ROOM, spare={2: 1}, advised=True)
    job.script.slow = {3}
    job.switch(3)
    job.settle()
    job.fault(1, "memory")
    job.settle()
    assert job.doing == "choosing"
    job.switch()
    job.settle()
    assert (job.doing, len(job.consulted)) == ("choosing", 1)


def test_strategy_is_not_chosen_again_when_a_switch_is_cancelled_later() -> None:
    """When a successor was ready for a switch but the job follows `recover` for another rank, and
    the switch is then cancelled, then the strategy is not chosen again."""
    job = trained(placement=WITH_ROOM, spare={2: 1}, advised=True)
    job.switch(3)
    job.settle()
    job.script.slow = {1}
    job.kill(1)
    job.settle()
    job.advise(strategy="recover", base="recover")
    job.settle()
    asked = len(job.consulted)
    assert job.doing == "awaiting"
    job.switch()
    job.settle()
    assert (job.doing, len(job.consulted)) == ("awaiting", asked)
    job.arrive(1)
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]


def test_plugins_are_asked_again_when_a_partly_ready_switch_is_cancelled() -> None:
    """When plugins are asked because one of two successors of a switch is ready, and the switch of
    both ranks is cancelled, then the plugins are asked again."""
    job = trained(placement=WITH_ROOM, spare={2: 2}, advised=True)
    job.script.slow = {2}
    job.notice(2, "straggler")
    job.switch(3)
    job.settle()
    assert job.doing == "choosing"
    job.switch(2, 3)
    asked = len(job.consulted)
    job.switch()
    job.settle()
    assert len(job.consulted) == asked + 1


def test_completed_switch_is_not_cancelled() -> None:
    """When a request to cancel a switch comes after the successor has taken over the rank, then it
    has no effect."""
    job = trained(placement=WITH_ROOM, spare={2: 1})
    job.switch(3)
    until(job, "repairing")
    job.switch()
    job.settle()
    job.train()
    assert strategies(job) == ["migrate"]
    assert job.facts("switch_called_off") == []


def test_switch_is_cancelled_when_one_of_its_successors_ends() -> None:
    """When two ranks are to be switched and one successor ends before the takeover, then the other
    successor is ended too. The log gives the reason, and the switch is not tried again."""
    job = trained(placement=WITH_ROOM, spare={2: 2})
    job.script.slow = {2}
    job.switch(2, 3)
    job.settle()
    job.kill_successor(2)
    job.settle()
    job.train()
    assert job.successors == {}
    assert len(job.orders(Spawn)) == 2
    assert job.facts("switch_called_off") == [
        {"ranks": [2, 3], "why": "the process that was to take over from rank 2 has ended"}
    ]
    assert job.doing == "healthy"


def test_switch_continues_when_the_successor_of_a_straggler_ends() -> None:
    """When the successor of a straggler ends while another rank is being switched, then the switch
    of that rank continues."""
    job = trained(placement=WITH_ROOM, spare={2: 2})
    job.script.slow = {2, 3}
    job.notice(2, "straggler")
    job.switch(3)
    job.settle()
    job.kill_successor(2)
    job.settle()
    assert job.facts("switch_called_off") == []
    job.arrive(3)
    job.settle()
    job.train()
    assert strategies(job) == ["migrate"]


def test_cancelled_switch_reports_why_its_successor_was_ended() -> None:
    """When the node of a successor turns out to be faulty and is excluded, then the switch of the
    rank is cancelled. The log gives the fault of the node as the reason."""
    job = trained(5, placement={0: (0, 1), 1: (2, 3), 2: (4,)}, spare={2: 1})
    job.script.slow = {3}
    job.switch(3)
    job.settle()
    assert job.successors[3].node == 2
    job.notice(4, "node", "its fan has failed")
    job.settle()
    (told,) = job.facts("switch_called_off")
    assert told == {
        "ranks": [3],
        "why": "the process that was to take over from rank 3 has ended: its fan has failed",
    }


def test_rank_lost_before_its_switch_is_replaced_and_the_switch_ends() -> None:
    """When a rank that is to be switched loses its process before a successor has started, then the
    rank gets a new process, and its switch counts as done."""
    job = trained(placement=TWO_NODES)
    job.switch(3)
    job.kill(3)
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert job.machine.switch == frozenset()


@pytest.mark.parametrize("state", ["healthy", "choosing"])
def test_node_can_end_when_all_its_ranks_are_being_switched(state: str) -> None:
    """When the launcher of a node gets SIGTERM and all ranks of the node are being switched, then
    the job continues. The successors get the rank-local state that the old processes captured."""
    places = {0: (0, 1, 2), 1: (3,), 2: ()}
    job = trained(placement=places, spare={2: 1}, derives=False, advised=state == "choosing")
    job.script.slow = {3} if state == "healthy" else set()
    job.switch(3)
    job.settle()
    assert job.doing == state
    job.stop(node=1)
    job.settle()
    assert [facts["why"] for facts in job.facts("node_left")] == [
        "node 1 was asked to leave the job: SIGTERM came"
    ]
    if state == "choosing":
        job.advise()
    else:
        job.arrive(3)
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert (job.ranks[3].incarnation, job.ranks[3].node) == (1, 2)
    (rollback,) = job.orders(Rollback)
    assert (rollback.local_state, rollback.derive) == ({3: "00"}, ())
    assert job.doing == "healthy"


def test_left_node_is_reported_and_not_used_again() -> None:
    """When a node ends while all its ranks are being switched, then the log names these ranks, and
    the report has a fault for each of them. The node is not used again."""
    job = trained(placement={0: (0, 1, 2), 1: (3,), 2: ()}, spare={2: 1})
    job.script.slow = {3}
    job.switch(3)
    job.settle()
    job.stop(node=1)
    job.settle()
    why = "node 1 was asked to leave the job: SIGTERM came"
    assert job.facts("node_left") == [{"node": 1, "ranks": [3], "why": why}]
    job.arrive(3)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert [(f["kind"], f["rank"]) for f in incident["faults"]] == [("node", 3)]
    assert incident["faults"][0]["evidence"].startswith(why)
    job.lose_node(2)
    job.settle()
    assert {order.node for order in job.orders(Spawn)} == {2}


def test_end_of_the_launcher_of_an_unknown_node_ends_the_job() -> None:
    """When the launcher of a node that has never joined gets SIGTERM, then the job is cancelled."""
    job = trained(placement=WITH_ROOM, spare={2: 2})
    job.stop(node=7)
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("cancelled", 143)


@pytest.mark.parametrize("recovered", [True, False])
def test_end_of_the_launcher_of_a_lost_node_does_not_end_the_job(*, recovered: bool) -> None:
    """When a node is lost and its launcher then gets SIGTERM, then the job continues, because the
    ranks of the node get a place on another node."""
    job = trained(placement=WITH_ROOM, spare={2: 2})
    job.lose_node(1)
    if recovered:
        job.settle()
        job.train()
    job.stop(node=1)
    job.settle()
    job.train()
    assert job.over is None
    assert strategies(job) == ["recover"]
    assert job.facts("node_left") == [{"node": 1, "ranks": [], "why": "SIGTERM came"}]


def test_end_of_the_launcher_of_a_node_without_ranks_does_not_end_the_job() -> None:
    """When the launcher of a node without ranks gets SIGTERM, then the job trains on. If the node
    returns, it has room again."""
    job = trained(placement={0: (0, 1, 2), 1: (3,), 2: ()}, spare={2: 1})
    job.switch(3)
    job.settle()
    job.train()
    job.stop(node=1)
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert strategies(job) == ["migrate"]
    job.lose_node(1)
    job.come(1)
    job.switch(3)
    job.settle()
    job.train()
    assert strategies(job) == ["migrate", "migrate"]
    assert (job.ranks[3].incarnation, job.ranks[3].node) == (2, 1)


def test_end_of_the_launcher_of_a_node_with_a_remaining_rank_ends_the_job() -> None:
    """When the launcher of a node gets SIGTERM and one of its ranks is not being switched, then the
    job writes a last checkpoint and ends."""
    job = trained(placement=WITH_ROOM, spare={2: 1})
    job.switch(3)
    job.stop(node=1)
    job.settle()
    assert [facts["strategy"] for facts in job.facts("strategy_chosen")] == ["dump"]


def test_switch_continues_after_the_repair_of_another_rank() -> None:
    """When the memory of one rank fails while the successor of another rank starts, then the faulty
    rank is repaired first. The successor takes over when it is ready."""
    job = trained(placement=WITH_ROOM, spare={2: 1})
    job.script.slow = {3}
    job.switch(3)
    job.settle()
    job.fault(1, "memory")
    job.settle()
    job.train()
    job.arrive(3)
    job.settle()
    job.train()
    assert strategies(job) == ["retry", "migrate"]


@pytest.mark.parametrize(
    ("facts", "ranks", "why"),
    [
        ({"enable": frozenset({"retry"})}, (3,), "migrate is not enabled"),
        (
            {"strategies": ("retry", "recover")}, (3,),
            "the adaptor of ranks [0, 1, 2, 3] does not support the strategy migrate",
        ),
        ({}, (3, 7), "ranks [7] do not take part in training"),
    ],
)  # fmt: skip
def test_impossible_switch_is_refused_with_the_reason(
    facts: dict[str, Any],  # Any: as in `trained`
    ranks: tuple[int, ...],
    why: str,
) -> None:
    """When the policy or the adaptor does not allow to switch a rank, or a named rank is no member,
    then the request is refused with the reason, and no successor is started."""
    job = trained(placement=WITH_ROOM, spare={2: 1}, **facts)
    job.switch(*ranks)
    job.settle()
    assert job.facts("switch_called_off") == [{"ranks": list(ranks), "why": why}]
    assert job.orders(Spawn) == []


def test_successor_that_dies_after_the_takeover_is_replaced() -> None:
    """When a successor has taken over a rank and dies during the repair, then another process
    starts on the same node."""
    job = trained(placement=WITH_ROOM, spare={2: 1})
    job.notice(3, "straggler")
    while job.ranks[3].incarnation == 0:
        job._obey(job._queue.popleft())
    assert job.doing == "repairing"
    job.kill(3)
    job.settle()
    job.train()
    assert [(s.incarnation, s.node) for s in job.orders(Spawn)] == [(1, 2), (2, 2)]
    assert strategies(job) == ["recover"]
    assert job.doing == "healthy"


def test_successor_takes_the_rank_of_a_straggler_that_dies() -> None:
    """When a straggler dies before its successor is ready, then the successor takes the rank and no
    other process starts. The job waits for the successor."""
    job = trained(placement=WITH_ROOM, spare={2: 1})
    job.script.slow = {3}
    job.notice(3, "straggler")
    job.settle()
    job.kill(3)
    job.settle()
    assert job.doing == "awaiting"
    assert [s.incarnation for s in job.orders(Spawn)] == [1]
    job.arrive(3)
    job.settle()
    job.train()
    (incident,) = job.reports()
    assert incident["strategy"] == "recover"
    assert [(f["kind"], f["rank"]) for f in incident["faults"]] == [("process", 3)]
    assert job.orders(Kill) == []
    (rollback,) = job.orders(Rollback)
    # the first process of rank 3 captured this rank-local state
    assert (rollback.local_state, rollback.derive) == ({3: "00"}, ())
    assert job.doing == "healthy"


def test_shard_of_a_lost_rank_is_known_before_its_successor_is_ready() -> None:
    """When the only holder of a shard dies during a last checkpoint and its successor is not ready,
    then no checkpoint is committed, because it would lack that shard."""
    job = trained(placement=WITH_ROOM, spare={2: 1}, groups={"a": (0, 1, 2), "b": (3,)})
    job.script.slow = {3}
    job.notice(3, "straggler")
    job.script.muted = {(3, "save")}
    job.fault(0, "software")
    job.settle()
    assert job.doing == "dumping"
    job.kill(3)
    job.settle()
    assert job.orders(Commit) == []
    assert tried(job)["dump"] == "no sound copy of shard 'b' is left on ranks [3]"


def test_column_of_a_lost_rank_is_known_before_its_successor_is_ready() -> None:
    """When a rank dies while its successor starts and `recover` is not enabled, then its whole
    model replica leaves the job, and the other ranks continue."""
    job = trained(
        placement=WITH_ROOM, spare={2: 1}, columns={2: (2, 3), 3: (2, 3)},
        enable=frozenset({"migrate", "scale_in", "dump"}),
    )  # fmt: skip
    job.script.slow = {3}
    job.notice(3, "straggler")
    job.settle()
    job.kill(3)
    job.settle()
    job.train()
    assert strategies(job) == ["scale_in"]
    assert job.machine.members == {0, 1}


@pytest.mark.parametrize("respawns", [1, 2])
def test_end_of_a_successor_counts_for_the_limit_of_new_processes(
    respawns: int,
) -> None:
    """When a straggler and its successor both die, then the rank has died twice. Another process
    starts only if the limit allows it."""
    job = trained(placement=WITH_ROOM, spare={2: 1}, respawns=respawns, enable=MIGRATE_OR_RECOVER)
    job.script.slow = {3}
    job.notice(3, "straggler")
    job.settle()
    job.kill(3)
    job.kill_successor(3)
    job.settle()
    assert [s.incarnation for s in job.orders(Spawn)] == [1, 2][:respawns]
    if respawns == 1:
        assert tried(job)["recover"] == "rank 3 has died 2 times in this incident"


def test_place_of_a_dead_straggler_is_free_for_another_rank() -> None:
    """When a straggler dies and its successor takes the rank on another node, then the straggler's
    place on its node is free. When the node of the successor is then lost, that rank starts in the
    free place."""
    job = trained(5, placement={0: (0, 1), 1: (2, 3), 2: (4,)}, spare={2: 1})
    job.script.slow = {3}
    job.notice(3, "straggler")
    job.settle()
    job.kill(3)
    job.settle()
    job.arrive(3)
    job.settle()
    job.train()
    assert job.ranks[3].node == 2
    job.lose_node(2)
    job.settle()
    job.train()
    assert strategies(job) == ["recover", "scale_in"]
    assert job.machine.members == {0, 1, 2, 3}
    assert job.ranks[3].node == 1
    assert job.doing == "healthy"


def test_successor_takes_the_rank_when_the_node_of_the_straggler_is_lost() -> None:
    """When the node of a straggler is lost, then its successor takes the rank. The other ranks of
    that node start on a node with room."""
    job = trained(placement=WITH_ROOM, spare={2: 2})
    job.script.slow = {3}
    job.notice(3, "straggler")
    job.settle()
    job.lose_node(1)
    job.settle()
    job.arrive(3)
    job.settle()
    job.train()
    assert sorted((s.rank, s.node, s.incarnation) for s in job.orders(Spawn)) == [
        (2, 2, 1), (3, 2, 1),
    ]  # fmt: skip
    assert strategies(job) == ["recover"]
    assert job.doing == "healthy"


def test_straggler_trains_on_when_the_node_of_its_successor_is_lost() -> None:
    """When the node of a successor is lost before the takeover, then the straggler trains on, and
    no incident is reported."""
    job = trained(placement=WITH_ROOM, spare={2: 1})
    job.script.slow = {3}
    job.notice(3, "straggler")
    job.settle()
    job.lose_node(2)
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert job.reports() == []
    assert job.machine.next_deadline() is None


def test_successor_that_is_not_ready_in_time_is_ended() -> None:
    """When a successor is not ready within the limit, then it is ended, and the straggler trains
    on."""
    job = trained(placement=WITH_ROOM, spare={2: 1}, join=40.0)
    job.script.slow = {3}
    job.notice(3, "straggler")
    job.settle()
    job.wait()
    job.settle()
    assert [(k.rank, k.incarnation) for k in job.orders(Kill)] == [(3, 1)]
    assert job.ranks[3].alive
    assert job.doing == "healthy"
    assert job.reports() == []


def test_lost_rank_is_replaced_before_a_takeover() -> None:
    """When a process dies while all ranks stop for a successor, then that process is replaced. The
    successor is ended when the job is healthy."""
    job = trained(placement=WITH_ROOM, spare={2: 1})
    job.notice(3, "straggler")
    until(job, "freezing")
    job.script.slow = {1}
    job.kill(1)
    while job.doing != "awaiting":
        job._obey(job._queue.popleft())
    job.settle()
    job.arrive(1)
    job.settle()
    job.train()
    assert job.doing == "healthy"
    assert strategies(job) == ["recover"]
    assert tried(job) == {"retry": "ranks [1] have lost their process"}
    assert [(k.rank, k.incarnation, k.cause) for k in job.orders(Kill)] == [
        (3, 1, "the successor could not take over its rank")
    ]
    job.settle()
    assert job.successors == {}
    assert job.ranks[3].incarnation == 0


def test_takeover_continues_when_another_node_joins() -> None:
    """When another agent joins while all ranks stop for a successor, then the successor still takes
    over."""
    job = trained(placement=WITH_ROOM, spare={2: 1, 5: 1})
    job.notice(3, "straggler")
    while job.doing == "healthy":
        job._obey(job._queue.popleft())
    job.come(5)
    job.settle()
    job.train()
    assert [(k.rank, k.incarnation) for k in job.orders(Kill)] == [(3, 0)]
    assert strategies(job) == ["migrate"]


@pytest.mark.parametrize(
    ("facts", "why_not"),
    [
        ({"placement": TWO_NODES}, "no other node has room"),
        (
            {"placement": WITH_ROOM, "spare": {2: 1}, "enable": frozenset({"retry"})},
            "migrate is not enabled",
        ),
        (
            {"placement": WITH_ROOM, "spare": {2: 1}, "strategies": ("retry", "recover")},
            "the adaptor of ranks [0, 1, 2, 3] does not support the strategy migrate",
        ),
    ],
)
def test_operator_is_told_why_a_straggler_gets_no_successor(
    facts: dict[str, Any],  # Any: as in `trained`
    why_not: str,
) -> None:
    """When no node has room for a successor or `migrate` is not possible, then the log names the
    straggler and the reason. The job continues."""
    job = trained(**facts)
    job.notice(3, "straggler", "its clock is throttled")
    assert job.said == []
    assert job.facts("rank_straggles") == [
        {"rank": 3, "why": "its clock is throttled", "why_not": why_not}
    ]
    assert job.doing == "healthy"


def test_no_successor_starts_while_all_ranks_are_stopped() -> None:
    """When a rank is reported as a straggler during an incident, then no successor starts, and the
    log says why."""
    job = trained(placement=WITH_ROOM, spare={2: 1}, advised=True)
    job.fault(1, "memory")
    job.settle()
    job.notice(3, "straggler", "its clock is throttled")
    assert job.orders(Spawn) == []
    (told,) = job.facts("rank_straggles")
    assert told["why_not"] == "all ranks are stopped already"


def test_straggler_gets_only_one_successor() -> None:
    """When a rank is reported as a straggler twice, then only one successor starts."""
    job = trained(placement=WITH_ROOM, spare={2: 2})
    job.script.slow = {3}
    job.notice(3, "straggler")
    job.settle()
    job.notice(3, "straggler")
    assert len(job.orders(Spawn)) == 1
    assert (
        job.facts("rank_straggles")[-1]["why_not"]
        == "a second process of the rank was started already"
    )


def test_successor_is_ended_when_its_node_is_excluded() -> None:
    """When the node of a successor is reported as faulty, then the node is excluded, and the
    successor is ended."""
    job = trained(placement={0: (0, 1), 1: (2, 3), 2: (4,)}, world=5, spare={2: 1, 0: 2})
    job.script.slow = {3}
    job.notice(3, "straggler")
    job.settle()
    successor = job.successors[3]
    assert successor.node == 0
    job.notice(0, "node", "its fan has failed")
    job.settle()
    assert not successor.alive


def test_other_ranks_keep_their_processes_in_a_takeover() -> None:
    """When a successor has taken over, then no other process was ended or started."""
    job = trained(placement=WITH_ROOM, spare={2: 1})
    job.notice(0, "straggler")
    job.settle()
    job.train()
    assert [s.rank for s in job.orders(Spawn)] == [0]
    assert {r.incarnation for r in job.ranks.values() if r.rank} == {0}
    assert job.ranks[0].incarnation == 1


def test_late_report_about_an_earlier_agent_is_ignored() -> None:
    """When a node has a new agent and a late report says that an earlier agent of the node has
    ended, then the job stays healthy."""
    came = ScriptedJob(4).now
    job = trained(placement={1: (2, 3), 0: (0, 1)})
    job.report(NodeLost(node=1, pid=77, why="its agent has ended", at=came))
    assert job.doing == "healthy"
    job.report(NodeLost(node=1, pid=1, why="its agent has ended", at=job.now))
    assert job.doing != "healthy"


def test_end_of_a_later_unknown_agent_means_that_the_node_is_lost() -> None:
    """When a report says that an agent has ended which started after the known agent of its node,
    then the node counts as lost."""
    came = ScriptedJob(4).now
    job = trained(placement={1: (2, 3), 0: (0, 1)})
    job.report(NodeLost(node=1, pid=77, why="its agent has ended", at=came + 1e-3))
    assert [fault["rank"] for fault in job.facts("fault")] == [2, 3]
    assert job.doing == "freezing"


def test_recover_is_not_followed_when_a_node_has_room_for_one_of_two_ranks() -> None:
    """When a node joins with room for only one of the two lost ranks, then the advice `recover` is
    not followed. The job writes a last checkpoint and ends."""
    job = trained(placement=TWO_NODES, spare={2: 1}, advised=True, enable={"recover", "dump"})
    job.lose_node(1)
    while job.doing != "choosing":
        job._obey(job._queue.popleft())
    job.come(2)
    job.advise(strategy="recover")
    job.settle()
    assert job.orders(Spawn) == []
    assert job.facts("advice_not_followed")[-1]["why_not"] == (
        "no node has a free place left for rank 3"
    )
    assert job.over is not None
    assert job.over.result == "dumped"


def test_job_ends_when_an_agent_restarts_during_the_exit() -> None:
    """When all steps are done and an agent restarts before the ranks of its node have left, then
    the job does not wait for these ranks."""
    job = trained(placement={0: (0, 1), 1: (2, 3)})
    job.script.muted = {(rank, "complete") for rank in range(4)}
    job.finish(0, 1, 2, 3)
    job.settle()
    assert job.doing == "exiting"
    job.report(NodeJoined(node=1, host="h", pid=2, ranks=(2, 3), at=job.now))
    for rank in (0, 1):
        job.kill(rank, 0)
    assert job.over is not None
    assert job.over.result == "completed"
    assert [s.rank for s in job.orders(Spawn)] == []


def test_job_ends_when_a_rank_does_not_leave_while_a_successor_starts() -> None:
    """When all steps are done and the process of a rank does not exit in time, then it is ended and
    the job fails. The job does not wait for the successor of another rank."""
    job = trained(placement={0: (0, 1), 1: (2, 3), 2: ()}, spare={2: 1})
    job.script.slow = {3}
    job.notice(3, "straggler")
    job.settle()
    job.script.muted = {(0, "complete")}
    job.finish()
    assert job.doing == "exiting"
    while job.over is None:
        job.wait()
        job.settle()
    assert job.over is not None
    assert job.over.result == "failed"


# ---------------------------------------------------------------- ranks outside a job that has shrunk


def parked(
    *enable: str,
    trains: bool = True,
    **facts: Any,  # Any: as in `trained`
) -> ScriptedJob:
    """
    Return a job that rank 1 left 200 seconds ago because its memory had failed twice.

    The process of rank 1 is still alive: it is parked outside the training loop. `enable` adds
    strategies to those of the job. With `trains`, the job has trained one step without the rank.
    """
    job = trained(
        flaps=1, flap_window=100.0, enable=frozenset({"retry", "scale_in", *enable}), **facts
    )
    for number in range(2):
        job.fault(1, "memory")
        job.settle()
        if trains or not number:
            job.train()
    assert strategies(job) == ["retry", "scale_in"] if trains else ["retry"]
    assert job.machine.members == {0, 2, 3}
    job.said.clear()
    job.now += 200.0
    return job


def test_parked_rank_rejoins_when_its_failure_window_has_passed() -> None:
    """When a rank has left the job after too many failures, its process is still alive, and the
    failure window has passed, then the rank takes part again in that process."""
    job = parked("scale_out")
    job.checkpointed(3)  # after any event the job checks whether rank 1 may rejoin
    job.settle()
    job.train()
    assert strategies(job)[-1] == "scale_out"
    assert job.machine.members == {0, 1, 2, 3}


def test_no_rank_is_stopped_for_a_parked_process_when_scale_out_is_disabled() -> None:
    """When the living process of a rank outside the job could rejoin but `scale_out` is not
    enabled, then no order is sent, and the members keep training."""
    job = parked()
    job.checkpointed(3)
    job.settle()
    job.train()
    assert [order for order in job.said if isinstance(order, RankOrder)] == []
    assert job.doing == "healthy"


def test_parked_process_that_does_not_save_is_ended_without_a_fault() -> None:
    """When the living process of a rank outside the job does not answer `Save` during a last
    checkpoint, then it is ended. The report names no hang, because the rank was not a member."""
    job = parked("dump", trains=False)
    job.script.muted = {(1, "save")}
    job.stop(0)
    job.settle()
    assert 1 in {rank for save in job.orders(Save) for rank in save.to}
    job.wait()
    job.settle()
    assert [(k.rank, k.last_words, k.cause) for k in job.orders(Kill)] == [
        (1, True, "no answer to the order save in time")
    ]
    assert [fault["kind"] for fault in job.reports()[-1]["faults"]] == ["memory"]
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)


def test_parked_process_saves_no_rank_local_state_of_a_step_trained_without_it() -> None:
    """When a last checkpoint has a step that the job has trained without a rank, then the parked
    process of that rank saves nothing. Its data position of that step belongs to an attempt that
    was given up."""
    job = parked("dump")
    job.stop(0)
    job.settle()
    assert {rank for save in job.orders(Save) for rank in save.to} == {0, 2, 3}
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)


def test_rank_without_a_data_position_saves_the_shards_that_only_it_still_holds() -> None:
    """When a rank that rejoins has fetched its shards, has no data position yet, and all other
    ranks are lost, then it saves the shards and the data positions of the others, but none of its
    own."""
    job = parked("scale_out", "dump")
    job.script.muted = {(rank, "rollback") for rank in range(4)}
    job.checkpointed(3)
    until(job, "rolling back")
    for rank in (0, 2, 3):
        job.kill(rank)
    job.stop(0)
    job.settle()
    (save,) = job.orders(Save)
    assert (save.to, save.shards, save.writes_own) == ((1,), ("dense",), False)
    assert set(save.local_state) == {0, 2, 3}
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)


def test_checkpoint_is_committed_again_when_a_successor_replaces_the_committing_process() -> None:
    """When the process that has to commit a last checkpoint is lost and its rank has a successor,
    then the checkpoint is planned again. The job does not end before a checkpoint is committed."""
    job = trained(placement=WITH_ROOM, spare={2: 1}, max_incidents=0)
    job.script.muted = {(0, "commit")}
    job.notice(0, "straggler")
    job.settle()
    job.kill(3)
    job.settle()
    assert job.doing == "dumping"
    assert [commit.to for commit in job.orders(Commit)] == [(0,)]
    job.kill(0)
    job.script.muted = set()
    job.settle()
    assert len(job.orders(Commit)) == 2
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)


def test_parked_process_on_an_excluded_node_is_ended_without_a_fault() -> None:
    """When a faulty node with one member and one parked process of a rank outside the job is
    excluded, then both processes are ended. The report names only the member."""
    job = parked("dump", placement={0: (0, 2), 1: (1, 3)})
    job.notice(3, "node", "its fan has failed")
    job.settle()
    job.train()
    assert [kill.rank for kill in job.orders(Kill)] == [1, 3]
    assert [(f["kind"], f["rank"]) for f in job.reports()[-1]["faults"]] == [("node", 3)]
    assert strategies(job)[-1] == "scale_in"


def test_process_that_is_ready_after_it_was_told_to_end_does_not_rejoin() -> None:
    """When a rank outside the job gets a new process, and this process becomes ready after it was
    told to end, then no order is sent and the job stays healthy."""
    job = trained(placement={0: (0, 1), 1: (2, 3)})
    job.lose_node(1)
    job.settle()
    job.train()
    assert job.machine.members == {0, 1}
    job.script.slow, job.script.deaf = {2, 3}, {1}
    job.come(1)
    job.settle()
    for _ in (2, 3):
        job.wait()
    assert [kill.rank for kill in job.machine.outstanding() if isinstance(kill, Kill)] == [2, 3]
    job.said.clear()
    job.arrive(2)
    job.arrive(3)
    job.settle()
    assert (job.said, job.doing) == ([], "healthy")
