"""
The planner: the step to continue from, transfers, savers, and the groups of ranks with equal shards.
"""

from dataclasses import (
    replace,
)

import pytest

from tests.core.placements import (
    ALL,
    everybody,
    fetched,
    grid,
    replaced,
    terms,
    without,
)
from tft.core.plan.coverage import (
    agreed_step,
    covered_step,
    sound,
)
from tft.core.plan.offers import (
    offers,
)
from tft.core.plan.repair import (
    SOURCES,
    Repair,
    plan_repair,
)
from tft.core.plan.savers import (
    plan_save,
    savers,
)
from tft.core.plan.standing import (
    Standing,
)
from tft.core.plan.topology import (
    Topology,
    strided,
)
from tft.errors import (
    UsageError,
)

# ---------------------------------------------------------------- the step to continue from


def test_agreed_step_is_the_highest_step_that_every_shard_has() -> None:
    """When one shard is held at steps 5 and 4 and the other shard only at step 4, then the agreed
    step, from which all ranks continue, is 4."""
    groups = {"a": (0, 1), "b": (2, 3)}
    assert covered_step(groups, everybody(4, r0=5, r3=None)) == 4


def test_kept_copies_count_for_the_agreed_step() -> None:
    """When the ranks are at different steps, then the agreed step may be one that some rank has
    only as a kept copy."""
    standings = {
        0: Standing(rank=0, held=5, backups=(3, 4)),
        1: Standing(rank=1, held=4, backups=(3,)),
    }
    assert covered_step({"a": (0,), "b": (1,)}, standings) == 4


def test_state_in_use_of_a_faulty_rank_does_not_set_the_step() -> None:
    """When only a faulty rank is at step 5, then the agreed step is 4. A copy that the faulty rank
    kept from before the fault can be used."""
    faulty = Standing(rank=0, held=5, sound=False, backups=(3,))
    sound = Standing(rank=1, held=4)
    assert covered_step({"a": (0, 1)}, {0: faulty, 1: sound}) == 4
    assert covered_step({"a": (0,)}, {0: faulty}) == 3


def test_copy_that_other_ranks_outran_in_the_tail_does_not_set_the_step() -> None:
    """When the only holder of a shard at step 5 stopped in the tail of that step and other ranks
    came further in the tail, then its current state does not count. A kept copy of step 5 counts.
    """
    outrun = Standing(rank=0, held=5, tail=True, outrun=frozenset({"a"}))
    groups = {"a": (0, 1)}
    assert covered_step(groups, {0: outrun, 1: Standing(rank=1, held=4)}) == 4
    kept = replace(outrun, backups=(5,))
    assert covered_step(groups, {0: kept, 1: Standing(rank=1, held=4)}) == 5


def test_rank_in_the_tail_of_a_later_step_can_give_its_kept_copy() -> None:
    """When a rank stopped in the tail of step 5, then its kept copy of step 4 counts the same as
    the state of a rank at step 4."""
    ahead = Standing(rank=0, held=5, tail=True, backups=(4,))
    standings = {0: ahead, 1: Standing(rank=1, held=4)}
    assert [holder.rank for holder in sound("a", (0, 1), standings, 4, None)] == [0, 1]


def test_lost_rank_holds_no_usable_state() -> None:
    """When a rank is lost, then neither its current state nor its kept copies can be used."""
    lost = Standing(rank=0, alive=False, held=5, backups=(4,))
    assert isinstance(covered_step({"a": (0,)}, {0: lost}), str)
    assert not lost.uses(5, None)


def test_copies_of_steps_after_the_ceiling_are_not_used() -> None:
    """When copies of steps later than 3 may be polluted, then the agreed step is 3, from a kept
    copy or from the current state of a rank. A rank at step 3 needs no repair."""
    standings = {
        0: Standing(rank=0, held=5, backups=(3, 4)),
        1: Standing(rank=1, held=3),
    }
    assert covered_step({"a": (0, 1)}, standings, 3) == 3
    assert standings[1].uses(3, 3)
    assert not standings[0].uses(5, 4)
    assert not standings[0].uses(4, None)


