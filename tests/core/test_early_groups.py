"""
Process groups that are formed early: while the ranks compare their copies, before the recovery
strategy is chosen.
"""

from collections.abc import Callable

import pytest

from tests.core.lives import names, strategies, trained
from tft.core.job.transitions import State
from tft.protocol.messages import (
    Compare,
    Fetch,
    Freeze,
    Kill,
    OrderName,
    RankOrder,
    Regroup,
    Rollback,
    Save,
    Stop,
)
from tft.testing.scripted import ScriptedJob


def orders_to_ranks(job: ScriptedJob) -> list[str]:
    """
    Return the names of all orders to ranks, in order.
    """
    return names([order for order in job.said if isinstance(order, RankOrder)])


def recovered_without_answers_of_rank_1(*orders: OrderName) -> ScriptedJob:
    """
    Return a job that has recovered from a network fault and from the loss of rank 1 during it. Rank
    1 had not answered `orders` when it was lost.
    """
    job = trained()
    job.script.muted = {(1, order) for order in orders}
    job.fault(0, "network")
    job.settle()
    job.script.muted = set()
    job.kill(1)
    job.settle()
    job.train()
    return job


def fails_to_form_groups(job: ScriptedJob, rank: int) -> None:
    """
    Let a rank that has not answered the order to form groups report a failure.
    """
    job.script.failures[rank, "regroup"] = ["connection refused"]
    job.script.muted.discard((rank, "regroup"))
    job.repeat()


def test_groups_are_formed_while_copies_are_compared() -> None:
    """When a collective fails and every process is alive, then the ranks are ordered at once to
    stop, to compare and to form groups. They form groups only once."""
    job = trained()
    job.fault(0, "network")
    job.settle()
    job.train()
    assert orders_to_ranks(job)[:6] == [
        "Freeze", "Stop", "Compare", "Regroup", "Rebuild", "Rollback",
    ]  # fmt: skip
    assert job.orders(Regroup)[0].step == 4
    assert strategies(job) == ["retry"]


def test_wrappers_are_not_built_before_the_copies_are_compared() -> None:
    """When the groups are formed and a rank still compares, then no strategy is chosen."""
    job = trained()
    job.script.muted = {(1, "compare")}
    job.fault(0, "network")
    job.settle()
    assert job.machine.incident.tasks["regroup"].waiting == set()
    assert job.doing == "clearing"


@pytest.mark.parametrize(
    "happen",
    [
        pytest.param(lambda job: job.kill(1), id="lost process"),
        pytest.param(lambda job: job.fault(1, "memory"), id="damaged memory"),
        pytest.param(lambda job: job.fault(1, "numeric", polluted=True), id="wrong numbers"),
        pytest.param(lambda job: job.stop("enough"), id="request to end"),
    ],
)
def test_groups_are_not_formed_early_when_the_plan_is_open(
    happen: Callable[[ScriptedJob], None],
) -> None:
    """When another strategy than a retry from the last step is possible, then the strategy is
    chosen first."""
    job = trained()
    job.script.muted = {(rank, "compare") for rank in range(4)}
    happen(job)
    job.settle()
    assert job.orders(Stop)
    assert not job.orders(Regroup)


def test_groups_are_not_formed_early_when_a_plugin_may_advise() -> None:
    """When a recovery plugin may advise another strategy, then no groups are formed before it."""
    job = trained(advised=True)
    job.fault(0, "network")
    job.settle()
    assert job.state is State.CHOOSING
    assert not job.orders(Regroup)


def test_rank_that_is_lost_while_groups_are_formed_leads_to_a_new_round() -> None:
    """When a rank dies while all form groups early, then the others would wait for it. So a new
    round begins, in which the rank is replaced."""
    job = recovered_without_answers_of_rank_1("compare", "regroup")
    rounds = [(order.round, order.to) for order in job.orders(Freeze)]
    assert rounds == [(1, (0, 1, 2, 3)), (2, (0, 2, 3))]
    assert [order.round for order in job.orders(Regroup)] == [1, 2]
    assert strategies(job) == ["recover"]


@pytest.mark.parametrize(
    "happen",
    [
        pytest.param(lambda job: job.kill(1), id="lost rank"),
        pytest.param(lambda job: job.reopen_store(2), id="lost store"),
        pytest.param(lambda job: fails_to_form_groups(job, 1), id="failed groups"),
    ],
)
def test_no_new_round_begins_while_a_rank_digests_its_copies(
    happen: Callable[[ScriptedJob], None],
) -> None:
    """When groups can never be formed and a rank still digests its copies, then the new round
    begins after that, because a rank that digests cannot stop. The rank has the whole limit for
    its digests."""
    job = trained()
    job.script.muted = {(3, "compare"), (1, "regroup")}
    job.fault(0, "network")
    job.settle()
    happen(job)
    job.settle()
    job.let_pass(200.0)
    assert {order.round for order in job.orders(Regroup)} == {1}
    assert not job.orders(Kill)
    job.script.muted = set()
    job.repeat()
    job.settle()
    job.train()
    assert job.state is State.HEALTHY
    assert {order.round for order in job.orders(Regroup)} == {1, 2}
    assert not job.orders(Kill)


def test_lost_rank_is_noticed_before_it_has_left_its_loop() -> None:
    """When a rank dies before it has left its loop, then no groups of the old round are used."""
    job = recovered_without_answers_of_rank_1("stop")
    assert strategies(job) == ["recover"]
    assert [order.round for order in job.orders(Rollback)] == [job.orders(Regroup)[-1].round]


