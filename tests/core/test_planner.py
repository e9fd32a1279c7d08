"""
Which step everyone can be brought to, who copies what from whom, and who saves what.
"""

from dataclasses import replace

from tests.core.placements import (
    ALL,
    everybody,
    fetched,
    replaced,
    terms,
    without,
)
from tft.core.plan.coverage import agreed_step, covered_step, sound
from tft.core.plan.offers import offers
from tft.core.plan.repair import SOURCES, Repair, plan_repair
from tft.core.plan.savers import plan_save, savers
from tft.core.plan.standing import Standing
from tft.core.plan.topology import Topology

# ---------------------------------------------------------------- the step


def test_the_step_is_the_highest_one_that_every_shard_is_held_at() -> None:
    """
    When one shard is held at 5 and at 4, the other at 4 only, then 4 it is.
    """
    groups = {"a": (0, 1), "b": (2, 3)}
    assert covered_step(groups, everybody(4, r0=5, r3=None)) == 4


def test_a_step_is_covered_by_copies_that_were_kept_too() -> None:
    """
    When the ranks stand at different steps, then a copy that one of them kept makes a step whole.
    """
    standings = {
        0: Standing(rank=0, held=5, backups=(3, 4)),
        1: Standing(rank=1, held=4, backups=(3,)),
    }
    assert covered_step({"a": (0,), "b": (1,)}, standings) == 4


def test_a_rank_that_a_fault_has_touched_never_sets_the_step() -> None:
    """
    When only a faulty rank is at 5, then 4 it is; but what it kept from before the fault counts.
    """
    faulty = Standing(rank=0, held=5, sound=False, backups=(3,))
    sound = Standing(rank=1, held=4)
    assert covered_step({"a": (0, 1)}, {0: faulty, 1: sound}) == 4
    assert covered_step({"a": (0,)}, {0: faulty}) == 3


def test_a_shard_that_others_have_further_in_the_tail_does_not_set_the_step() -> None:
    """
    When the one holder of a shard at step 5 was left in the tail of that step, and others have come
    further there, then its copy of step 5 does not count; what it keeps counts.
    """
    outrun = Standing(rank=0, held=5, tail=True, outrun=frozenset({"a"}))
    groups = {"a": (0, 1)}
    assert covered_step(groups, {0: outrun, 1: Standing(rank=1, held=4)}) == 4
    kept = replace(outrun, backups=(5,))
    assert covered_step(groups, {0: kept, 1: Standing(rank=1, held=4)}) == 5


def test_a_rank_in_the_tail_of_a_later_step_gives_what_it_keeps() -> None:
    """
    When a rank was left in the tail of step 5, then its copy of step 4 is as good as that of a rank
    that is at step 4.
    """
    ahead = Standing(rank=0, held=5, tail=True, backups=(4,))
    standings = {0: ahead, 1: Standing(rank=1, held=4)}
    assert [holder.rank for holder in sound("a", (0, 1), standings, 4, None)] == [0, 1]


def test_a_rank_without_a_process_holds_nothing() -> None:
    """
    When a rank is lost, then neither what it had nor what it kept can be used.
    """
    lost = Standing(rank=0, alive=False, held=5, backups=(4,))
    assert isinstance(covered_step({"a": (0,)}, {0: lost}), str)
    assert not lost.uses(5, None)


def test_no_copy_of_a_polluted_step_is_used() -> None:
    """
    When no copy of a step later than 3 is sound, then the step is 3, kept or in use, and who
    stands there needs nothing.
    """
    standings = {
        0: Standing(rank=0, held=5, backups=(3, 4)),
        1: Standing(rank=1, held=3),
    }
    assert covered_step({"a": (0, 1)}, standings, 3) == 3
    assert standings[1].uses(3, 3)
    assert not standings[0].uses(5, 4)
    assert not standings[0].uses(4, None)


def test_a_shard_without_a_copy_is_named() -> None:
    """
    When nobody sound holds a shard, then the answer is the sentence that says which.
    """
    groups = {"a": (0,), "b": (1, 2)}
    assert covered_step(groups, without(everybody(2), [1])) == (
        "no sound copy of shard 'b' is left on ranks [1, 2]"
    )
    assert covered_step(groups, everybody(3), 3) == (
        "no sound copy of shard 'a', of step 3 or earlier, is left on ranks [0]"
    )


def test_a_sentence_does_not_name_a_hundred_thousand_ranks() -> None:
    """
    When many ranks are concerned, then some are named and the others counted.
    """
    why = covered_step({"a": range(16)}, {})
    assert why == f"no sound copy of shard 'a' is left on ranks {list(range(16))}"
    assert str(covered_step({"a": range(17)}, {})).endswith(", 15, … 1 more]")
    why = covered_step({"a": range(20)}, {})
    assert str(why).endswith(
        "on ranks [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, … 4 more]"
    )


