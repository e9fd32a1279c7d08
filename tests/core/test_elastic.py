"""
Shrinking, growing, and taking over: who takes part, and in which process.
"""

from typing import Any

import pytest

from tests.core.lives import names, strategies, trained, tried
from tft.core.job.policy import STRATEGIES, Policy
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
from tft.testing.scripted import ScriptedJob

TWO_NODES = {0: (0, 1), 1: (2, 3)}
MIGRATE_OR_RECOVER = frozenset({"migrate", "recover", "dump"})
WITH_ROOM = {0: (0, 1), 1: (2, 3), 2: ()}
COLUMNS = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
"""Two replicas of a model that is cut in two."""
SHARDS = {"first": (0, 2), "second": (1, 3)}


def elastic(**facts: Any) -> ScriptedJob:  # Any: as in `trained`
    """
    Two nodes with a replica each.
    """
    return trained(**{"placement": TWO_NODES, "columns": COLUMNS, "groups": SHARDS, **facts})


def shrunk(**facts: Any) -> ScriptedJob:  # Any: as in `trained`
    """
    Such a job after one of the nodes was lost, and a step after that.
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


def test_the_column_of_the_lost_leaves_and_the_rest_goes_on() -> None:
    """
    When a node is lost that has no other place, then its ranks are no members any more; the
    others form groups without them and go on at the step that was interrupted, copying nothing.
    """
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
        "recover": "node 1 is gone, and its ranks have no other place",
    }
    assert job.facts("strategy_chosen")[0]["why"] == (
        "ranks [2, 3] leave, 2 go on; training goes on after step 3"
    )
    assert job.doing == "healthy"


def test_whoever_has_to_leave_with_the_lost_is_parked_not_ended() -> None:
    """
    When one rank of a column is lost, then the other one of it leaves with it, its process kept:
    it was stopped with everyone else and hears nothing more.
    """
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


def test_ranks_without_a_column_leave_alone() -> None:
    """
    When no rank names others that have to leave with it, then only the lost one leaves.
    """
    job = trained(placement={0: (0, 1, 2), 1: (3,)})
    job.lose_node(1)
    job.settle()
    assert job.machine.members == {0, 1, 2}
    assert [r.without for r in job.orders(Regroup)] == [(3,)]


def test_a_job_does_not_shrink_to_nothing() -> None:
    """
    When every rank has to leave with the lost one, then the job does not shrink, it saves.
    """
    job = trained(columns=dict.fromkeys(range(4), (0, 1, 2, 3)), placement={0: (0, 1, 2), 1: (3,)})
    job.lose_node(1)
    job.settle()
    assert job.over is not None
    assert job.over.result == "dumped"
    assert tried(job)["scale_in"] == "no rank would be left"


def test_a_job_does_not_shrink_past_the_last_place_of_a_shard() -> None:
    """
    When a shard has no place among those who would stay, then the job does not shrink, though
    one who would have to leave still has it: it is saved.
    """
    job = elastic(groups={"first": (0, 2), "second": (1, 3), "own": (2,)}, placement={
        0: (0, 1), 1: (2,), 2: (3,)})  # fmt: skip
    job.lose_node(2)
    job.settle()
    assert tried(job)["scale_in"] == "shard 'own' is held only by ranks that leave"
    assert job.over is not None
    assert job.over.result == "dumped"


def test_what_an_adaptor_takes_part_in_is_what_it_says_when_it_is_ready() -> None:
    """
    When one rank finds, once it has its state, that it cannot do with fewer ranks, then the job does not
    shrink.
    """
    job = elastic(settled={0: ("retry", "recover", "dump")})
    job.lose_node(1)
    job.settle()
    assert tried(job)["scale_in"] == "the adaptor of ranks [0] cannot take part"
    assert job.over is not None
    assert job.over.result == "dumped"


@pytest.mark.parametrize("cannot", ["policy", "adaptor"])
def test_a_job_does_not_shrink_unless_everyone_can(cannot: str) -> None:
    """
    When shrinking is not enabled, or the adaptor has no part in it, then the job saves instead.
    """
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
        else "the adaptor of ranks [0, 1] cannot take part"
    )


def test_the_node_of_rank_0_may_leave_like_any_other() -> None:
    """
    When rank 0 is among the lost, then its column leaves and the others go on.
    """
    job = elastic()
    job.lose_node(0)
    job.settle()
    job.train()
    assert job.machine.members == {2, 3}
    assert strategies(job) == ["scale_in"]


# ---------------------------------------------------------------- faults while scaled in


def test_a_fault_while_scaled_in_is_an_incident_of_the_members() -> None:
    """
    When a process dies after the job has shrunk, then it is replaced, and copies its state from
    wherever it can: nothing is asked of those outside.
    """
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


def test_a_memory_fault_while_scaled_in_is_retried() -> None:
    """
    When a member's memory fails in a job that has shrunk to two holders, then the other one has
    the state.
    """
    job = trained(placement={0: (0, 1, 2), 1: (3,)})
    job.lose_node(1)
    job.settle()
    job.train()
    job.fault(0, "memory")
    job.settle()
    job.train()
    assert strategies(job) == ["scale_in", "retry"]
    assert job.doing == "healthy"


def test_a_job_that_has_shrunk_shrinks_again() -> None:
    """
    When another node is lost after the first, then its ranks leave, too.
    """
    job = trained(placement={0: (0, 1), 1: (2,), 2: (3,)})
    for node, left in ((2, {0, 1, 2}), (1, {0, 1})):
        job.lose_node(node)
        job.settle()
        job.train()
        assert job.machine.members == left
    assert strategies(job) == ["scale_in", "scale_in"]
    assert [r.without for r in job.orders(Regroup)] == [(3,), (2, 3)]


def test_the_last_places_of_a_job_that_has_shrunk_are_saved() -> None:
    """
    When a process of the only column left is lost and cannot be replaced, then what the other
    nodes' ranks once had is no help: the shard is named, or saved where somebody has it.
    """
    job = shrunk(respawns=0)
    job.kill(1)
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("failed", 4)
    assert "shard 'second'" in job.over.why


def test_a_job_that_has_shrunk_can_be_dumped() -> None:
    """
    When the end is asked for after the job has shrunk, then its members save everything.
    """
    job = shrunk()
    job.stop(0)
    job.settle()
    assert job.over is not None
    assert job.over.result == "dumped"
    assert {s.to: s.shards for s in job.orders(Save)} == {(0,): ("first",), (1,): ("second",)}


def test_a_job_that_has_shrunk_completes_with_its_members() -> None:
    """
    When the members have finished, then the job is complete, and a process that was parked
    outside does not keep it.
    """
    job = elastic(placement={0: (0, 1), 1: (2,), 2: (3,)})
    job.lose_node(2)
    job.settle()
    job.train()
    job.finish()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("completed", 0)


def test_a_parked_process_that_ends_is_no_fault() -> None:
    """
    When a process outside dies, then nothing happens to the members.
    """
    job = elastic(placement={0: (0, 1), 1: (2,), 2: (3,)})
    job.lose_node(2)
    job.settle()
    job.train()
    job.said.clear()
    job.kill(2)
    assert job.said == []
    assert job.doing == "healthy"
    assert job.facts("rank_gone")[-1] == {"rank": 2, "code": -9, "outside": True}


# ---------------------------------------------------------------- scale out


def test_a_node_that_returns_brings_its_ranks_back() -> None:
    """
    When the node of those who left is back, then their processes are started while the others
    train; when the whole column is ready, the job stops at a step boundary, takes them in, and
    they copy the state of now.
    """
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


def test_a_parked_process_comes_back_with_its_column() -> None:
    """
    When only one rank of a column was lost and is there again, then the one that was parked with
    it comes back in the process it had.
    """
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


def test_another_node_with_room_is_as_good_as_the_one_that_was_lost() -> None:
    """
    When a new node with room comes, then those who left are started there.
    """
    job = shrunk()
    job.spare[5] = 2
    job.come(5)
    job.settle()
    job.train()
    assert [(s.rank, s.node) for s in job.orders(Spawn)] == [(2, 5), (3, 5)]
    assert job.machine.members == {0, 1, 2, 3}


def test_a_column_that_is_not_whole_waits() -> None:
    """
    When a new node has room for one of two who left, then nobody is taken in.
    """
    job = shrunk()
    job.spare[5] = 1
    job.come(5)
    job.settle()
    job.train()
    assert [s.rank for s in job.orders(Spawn)] == [2]
    assert job.machine.members == {0, 1}
    assert job.orders(Freeze) == []


def test_nobody_comes_back_where_that_is_not_enabled() -> None:
    """
    When growing is not enabled, then a node that returns is not used.
    """
    job = shrunk(enable=frozenset({"retry", "recover", "scale_in", "dump"}))
    job.come(1)
    job.settle()
    assert job.said == []
    assert job.doing == "healthy"


def test_ranks_that_could_not_go_on_where_the_others_are_stay_outside() -> None:
    """
    When the adaptor cannot make a rank's RNG and data position anew, then those who had left are
    not taken in: the members go on as they were.
    """
    job = shrunk(derives=False)
    job.come(1)
    job.settle()
    job.train()
    assert job.machine.members == {0, 1}
    assert strategies(job) == ["scale_in", "retry"]
    assert len(job.orders(Regroup)) == 1
    assert job.doing == "healthy"


def test_who_comes_back_does_not_go_on_with_what_it_had_when_it_left() -> None:
    """
    When a rank had captured its RNG and data position of the very step at which it comes back, then
    it makes them anew all the same: it has not done the batches of that step.
    """
    job = trained(enable=frozenset({"retry", "scale_in", "scale_out", "dump"}))
    job.kill(3)
    job.settle()
    job.train(2)
    assert job.machine.members == {0, 1, 2, 3}
    back = job.orders(Rollback)[-1]
    assert (back.step, back.derive) == (4, (3,))
    assert job.facts("private_derived") == [{"ranks": [3], "step": 4}]


@pytest.mark.parametrize("steps", [0, 1])
def test_a_start_has_nothing_that_could_get_lost(steps: int) -> None:
    """
    When a node is lost before a step is done, then its ranks make their RNG and data position as
    they did at first: only after a step it is told that they are not as they were.
    """
    job = ScriptedJob(4, placement=WITH_ROOM, spare={2: 2}).start()
    job.train(steps)
    job.lose_node(1)
    job.settle()
    back = job.orders(Rollback)[-1]
    assert (back.step, back.derive) == (steps, (2, 3))
    assert job.facts("private_derived") == [{"ranks": [2, 3], "step": 1}][:steps]


def test_somebody_lost_while_others_come_back_comes_first() -> None:
    """
    When a member dies in the very stop that was to take others in, then it is replaced first; the
    change of who takes part is left alone, with the reason.
    """
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


def test_those_who_come_back_and_die_again_do_not_take_the_job_with_them() -> None:
    """
    When a process dies that was about to be taken in, then the members go on as they were.
    """
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


def test_those_who_come_back_and_die_in_the_repair_are_an_incident() -> None:
    """
    When a process dies after it was taken in, then it is a member like any other: it is replaced.
    """
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


def test_a_pause_that_is_wanted_comes_before_those_who_are_ready() -> None:
    """
    When a column is ready while the job is paused, then it is taken in after the pause.
    """
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


def test_a_chance_is_let_pass_when_no_incident_is_left() -> None:
    """
    When the limit of incidents is reached, then nobody stops the job to take others in: the next
    incident would be its last.
    """
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
    Everyone does what they were told, as far as it takes to come to a state.
    """
    while job.doing != state:
        job.obey_next()


