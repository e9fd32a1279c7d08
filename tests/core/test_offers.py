"""
The strategies that an incident offers, and the sentence that rules out each of the others.
"""

import pytest

from tests.core.placements import ALL, everybody, grid, optimizer, replaced, terms, without
from tft.core.plan.offers import Offer, offers
from tft.core.plan.standing import Standing, Terms
from tft.core.plan.topology import Topology

SHARED = Topology(groups={"a": (0, 1, 2, 3)})
"""Four ranks that all have everything."""


def offered(
    standings: dict[int, Standing],
    what: Terms | None = None,
    *,
    topology: Topology = SHARED,
    members: int = 4,
) -> dict[str, Offer]:
    """
    Return the offer of each strategy, by strategy. The first `members` ranks take part in the job.
    """
    made = offers(topology, standings, frozenset(range(members)), what or terms())
    return {offer.strategy: offer for offer in made}


def ruled_out(standings: dict[int, Standing], what: Terms | None = None) -> dict[str, str | None]:
    """
    Return the reason that rules out each strategy, or None, by strategy.
    """
    return {name: offer.why_not for name, offer in offered(standings, what).items()}


def test_the_strategies_are_offered_in_the_order_in_which_they_are_tried() -> None:
    """
    When there is an incident, then what changes least comes first, and the end last.
    """
    assert list(offered(everybody(4))) == [
        "migrate", "scale_out", "retry", "recover", "scale_in", "dump", "exit",
    ]  # fmt: skip


def test_after_a_fault_that_kills_nobody_the_processes_are_kept() -> None:
    """
    When all live, then a retry can work; recover needs a rank that is to blame, and nobody has to
    leave.
    """
    offer = offered(everybody(4))
    assert offer["retry"] == Offer(
        strategy="retry",
        why_not=None,
        why="every process is kept; training goes on after step 4",
        step=4,
    )
    assert offer["recover"].why_not == "no rank can be named whose process should be replaced"
    assert offer["scale_in"].why_not == "no rank has to leave"
    assert offer["migrate"].why_not == "no process is ready to take over"
    assert offer["scale_out"].why_not == "no rank is ready to come back"


def test_the_last_ways_are_a_last_checkpoint_and_none() -> None:
    """
    When a step is covered, then it can be saved; the end can always come.
    """
    offer = offered(everybody(4))
    assert offer["dump"] == Offer(
        strategy="dump", why_not=None, why="a last checkpoint of step 4 is written", step=4
    )
    assert offer["exit"] == Offer(strategy="exit", why_not=None, why="nothing is saved")


def test_a_lost_rank_gets_another_process() -> None:
    """
    When a rank is lost, then a retry is out, recover goes on from the copies of the others, and
    scale_in would do without the rank.
    """
    offer = offered(without(everybody(4), [2]))
    assert offer["retry"].why_not == "ranks [2] have lost their process"
    assert offer["recover"] == Offer(
        strategy="recover",
        why_not=None,
        why="ranks [2] get another process; training goes on after step 4",
        step=4,
    )
    assert offer["scale_in"] == Offer(
        strategy="scale_in",
        why_not=None,
        why="ranks [2] leave, 3 go on; training goes on after step 4",
        step=4,
        leaving=(2,),
    )


def test_a_rank_whose_new_process_is_there_is_still_one_that_lost_its_process() -> None:
    """
    When the replacement has come up already, then what is done is still a recovery, not a retry.
    """
    offer = offered(replaced(everybody(4), [2]), terms(replaced=frozenset({2})))
    assert offer["retry"].why_not == "ranks [2] have lost their process"
    assert offer["recover"].why == "ranks [2] get another process; training goes on after step 4"
    assert offer["recover"].replace == ()
    both = offered(without(replaced(everybody(4), [2]), [0]), terms(replaced=frozenset({2})))
    assert both["retry"].why_not == "ranks [0, 2] have lost their process"
    assert both["recover"].why.startswith("ranks [0, 2] get another process;")


def test_a_rank_of_which_nothing_is_known_is_lost() -> None:
    """
    When a member has never said where it stands, then it counts as without a process.
    """
    standings = everybody(4)
    del standings[3]
    assert offered(standings)["retry"].why_not == "ranks [3] have lost their process"
    assert offered(standings)["recover"].why_not is None