def test_early_groups_are_given_up_for_a_last_checkpoint() -> None:
    """When the job is asked to end while groups are formed early, then it saves a last checkpoint
    after the comparison. A rank that still forms groups gives this up, because the orders to save
    come in a new round."""
    job = trained()
    job.script.muted = {(1, "regroup"), (2, "compare")}
    job.fault(0, "network")
    job.settle()
    job.stop()
    job.script.muted = {(1, "regroup")}
    job.repeat()
    job.settle()
    assert {order.round for order in job.orders(Regroup)} == {1}
    assert {order.round for order in job.orders(Save)} == {2}
    assert job.over is not None
    assert job.over.result == "cancelled"


def test_rank_with_a_wrong_copy_fetches_after_early_groups() -> None:
    """When the comparison finds a wrong copy, then the rank fetches the right one. The groups that
    were formed early are kept, because all processes stay."""
    job = trained()
    job.ranks[2].state.content = "damaged"
    job.fault(0, "network")
    job.settle()
    job.train()
    assert [order.to for order in job.orders(Fetch)] == [(2,)]
    assert [order.round for order in job.orders(Regroup)] == [1]
    assert strategies(job) == ["retry"]


def test_failure_to_form_groups_early_counts_as_a_failed_attempt() -> None:
    """When groups cannot be formed early, then a new round begins. In this round, the groups are
    formed only after the comparison."""
    job = trained()
    job.script.failures[1, "regroup"] = ["connection refused"]
    job.fault(0, "network")
    job.settle()
    job.train()
    assert [(order.round, order.step) for order in job.orders(Regroup)] == [(1, 4), (2, 4)]
    said = orders_to_ranks(job)
    second = said.index("Freeze", 1)
    assert said[second : second + 4] == ["Freeze", "Stop", "Compare", "Regroup"]
    assert strategies(job) == ["retry"]


def test_time_limit_of_early_groups_begins_when_all_ranks_have_left_their_loops() -> None:
    """When a rank evaluates for an hour before it leaves its loop, then the other ranks may wait
    for it in the forming of groups."""
    job = trained(world=3, after=3600.0)
    job.ranks[0].loop.after = True
    job.script.muted = {(0, "stop"), (1, "regroup")}
    job.fault(2, "network")
    job.settle()
    job.let_pass(3000.0)
    assert job.doing == "clearing"
    assert [order.round for order in job.orders(Regroup)] == [1]
    assert job.orders(Compare)


def test_ranks_form_other_groups_when_they_return_to_another_step() -> None:
    """When a rank has lost the state of the last step, then all return to another step than was
    expected. They get a new order in a new round."""
    job = trained(keeps=2)
    for one in job.ranks.values():
        one.state.torn = True
    job.fault(0, "network")
    job.settle()
    job.train()
    steps = [(order.round, order.step) for order in job.orders(Regroup)]
    assert steps[-1][1] == job.orders(Rollback)[-1].step + 1
    assert len({round_ for round_, _ in steps}) == len(steps)


def test_failed_groups_are_not_ordered_again_while_ranks_digest_their_copies() -> None:
    """When a rank could not form groups and another still digests its copies, then the order is not
    repeated to the first rank: it would only report the same failure again."""
    job = trained()
    job.script.muted = {(3, "compare"), (2, "regroup")}
    job.script.failures[1, "regroup"] = ["connection refused"]
    job.fault(0, "network")
    job.settle()
    owed = [order for order in job.machine.outstanding() if isinstance(order, Regroup)]
    assert [order.to for order in owed] == [(2,)]


def test_rank_that_cannot_digest_because_of_lost_groups_is_not_ended() -> None:
    """When a rank does not compare within the limit and the groups can never be formed, then the
    rank may be waiting for them. So a new round begins, and the rank is not ended."""
    job = trained()
    job.script.muted = {(3, "compare"), (3, "regroup")}
    job.script.failures[1, "regroup"] = ["connection refused"]
    job.fault(0, "network")
    job.settle()
    job.wait()
    job.script.muted = set()
    job.settle()
    job.train()
    assert not job.orders(Kill)
    assert job.state is State.HEALTHY
    assert strategies(job) == ["retry"]


def test_groups_are_not_formed_early_when_a_rank_fails_too_often() -> None:
    """When a rank has caused too many incidents, then it is not retried, so groups are not formed
    before the strategy is chosen."""
    job = trained(flaps=0)
    job.script.muted = {(3, "compare")}
    job.fault(0, "network")
    job.settle()
    assert not job.orders(Regroup)


def test_ranks_that_digest_have_more_time_to_stop_in_a_new_round() -> None:
    """When a new round begins while a rank digests its copies, then it has the time of a repair to
    stop, in this round and in the next. So the last checkpoint is not lost."""
    job = trained()
    job.script.muted = {(3, "compare")}
    job.fault(0, "network")
    job.settle()
    for epoch in (2, 3):  # new controllers that could not read all events begin new rounds
        job.script.muted = {(3, "stop")}
        job.lead(epoch, lost=1)
        job.settle()
        assert job.machine.incident.tasks["stop"].limit == 310.0
    job.script.muted = set()
    job.repeat()
    job.settle()
    assert not job.orders(Kill)
    assert job.over is not None
    assert job.over.result == "dumped"
