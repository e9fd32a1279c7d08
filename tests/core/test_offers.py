"""
The strategies that an incident offers, and the sentence that says why a strategy is ruled out.
"""

import pytest

from tests.core.placements import ALL, everybody, grid, optimizer, replaced, terms, without
from tft.core.plan.offers import Offer, offers
from tft.core.plan.standing import Standing, Terms
from tft.core.plan.topology import Topology

SHARED = Topology(groups={"a": (0, 1, 2, 3)})
"""Four ranks that all hold the same shard."""


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


def test_offers_are_in_the_order_of_trial() -> None:
    """When strategies are offered, then the strategy that changes least comes first, and `exit`
    comes last."""
    assert list(offered(everybody(4))) == [
        "migrate", "scale_out", "retry", "recover", "scale_in", "dump", "exit",
    ]  # fmt: skip


def test_retry_is_possible_when_all_ranks_live() -> None:
    """When all processes live and no rank is faulty, then `retry` is offered. `recover` is ruled
    out without a faulty rank, and `scale_in` because no rank has to leave."""
    offer = offered(everybody(4))
    assert offer["retry"] == Offer(
        strategy="retry",
        why_not=None,
        why="every process is kept; training goes on after step 4",
        step=4,
    )
    assert (
        offer["recover"].why_not == "no rank is known to be at fault, so no process can be replaced"
    )
    assert offer["scale_in"].why_not == "no rank has to leave"
    assert offer["migrate"].why_not == "no process is ready to take over"
    assert offer["scale_out"].why_not == "no rank is ready to come back"


def test_dump_and_exit_are_the_last_offers() -> None:
    """When all shards of a step are held, then `dump` can save this step. `exit` is always
    possible."""
    offer = offered(everybody(4))
    assert offer["dump"] == Offer(
        strategy="dump", why_not=None, why="a last checkpoint of step 4 is written", step=4
    )
    assert offer["exit"] == Offer(strategy="exit", why_not=None, why="nothing is saved")


def test_recover_replaces_a_lost_rank() -> None:
    """When a rank is lost, then `retry` is ruled out, `recover` continues from the copies of the
    other ranks, and `scale_in` continues without the lost rank."""
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


def test_ready_replacement_still_counts_as_recover() -> None:
    """When the new process of a lost rank is already ready, then the offer is still `recover` and
    not `retry`."""
    offer = offered(replaced(everybody(4), [2]), terms(replaced=frozenset({2})))
    assert offer["retry"].why_not == "ranks [2] have lost their process"
    assert offer["recover"].why == "ranks [2] get another process; training goes on after step 4"
    assert offer["recover"].replace == ()
    both = offered(without(replaced(everybody(4), [2]), [0]), terms(replaced=frozenset({2})))
    assert both["retry"].why_not == "ranks [0, 2] have lost their process"
    assert both["recover"].why.startswith("ranks [0, 2] get another process;")


def test_member_without_a_standing_counts_as_lost() -> None:
    """When a member has never reported its position, then it counts as a rank without a process."""
    standings = everybody(4)
    del standings[3]
    assert offered(standings)["retry"].why_not == "ranks [3] have lost their process"
    assert offered(standings)["recover"].why_not is None


def test_recover_can_replace_a_living_faulty_rank() -> None:
    """When the process of a faulty rank is alive, then `recover` can replace it from the copies of
    the other ranks. A faulty rank outside the job is not replaced."""
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


def test_recover_is_ruled_out_for_the_only_holder_of_a_shard() -> None:
    """When replacing a process would lose a shard, then `recover` is ruled out, and the reason
    names the shard."""
    offer = offered(
        everybody(4),
        terms(faulty=frozenset({1})),
        topology=Topology(groups={"a": (0, 1), "b": (1,)}),
    )
    assert offer["recover"].why_not == (
        "with ranks [1] replaced, no sound copy of shard 'b' is left on ranks [1]"
    )


def test_recover_is_ruled_out_without_a_place_for_a_process() -> None:
    """When no node has a place for the new process of a lost rank, then `recover` is ruled out with
    the reason, and `scale_in` can still be chosen."""
    standings = without(everybody(4), [1, 2])
    standings[2] = Standing(rank=2, alive=False, unplaceable="node 1 is gone", strategies=ALL)
    assert offered(standings)["recover"].why_not == "node 1 is gone"
    assert offered(standings)["scale_in"].leaving == (1, 2)
    standings[0] = Standing(rank=0, held=4, unplaceable="it lives, and needs none", strategies=ALL)
    assert offered(without(standings, [2]))["recover"].why_not is None