def test_the_living_cause_of_an_incident_can_be_replaced() -> None:
    """
    When a rank is to blame but lives, then recover would replace its process, from the others'
    copies; whoever is to blame but takes no part is left alone.
    """
    offer = offered(everybody(5), terms(faulty=frozenset({1, 4})))["recover"]
    assert offer == Offer(
        strategy="recover",
        why_not=None,
        why=(
            "ranks [1] get another process, although their processes are alive; training goes on "
            "after step 4"
        ),
        step=4,
        replace=(1,),
    )


def test_the_only_holder_of_a_shard_is_not_replaced() -> None:
    """
    When replacing a process would lose a shard, then recover is out, and the sentence says why.
    """
    offer = offered(
        everybody(4),
        terms(faulty=frozenset({1})),
        topology=Topology(groups={"a": (0, 1), "b": (1,)}),
    )
    assert offer["recover"].why_not == (
        "with ranks [1] replaced, no sound copy of shard 'b' is left on ranks [1]"
    )


def test_a_rank_without_a_home_cannot_be_started_again() -> None:
    """
    When there is no place for another process, then recover says why, and scale_in is left.
    """
    standings = without(everybody(4), [1, 2])
    standings[2] = Standing(rank=2, alive=False, unplaceable="node 1 is gone", strategies=ALL)
    assert offered(standings)["recover"].why_not == "node 1 is gone"
    assert offered(standings)["scale_in"].leaving == (1, 2)
    standings[0] = Standing(rank=0, held=4, unplaceable="it lives, and needs none", strategies=ALL)
    assert offered(without(standings, [2]))["recover"].why_not is None


def test_a_rank_that_fails_again_and_again_gets_no_more_chances() -> None:
    """
    When a rank flaps, then nothing that would keep it or start it again is done; it may leave.
    """
    often = terms(flapping={2: "rank 2 was the cause of 4 incidents"}, faulty=frozenset({2}))
    why = ruled_out(everybody(4), often)
    assert why["retry"] == why["recover"] == "rank 2 was the cause of 4 incidents"
    assert offered(everybody(4), often)["scale_in"].leaving == (2,)
    assert why["dump"] is None


def test_a_column_leaves_as_a_whole() -> None:
    """
    When a rank of tp 2 and dp 2 is lost, then its whole replica leaves, and the other goes on.
    """
    offer = offered(without(everybody(4), [3]), topology=grid(2, 1, 2, copies=2))
    assert offer["scale_in"].leaving == (2, 3)
    assert offer["scale_in"].why_not is None


def test_those_who_are_outside_do_not_leave_again() -> None:
    """
    When a column reaches beyond the members, then only members leave.
    """
    topology = Topology(groups={"a": (0, 1, 2, 3, 4)}, columns={3: (3, 4)})
    offer = offered(without(everybody(5), [3]), topology=topology)
    assert offer["scale_in"].leaving == (3,)


def test_nobody_leaves_where_a_shard_would_have_no_place() -> None:
    """
    When all the ranks that a shard is placed on would leave, then scale_in is out.
    """
    standings = without(everybody(4), [1, 3])
    offer = offered(standings, topology=optimizer(4, 2))
    assert offer["scale_in"].why_not == "shard 'optimizer.1' is held only by ranks that leave"
    assert ruled_out(without(everybody(4), range(4)))["scale_in"] == "no rank would be left"


def test_without_a_step_to_go_on_from_training_ends() -> None:
    """
    When a shard is lost, then every way on is ruled out by the same sentence, and so is a last
    checkpoint.
    """
    torn = everybody(4, r0=None, r1=None, r2=None, r3=None)
    why = ruled_out(torn)
    sentence = "no sound copy of shard 'a' is left on ranks [0, 1, 2, 3]"
    assert why["retry"] == why["dump"] == sentence
    assert why["exit"] is None


def test_a_checkpoint_on_disk_keeps_the_job_going_but_is_not_saved_again() -> None:
    """
    When the state in memory is lost but a checkpoint is there, then training can go on from it; a
    last checkpoint would be no news.
    """
    torn = everybody(4, r0=None, r1=None, r2=None, r3=None)
    offer = offered(torn, terms(checkpoints={2: "/ckpt/2"}))
    assert (offer["retry"].why_not, offer["retry"].step) == (None, 2)
    assert offer["dump"].why_not is not None


def test_a_polluted_step_is_neither_gone_on_from_nor_saved() -> None:
    """
    When no copy of a step after 3 is sound, then the ways on and the last checkpoint respect it.
    """
    standings = {
        rank: Standing(rank=rank, held=4, backups=(3,), strategies=ALL) for rank in range(4)
    }
    offer = offered(standings, terms(ceiling=3))
    assert (offer["retry"].step, offer["dump"].step) == (3, 3)