def test_a_successor_warms_while_the_straggler_trains_and_then_takes_over() -> None:
    """
    When a rank holds the others up, then a second process is started for it on a node with room
    while it trains on; when that is ready, everyone comes to one boundary, it takes the rank and
    copies the state of the others, and the first process is ended.
    """
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


def test_a_successor_obeys_nothing_before_it_holds_the_rank() -> None:
    """
    When an order goes to a rank that has two processes, then only the one that is meant carries
    it out; what the other says to it counts for nothing.
    """
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


def test_what_a_successor_answers_before_its_time_is_absorbed() -> None:
    """
    When an answer comes from the process that does not hold the rank, then the answer of the one
    that does is still awaited.
    """
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


def test_a_successor_that_dies_while_it_warms_leaves_everything_as_it_was() -> None:
    """
    When the second process ends before it is ready, then the first trains on; when the rank is
    noticed again, there is room for another successor.
    """
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


def test_a_successor_that_dies_when_it_was_to_take_over_leaves_a_retry() -> None:
    """
    When the second process dies while everyone is being stopped for it, then all go on with the
    processes they have.
    """
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


def test_a_successor_that_dies_on_the_way_to_the_boundary_holds_nobody_up() -> None:
    """
    When the second process dies while everyone comes to the boundary for it, then all go on from where
    they are: nobody is stopped, and it is no incident.
    """
    job = trained(placement=WITH_ROOM, spare={2: 1})
    job.notice(3, "straggler")
    until(job, "pausing")
    job.kill_successor(3)
    job.settle()
    job.train()
    assert job.orders(Stop) == []
    assert job.reports() == []
    assert job.doing == "healthy"