def test_copies_of_different_steps_do_not_make_a_whole() -> None:
    """
    When one shard is left at 4 and the other at 5, then there is no step to agree on.
    """
    assert covered_step({"a": (0,), "b": (1,)}, everybody(2, r1=5)) == (
        "no step is complete: the copies that are left are of different steps"
    )


def test_without_a_placement_there_is_no_step() -> None:
    """
    When no rank has said yet what it holds, then that is the answer.
    """
    assert covered_step({}, {}) == "no rank has reported what it holds"


def test_a_checkpoint_is_taken_when_no_copy_is_left() -> None:
    """
    When memory does not cover a step, then the step of the checkpoint is agreed on; where it is
    covered, memory goes first.
    """
    topology = Topology(groups={"a": (0, 1)})
    disk = terms(checkpoints={2: "/ckpt/2"})
    assert agreed_step(topology, without(everybody(2), [0, 1]), disk) == 2
    assert agreed_step(topology, without(everybody(2), [0]), disk) == 4
    assert isinstance(agreed_step(topology, without(everybody(2), [0, 1]), terms()), str)


def test_a_checkpoint_of_a_polluted_step_is_no_checkpoint() -> None:
    """
    When a checkpoint was written after the numbers went bad, then it is not loaded; the newest
    of those written before is.
    """
    topology = Topology(groups={"a": (0, 1)})
    three = {1: "/c/1", 3: "/c/3", 2: "/c/2"}
    assert agreed_step(topology, everybody(2), terms(checkpoints=three, ceiling=2)) == 2
    late = agreed_step(topology, everybody(2), terms(checkpoints={3: "/c"}, ceiling=2))
    assert late == "no sound copy of shard 'a', of step 2 or earlier, is left on ranks [0, 1]"


def test_a_step_needs_the_rng_and_data_position_of_everyone() -> None:
    """
    When those of a rank went with its node, then the step is one of which they are known; where
    there is none, the first such rank is named.
    """
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


def test_before_the_first_step_everyones_own_beginning_will_do() -> None:
    """
    When nothing was trained, then nobody copies anything: the state of step 0 is made, not moved.
    """
    beginning = terms(checkpoints={0: ""})
    topology = Topology(groups={"a": (0, 1), "b": (2,)})
    new = everybody(2, 0)
    assert agreed_step(topology, new, beginning) == 0
    assert plan_repair(topology, new, range(2), beginning) == Repair(step=0)


def test_who_is_not_as_it_began_copies_where_another_is() -> None:
    """
    When nothing was trained, and a rank has been overwritten in part whose shard another one has,
    then a retry will do: it copies.
    """
    torn = everybody(2, 0, r1=None)
    topology, members = Topology(groups={"a": (0, 1)}), frozenset({0, 1})
    chances = {o.strategy: o for o in offers(topology, torn, members, terms(checkpoints={0: ""}))}
    assert chances["retry"].why_not is None


def test_who_is_not_as_it_began_may_leave() -> None:
    """
    When nothing was trained, a shard has lost its holders, and the one that is not as it began
    leaves with a lost one, then the others go on from their beginning.
    """
    topology = Topology(groups={"a": (0, 1, 2, 3), "b": (1, 3)}, columns={2: (2, 3), 3: (2, 3)})
    late = Standing(rank=1, alive=False, coming=True, strategies=ALL)
    torn = without(everybody(4, 0, r2=None), [3]) | {1: late}
    beginning = terms(checkpoints={0: ""}, replaced=frozenset({3}))
    made = offers(topology, torn, frozenset(range(4)), beginning)
    (offer,) = (o for o in made if o.strategy == "scale_in")
    assert (offer.why_not, offer.leaving) == (None, (2, 3))


def test_those_who_are_not_as_they_began_are_named_in_their_order() -> None:
    """
    When nothing was trained, and several ranks have been overwritten in part, then they are named
    in their order; one of which nothing is known is as good as new.
    """
    topology = Topology(groups={"a": (0, 1, 8), "b": (9,)})
    torn = everybody(9, 0, r1=None, r8=None)
    found = plan_repair(topology, torn, frozenset({1, 8, 10}), terms(checkpoints={0: ""}))
    assert isinstance(found, str)
    assert "ranks [1, 8] no longer have the state they began with" in found


def test_who_is_not_as_it_began_any_more_is_replaced_before_the_first_step() -> None:
    """
    When nothing was trained, a shard has lost its holders, and a rank has been overwritten in part,
    then its own beginning will not do: it gets another process, where that is what is done.
    """
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