def test_message_names_the_shard_that_has_no_sound_copy() -> None:
    """When no usable copy of a shard is left, then the result is a message that names this shard."""
    groups = {"a": (0,), "b": (1, 2)}
    assert covered_step(groups, without(everybody(2), [1])) == (
        "no sound copy of shard 'b' is left on ranks [1, 2]"
    )
    assert covered_step(groups, everybody(3), 3) == (
        "no sound copy of shard 'a', of step 3 or earlier, is left on ranks [0]"
    )


def test_message_names_only_some_of_many_ranks() -> None:
    """When a message concerns many ranks, then it names some of them and gives the number of the
    others."""
    why = covered_step({"a": range(16)}, {})
    assert why == f"no sound copy of shard 'a' is left on ranks {list(range(16))}"
    assert str(covered_step({"a": range(17)}, {})).endswith(", 15, … 1 more]")
    why = covered_step({"a": range(20)}, {})
    assert str(why).endswith(
        "on ranks [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, … 4 more]"
    )


def test_copies_of_different_steps_give_no_agreed_step() -> None:
    """When the only copies of one shard are of step 4 and those of another shard are of step 5,
    then there is no agreed step."""
    assert covered_step({"a": (0,), "b": (1,)}, everybody(2, r1=5)) == (
        "no step is complete: the copies that are left are of different steps"
    )


def test_no_step_is_agreed_when_no_rank_has_reported_its_shards() -> None:
    """When no rank has reported which shards it holds, then the result is a message that says this."""
    assert covered_step({}, {}) == "no rank has reported which shards it holds"


def test_checkpoint_is_used_when_no_copy_in_memory_is_left() -> None:
    """When the copies in memory do not contain all shards of any step, then the agreed step is that
    of the checkpoint. When they do, then memory has priority."""
    topology = Topology(groups={"a": (0, 1)})
    disk = terms(checkpoints={2: "/ckpt/2"})
    assert agreed_step(topology, without(everybody(2), [0, 1]), disk) == 2
    assert agreed_step(topology, without(everybody(2), [0]), disk) == 4
    assert isinstance(agreed_step(topology, without(everybody(2), [0, 1]), terms()), str)


def test_checkpoint_of_a_polluted_step_is_not_loaded() -> None:
    """When a checkpoint was written after the numbers went wrong, then it is not loaded, and the
    newest earlier checkpoint is used."""
    topology = Topology(groups={"a": (0, 1)})
    three = {1: "/c/1", 3: "/c/3", 2: "/c/2"}
    assert agreed_step(topology, everybody(2), terms(checkpoints=three, ceiling=2)) == 2
    late = agreed_step(topology, everybody(2), terms(checkpoints={3: "/c"}, ceiling=2))
    assert late == "no sound copy of shard 'a', of step 2 or earlier, is left on ranks [0, 1]"


def test_agreed_step_needs_the_rng_and_data_position_of_every_rank() -> None:
    """When the RNG and data position of a rank were lost with its node, then the agreed step is one
    for which they are still known. If there is none, then the message names the first affected
    rank."""
    topology = Topology(groups={"a": (0, 1)})
    standings = {rank: Standing(rank=rank, held=4, backups=(2, 3)) for rank in (0, 1)}
    known = {8: frozenset({2, 3, 5}), 1: frozenset({2, 3})}
    assert agreed_step(topology, standings, terms(without_local_state=known)) == 3
    assert (
        agreed_step(topology, standings, terms(without_local_state=known | {0: frozenset({2})}))
        == 2
    )
    lost = terms(without_local_state={8: frozenset(), 1: frozenset({5})})
    assert agreed_step(topology, standings, lost) == (
        "the RNG and data position of rank 1 at the end of step 4 were lost with its node"
    )


def test_no_state_is_copied_before_the_first_step() -> None:
    """When no step was trained, then the repair plan is step 0 and no rank copies any state."""
    beginning = terms(checkpoints={0: ""})
    topology = Topology(groups={"a": (0, 1), "b": (2,)})
    new = everybody(2, 0)
    assert agreed_step(topology, new, beginning) == 0
    assert plan_repair(topology, new, range(2), beginning) == Repair(step=0)