def test_a_job_that_gave_up_a_takeover_can_be_paused() -> None:
    """
    When the successor has died on the way to the boundary, and a pause is requested later, then the
    job pauses at the next boundary and stays there.
    """
    job = trained(placement=WITH_ROOM, spare={2: 1})
    job.notice(3, "straggler")
    until(job, "pausing")
    job.kill_successor(3)
    job.settle()
    job.train()
    job.pause()
    job.settle()
    assert job.doing == "paused"


def test_a_successor_that_fails_after_all_is_done_does_not_count() -> None:
    """
    When all steps are done while a second process is ready, and that process then ends with a code,
    then the job has completed: the process held no rank.
    """
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


def test_a_boundary_that_cannot_be_reached_is_not_waited_for_again() -> None:
    """
    When the ranks do not come to the boundary within the limit, then all go on, and the second process is
    ended: it would not work the next time either.
    """
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


def test_a_pause_that_is_asked_for_while_somebody_is_about_to_take_over_comes_after_it() -> None:
    """
    When a pause is asked for while everyone comes to the boundary, then it begins when the job is healthy
    again; that it is called off leaves the taking over as it is.
    """
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


def test_a_fault_on_the_way_to_the_boundary_is_handled_and_then_the_successor_takes_over() -> None:
    """
    When a process dies while everyone comes to the boundary, then it is replaced first; the second process
    of the other rank is still wanted, and takes over when that is done.
    """
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


