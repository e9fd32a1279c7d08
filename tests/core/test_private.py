"""
What a rank has captured of its own (RNG, data position): where it is when the rank has moved, and
who may make it anew.
"""

from tests.core.lives import strategies, take_over, trained, tried
from tft.core.job.policy import STRATEGIES
from tft.protocol.messages import Fetch, Load, Rollback, Spawn
from tft.testing.scripted import ScriptedJob

TWO_NODES = {0: (0, 1), 1: (2, 3)}
SEVEN = ("/run/checkpoints/step-00000007", 7)
NO_SHRINKING = frozenset({"retry", "recover", "dump"})
GONE = "the RNG and data position of rank 2 at the end of step 3 were lost with its node"


def test_what_cannot_be_made_anew_is_lost_with_its_node() -> None:
    """
    When a node is lost and its ranks could move, but the adaptor cannot make anew what they had
    captured, then nobody goes on without it: the others write a last checkpoint.
    """
    job = trained(placement={**TWO_NODES, 2: ()}, spare={2: 2}, derives=False, enable=NO_SHRINKING)
    job.lose_node(1)
    job.settle()
    assert strategies(job) == ["dump"]
    assert tried(job)["recover"] == GONE
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)


def test_room_that_comes_later_does_not_bring_back_what_was_captured() -> None:
    """
    When a node is lost and another one with room joins before it is decided what to do, then what
    the lost ranks had captured is as far away as before: no process is started in vain.
    """
    job = trained(placement=TWO_NODES, spare={2: 2}, derives=False, enable=NO_SHRINKING)
    job.script.muted = {(0, "stop")}
    job.lose_node(1)
    job.settle()
    job.come(2)
    assert job.doing == "clearing"
    job.script.muted = set()
    job.repeat()
    job.settle()
    assert strategies(job) == ["dump"]
    assert tried(job)["recover"] == GONE
    assert job.orders(Spawn) == []


def test_what_was_captured_where_a_process_could_not_be_ended_is_out_of_reach() -> None:
    """
    When a process cannot be ended, and its rank could only come back on another node, then what it
    had captured stays where it was: nobody goes on without it.
    """
    job = trained(placement={**TWO_NODES, 2: ()}, spare={2: 1}, derives=False, enable=NO_SHRINKING)
    job.script.deaf = {1}
    job.notice(3, "process", "its card is gone")
    job.settle()
    job.wait()
    job.settle()
    assert strategies(job) == ["dump"]
    assert tried(job)["recover"] == GONE.replace("rank 2", "rank 3")


def test_what_is_in_no_checkpoint_any_more_is_made_anew() -> None:
    """
    When a rank is lost before it has loaded the checkpoint that all begin with, and that one then
    turns out not to be whole, then others have what it shares, and its own is made anew.
    """
    job = ScriptedJob(2, resume=SEVEN, strategies=STRATEGIES)
    job.script.muted = {(1, "load")}
    job.start()
    job.script.muted = set()
    job.script.failures[1, "load"] = ["a digest differs"] * 2
    job.kill(1)
    job.settle()
    job.wait()
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert len(job.orders(Load)) == 3
    assert [fetch.to for fetch in job.orders(Fetch)] == [(1,)]
    assert job.orders(Rollback)[-1].derive == (1,)
    assert {rank.step for rank in job.ranks.values()} == {8}


def test_who_comes_back_to_a_job_that_has_gone_on_is_not_what_the_checkpoint_holds() -> None:
    """
    When a rank was lost before it had captured anything, and comes back when the others have
    trained on from the checkpoint, then it makes its own state anew, and nobody loads.
    """
    job = ScriptedJob(4, resume=SEVEN, strategies=STRATEGIES, placement={0: (0, 1, 2), 1: (3,)})
    job.script.muted = {(3, "load")}
    job.start()
    job.lose_node(1)
    job.settle()
    job.train(2)
    assert job.machine.members == {0, 1, 2}
    loads = len(job.orders(Load))
    job.script.muted = set()
    job.come(1)
    job.settle()
    job.train()
    assert strategies(job) == ["scale_in", "scale_out"]
    assert len(job.orders(Load)) == loads
    assert job.orders(Rollback)[-1].derive == (3,)
    assert job.doing == "healthy"


def taken_over(private: dict[int, str], *, derives: bool) -> ScriptedJob:
    """
    A job in which another process, on another node, has taken over from rank 1 at the end of step 3;
    the first has left this.
    """
    job = trained(
        placement={0: (0, 1), 1: ()}, spare={1: 1}, world=2, keeps=2, derives=derives,
        enable=frozenset({"migrate", "retry", "recover", "dump"}),
    )  # fmt: skip
    take_over(job, private)
    assert (job.doing, job.ranks[1].node) == ("resuming", 1)
    return job


def moved(private: dict[int, str], *, derives: bool) -> ScriptedJob:
    """
    The same, and before a step is done everyone has to go back to the one before.
    """
    job = taken_over(private, derives=derives)
    job.fault(0, "numeric", polluted=True)
    job.settle()
    return job


def test_what_was_told_of_a_rank_outlives_the_next_process_too() -> None:
    """
    When the process that has taken over is lost as well, and everyone has to go back to a step from
    before that, then what the first one had captured is still known.
    """
    job = taken_over({2: "ab", 3: "cd"}, derives=False)
    job.kill(1)
    job.settle()
    job.fault(0, "numeric", polluted=True)
    job.settle()
    assert (job.orders(Rollback)[-1].step, job.orders(Rollback)[-1].private) == (2, {1: "ab"})


def test_who_has_moved_is_told_what_it_had_captured_before_that() -> None:
    """
    When everyone goes back to a step from before a rank has moved, then the rank, whose new page has
    nothing of that, is told what it had captured.
    """
    job = moved({2: "ab", 3: "cd"}, derives=False)
    assert (job.orders(Rollback)[-1].step, job.orders(Rollback)[-1].private) == (2, {1: "ab"})
    job.train()
    assert strategies(job) == ["retry"]
    assert job.doing == "healthy"


def test_what_was_told_of_a_way_that_was_given_up_is_not_told_again() -> None:
    """
    When steps that a rank had captured elsewhere are trained anew, then it has captured them itself, and
    is not told what they were the first time.
    """
    job = moved({2: "ab", 3: "cd"}, derives=False)
    job.train()
    job.fault(0, "network")
    job.settle()
    assert (job.orders(Rollback)[-1].step, job.orders(Rollback)[-1].private) == (3, {})


def test_who_has_moved_makes_anew_what_was_not_told() -> None:
    """
    When everyone goes back to a step from before a rank has moved, and what it had captured then is
    known to nobody, then it is made anew where that can be; else there is no such way back.
    """
    job = moved({3: "cd"}, derives=True)
    assert job.orders(Rollback)[-1].derive == (1,)
    job.train()
    assert strategies(job) == ["retry"]
    job = moved({3: "cd"}, derives=False)
    assert tried(job)["retry"] == (
        "the RNG and data position of rank 1 at the end of step 2 were lost with its node"
    )