def test_rank_overwritten_before_the_first_step_is_repaired_by_a_retry() -> None:
    """When no step was trained and the state of a rank was partly overwritten, but another rank
    holds the same shard, then the strategy `retry` is possible."""
    torn = everybody(2, 0, r1=None)
    topology, members = Topology(groups={"a": (0, 1)}), frozenset({0, 1})
    chances = {o.strategy: o for o in offers(topology, torn, members, terms(checkpoints={0: ""}))}
    assert chances["retry"].why_not is None


def test_rank_overwritten_before_the_first_step_may_leave_by_scale_in() -> None:
    """When no step was trained, and a rank whose state was partly overwritten would leave together
    with a lost rank, then `scale_in` is possible for the other ranks."""
    topology = Topology(groups={"a": (0, 1, 2, 3), "b": (1, 3)}, columns={2: (2, 3), 3: (2, 3)})
    late = Standing(rank=1, alive=False, coming=True, strategies=ALL)
    torn = without(everybody(4, 0, r2=None), [3]) | {1: late}
    beginning = terms(checkpoints={0: ""}, replaced=frozenset({3}))
    made = offers(topology, torn, frozenset(range(4)), beginning)
    (offer,) = (o for o in made if o.strategy == "scale_in")
    assert (offer.why_not, offer.leaving) == (None, (2, 3))


def test_ranks_overwritten_before_the_first_step_are_named_in_order() -> None:
    """When no step was trained and the states of several ranks were partly overwritten, then the
    message names them in rank order. A rank that has not reported anything counts as new."""
    topology = Topology(groups={"a": (0, 1, 8), "b": (9,)})
    torn = everybody(9, 0, r1=None, r8=None)
    found = plan_repair(topology, torn, frozenset({1, 8, 10}), terms(checkpoints={0: ""}))
    assert isinstance(found, str)
    assert "ranks [1, 8] no longer have the state they began with" in found


def test_rank_overwritten_before_the_first_step_is_replaced() -> None:
    """When no step was trained, a shard has lost its holders and the state of a rank was partly
    overwritten, then `recover` replaces this rank. The strategy `retry` is refused."""
    beginning = terms(checkpoints={0: ""}, replaced=frozenset({2}))
    topology = Topology(groups={"a": (0, 1), "b": (2, 3)})
    torn = everybody(2, 0, r1=None)
    found = plan_repair(topology, torn, range(2), beginning)
    assert isinstance(found, str)
    assert found.startswith(
        "no step was trained yet, and ranks [1] no longer have the state they began with"
    )
    chances = {o.strategy: o for o in offers(topology, torn, frozenset({0, 1}), beginning)}
    assert chances["recover"].replace == (1,)
    again = terms(checkpoints={0: ""})
    chances = {o.strategy: o for o in offers(topology, torn, frozenset({0, 1}), again)}
    assert chances["retry"].why_not == (
        "no step was trained yet, and ranks [1] no longer have the state they began with"
    )


# ---------------------------------------------------------------- repair plans


def test_every_rank_without_the_agreed_step_in_use_fetches_it() -> None:
    """When a rank holds no complete step, is behind, or had a fault, then it fetches from all ranks
    that hold the agreed step."""
    standings = everybody(5, r1=None, r2=3)
    standings[3] = Standing(rank=3, held=4, sound=False)
    plan = plan_repair(Topology(groups={"a": (0, 1, 2, 3, 4)}), standings, range(6), terms())
    assert fetched(plan) == {1: {"a": [0, 4]}, 2: {"a": [4, 0]}, 3: {"a": [0, 4]}}


def test_checkpoint_that_is_newer_than_every_copy_is_loaded() -> None:
    """When a checkpoint is newer than every copy that is left, then the checkpoint is loaded. When
    both are of the same step, then the copy is used."""
    groups = Topology(groups={"a": (0, 1)})
    standings = {0: Standing(rank=0, held=None, backups=(4,)), 1: Standing(rank=1, alive=False)}
    plan = plan_repair(groups, standings, range(2), terms(checkpoints={6: "/six", 3: "/three"}))
    assert isinstance(plan, Repair)
    assert (plan.step, plan.load) == (6, "/six")
    assert agreed_step(groups, standings, terms(checkpoints={6: "/six"})) == 6
    plan = plan_repair(groups, standings, range(2), terms(checkpoints={4: "/four"}))
    assert isinstance(plan, Repair)
    assert (plan.step, plan.load, plan.restore) == (4, "", (0,))