# ---------------------------------------------------------------- repair


def test_everyone_who_has_not_the_step_in_use_fetches_it() -> None:
    """
    When ranks are torn, behind, new or touched by a fault, then each fetches from all who have it.
    """
    standings = everybody(5, r1=None, r2=3)
    standings[3] = Standing(rank=3, held=4, sound=False)
    plan = plan_repair(Topology(groups={"a": (0, 1, 2, 3, 4)}), standings, range(6), terms())
    assert fetched(plan) == {1: {"a": [0, 4]}, 2: {"a": [4, 0]}, 3: {"a": [0, 4]}}


def test_a_checkpoint_of_a_later_step_than_any_copy_is_loaded() -> None:
    """
    When all that is left of the copies is an old one, and a checkpoint is newer, then that is where
    training goes on; of the same step the copy is nearer.
    """
    groups = Topology(groups={"a": (0, 1)})
    standings = {0: Standing(rank=0, held=None, backups=(4,)), 1: Standing(rank=1, alive=False)}
    plan = plan_repair(groups, standings, range(2), terms(checkpoints={6: "/six", 3: "/three"}))
    assert isinstance(plan, Repair)
    assert (plan.step, plan.load) == (6, "/six")
    assert agreed_step(groups, standings, terms(checkpoints={6: "/six"})) == 6
    plan = plan_repair(groups, standings, range(2), terms(checkpoints={4: "/four"}))
    assert isinstance(plan, Repair)
    assert (plan.step, plan.load, plan.restore) == (4, "", (0,))


def test_a_source_is_named_with_its_address() -> None:
    """
    When a shard is to be fetched, then the plan says where.
    """
    plan = plan_repair(Topology(groups={"a": (0, 1)}), everybody(2, r1=None), range(2), terms())
    assert isinstance(plan, Repair)
    (source,) = plan.transfers[1][0].sources
    assert (source.rank, source.address) == (0, "host:0")


def test_whoever_kept_a_copy_takes_it_back_and_gives_it_to_others() -> None:
    """
    When the agreed step is one that a rank only keeps, then it restores it, fetches nothing, and
    serves it.
    """
    standings = {
        0: Standing(rank=0, held=5, backups=(4,)),
        1: Standing(rank=1),
        2: Standing(rank=2, held=4, sound=False, backups=(4,)),
    }
    plan = plan_repair(Topology(groups={"a": (0, 1, 2)}), standings, range(3), terms(ceiling=4))
    assert isinstance(plan, Repair)
    assert (plan.step, plan.restore) == (4, (0, 2))
    assert fetched(plan) == {1: {"a": [0, 2]}}


def test_a_plan_has_the_ranks_in_order() -> None:
    """
    When several ranks take back a copy or fetch, then the plan lists them in order.
    """
    standings = everybody(9, r8=None, r1=None)
    world = Topology(groups={"a": (0, 8, 1)})
    plan = plan_repair(world, standings, range(9), terms())
    assert isinstance(plan, Repair)
    assert list(plan.transfers) == [1, 8]
    kept = {rank: Standing(rank=rank, backups=(4,)) for rank in (8, 1)}
    plan = plan_repair(world, standings | kept, range(9), terms())
    assert isinstance(plan, Repair)
    assert plan.restore == (1, 8)


def test_only_members_are_repaired_but_others_may_be_sources() -> None:
    """
    When a rank has left the job but still holds the state, then it gives and takes nothing.
    """
    standings = everybody(4, r1=None, r3=None)
    plan = plan_repair(Topology(groups={"a": (0, 1, 2, 3)}), standings, (0, 1), terms())
    assert fetched(plan) == {1: {"a": [0, 2]}}


def test_nobody_is_repaired_where_nothing_is_wrong() -> None:
    """
    When everyone has the step in use, then the plan is empty.
    """
    plan = plan_repair(Topology(groups={"a": (0, 1)}), everybody(2), range(2), terms())
    assert plan == Repair(step=4)


def test_a_checkpoint_is_loaded_by_all() -> None:
    """
    When the step comes from disk, then nothing is copied between ranks.
    """
    topology = Topology(groups={"a": (0,), "b": (1,)})
    lost = replaced(everybody(2), [0])
    assert plan_repair(topology, lost, range(2), terms(checkpoints={2: "/ckpt/2"})) == Repair(
        step=2, load="/ckpt/2"
    )
    assert plan_repair(topology, lost, range(2), terms()) == (
        "no sound copy of shard 'a' is left on ranks [0]"
    )