def test_before_the_first_step_there_is_nothing_to_save() -> None:
    """
    When nothing was trained, then a last checkpoint is not written.
    """
    why = ruled_out(everybody(4, step=0), terms(trained=False))
    assert why["dump"] == "no step has been trained yet"


def test_what_did_not_help_is_not_tried_again() -> None:
    """
    When a strategy has failed in this incident, then its reason is given again.
    """
    why = ruled_out(everybody(4), terms(failed={"retry": "the fault came back"}))
    assert why["retry"] == "the fault came back"


def test_only_what_is_enabled_is_offered() -> None:
    """
    When a strategy is not enabled, then it is out; the end needs no permission.
    """
    why = ruled_out(everybody(4), terms(enabled=frozenset({"dump"})))
    assert why["retry"] == "retry is not enabled"
    assert (why["dump"], why["exit"]) == (None, None)


def test_only_what_the_adaptors_of_those_who_live_and_take_part_can_do_is_offered() -> None:
    """
    When an adaptor cannot take part in a strategy, then its rank is named; the lost, and those
    outside, are not asked.
    """
    standings = without(everybody(6), [3])
    standings[3] = Standing(rank=3, alive=False)
    standings[4] = standings[5] = Standing(rank=5, held=4)
    assert offered(standings)["scale_in"].why_not is None
    standings[1] = Standing(rank=1, held=4, strategies=frozenset({"dump"}))
    why = ruled_out(standings)
    assert why["scale_in"] == "the adaptor of ranks [1] cannot take part"
    assert (why["dump"], why["exit"]) == (None, None)


def test_when_the_job_has_to_end_only_a_last_checkpoint_is_left() -> None:
    """
    When something forces the end, then no way on is offered, and the reason stands for all.
    """
    why = ruled_out(everybody(4), terms(forced="a signal"))
    assert {name for name, reason in why.items() if reason == "a signal"} == {
        "migrate", "scale_out", "retry", "recover", "scale_in",
    }  # fmt: skip
    assert (why["dump"], why["exit"]) == (None, None)


WIDE = Topology(groups={"a": tuple(range(9))})
"""Nine ranks: with a single-digit world, a set happens to be in order."""


def test_ranks_are_named_in_order() -> None:
    """
    When several ranks are concerned, then every sentence and every list has them in order.
    """
    standings = without(everybody(9), [8, 1])
    chance = terms(successors=frozenset({3}), returning=frozenset({9}))
    offer = offered(standings, chance, topology=WIDE, members=9)
    for strategy in ("migrate", "scale_out", "retry"):
        assert offer[strategy].why_not == "ranks [1, 8] have lost their process"
    assert offer["recover"].why.startswith("ranks [1, 8] get another process;")
    assert offer["scale_in"].why.startswith("ranks [1, 8] leave, 7 go on;")
    assert offer["scale_in"].leaving == (1, 8)
    blamed = terms(faulty=frozenset({8, 1}), successors=frozenset({8, 1}))
    offer = offered(everybody(9), blamed, topology=WIDE, members=9)
    assert offer["recover"].replace == offer["migrate"].replace == (1, 8)
    back = terms(returning=frozenset({8, 1}))
    assert offered(everybody(9), back, topology=WIDE)["scale_out"].joining == (1, 8)


def test_of_several_reasons_the_one_of_the_first_rank_is_given() -> None:
    """
    When more than one rank has no home, flaps, could not come back or is not known, then the
    lowest of them is told about.
    """
    standings = everybody(9) | {
        rank: Standing(rank=rank, alive=False, unplaceable=f"no place for {rank}")
        for rank in (8, 1)
    }
    offer = offered(standings, topology=WIDE, members=9)
    assert offer["recover"].why_not == "no place for 1"
    flapping = terms(flapping={8: "rank 8 flaps", 1: "rank 1 flaps"})
    assert offered(everybody(9), flapping, topology=WIDE, members=9)["retry"].why_not == (
        "rank 1 flaps"
    )
    away = terms(returning=frozenset({8, 1}), excluded=frozenset({8, 1}))
    assert offered(everybody(9), away, topology=WIDE)["scale_out"] == Offer(
        strategy="scale_out",
        why_not="the adaptor of rank 1 cannot make its RNG and data position anew",
    )
    unknown = terms(strangers=frozenset({8, 1}))
    assert offered(without(everybody(9), [2]), unknown, topology=WIDE)["scale_in"] == Offer(
        strategy="scale_in", why_not="rank 1 has never reported what it holds"
    )