def test_repair_plan_gives_the_address_of_each_source() -> None:
    """When a shard is to be fetched, then the plan gives the address of the source."""
    plan = plan_repair(Topology(groups={"a": (0, 1)}), everybody(2, r1=None), range(2), terms())
    assert isinstance(plan, Repair)
    (source,) = plan.transfers[1][0].sources
    assert (source.rank, source.address) == (0, "host:0")


def test_rank_that_kept_the_agreed_step_restores_it_and_serves_it() -> None:
    """When a rank has the agreed step only as a kept copy, then the rank restores the copy, fetches
    nothing, and is a source for other ranks."""
    standings = {
        0: Standing(rank=0, held=5, backups=(4,)),
        1: Standing(rank=1),
        2: Standing(rank=2, held=4, sound=False, backups=(4,)),
    }
    plan = plan_repair(Topology(groups={"a": (0, 1, 2)}), standings, range(3), terms(ceiling=4))
    assert isinstance(plan, Repair)
    assert (plan.step, plan.restore) == (4, (0, 2))
    assert fetched(plan) == {1: {"a": [0, 2]}}


def test_repair_plan_lists_the_ranks_in_order() -> None:
    """When several ranks restore a copy or fetch state, then the plan lists them in rank order."""
    standings = everybody(9, r8=None, r1=None)
    world = Topology(groups={"a": (0, 8, 1)})
    plan = plan_repair(world, standings, range(9), terms())
    assert isinstance(plan, Repair)
    assert list(plan.transfers) == [1, 8]
    kept = {rank: Standing(rank=rank, backups=(4,)) for rank in (8, 1)}
    plan = plan_repair(world, standings | kept, range(9), terms())
    assert isinstance(plan, Repair)
    assert plan.restore == (1, 8)


def test_rank_outside_the_job_is_a_source_but_is_not_repaired() -> None:
    """When ranks have left the job, then the plan repairs members only. A rank outside the job that
    still holds the state is a source for a member."""
    standings = everybody(4, r1=None, r3=None)
    plan = plan_repair(Topology(groups={"a": (0, 1, 2, 3)}), standings, (0, 1), terms())
    assert fetched(plan) == {1: {"a": [0, 2]}}


def test_repair_plan_is_empty_when_all_ranks_have_the_step_in_use() -> None:
    """When all ranks have the agreed step as their current state, then the repair plan is empty."""
    plan = plan_repair(Topology(groups={"a": (0, 1)}), everybody(2), range(2), terms())
    assert plan == Repair(step=4)


def test_no_rank_copies_from_another_rank_when_a_checkpoint_is_loaded() -> None:
    """When the agreed step comes from a checkpoint, then no state is copied between ranks."""
    topology = Topology(groups={"a": (0,), "b": (1,)})
    lost = replaced(everybody(2), [0])
    assert plan_repair(topology, lost, range(2), terms(checkpoints={2: "/ckpt/2"})) == Repair(
        step=2, load="/ckpt/2"
    )
    assert plan_repair(topology, lost, range(2), terms()) == (
        "no sound copy of shard 'a' is left on ranks [0]"
    )


def test_receivers_use_different_sources_when_enough_ranks_have_the_shard() -> None:
    """When more ranks hold a shard than one receiver needs as sources, then the receivers use
    different sources. No rank is a source twice before every holder was a source once."""
    world = 4 * SOURCES
    standings = replaced(everybody(world), range(3))
    plan = fetched(
        plan_repair(Topology(groups={"a": tuple(range(world))}), standings, range(3), terms())
    )
    assert all(len(parts["a"]) == SOURCES for parts in plan.values())
    assert len({source for parts in plan.values() for source in parts["a"]}) == 3 * SOURCES


def test_next_shard_is_fetched_from_ranks_with_the_least_load() -> None:
    """When a rank has already given one shard, then the next shard is fetched from other ranks."""
    groups = {"a": (0, 9), "b": (0, *range(1, 10))}
    plan = fetched(plan_repair(Topology(groups=groups), everybody(10, r9=None), range(10), terms()))
    assert plan == {9: {"a": [0], "b": [1, 2, 3, 4, 5, 6, 7, 8]}}


