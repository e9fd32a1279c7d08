"""
What has to have been heard before an incident is over, and who is let in then.
"""

from tests.core.lives import strategies, trained, tried
from tft.protocol.messages import Freeze, Release, Resume, Spawn, Trained

WITH_ROOM = {0: (0, 1), 1: (2, 3), 2: ()}


def test_step_report_before_the_resume_answer_does_not_end_the_incident() -> None:
    """When a rank reports a step before its answer to `Resume`, then the job is healthy only after
    the answer arrives."""
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


def test_step_report_before_the_release_answer_does_not_end_the_pause() -> None:
    """When a rank reports a step before its answer to `Release`, then the job is healthy only after
    the answer arrives."""
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


def test_successor_on_an_excluded_node_does_not_take_over_when_it_is_ready() -> None:
    """When the node of a starting successor is excluded and its agent does not end it, then the
    successor does not take over when it is ready. The next incident does not include it either."""
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


def test_straggler_gets_another_successor_when_the_first_is_excluded() -> None:
    """When a straggler dies after its successor was excluded with its node, then another process is
    started for the rank."""
    job = trained(5, placement={0: (0, 1), 1: (2, 3), 2: (4,)}, spare={2: 1})
    job.script.slow = {3}
    job.notice(3, "straggler")
    job.settle()
    job.script.deaf = {2}
    job.notice(4, "node", "its fan has failed")
    job.kill(3)
    assert [(s.rank, s.node, s.incarnation) for s in job.orders(Spawn)] == [(3, 2, 1), (3, 1, 2)]


def test_freeze_cause_names_returning_ranks_in_order() -> None:
    """When several ranks that had left are ready to return, then the cause of the freeze names them
    in rank order."""
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


def test_decision_waits_for_the_end_of_a_replaced_straggler() -> None:
    """When a rank is lost before the end of a replaced straggler is reported, then no strategy is
    chosen until this end is reported."""
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


def test_migration_fails_when_the_captured_state_of_a_straggler_is_lost() -> None:
    """When a replaced straggler cannot be ended and its captured state cannot be recreated, then
    `migrate` fails with a reason. The other ranks write a last checkpoint."""
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
