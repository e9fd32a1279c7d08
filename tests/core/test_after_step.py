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


def test_rank_that_evaluates_is_not_treated_as_hung() -> None:
    """When a rank is lost while another rank evaluates, then the job waits for the evaluation as
    long as that rank has announced. The evaluating rank then keeps its process."""
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


def test_hung_rank_is_ended_in_time_while_another_rank_evaluates() -> None:
    """When one rank evaluates and another rank does not leave its loop, then the other rank is
    ended within the usual time."""
    job = trained(after=3600.0)
    job.ranks[0].loop.after = True
    job.script.muted = {(0, "stop"), (2, "stop")}
    job.kill(3)
    job.settle()
    job.wait()
    assert [order.rank for order in job.orders(Kill)] == [2]


def test_rank_is_ended_when_its_evaluation_exceeds_the_announced_time() -> None:
    """When a rank evaluates for longer than the 100 s that it has announced, then its process is
    ended."""
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


def test_ranks_that_evaluate_together_get_the_longest_announced_time() -> None:
    """When two ranks evaluate and have announced 1000 s and 100 s, then the job waits 1000 s for
    both, because one may wait for the other."""
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


def test_after_step_function_is_not_repeated_when_all_ranks_completed_it() -> None:
    """When a rank is lost in the next step, then the function after the step is not called again."""
    job = trained(after=60.0)
    job.kill(3)
    job.settle()
    assert again(job) == [False]


def test_after_step_function_is_repeated_when_the_lost_rank_was_in_it() -> None:
    """When a rank is lost inside the function after the step and the others have completed it, then
    all ranks call the function again."""
    job = trained(after=60.0)
    job.ranks[3].loop.after = True
    job.kill(3)
    job.settle()
    assert again(job) == [True]


def test_after_step_function_is_repeated_when_a_remaining_rank_was_cut_off() -> None:
    """When a rank is lost and another rank was cut off in the function after the step or in the
    tail, then all ranks call the function again. A later fault does not change this."""
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


def test_after_step_function_is_repeated_when_a_rank_stopped_before_it() -> None:
    """When a rank is lost while another rank is in the tail, then the other rank stops at the end
    of the tail. All ranks call the function after the step again."""
    job = trained(after=60.0)
    job.ranks[1].loop.tail = True
    job.kill(3)
    job.settle()
    assert not job.ranks[1].loop.tail
    assert again(job) == [True]


def test_new_process_without_state_does_not_cause_a_repeated_call() -> None:
    """When a second fault comes before the new process of a lost rank has its state, then the
    function that all ranks had completed is not called again."""
    job = trained(after=60.0)
    job.script.muted = {(3, "fetch")}
    job.kill(3)
    job.settle()
    job.script.muted = set()
    job.fault(2, "network")
    job.settle()
    assert len(job.orders(Freeze)) == 2
    assert again(job) == [False]


def test_after_step_function_is_repeated_when_a_node_is_lost() -> None:
    """When a node is lost, then the progress of its ranks is unknown, and all ranks call the
    function after the step again."""
    job = trained(placement={0: (0, 1, 2), 1: (3,)}, spare={0: 1}, after=60.0)
    job.lose_node(1)
    job.settle()
    assert again(job) == [True]


def test_after_step_function_is_not_repeated_for_ranks_that_leave() -> None:
    """When the ranks of a lost node are restarted, lost again and leave the job, then the members,
    which have completed the function, do not call it again."""
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
def test_after_step_function_is_repeated_only_after_the_first_step(steps: int) -> None:
    """When a rank is lost with its node before the first step, then no function is called again.
    After the first step, all ranks call the function again."""
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


def test_after_step_function_of_one_rank_is_repeated() -> None:
    """When only one rank has a function after its steps and another rank is lost with its node,
    then the function is called again."""
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


def test_job_without_an_after_step_function_has_no_repeated_call() -> None:
    """When no rank has a function after its steps, then a rank that was cut off in the tail causes
    no repeated call."""
    job = trained()
    job.ranks[1].loop.tail = job.ranks[1].loop.cut = True
    job.kill(3)
    job.settle()
    assert again(job) == [False]


def test_resumed_job_calls_the_after_step_function_of_its_checkpoint() -> None:
    """When a job resumes from a checkpoint, then all ranks call the function after that step,
    because the earlier run may not have called it. A fault before the next step does not change
    this."""
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