def test_who_leaves_does_not_have_to_know_where_its_data_stood() -> None:
    """
    When the RNG and data position of a rank went with its node, then no way leads on with it; one
    does without it.
    """
    without_local_state = terms(without_local_state={2: frozenset()}, replaced=frozenset({2}))
    offer = offered(without(everybody(4), [2]), without_local_state)
    assert offer["recover"].why_not == (
        "the RNG and data position of rank 2 at the end of step 4 were lost with its node"
    )
    assert (offer["scale_in"].why_not, offer["scale_in"].step) == (None, 4)
    both = terms(without_local_state={2: frozenset(), 3: frozenset()}, replaced=frozenset({2}))
    assert offered(without(everybody(4), [2]), both)["scale_in"].why_not == (
        "the RNG and data position of rank 3 at the end of step 4 were lost with its node"
    )


def test_the_newest_step_that_is_covered_is_saved() -> None:
    """
    When two steps are held whole, then the last checkpoint is of the later one.
    """
    standings = {0: Standing(rank=0, held=4, backups=(3,), strategies=ALL)}
    offer = offered(standings, topology=Topology(groups={"a": (0,)}), members=1)
    assert offer["dump"].step == 4


def test_who_is_only_late_is_waited_for() -> None:
    """
    When a rank starts with the job and is not there yet, then nobody leaves for its sake; when it
    starts again because it was lost, then the job can go on without it.
    """
    standings = without(everybody(4), [1, 2])
    standings[1] = Standing(rank=1, alive=False, coming=True, strategies=ALL)
    assert offered(standings)["scale_in"].leaving == (2,)
    again = terms(replaced=frozenset({1}))
    assert offered(standings, again)["scale_in"].leaving == (1, 2)


# ---------------------------------------------------------------- opportunities


def test_a_process_that_is_ready_takes_over() -> None:
    """
    When another process is ready for a slow rank, then it can take its rank, and the state comes
    from the others.
    """
    offer = offered(everybody(5), terms(successors=frozenset({2, 1, 4})))["migrate"]
    assert offer == Offer(
        strategy="migrate",
        why_not=None,
        why="ranks [1, 2] are taken over by processes that are ready; "
        "training goes on after step 4",
        step=4,
        replace=(1, 2),
    )
    alone = offered(
        everybody(4), terms(successors=frozenset({2})), topology=Topology(groups={"a": (2,)})
    )
    assert alone["migrate"].why_not == (
        "with ranks [2] replaced, no sound copy of shard 'a' is left on ranks [2]"
    )


def test_those_who_left_come_back() -> None:
    """
    When ranks outside are ready again, then they can be taken in.
    """
    offer = offered(everybody(6), terms(returning=frozenset({5, 4})))["scale_out"]
    assert offer == Offer(
        strategy="scale_out",
        why_not=None,
        why="ranks [4, 5] come back; training goes on after step 4",
        step=4,
        joining=(4, 5),
    )


@pytest.mark.parametrize("strategy", ["migrate", "scale_out"])
def test_nobody_comes_or_goes_while_somebody_is_lost(strategy: str) -> None:
    """
    When a rank is lost, or flaps, then opportunities wait.
    """
    chance = {"successors": frozenset({1}), "returning": frozenset({4})}
    lost = offered(without(everybody(5), [0]), terms(**chance))
    assert lost[strategy].why_not == "ranks [0] have lost their process"
    flapping = offered(everybody(5), terms(**chance, flapping={3: "rank 3 fails"}))
    assert flapping[strategy].why_not == "rank 3 fails"


def test_who_is_replaced_is_named_once() -> None:
    """
    When nobody has what a job begins with any more and one of them is at fault, then all of them get
    another process, each one.
    """
    standings = everybody(2, None)
    asked = terms(
        enabled=frozenset({"recover"}), checkpoints={0: ""}, trained=False, faulty=frozenset({1})
    )
    (offer,) = [
        offer
        for offer in offers(Topology(groups={"dense": (0, 1)}), standings, frozenset({0, 1}), asked)
        if offer.strategy == "recover"
    ]
    assert (offer.why_not, offer.replace) == (None, (1, 0))