# ---------------------------------------------------------------- migrate, because somebody asks for it


def test_ranks_that_are_to_be_switched_go_together_when_all_are_ready() -> None:
    """
    When two ranks are to go to other processes, then each gets one where there is room; the first that is
    ready waits for the other, and both take over in one incident.
    """
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


def test_a_switch_waits_for_a_place() -> None:
    """
    When there is no node with room, then the job trains on; when one comes, the process is started there.
    """
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


def test_nobody_is_switched_to_a_node_that_is_to_be_left() -> None:
    """
    When there is room on the node of another rank that is to be switched, then it is not used.
    """
    job = trained(placement=TWO_NODES, spare={0: 1})
    job.switch(1, 3)
    job.settle()
    assert job.orders(Spawn) == []


@pytest.mark.parametrize("state", ["healthy", "pausing", "freezing", "clearing"])
def test_a_switch_that_is_called_off_leaves_everyone_where_they_are(state: str) -> None:
    """
    When a switch is called off, whether its process warms, or everyone is on the way to let it take over,
    then that is ended, and the job goes on with the processes that it had.
    """
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


def test_a_switch_that_is_called_off_while_it_is_chosen_is_chosen_no_more() -> None:
    """
    When a switch is called off while recovery plugins are asked, then they are asked again, without it.
    """
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


