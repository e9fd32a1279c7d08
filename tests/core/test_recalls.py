"""
The rank-local state of a lost node, which another node has kept: when it is asked for, when it
counts, and what is done without it.
"""

from typing import Any

import pytest

from tests.core.lives import strategies, trained, tried
from tft.core.job.nodes import Nodes
from tft.core.job.policy import Policy
from tft.core.job.training import Rollbacks
from tft.core.job.transitions import State
from tft.protocol.messages import Exited, NodeJoined, Recall, Recalled, Rollback, Save
from tft.testing.scripted import Kept, ScriptedJob

PLACEMENT = {0: (0, 1), 1: (2, 3), 2: ()}
ON = frozenset({"retry", "recover", "dump"})
FREEZE = Policy().freeze


def spared(**facts: Any) -> ScriptedJob:  # Any: named fields
    """
    Return a healthy job on two nodes after step 3, with a third node that has room for two ranks.
    The rank-local state of its ranks cannot be made anew.
    """
    return trained(
        **{"placement": PLACEMENT, "spare": {2: 2}, "derives": False, "enable": ON, **facts}
    )


def keeps(job: ScriptedJob, *steps: int, **facts: Any) -> None:  # Any: fields of `Kept`
    """
    Let the keeper of node 1 have the rank-local state of ranks 2 and 3 of these steps.
    """
    for rank in (2, 3):
        state = {step: f"{rank}{step}" for step in steps}
        job.script.kept[rank] = Kept(local_state=state, **facts)


def test_keeper_is_the_next_node_of_the_ring() -> None:
    """When nodes have joined, then the keeper of each is the next one that is not lost, and the
    keeper of the last is the first. A single node has none."""
    nodes = Nodes(ranks={0: (0,), 2: (2,), 1: (1,), 5: ()})
    assert nodes.kept_by() == {0: 1, 1: 2, 2: 5, 5: 0}
    nodes.lost = {2}
    assert nodes.kept_by() == {0: 1, 1: 5, 5: 0}
    assert [nodes.keeper(node) for node in (0, 1, 2, 5)] == [1, 5, 5, 0]
    nodes.lost = {1, 2, 5}
    assert nodes.kept_by() == {}
    assert nodes.keeper(0) is None
    assert nodes.keeper(5) == 0


def test_captures_from_before_a_rollback_count_up_to_its_step() -> None:
    """When ranks have gone back to a step, then a capture that was read before that counts only up
    to this step. A capture that was read since then counts."""
    rollbacks = Rollbacks()
    rollbacks.went_back((0, 1), 0)
    assert rollbacks.kept((0, 1), 9)
    rollbacks.went_back((2, 3), 7)
    rollbacks.went_back((4, 1), 5)
    rollbacks.went_back((5, 1), 8)
    assert [rollbacks.kept((0, 1), step) for step in (5, 6)] == [True, False]
    assert [rollbacks.kept((2, 3), step) for step in (5, 6)] == [True, False]
    assert [rollbacks.kept((4, 1), step) for step in (8, 9)] == [True, False]
    assert rollbacks.kept((5, 1), 9)
    assert not rollbacks.kept((0, 0), 1)


def test_lost_node_is_replaced_with_the_state_that_its_keeper_reports() -> None:
    """When a node is lost and its keeper has the rank-local state of the last step, then its ranks
    start elsewhere with this state. No step is lost, and nothing is made anew."""
    job = spared()
    keeps(job, 2, 3)
    job.lose_node(1)
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert [(order.node, order.lost, order.ranks) for order in job.orders(Recall)] == [
        (2, 1, (2, 3))
    ]
    rollback = job.orders(Rollback)[-1]
    assert (rollback.step, rollback.derive) == (3, ())
    assert rollback.local_state == {2: "23", 3: "33"}
    (report,) = job.reports()
    assert (report["steps_lost"], report["inexact"], report["unprotected"]) == (0, [], [])


