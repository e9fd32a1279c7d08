"""
What is called after a step, such as an evaluation: who is given time for it, and who calls it again.
"""

import pytest

from tests.core.lives import strategies, trained
from tft.core.job.policy import STRATEGIES, Policy
from tft.protocol.messages import Freeze, Kill, Ready, Resume, ShardCopies
from tft.testing.scripted import ScriptedJob


def again(job: ScriptedJob) -> list[bool]:
    """
    Whether everyone was to call it again, at each order to go on.
    """
    return [order.again for order in job.orders(Resume)]


# ---------------------------------------------------------------- time


def test_a_rank_that_evaluates_is_not_taken_for_one_that_hangs() -> None:
    """
    When a rank is lost while another one evaluates, and that does not leave its loop within the time that others
    have, then it is waited for as long as it has said, and everyone goes on with it.
    """
    job = trained(after=3600.0)
    job.ranks[0].loop.after = True
    job.script.muted = {(0, "stop")}
    job.kill(3)
    job.settle()
    job.wait()
    job.settle()
    assert job.orders(Kill) == []
    assert job.doing == "clearing"
    why = "a function after a step is running there"
    assert job.facts("stop_waits") == [{"ranks": [0], "why": why}]
    assert job.facts("order_overdue") == []
    job.script.muted = set()
    job.ranks[0].orders.names.discard("stop")
    job.repeat()
    job.settle()
    job.train()
    assert job.orders(Kill) == []
    assert strategies(job) == ["recover"]


def test_whoever_else_hangs_meanwhile_is_ended_in_time() -> None:
    """
    When one rank evaluates and another one does not leave its loop, then that one is ended as always.
    """
    job = trained(after=3600.0)
    job.ranks[0].loop.after = True
    job.script.muted = {(0, "stop"), (2, "stop")}
    job.kill(3)
    job.settle()
    job.wait()
    assert [order.rank for order in job.orders(Kill)] == [2]


def test_an_evaluation_that_takes_too_long_is_a_hang() -> None:
    """
    When a rank evaluates for longer than it has said, then it is ended.
    """
    job = trained(after=100.0)
    job.ranks[0].loop.after = True
    job.script.muted = {(0, "stop")}
    job.kill(3)
    job.settle()
    began = job.now
    while not job.orders(Kill):
        job.wait()
    assert [order.rank for order in job.orders(Kill)] == [0]
    assert job.now - began > 99.9


def test_ranks_that_evaluate_together_get_the_longest_time_that_one_of_them_needs() -> None:
    """
    When two ranks evaluate, and one has announced 1000 s for it and the other 100 s, then both are waited for until
    1000 s are over: the second may wait for the first.
    """
    job = ScriptedJob(4, Policy(), strategies=STRATEGIES, after=100.0)
    job.script.slow = {0}
    job.start()
    slow = job.ranks[0]
    job.join(slow)
    slow.state.shards = ("dense",)
    shards = (ShardCopies(shard="dense", ranks=(0, 1, 2, 3)),)
    job.report(Ready(rank=0, incarnation=0, shards=shards, after=1000.0, at=job.now))
    job.settle()
    job.train(3)
    for rank in (0, 1):
        job.ranks[rank].loop.after = True
    job.script.muted = {(0, "stop"), (1, "stop")}
    job.kill(3)
    job.settle()
    began = job.now
    while not job.orders(Kill):
        job.wait()
    assert job.now - began > 999.9
    assert [order.rank for order in job.orders(Kill)] == [0, 1]


# ---------------------------------------------------------------- again


def test_nothing_is_called_again_where_all_have_been_through_it() -> None:
    """
    When a rank is lost in the step after, then nothing is called again.
    """
    job = trained(after=60.0)
    job.kill(3)
    job.settle()
    assert again(job) == [False]


def test_what_the_lost_rank_has_not_been_through_all_call_again() -> None:
    """
    When a rank is lost while it is called there, and the others are through with it, then all call it again.
    """
    job = trained(after=60.0)
    job.ranks[3].loop.after = True
    job.kill(3)
    job.settle()
    assert again(job) == [True]


def test_what_one_of_those_left_has_not_been_through_all_call_again() -> None:
    """
    When a rank is lost, and another one was cut off in what is called after the step, or in its tail, then all call
    it again, whatever has happened to it since.
    """
    for cut in ("after", "tail"):
        job = trained(after=60.0)
        setattr(job.ranks[1].loop, cut, True)
        job.ranks[1].loop.cut = True
        job.kill(3)
        job.settle()
        assert again(job) == [True], cut
        job.kill(2)  # the incident is not over, and rank 1 has been brought to the step since
        job.settle()
        assert again(job) == [True, True], cut