def test_flapping_rank_is_neither_kept_nor_started_again() -> None:
    """When a rank has failed too often (it is flapping), then every strategy that keeps it or
    starts it again is ruled out. `scale_in` and `dump` remain possible."""
    often = terms(flapping={2: "rank 2 was the cause of 4 incidents"}, faulty=frozenset({2}))
    why = ruled_out(everybody(4), often)
    assert why["retry"] == why["recover"] == "rank 2 was the cause of 4 incidents"
    assert offered(everybody(4), often)["scale_in"].leaving == (2,)
    assert why["dump"] is None


def test_whole_column_leaves() -> None:
    """When a rank is lost with tensor parallelism of 2 and data parallelism of 2, then its whole
    model replica leaves, and the other replica continues."""
    offer = offered(without(everybody(4), [3]), topology=grid(2, 1, 2, copies=2))
    assert offer["scale_in"].leaving == (2, 3)
    assert offer["scale_in"].why_not is None


def test_only_members_of_a_column_leave() -> None:
    """When a model replica contains ranks that are outside the job, then `scale_in` lists only its
    members as leaving."""
    topology = Topology(groups={"a": (0, 1, 2, 3, 4)}, columns={3: (3, 4)})
    offer = offered(without(everybody(5), [3]), topology=topology)
    assert offer["scale_in"].leaving == (3,)


def test_scale_in_is_ruled_out_when_a_shard_would_be_lost() -> None:
    """When all holders of a shard would leave, or all ranks would leave, then `scale_in` is ruled
    out with that reason."""
    standings = without(everybody(4), [1, 3])
    offer = offered(standings, topology=optimizer(4, 2))
    assert offer["scale_in"].why_not == "shard 'optimizer.1' is held only by ranks that leave"
    assert ruled_out(without(everybody(4), range(4)))["scale_in"] == "no rank would be left"


def test_lost_shard_rules_out_all_strategies_but_exit() -> None:
    """When no copy of a shard is left, then `retry` and `dump` are ruled out with the same
    sentence. `exit` remains possible."""
    torn = everybody(4, r0=None, r1=None, r2=None, r3=None)
    why = ruled_out(torn)
    sentence = "no sound copy of shard 'a' is left on ranks [0, 1, 2, 3]"
    assert why["retry"] == why["dump"] == sentence
    assert why["exit"] is None


def test_existing_checkpoint_allows_recovery_but_no_dump() -> None:
    """When the state in memory is lost and a checkpoint exists, then training can continue from the
    checkpoint. `dump` is ruled out, because it would save nothing new."""
    torn = everybody(4, r0=None, r1=None, r2=None, r3=None)
    offer = offered(torn, terms(checkpoints={2: "/ckpt/2"}))
    assert (offer["retry"].why_not, offer["retry"].step) == (None, 2)
    assert offer["dump"].why_not is not None


def test_polluted_step_is_neither_used_nor_saved() -> None:
    """When no copy of a step after 3 is sound, then `retry` continues from step 3, and `dump` saves
    step 3."""
    standings = {
        rank: Standing(rank=rank, held=4, backups=(3,), strategies=ALL) for rank in range(4)
    }
    offer = offered(standings, terms(ceiling=3))
    assert (offer["retry"].step, offer["dump"].step) == (3, 3)


def test_dump_is_ruled_out_before_the_first_step() -> None:
    """When no step was trained, then `dump` is ruled out."""
    why = ruled_out(everybody(4, step=0), terms(trained=False))
    assert why["dump"] == "no step has been trained yet"


def test_failed_strategy_is_not_offered_again() -> None:
    """When a strategy has failed in this incident, then it is ruled out with the reason of the
    failure."""
    why = ruled_out(everybody(4), terms(failed={"retry": "the fault came back"}))
    assert why["retry"] == "the fault came back"


def test_strategy_that_is_not_enabled_is_ruled_out() -> None:
    """When a strategy is not enabled, then it is ruled out. `exit` is always enabled."""
    why = ruled_out(everybody(4), terms(enabled=frozenset({"dump"})))
    assert why["retry"] == "retry is not enabled"
    assert (why["dump"], why["exit"]) == (None, None)