def test_ranks_to_be_switched_are_named_and_started_in_order() -> None:
    """
    When a switch is asked for, or cannot be, or is called off, then its ranks are told in order, and their processes are
    started in order, whatever order the request had.
    """
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
        {"ranks": [9, 16], "why": "ranks [9, 16] do not take part"},
    ]


def test_a_switch_that_is_asked_for_again_goes_on_for_the_ranks_that_are_named_again() -> None:
    """
    When a later request names one of two ranks, then the switch of the other is called off, the process of the one that
    is named again warms on, and nothing new is told of it.
    """
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


def test_a_switch_that_is_called_off_leaves_the_successor_of_a_straggler() -> None:
    """
    When a switch is called off, and another process warms for a rank that straggles, then that one warms on.
    """
    job = trained(placement=WITH_ROOM, spare={2: 2})
    job.script.slow = {2, 3}
    job.notice(2, "straggler")
    job.switch(3)
    job.settle()
    job.switch()
    job.settle()
    assert [order.rank for order in job.orders(Kill)] == [3]
    assert job.successors.keys() == {2}


def test_calling_off_what_was_not_asked_for_is_no_refusal() -> None:
    """
    When nobody is to be switched any more, then that is accepted, also by a job that could switch nobody.
    """
    job = trained(enable=frozenset({"retry"}))
    job.switch()
    assert job.facts("switch_called_off") == []