def test_last_checkpoint_has_the_state_that_the_keeper_reports() -> None:
    """When a node is lost and no node has room for its ranks, then the last checkpoint contains the
    rank-local state of these ranks."""
    job = spared(placement={0: (0, 1), 1: (2, 3)}, spare={})
    keeps(job, 3)
    job.lose_node(1)
    job.settle()
    assert strategies(job) == ["dump"]
    assert [order.local_state for order in job.orders(Save) if order.local_state] == [
        {2: "23", 3: "33"}
    ]


def test_choice_waits_for_the_keeper_and_the_order_is_repeated() -> None:
    """When the keeper has not answered, then no strategy is chosen and the order is repeated for
    the ranks that are missing. With the last answer the choice is made."""
    job = spared()
    keeps(job, 3)
    job.script.forgetful = {2}
    job.lose_node(1)
    job.settle()
    assert job.doing == "clearing"
    assert [o.ranks for o in job.machine.outstanding() if isinstance(o, Recall)] == [(2, 3)]
    job.script.forgetful = set()
    job.repeat()
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]


@pytest.mark.parametrize("lasting", [FREEZE - 0.1, FREEZE])
def test_keeper_that_does_not_answer_is_waited_for_as_long_as_for_a_freeze(lasting: float) -> None:
    """When the keeper does not answer within the limit of a freeze, then the strategy is chosen
    without it, and the report says which state was lost and why."""
    job = spared()
    job.script.forgetful = {2}
    job.lose_node(1)
    job.settle()
    began = job.now
    assert job.machine.next_deadline() is not None
    job.let_pass(lasting)
    job.settle()
    assert strategies(job) == (["dump"] if job.now >= began + FREEZE else [])
    if lasting < FREEZE:
        return
    (report,) = job.reports()
    assert report["unprotected"] == [
        "the RNG and data position of ranks [2, 3] were lost with node 1: node 2, which kept a "
        "copy, has not reported it in time"
    ]
    assert "were lost with its node" in tried(job)["recover"]
    assert job.facts("local_state_not_recalled")[0]["ranks"] == [2, 3]


@pytest.mark.parametrize("late", [False, True])
def test_report_of_the_keeper_counts_until_the_ranks_roll_back(late: bool) -> None:
    """When the keeper answers after its limit, and before the ranks roll back, then its state is
    used. Later it is not: the ranks have made theirs anew."""
    job = spared(derives=True)
    job.script.forgetful = {2}
    job.lose_node(1)
    job.settle()
    job.let_pass(FREEZE)
    while job.state is not (State.ROLLING_BACK if late else State.REPAIRING):
        job.obey_next()
    for rank in (2, 3):
        job.report(
            Recalled(
                node=2, lost=1, rank=rank, incarnation=0, incident=0, round=1,
                local_state={3: f"{rank}3"}, at=job.now,
            )
        )  # fmt: skip
    job.settle()
    job.train()
    (rollback,) = job.orders(Rollback)
    assert (rollback.derive, rollback.local_state) == (
        ((2, 3), {}) if late else ((), {2: "23", 3: "33"})
    )


def test_new_leader_gives_the_keeper_its_time_again() -> None:
    """When another controller leads, then the limit of the recall begins anew."""
    job = spared()
    job.script.forgetful = {2}
    job.lose_node(1)
    job.settle()
    job.let_pass(FREEZE - 0.5)
    job.lead(2)
    job.let_pass(FREEZE - 0.5)
    job.settle()
    assert job.doing == "clearing"
    job.let_pass(0.5)
    job.settle()
    assert strategies(job) == ["dump"]


def test_keeper_that_is_lost_too_is_not_waited_for() -> None:
    """When the keeper of a lost node is lost as well, then its answer is not waited for, and the
    report says so. The job does what it does without kept state."""
    job = spared(placement={0: (0, 1), 1: (2,), 2: (3,), 3: ()}, spare={3: 2})
    keeps(job, 3)
    job.script.forgetful = {2}
    job.lose_node(1)
    job.lose_node(2)
    job.settle()
    assert strategies(job) == ["dump"]
    assert [(order.node, order.ranks) for order in job.orders(Recall)] == [(2, (2,)), (3, (3,))]
    (report,) = job.reports()
    assert report["unprotected"] == [
        "the RNG and data position of ranks [2] were lost with node 1: node 2, which kept a "
        "copy, was lost too"
    ]