def test_rank_that_gives_half_a_shard_has_half_the_load() -> None:
    """When two ranks are the sources of one shard together, then each of them counts half the load
    of a rank that is the only source of a shard."""
    groups = {"a": (0, 9), "b": (1, 2, 9), "c": (0, *range(1, 10))}
    plan = fetched(plan_repair(Topology(groups=groups), everybody(10, r9=None), range(10), terms()))
    assert plan[9]["c"] == [3, 4, 5, 6, 7, 8, 1, 2]


# ---------------------------------------------------------------- ranks that save a last checkpoint


def test_each_shard_is_saved_by_its_first_sound_holder() -> None:
    """When a shard has several holders of the step to save, then only the first of them in its
    group saves it."""
    topology = Topology(groups={"a": (0, 1), "b": (2, 1), "c": (2,)})
    plan = savers(topology, everybody(3, r0=3), 4, None, spread=False)
    assert plan == {1: ("a",), 2: ("b", "c")}


def test_kept_copy_of_the_last_checkpoint_step_can_be_saved() -> None:
    """When a rank keeps a copy of the step of the last checkpoint, then it can save this copy. When
    that step is polluted, then it cannot."""
    topology = Topology(groups={"a": (0,)})
    kept = {0: Standing(rank=0, held=5, backups=(4,))}
    assert savers(topology, kept, 4, 4, spread=False) == {0: ("a",)}


def test_shards_to_save_are_spread_over_nodes_and_ranks() -> None:
    """When four ranks on two nodes hold all shards, then each node writes half and its ranks take
    turns. Without spreading, the first rank writes all shards."""
    topology = Topology(groups=dict.fromkeys("abcd", (0, 1, 2, 3)), nodes={0: 0, 1: 0, 2: 1, 3: 1})
    assert savers(topology, everybody(4), 4, None, spread=True) == {
        0: ("a",),
        2: ("b",),
        1: ("c",),
        3: ("d",),
    }
    assert savers(topology, everybody(4), 4, None, spread=False) == {0: ("a", "b", "c", "d")}


def test_ranks_on_an_unknown_node_share_the_saving() -> None:
    """When it is not known on which nodes the ranks are, then the ranks still take turns to save
    shards."""
    topology = Topology(groups=dict.fromkeys("abcd", (0, 1)), nodes={2: 0})
    plan = savers(topology, everybody(2), 4, None, spread=True)
    assert plan == {0: ("a", "c"), 1: ("b", "d")}
    topology = Topology(groups={"a": (2,), "b": (0, 3)}, nodes={2: 0, 3: 1})
    assert savers(topology, everybody(4), 4, None, spread=True) == {2: ("a",), 3: ("b",)}


def test_writer_of_a_shard_keeps_it_in_a_new_plan() -> None:
    """When a plan is made again while ranks write, then a rank that can still write a shard keeps
    it: no two ranks write the same files. The other shards are spread over the other nodes."""
    groups = {"a": (0, 1), "b": (1, 3), "c": (0, 1, 3)}
    topology = Topology(groups=groups, nodes={0: 0, 1: 0, 3: 1})
    standings = {rank: Standing(rank=rank, held=4) for rank in (1, 3)}
    plan = savers(topology, standings, 4, None, spread=True, writing={"a": 0, "b": 1})
    assert plan == {1: ("a", "b"), 3: ("c",)}


def test_rank_that_restores_a_copy_to_save_it_writes_further_copies() -> None:
    """When a rank restores its kept copy because it alone holds one shard, then it has also
    restored the other shard. It then writes a second copy of the other shard."""
    topology = Topology(groups={"a": (0,), "b": (1, 0)})
    standings = {
        0: Standing(rank=0, sound=False, held=6, backups=(5,)),
        1: Standing(rank=1, held=5),
    }
    plan = plan_save(
        topology,
        standings,
        {0: True, 1: True},
        5,
        None,
        shards=savers(topology, standings, 5, None, spread=False),
        with_copies=True,
    )
    assert plan.restoring == (0,)
    assert plan.shards == {0: ("a",), 1: ("b",)}
    assert plan.copies == {0: ("b",), 1: ()}