@pytest.mark.parametrize("joined", [True, False])
def test_whether_ranks_can_be_switched_is_known_when_all_have_joined(*, joined: bool) -> None:
    """
    When a switch is asked for before all processes have called `tft.init`, then it is kept: it is not known what their
    adaptors can do. When all have, then a switch that cannot be is refused, though training has not begun.
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
    assert refused == (["the adaptor of ranks [0, 1, 2] cannot take part"] if joined else [])


def test_a_switch_that_is_called_off_before_its_process_was_ready_changes_no_choice() -> None:
    """
    When recovery plugins are asked about another fault, and a switch is called off whose process still warms, then they
    are not asked again.
    """
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


def test_a_switch_that_is_called_off_after_the_choice_changes_no_choice() -> None:
    """
    When another strategy was chosen than to let the processes of a switch take over, and then the switch is called off,
    then the strategy is not chosen again.
    """
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


def test_a_switch_of_which_a_part_was_ready_is_chosen_no_more() -> None:
    """
    When recovery plugins are asked about the processes that are ready to take over, and these are called off together
    with one that still warms, then they are asked again.
    """
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


def test_a_switch_that_is_done_is_not_called_off_any_more() -> None:
    """
    When a switch is called off after its process has taken over, then nothing follows.
    """
    job = trained(placement=WITH_ROOM, spare={2: 1})
    job.switch(3)
    until(job, "repairing")
    job.switch()
    job.settle()
    job.train()
    assert strategies(job) == ["migrate"]
    assert job.facts("switch_called_off") == []


def test_a_switch_of_which_a_part_dies_is_over() -> None:
    """
    When one of the processes ends before they can take over, then the others are ended, too, and whoever
    has asked for it is told; nobody tries again by himself.
    """
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


def test_a_switch_does_not_end_with_the_successor_of_a_straggler() -> None:
    """
    When a process ends that was to take over from a straggler, and other ranks are to be switched, then their switch
    goes on.
    """
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


def test_a_switch_whose_process_was_ended_says_why() -> None:
    """
    When the node is given up on which a process warms that is to take over, then the switch is called off, with the
    reason for which that process was ended.
    """
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


def test_a_rank_that_is_lost_while_it_waits_to_be_switched_is_replaced() -> None:
    """
    When a rank that is to be switched loses its process before there is a place for the other one, then it
    gets another process as ever, and with that the switch is done.
    """
    job = trained(placement=TWO_NODES)
    job.switch(3)
    job.kill(3)
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert job.machine.switch == frozenset()


@pytest.mark.parametrize("state", ["healthy", "choosing"])
def test_a_node_of_which_all_ranks_are_switched_may_be_ended(state: str) -> None:
    """
    When the launcher of a node is told to end, and all its ranks are to go to other processes, then the job
    does not end: what the old processes leave behind is waited for, and the new ones follow them.
    """
    places = {0: (0, 1, 2), 1: (3,), 2: ()}
    job = trained(placement=places, spare={2: 1}, derives=False, advised=state == "choosing")
    job.script.slow = {3} if state == "healthy" else set()
    job.switch(3)
    job.settle()
    assert job.doing == state
    job.stop(node=1)
    job.settle()
    assert [facts["why"] for facts in job.facts("node_left")] == [
        "node 1 is not wanted any more: SIGTERM came"
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
    assert (rollback.private, rollback.derive) == ({3: "00"}, ())
    assert job.doing == "healthy"


def test_a_node_that_is_left_is_told_and_not_used_again() -> None:
    """
    When a node of which all ranks are switched is ended, then the log says which ranks were on it, the report has one
    fault of each of them, and no process is started on it any more.
    """
    job = trained(placement={0: (0, 1, 2), 1: (3,), 2: ()}, spare={2: 1})
    job.script.slow = {3}
    job.switch(3)
    job.settle()
    job.stop(node=1)
    job.settle()
    why = "node 1 is not wanted any more: SIGTERM came"
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


def test_the_end_of_a_node_that_never_joined_ends_the_job() -> None:
    """
    When the launcher of a node is told to end, and that node has never joined, then that is a request to end the job.
    """
    job = trained(placement=WITH_ROOM, spare={2: 2})
    job.stop(node=7)
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("cancelled", 143)


@pytest.mark.parametrize("recovered", [True, False])
def test_the_end_of_a_lost_node_does_not_end_the_job(*, recovered: bool) -> None:
    """
    When a node is lost and its launcher is told to end, as a scheduler does with a broken node, then the job goes on:
    its ranks get, or have got, another place.
    """
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
    assert [facts["ranks"] for facts in job.facts("node_left")] == [[]]


def test_a_node_whose_ranks_have_gone_elsewhere_may_be_ended() -> None:
    """
    When the launcher of a node is told to end that has no ranks any more, then the job trains on; should the
    node come again, there is room on it.
    """
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


def test_a_node_with_ranks_of_the_job_ends_it() -> None:
    """
    When the launcher of a node is told to end of which a rank is to stay, then that is a request to end.
    """
    job = trained(placement=WITH_ROOM, spare={2: 1})
    job.switch(3)
    job.stop(node=1)
    job.settle()
    assert [facts["strategy"] for facts in job.facts("strategy_chosen")] == ["dump"]


def test_a_fault_while_a_successor_warms_is_handled_as_ever_and_the_switch_after_it() -> None:
    """
    When the memory of another rank fails while the second process warms, then that is repaired; when the
    process is ready, it takes over.
    """
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
            "the adaptor of ranks [0, 1, 2, 3] cannot take part",
        ),
        ({}, (3, 7), "ranks [7] do not take part"),
    ],
)  # fmt: skip
def test_a_switch_that_cannot_be_is_refused(
    facts: dict[str, Any],  # Any: as in `trained`
    ranks: tuple[int, ...],
    why: str,
) -> None:
    """
    When ranks cannot go to other processes, then whoever asks for it is told why, and the job goes on.
    """
    job = trained(placement=WITH_ROOM, spare={2: 1}, **facts)
    job.switch(*ranks)
    job.settle()
    assert job.facts("switch_called_off") == [{"ranks": list(ranks), "why": why}]
    assert job.orders(Spawn) == []


def test_a_successor_that_dies_after_it_took_over_is_replaced() -> None:
    """
    When the process that has taken over dies in the repair, then it is a lost process of a
    member: another is started where it was.
    """
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


def test_a_straggler_that_dies_while_its_successor_warms_is_followed_by_it() -> None:
    """
    When the first process ends before the second is ready, then nothing else is started: the
    second takes the rank as it is, and everyone waits for it.
    """
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
    assert (rollback.private, rollback.derive) == ({3: "00"}, ())  # what the first one had captured
    assert job.doing == "healthy"


def test_what_a_rank_holds_is_known_before_the_process_that_follows_it_says_so() -> None:
    """
    When the process of a rank that alone has a shard is lost while a last checkpoint is written, and
    another one that has yet to start takes its rank, then the shard is not forgotten: nothing is
    committed without it.
    """
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


def test_who_leaves_together_is_known_before_the_process_that_follows_one_says_so() -> None:
    """
    When the process of a rank is lost while the one that is to take over from it starts, then the ranks
    leave that can only leave together, and the others go on.
    """
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
def test_a_process_that_follows_a_lost_one_is_counted_like_one_that_is_started(
    respawns: int,
) -> None:
    """
    When the process that has followed a lost one dies, too, then its rank has died twice: another
    is started as long as that is not once too often.
    """
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


def test_the_place_of_a_straggler_that_died_is_free_for_another() -> None:
    """
    When a straggler dies and its successor on another node follows it, then its place is free: when the node of the
    successor is lost with two ranks, one of them goes there, and there is no room for the other.
    """
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


def test_a_straggler_whose_node_is_lost_is_followed_by_its_successor() -> None:
    """
    When the node of the first process is lost, then its second process takes the rank, and the
    others of that node are started where there is room.
    """
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


def test_a_successor_whose_node_is_lost_is_forgotten() -> None:
    """
    When the node on which the second process warms is lost, then the first trains on.
    """
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


def test_a_successor_that_never_gets_ready_is_ended() -> None:
    """
    When the second process does not come as far as its session, then after the limit it is ended
    and the first trains on.
    """
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


def test_somebody_lost_while_a_successor_is_ready_comes_first() -> None:
    """
    When a process dies in the very stop that was to let a successor take over, then it is replaced;
    the successor is not needed any more, and ended when the job is healthy.
    """
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
        (3, 1, "it could not take over")
    ]
    job.settle()
    assert job.successors == {}
    assert job.ranks[3].incarnation == 0


def test_a_node_that_comes_does_not_end_a_successor_that_is_taking_over() -> None:
    """
    When another agent comes up while everyone is being stopped for a successor, then the successor still
    takes over.
    """
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
            "the adaptor of ranks [0, 1, 2, 3] cannot take part",
        ),
    ],
)
def test_a_straggler_that_nobody_can_take_over_from_is_told(
    facts: dict[str, Any],  # Any: as in `trained`
    why_not: str,
) -> None:
    """
    When there is no place for a successor, or taking over is not possible, then the operator is told
    who straggles and why nothing is done, and the job goes on.
    """
    job = trained(**facts)
    job.notice(3, "straggler", "its clock is throttled")
    assert job.said == []
    assert job.facts("rank_straggles") == [
        {"rank": 3, "why": "its clock is throttled", "why_not": why_not}
    ]
    assert job.doing == "healthy"


def test_nobody_gets_a_successor_while_everyone_stands_still() -> None:
    """
    When a rank is noticed to straggle in an incident, then no second process is started, and the operator is told why.
    """
    job = trained(placement=WITH_ROOM, spare={2: 1}, advised=True)
    job.fault(1, "memory")
    job.settle()
    job.notice(3, "straggler", "its clock is throttled")
    assert job.orders(Spawn) == []
    (told,) = job.facts("rank_straggles")
    assert told["why_not"] == "all ranks are stopped already"


def test_a_straggler_gets_one_successor() -> None:
    """
    When a rank is noticed to straggle twice, then one second process is enough.
    """
    job = trained(placement=WITH_ROOM, spare={2: 2})
    job.script.slow = {3}
    job.notice(3, "straggler")
    job.settle()
    job.notice(3, "straggler")
    assert len(job.orders(Spawn)) == 1
    assert job.facts("rank_straggles")[-1]["why_not"] == "another process is on its way"


def test_a_node_that_is_given_up_takes_no_successor_with_it_into_the_job() -> None:
    """
    When the node on which a successor warms is isolated, then the successor is ended.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3), 2: (4,)}, world=5, spare={2: 1, 0: 2})
    job.script.slow = {3}
    job.notice(3, "straggler")
    job.settle()
    successor = job.successors[3]
    assert successor.node == 0
    job.notice(0, "node", "its fan has failed")
    job.settle()
    assert not successor.alive