def test_what_a_rank_has_not_come_to_before_it_was_stopped_all_call_again() -> None:
    """
    When a rank is lost while another one is in the tail of the step, then the other one leaves its loop at the end of
    the tail: all call again what is called after the step.
    """
    job = trained(after=60.0)
    job.ranks[1].loop.tail = True
    job.kill(3)
    job.settle()
    assert not job.ranks[1].loop.tail
    assert again(job) == [True]


def test_a_new_process_that_has_no_state_yet_has_nothing_to_call_again() -> None:
    """
    When another fault comes before the process that replaces a lost one has its state, and all had been through the
    step, then nothing is called again.
    """
    job = trained(after=60.0)
    job.script.muted = {(3, "fetch")}
    job.kill(3)
    job.settle()
    job.script.muted = set()
    job.fault(2, "network")
    job.settle()
    assert len(job.orders(Freeze)) == 2
    assert again(job) == [False]


def test_a_rank_that_was_lost_with_its_node_may_not_have_been_through_it() -> None:
    """
    When a node is lost, nobody knows how far its ranks were: all call again what is called after the step.
    """
    job = trained(placement={0: (0, 1, 2), 1: (3,)}, spare={0: 1}, after=60.0)
    job.lose_node(1)
    job.settle()
    assert again(job) == [True]


def test_nothing_is_called_again_for_a_rank_that_has_left() -> None:
    """
    When the ranks of a lost node get other processes, and are lost again and leave the job, then the others, who have
    all been through it, do not call it again.
    """
    places = {0: (0, 1), 1: (2, 3), 2: ()}
    pairs = {rank: (rank // 2 * 2, rank // 2 * 2 + 1) for rank in range(4)}
    job = trained(placement=places, spare={2: 2}, columns=pairs, after=60.0)
    job.script.slow = {2, 3}
    job.lose_node(1)
    job.settle()
    job.lose_node(2)
    job.settle()
    assert job.machine.members == {0, 1}
    assert again(job) == [False]


@pytest.mark.parametrize("steps", [0, 1])
def test_before_the_first_step_nothing_was_called(steps: int) -> None:
    """
    When a rank is lost with its node before the first step, then there is nothing to call again; after the first step
    there is.
    """
    job = ScriptedJob(
        4,
        Policy(),
        strategies=STRATEGIES,
        placement={0: (0, 1, 2), 1: (3,)},
        spare={0: 1},
        after=60.0,
    )
    job.start()
    job.train(steps)
    job.said.clear()
    job.lose_node(1)
    job.settle()
    assert again(job) == [bool(steps)]


def test_what_one_rank_alone_calls_is_called_again() -> None:
    """
    When one rank alone calls something after its steps, and another rank is lost with its node, then it is called again.
    """
    job = ScriptedJob(
        4, Policy(), strategies=STRATEGIES, placement={0: (0, 1, 2), 1: (3,)}, spare={0: 1}
    )
    job.script.slow = {0}
    job.start()
    job.join(job.ranks[0])
    dense = ShardCopies(shard="dense", ranks=(0, 1, 2, 3))
    job.ranks[0].state.shards = ("dense",)
    job.report(Ready(rank=0, incarnation=0, shards=(dense,), after=60.0, at=job.now))
    job.settle()
    job.train(2)
    job.said.clear()
    job.lose_node(1)
    job.settle()
    assert again(job) == [True]


def test_a_job_that_calls_nothing_is_not_told_to() -> None:
    """
    When nothing is called after steps, then a step that was not ended by all is no reason to.
    """
    job = trained()
    job.ranks[1].loop.tail = job.ranks[1].loop.cut = True
    job.kill(3)
    job.settle()
    assert again(job) == [False]


def test_a_resumed_job_calls_what_is_called_after_the_step_of_its_checkpoint() -> None:
    """
    When a job goes on from a checkpoint, then nobody knows whether the earlier run has called what is called after that
    step: everyone calls it, also where a rank is lost before it has done a step.
    """
    job = ScriptedJob(
        4, Policy(), strategies=STRATEGIES, resume=("/checkpoints/step-7", 7), after=60.0
    )
    job.start()
    job.kill(3)
    job.settle()
    job.train()
    job.train()
    job.kill(2)
    job.settle()
    job.train()
    assert again(job) == [True, True, False]
