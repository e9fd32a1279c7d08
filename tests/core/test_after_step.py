"""
What is called after a step, such as an evaluation: who is given time for it, and who calls it again.
"""

from tests.core.lives import strategies, trained
from tft.core.job.policy import STRATEGIES, Policy
from tft.protocol.messages import Kill, Resume
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
    job.ranks[0].after = True
    job.muted = {(0, "stop")}
    job.kill(3)
    job.settle()
    job.wait()
    job.settle()
    assert job.orders(Kill) == []
    assert job.doing == "clearing"
    job.muted = set()
    job.ranks[0].heard.discard("stop")
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
    job.ranks[0].after = True
    job.muted = {(0, "stop"), (2, "stop")}
    job.kill(3)
    job.settle()
    job.wait()
    assert [order.rank for order in job.orders(Kill)] == [2]


def test_an_evaluation_that_takes_too_long_is_a_hang() -> None:
    """
    When a rank evaluates for longer than it has said, then it is ended.
    """
    job = trained(after=100.0)
    job.ranks[0].after = True
    job.muted = {(0, "stop")}
    job.kill(3)
    job.settle()
    began = job.now
    while not job.orders(Kill):
        job.wait()
    assert [order.rank for order in job.orders(Kill)] == [0]
    assert job.now - began > 99.9


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
    job.ranks[3].after = True
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
        setattr(job.ranks[1], cut, True)
        job.ranks[1].cut = True
        job.kill(3)
        job.settle()
        assert again(job) == [True], cut
        job.kill(2)  # the incident is not over, and rank 1 has been brought to the step since
        job.settle()
        assert again(job) == [True, True], cut


def test_a_rank_that_was_lost_with_its_node_may_not_have_been_through_it() -> None:
    """
    When a node is lost, nobody knows how far its ranks were: all call again what is called after the step.
    """
    job = trained(placement={0: (0, 1, 2), 1: (3,)}, spare={0: 1}, after=60.0)
    job.lose_node(1)
    job.settle()
    assert again(job) == [True]


def test_a_job_that_calls_nothing_is_not_told_to() -> None:
    """
    When nothing is called after steps, then a step that was not ended by all is no reason to.
    """
    job = trained()
    job.ranks[1].tail = job.ranks[1].cut = True
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