def test_what_is_given_is_spread_over_those_who_have_it() -> None:
    """
    When more ranks have a shard than a receiver needs sources, then the receivers take different
    ones, and nobody gives to two before all have given to one.
    """
    world = 4 * SOURCES
    standings = replaced(everybody(world), range(3))
    plan = fetched(
        plan_repair(Topology(groups={"a": tuple(range(world))}), standings, range(3), terms())
    )
    assert all(len(parts["a"]) == SOURCES for parts in plan.values())
    assert len({source for parts in plan.values() for source in parts["a"]}) == 3 * SOURCES


def test_who_has_given_least_is_asked_next() -> None:
    """
    When a rank has given one shard already, then the next is taken from others.
    """
    groups = {"a": (0, 9), "b": (0, *range(1, 10))}
    plan = fetched(plan_repair(Topology(groups=groups), everybody(10, r9=None), range(10), terms()))
    assert plan == {9: {"a": [0], "b": [1, 2, 3, 4, 5, 6, 7, 8]}}


def test_a_part_of_a_shard_is_a_part_of_the_work() -> None:
    """
    When two ranks share in giving one shard, then each has given half of what a lone giver has.
    """
    groups = {"a": (0, 9), "b": (1, 2, 9), "c": (0, *range(1, 10))}
    plan = fetched(plan_repair(Topology(groups=groups), everybody(10, r9=None), range(10), terms()))
    assert plan[9]["c"] == [3, 4, 5, 6, 7, 8, 1, 2]


# ---------------------------------------------------------------- savers


def test_every_shard_has_one_saver() -> None:
    """
    When a shard has several sound holders, then the lowest-placed saves it.
    """
    topology = Topology(groups={"a": (0, 1), "b": (2, 1), "c": (2,)})
    plan = savers(topology, everybody(3, r0=3), 4, None, spread=False)
    assert plan == {1: ("a",), 2: ("b", "c")}


def test_a_copy_that_was_kept_is_saved_as_well() -> None:
    """
    When the step of the last checkpoint is one that a rank keeps, then it can save it; not if
    that step is polluted.
    """
    topology = Topology(groups={"a": (0,)})
    kept = {0: Standing(rank=0, held=5, backups=(4,))}
    assert savers(topology, kept, 4, 4, spread=False) == {0: ("a",)}


def test_savers_are_spread_over_the_nodes() -> None:
    """
    When four ranks on two nodes hold everything, then each node writes half, each rank in turn;
    without spreading, the first rank writes all of it.
    """
    topology = Topology(groups=dict.fromkeys("abcd", (0, 1, 2, 3)), nodes={0: 0, 1: 0, 2: 1, 3: 1})
    assert savers(topology, everybody(4), 4, None, spread=True) == {
        0: ("a",),
        2: ("b",),
        1: ("c",),
        3: ("d",),
    }
    assert savers(topology, everybody(4), 4, None, spread=False) == {0: ("a", "b", "c", "d")}


def test_ranks_whose_node_is_not_known_share_one() -> None:
    """
    When nobody has said which nodes there are, then the ranks still take turns.
    """
    topology = Topology(groups=dict.fromkeys("abcd", (0, 1)), nodes={2: 0})
    plan = savers(topology, everybody(2), 4, None, spread=True)
    assert plan == {0: ("a", "c"), 1: ("b", "d")}
    topology = Topology(groups={"a": (2,), "b": (0, 3)}, nodes={2: 0, 3: 1})
    assert savers(topology, everybody(4), 4, None, spread=True) == {2: ("a",), 3: ("b",)}


def test_who_restores_a_copy_to_save_it_writes_further_copies_of_it_too() -> None:
    """
    When a rank restores its copy of the step, because it alone has one shard, then it has the other
    shard in use as well, and can write a further copy of that.
    """
    topology = Topology(groups={"a": (0,), "b": (1, 0)})
    standings = {
        0: Standing(rank=0, sound=False, held=6, backups=(5,)),
        1: Standing(rank=1, held=5),
    }
    plan = plan_save(topology, standings, (0, 1), 5, None, spread=False, with_copies=True)
    assert plan.restoring == (0,)
    assert plan.shards == {0: ("a",), 1: ("b",)}
    assert plan.copies == {0: ("b",), 1: ()}


def test_only_a_copy_in_use_that_is_not_outrun_is_a_further_copy() -> None:
    """
    When one rank keeps the step without having it in use, and another was left in its tail while
    the saver has ended the step, then neither writes a further copy.
    """
    topology = Topology(groups={"a": (0, 1, 2)})
    standings = {
        0: Standing(rank=0, held=5),
        1: Standing(rank=1, held=6, backups=(5,)),
        2: Standing(rank=2, held=5, tail=True),
    }
    plan = plan_save(topology, standings, (0, 1, 2), 5, None, spread=False, with_copies=True)
    assert plan.shards == {0: ("a",)}
    assert not any(plan.copies.values())
