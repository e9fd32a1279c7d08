"""
What has to have been heard before an incident is over, and who is let in then.
"""

from tests.core.lives import strategies, trained, tried
from tft.protocol.messages import Freeze, Release, Resume, Spawn, Trained

WITH_ROOM = {0: (0, 1), 1: (2, 3), 2: ()}


def test_a_step_that_is_heard_of_before_the_answer_is_no_success_yet() -> None:
    """
    When the answer of a rank to `Resume` is overtaken by the step it has done, then the job is
    healthy only when the answer is there, too: it says that it is in the loop.
    """
    job = trained()
    job.script.muted = {(2, "resume")}
    job.kill(1)
    job.settle()
    job.train()
    late = job.ranks[2]
    job.report(Trained(rank=2, incarnation=0, step=4, at=job.now))
    assert job.doing == "resuming"
    (resume,) = job.orders(Resume)
    job.report(late.answer(resume, "resume", None, found=("pass", ""), at=job.now))
    assert job.doing == "healthy"


def test_a_step_after_a_pause_is_no_success_before_all_are_released() -> None:
    """
    When the answer of a rank to `Release` is overtaken by the step it has done, then the job is healthy only when the
    answer is there, too.
    """
    job = trained()
    job.pause()
    job.settle()
    job.script.muted = {(2, "release")}
    job.go_on()
    job.settle()
    job.train()
    late = job.ranks[2]
    job.report(Trained(rank=2, incarnation=0, step=4, at=job.now))
    assert job.doing == "resuming"
    (release,) = job.orders(Release)
    job.report(late.answer(release, "release", None, found=("pass", ""), at=job.now))
    assert job.doing == "healthy"


def test_a_successor_that_was_given_up_is_not_let_in_when_it_is_ready_at_last() -> None:
    """
    When the node on which a process gets ready to take over is given up, and its agent ends
    nobody, then nobody stops for that process when it says that it is ready, and in the next
    incident it is not let in, either.
    """
    job = trained(5, placement={0: (0, 1), 1: (2, 3), 2: (4,)}, spare={2: 1})
    job.script.slow = {3}
    job.notice(3, "straggler")
    job.settle()
    job.script.deaf = {2}
    job.notice(4, "node", "its fan has failed")
    job.settle()
    job.wait()
    job.settle()
    job.train()
    assert job.doing == "healthy"
    job.arrive(3)
    assert job.doing == "healthy"
    job.fault(0, "network")
    job.settle()
    job.train()
    assert strategies(job) == ["scale_in", "retry"]


def test_nobody_is_followed_by_a_process_that_was_given_up() -> None:
    """
    When a straggler dies, and the process that was to take over from it was given up with its
    node, then another one is started.
    """
    job = trained(5, placement={0: (0, 1), 1: (2, 3), 2: (4,)}, spare={2: 1})
    job.script.slow = {3}
    job.notice(3, "straggler")
    job.settle()
    job.script.deaf = {2}
    job.notice(4, "node", "its fan has failed")
    job.kill(3)
    assert [(s.rank, s.node, s.incarnation) for s in job.orders(Spawn)] == [(3, 2, 1), (3, 1, 2)]


def test_those_who_come_back_are_named_in_order() -> None:
    """
    When ranks that had left are ready to come back, then the reason why everyone is stopped names
    them in their order.
    """
    job = trained(9, placement={0: (0, 2, 3, 4, 5, 6, 7), 1: (8, 1)})
    job.lose_node(1)
    job.settle()
    job.train()
    job.said.clear()
    job.pause()
    job.settle()
    job.come(1)
    job.settle()
    job.go_on()
    job.settle()
    job.train()
    assert [f.cause for f in job.orders(Freeze)][-1] == "ranks [1, 8] are ready to come back"


def test_what_is_decided_waits_for_the_end_of_whoever_was_taken_over_from() -> None:
    """
    When a rank is lost after another process has taken over from a straggler, whose end has not
    come in, then it is decided anew as soon as that has come.
    """
    job = trained(placement=WITH_ROOM, spare={2: 1})
    job.script.deaf = {1}
    job.notice(3, "straggler")
    job.settle()
    assert job.doing == "awaiting"
    job.kill(0)
    job.settle()
    assert job.machine.incident.decision.strategy == ""
    job.kill(3)
    assert job.machine.incident.decision.strategy == "recover"
    job.settle()
    job.train()
    assert strategies(job) == ["recover"]
    assert job.doing == "healthy"


def test_what_a_straggler_takes_with_it_ends_the_way_that_needed_it() -> None:
    """
    When the process that was taken over from cannot be ended, and what it had captured cannot be
    made anew, then nothing is left to migrate with: the reason stands beside it, and what the
    others hold is saved.
    """
    job = trained(placement=WITH_ROOM, spare={2: 1}, derives=False)
    job.script.deaf = {1}
    job.notice(3, "straggler")
    job.settle()
    assert job.doing == "awaiting"
    job.wait()
    job.settle()
    assert tried(job)["migrate"] == (
        "the RNG and data position of rank 3 at the end of step 3 were lost with its node"
    )
    assert job.over is not None
    assert job.over.result == "dumped"