def test_rank_without_the_step_in_use_writes_no_further_copy() -> None:
    """When one rank has only a kept copy of the step and another rank stopped in the tail of the
    step, then neither of them writes a second copy."""
    topology = Topology(groups={"a": (0, 1, 2)})
    standings = {
        0: Standing(rank=0, held=5),
        1: Standing(rank=1, held=6, backups=(5,)),
        2: Standing(rank=2, held=5, tail=True),
    }
    plan = plan_save(
        topology,
        standings,
        dict.fromkeys((0, 1, 2), True),
        5,
        None,
        shards=savers(topology, standings, 5, None, spread=False),
        with_copies=True,
    )
    assert plan.shards == {0: ("a",)}
    assert not any(plan.copies.values())


def test_rank_without_local_state_of_the_step_writes_only_shards() -> None:
    """When a rank holds a shard alone and has no rank-local state of the step, then it writes the
    shard only. A rank that has neither writes nothing."""
    topology = Topology(groups={"a": (0,), "b": (1,)})
    standings = {rank: Standing(rank=rank, held=5) for rank in (0, 1)} | {2: Standing(rank=2)}
    plan = plan_save(
        topology,
        standings,
        {0: False, 1: True, 2: False},
        5,
        None,
        shards=savers(topology, standings, 5, None, spread=False),
        with_copies=False,
    )
    assert plan.shards == {0: ("a",), 1: ("b",)}
    assert plan.writers == (0, 1)
    assert plan.with_local_state == {1}


# ---------------------------------------------------------------- the topology


def test_copies_of_a_shard_are_a_stride_apart() -> None:
    """When the optimizer state of eight ranks is cut into four shards, then each shard is on two
    ranks whose numbers differ by four."""
    assert strided("optimizer", range(8), 2) == {
        "optimizer.0": (0, 4),
        "optimizer.1": (1, 5),
        "optimizer.2": (2, 6),
        "optimizer.3": (3, 7),
    }


def test_ranks_of_a_group_need_not_be_consecutive() -> None:
    """When a group consists of every eighth rank, then the copies of a shard are on ranks of this
    group, in the order of the group."""
    assert strided("o", (3, 11, 19, 27), 2) == {"o.0": (3, 19), "o.1": (11, 27)}


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_state_that_every_rank_has_is_one_shard(world: int) -> None:
    """When there are as many copies as ranks, then the state is not cut, and the shard has no
    number."""
    assert strided("parameters", range(world), world) == {"parameters": tuple(range(world))}


def test_single_copies_give_one_shard_per_rank() -> None:
    """When every shard has one copy, then there are as many shards as ranks."""
    assert strided("o", range(3), 1) == {"o.0": (0,), "o.1": (1,), "o.2": (2,)}


def test_remaining_ranks_hold_additional_copies_of_the_first_shards() -> None:
    """When seven ranks hold two copies of each shard, then there are three shards, and the first
    shard has three copies."""
    assert strided("o", range(7), 2) == {"o.0": (0, 3, 6), "o.1": (1, 4), "o.2": (2, 5)}


def test_state_is_not_cut_when_copies_exceed_half_of_the_ranks() -> None:
    """When three ranks are to hold two copies of a state, then the state cannot be cut, and each
    rank holds a copy."""
    assert strided("o", range(3), 2) == {"o": (0, 1, 2)}


@pytest.mark.parametrize("copies", [0, 5, -1])
def test_impossible_number_of_copies_is_refused(copies: int) -> None:
    """When the number of copies is larger than the number of ranks, or less than one, then an error
    gives the possible range."""
    with pytest.raises(
        UsageError, match=f"4 ranks can hold 1 to 4 copies of their state, not {copies}"
    ):
        strided("o", range(4), copies)


def test_ranks_of_a_column_leave_together() -> None:
    """When one rank of a model replica leaves, then all ranks of the replica leave. With tensor
    parallelism of 2 and data parallelism of 2, rank 2 leaves with rank 3."""
    topology = grid(2, 1, 2, copies=1)
    assert topology.columns_of([3]) == {2, 3}
    assert topology.columns_of([3, 0]) == {0, 1, 2, 3}
    assert topology.columns_of([]) == frozenset()


def test_rank_without_a_column_leaves_alone() -> None:
    """When a rank belongs to no listed model replica, then no other rank leaves with it."""
    assert Topology(groups={}, columns={1: (0, 1)}).columns_of([0, 2]) == {0, 2}