def test_everyone_but_the_straggler_keeps_its_process() -> None:
    """
    When a successor has taken over, then no other process was ended or started.
    """
    job = trained(placement=WITH_ROOM, spare={2: 1})
    job.notice(0, "straggler")
    job.settle()
    job.train()
    assert [s.rank for s in job.orders(Spawn)] == [0]
    assert {r.incarnation for r in job.ranks.values() if r.rank} == {0}
    assert job.ranks[0].incarnation == 1


def test_news_of_an_agent_that_was_replaced_is_old_news() -> None:
    """
    When a node has come back with another agent, and it is reported only then that the first one
    ended, then nobody is ended for it.
    """
    came = ScriptedJob(4).now
    job = trained(placement={1: (2, 3), 0: (0, 1)})
    job.report(NodeLost(node=1, pid=77, why="its agent has ended", at=came))
    assert job.doing == "healthy"
    job.report(NodeLost(node=1, pid=1, why="its agent has ended", at=job.now))
    assert job.doing != "healthy"


def test_an_agent_that_nobody_has_heard_of_has_taken_the_place_of_the_one_before() -> None:
    """
    When an agent has ended that came up, unheard, after the one that is known, then its node is lost:
    the one before it is gone, too.
    """
    came = ScriptedJob(4).now
    job = trained(placement={1: (2, 3), 0: (0, 1)})
    job.report(NodeLost(node=1, pid=77, why="its agent has ended", at=came + 1e-3))
    assert [fault["rank"] for fault in job.facts("fault")] == [2, 3]
    assert job.doing == "freezing"


def test_more_ranks_than_there_is_room_for_are_not_waited_for() -> None:
    """
    When a node is up only after another one was lost, and has room for one of its two ranks, then
    the two are not waited for: the job goes on without them, or ends.
    """
    job = trained(placement=TWO_NODES, spare={2: 1}, advised=True, enable={"recover", "dump"})
    job.lose_node(1)
    while job.doing != "choosing":
        job._obey(job._queue.popleft())
    job.come(2)
    job.advise(strategy="recover")
    job.settle()
    assert job.orders(Spawn) == []
    assert job.facts("advice_not_followed")[-1]["why_not"] == (
        "no node has room for rank 3 in addition to the others"
    )
    assert job.over is not None
    assert job.over.result == "dumped"


def test_an_agent_that_starts_anew_at_the_very_end_leaves_nobody_waiting() -> None:
    """
    When all is done and an agent is started anew before its ranks have left, then they went with
    the agent before, and nobody waits for them.
    """
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


def test_a_rank_that_fails_at_the_very_end_leaves_nobody_waiting() -> None:
    """
    When all is done and a rank is ended since it does not leave, then nobody waits for the successor of
    another one, which is ended with its node.
    """
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