def test_state_of_another_timeline_is_not_used() -> None:
    """When the keeper has captures from before a rollback, then those of steps after the rollback
    are not used: they belong to steps that were given up."""
    job = spared()
    job.kill(0)
    job.settle()
    job.train(2)
    step = job.ranks[0].step
    assert (strategies(job), step) == (["recover"], 5)
    keeps(job, step, attempt=(0, 1))
    job.lose_node(1)
    job.settle()
    assert strategies(job) == ["recover", "dump"]
    assert "were lost with its node" in tried(job)["recover"]


def test_state_of_a_process_that_did_not_hold_the_rank_is_not_used() -> None:
    """When the captures that were kept are of another process than the one that held the rank, then
    they are not used."""
    job = spared()
    keeps(job, 3, incarnation=1)
    job.lose_node(1)
    job.settle()
    assert strategies(job) == ["dump"]


def test_earlier_step_is_used_and_the_report_says_why() -> None:
    """When the keeper has only an earlier step than the ranks have completed, of which all ranks
    keep copies, then all ranks return to it, and the report says why."""
    job = spared(keeps=2)
    keeps(job, 1, 2)
    job.lose_node(1)
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    (report,) = job.reports()
    assert (report["step"], report["steps_lost"]) == (3, 1)
    assert report["unprotected"] == [
        "the state of step 3 is not used: no other node had the RNG and data position of ranks "
        "[2, 3] of this step when their node was lost"
    ]


def test_state_from_before_the_end_of_a_window_is_a_reservation() -> None:
    """When a rank's captures change after its all-reduces, and the keeper has only the one from
    before that, then the report has a reservation."""
    job = spared()
    keeps(job, 3, early=(3,))
    job.lose_node(1)
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    (report,) = job.reports()
    assert report["inexact"] == [
        "RNG and data position of ranks [2, 3] are those from before the end of step 3"
    ]


def test_report_of_the_page_itself_removes_the_reservation() -> None:
    """When the agent of a lost node reports the end of a process after all, then its captures count
    and there is no reservation."""
    job = spared()
    keeps(job, 3, early=(3,))
    job.script.slow = {2, 3}
    job.lose_node(1)
    job.settle()
    for rank in (2, 3):
        job.report(
            Exited(
                node=1, rank=rank, incarnation=0, code=-9, position=job.ranks[rank].position,
                stack="", local_state={3: "ff"}, at=job.now,
            )
        )  # fmt: skip
        job.arrive(rank)
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]


def test_node_lost_while_a_strategy_is_chosen_is_recalled_first() -> None:
    """When a node is lost while plugins are asked for advice, then they are asked again only when
    the keeper has answered."""
    job = spared(advised=True)
    keeps(job, 3)
    job.kill(0)
    job.settle()
    assert (job.doing, len(job.consulted)) == ("choosing", 1)
    job.script.forgetful = {2}
    job.lose_node(1)
    job.settle()
    job.lead(2)
    job.settle()
    assert (job.doing, len(job.consulted)) == ("choosing", 1)
    job.script.forgetful = set()
    job.repeat()
    job.settle()
    assert (job.doing, len(job.consulted)) == ("choosing", 2)


def test_another_agent_on_the_node_makes_its_keeper_report() -> None:
    """When another agent comes up on a node, then the pages are gone, and the state is taken from
    the keeper: the ranks start on the same node with it."""
    job = spared()
    keeps(job, 3)
    job.ranks[2].alive = job.ranks[3].alive = False
    job.report(NodeJoined(node=1, host="h", pid=2, ranks=(2, 3), at=job.now))
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert job.orders(Rollback)[-1].local_state == {2: "23", 3: "33"}
    assert job.ranks[2].node == 1