def test_strategy_without_the_adaptor_of_a_living_member_is_ruled_out() -> None:
    """When the adaptor of a living member does not support a strategy, then the strategy is ruled
    out, and the reason names the rank. Adaptors of lost ranks and of ranks outside the job do not
    count."""
    standings = without(everybody(6), [3])
    standings[3] = Standing(rank=3, alive=False)
    standings[4] = standings[5] = Standing(rank=5, held=4)
    assert offered(standings)["scale_in"].why_not is None
    standings[1] = Standing(rank=1, held=4, strategies=frozenset({"dump"}))
    why = ruled_out(standings)
    assert why["scale_in"] == "the adaptor of ranks [1] does not support the strategy scale_in"
    assert (why["dump"], why["exit"]) == (None, None)


def test_forced_end_leaves_only_a_last_checkpoint() -> None:
    """When the job is forced to end, for example by a signal, then only `dump` and `exit` can be
    chosen. All other strategies are ruled out with the same reason."""
    why = ruled_out(everybody(4), terms(forced="a signal"))
    assert {name for name, reason in why.items() if reason == "a signal"} == {
        "migrate", "scale_out", "retry", "recover", "scale_in",
    }  # fmt: skip
    assert (why["dump"], why["exit"]) == (None, None)


WIDE = Topology(groups={"a": tuple(range(9))})
"""Nine ranks, because a set of less than nine small numbers happens to be iterated in order."""


def test_sentences_name_ranks_in_order() -> None:
    """When a sentence or a list of an offer names several ranks, then it names them in rank order."""
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


def test_reason_of_the_lowest_rank_is_given() -> None:
    """When several ranks are a reason against a strategy, then the sentence gives the reason of the
    lowest rank."""
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
        strategy="scale_in", why_not="rank 1 has never reported which shards it holds"
    )


def test_leaving_rank_needs_no_rank_local_state() -> None:
    """When the RNG and data position of a rank were lost with its node, then no strategy can
    continue with this rank. `scale_in` can continue without it."""
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


def test_dump_saves_the_newest_covered_step() -> None:
    """When all shards of two steps are held, then the last checkpoint is of the later step."""
    standings = {0: Standing(rank=0, held=4, backups=(3,), strategies=ALL)}
    offer = offered(standings, topology=Topology(groups={"a": (0,)}), members=1)
    assert offer["dump"].step == 4


def test_scale_in_waits_for_a_rank_that_starts_with_the_job() -> None:
    """When a rank has not joined yet at the start of the job, then `scale_in` does not exclude it
    from the job. When the rank is started again after a loss, then `scale_in` may exclude it."""
    standings = without(everybody(4), [1, 2])
    standings[1] = Standing(rank=1, alive=False, coming=True, strategies=ALL)
    assert offered(standings)["scale_in"].leaving == (2,)
    again = terms(replaced=frozenset({1}))
    assert offered(standings, again)["scale_in"].leaving == (1, 2)


# ---------------------------------------------------------------- strategies that need no fault


def test_migrate_is_offered_when_a_successor_is_ready() -> None:
    """When a successor of a slow rank is ready, then `migrate` is offered: the successor takes the
    rank over with state from the other ranks. It is ruled out if no other rank holds the state."""
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


def test_scale_out_is_offered_when_ranks_outside_are_ready() -> None:
    """When ranks outside the job are ready again, then `scale_out` is offered, by which they become
    members again."""
    offer = offered(everybody(6), terms(returning=frozenset({5, 4})))["scale_out"]
    assert offer == Offer(
        strategy="scale_out",
        why_not=None,
        why="ranks [4, 5] come back; training goes on after step 4",
        step=4,
        joining=(4, 5),
    )


@pytest.mark.parametrize("strategy", ["migrate", "scale_out"])
def test_opportunities_wait_while_a_rank_is_lost(strategy: str) -> None:
    """When a rank is lost or flapping, then `migrate` and `scale_out` are ruled out."""
    chance = {"successors": frozenset({1}), "returning": frozenset({4})}
    lost = offered(without(everybody(5), [0]), terms(**chance))
    assert lost[strategy].why_not == "ranks [0] have lost their process"
    flapping = offered(everybody(5), terms(**chance, flapping={3: "rank 3 fails"}))
    assert flapping[strategy].why_not == "rank 3 fails"


def test_replaced_ranks_are_listed_once() -> None:
    """When no rank has its initial state any more and one of them is at fault, then all ranks are
    replaced, and each is listed once."""
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
