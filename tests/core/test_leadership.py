"""
Controllers: the lease, and a controller that takes over from a lost one.
"""

from collections.abc import (
    Callable,
)

import pytest

from tests.core.lives import (
    trained,
)
from tft.core.job.events import (
    Led,
)
from tft.core.job.transitions import (
    State,
)
from tft.core.link.leases import (
    Lease,
)
from tft.protocol.messages import (
    EndNode,
    Freeze,
    Kill,
    Regroup,
    Spawn,
)
from tft.simulation.story import (
    SharedStory,
)
from tft.testing.scripted import (
    ScriptedJob,
)

# ---------------------------------------------------------------- a new controller


def test_new_leader_repeats_open_orders_in_its_epoch() -> None:
    """When another controller becomes the leader, then it repeats the unanswered orders to ranks
    and agents in its own epoch."""
    job = trained(placement={0: (0, 1), 1: (2, 3)})
    job.script.gone = {1}  # the agent of node 1 receives no orders
    job.kill(3)
    job.script.muted = {(1, "regroup")}
    job.fault(2, "network")
    job.settle()
    job.lead(7)
    assert job.machine.epoch == 7
    said = job.machine.outstanding()
    assert [type(order) for order in said] == [Spawn]
    assert {order.epoch for order in said} == {7}
    job.script.gone = set()
    job.repeat()
    job.settle()
    (regroup,) = job.machine.outstanding()
    assert isinstance(regroup, Regroup)
    assert (regroup.epoch, regroup.to) == (7, (1,))


def waits_for_groups() -> ScriptedJob:
    """
    Return a job in which rank 2 has not answered the order to form process groups.
    """
    job = trained()
    job.script.muted = {(2, "regroup")}
    job.fault(1, "network")
    job.settle()
    return job


def waits_for_a_process() -> ScriptedJob:
    """
    Return a job in which the new process of a rank is starting.
    """
    job = trained()
    job.script.slow = {2}
    job.kill(2)
    job.settle()
    return job


def waits_for_an_end() -> ScriptedJob:
    """
    Return a job in which an agent was ordered to end a process and has not confirmed its end.
    """
    job = trained(placement={0: (0, 1), 1: (2, 3)})
    job.script.deaf = {1}
    job.notice(3, "process", "its card is gone")
    job.settle()
    return job


def is_paused() -> ScriptedJob:
    """
    Return a paused job. It continues when a user resumes it, or after an hour.
    """
    job = trained()
    job.pause()
    job.settle()
    return job


def waits_for_a_node() -> ScriptedJob:
    """
    Return a starting job of two nodes, of which only one has arrived.
    """
    job = ScriptedJob(4, placement={0: (0, 1), 1: (2, 3)})
    job.lead(1)
    job.come(0)
    job.reopen_store(1)
    job.settle()
    return job


@pytest.mark.parametrize(
    ("waits", "limit"),
    [
        (waits_for_a_node, 3600.0),
        (waits_for_groups, 60.0),
        (waits_for_a_process, 300.0),
        (waits_for_an_end, 10.0),
        (is_paused, 3600.0),
    ],
)
def test_full_limit_starts_again_with_a_new_leader(
    waits: Callable[[], ScriptedJob], limit: float
) -> None:
    """When another controller becomes the leader just before a deadline, then the full limit starts
    again. No order is sent before the new deadline."""
    job = waits()
    state, orders = job.state, len(job.said)
    job.now += limit - 1.0
    job.lead(2)
    deadline = job.now + limit
    assert job.machine.next_deadline() == pytest.approx(deadline)
    job.let_pass(limit - 0.1)
    assert (job.state, len(job.said)) == (state, orders)
    assert job.machine.next_deadline() == pytest.approx(deadline)
    job.wait()
    assert len(job.said) > orders


def test_new_leader_waits_until_the_ranks_have_left() -> None:
    """When another controller becomes the leader while the ranks leave, then the job is over when
    the ranks have left, and not before."""
    job = trained(enable=set())
    job.script.muted = {(2, "end")}
    job.kill(1)
    job.settle()
    assert job.state is State.EXITING
    job.lead(2)
    before = job.over
    job.kill(2)
    over = job.over
    assert before is None
    assert over is not None
    assert (over.result, over.code) == ("failed", 4)


def test_new_leader_of_a_finished_job_repeats_its_end() -> None:
    """When the controller is lost just after the job is over, then the next controller repeats the
    result and the orders to end the nodes, in its own epoch."""
    job = trained()
    job.finish()
    assert job.over is not None
    node, over = job.machine.handle(Led(at=job.now, epoch=5))
    assert isinstance(node, EndNode)
    assert node.epoch == 5
    assert over == job.over
    assert job.machine.next_deadline() is None


def test_new_leader_of_a_healthy_job_asks_nothing() -> None:
    """When another controller becomes the leader while all ranks train, then no order is sent and
    no deadline is set."""
    job = trained()
    job.lead(2)
    assert (job.orders(Freeze), job.orders(Kill)) == ([], [])
    assert job.machine.outstanding() == []
    assert job.machine.next_deadline() is None


# ---------------------------------------------------------------- the lease


def test_no_epoch_is_claimed_while_the_leader_is_heard() -> None:
    """When messages of the leader arrive again and again, then no controller claims a new epoch."""
    lease = Lease(patience=3.0, at=0.0)
    for at in (1.0, 2.0, 4.5, 7.0):
        lease.heard(1, at)
        assert lease.claim(at + 2.0) is None
    assert lease.next_deadline() == 10.0


def test_leader_that_has_lost_events_saves_a_last_checkpoint() -> None:
    """When a new leader has lost events of the story, then it freezes all ranks with a number that is
    higher than any that a lost event can have begun. The survivors save a last checkpoint."""
    job = trained()
    job.kill(1)
    incident = job.machine.incident.number
    job.lead(7, lost=5)
    freeze = job.orders(Freeze)[-1]
    assert (freeze.incident, freeze.epoch) == (incident + 6, 7)
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)
    assert job.over.why.startswith(
        "the story of the run is damaged, and 5 of its events could not be read; a last checkpoint"
    )


@pytest.mark.parametrize("when", ["start", "save"])
def test_leader_that_has_lost_events_ends_a_job_that_cannot_be_saved(when: str) -> None:
    """When events are lost before any rank is ready, or while a last checkpoint is being written,
    then the job fails, and the reason names the damage."""
    job = ScriptedJob(2) if when == "start" else trained()
    if when == "save":
        job.script.muted = {(0, "save")}
        job.stop()
        job.settle()
        assert job.state is State.DUMPING
    job.lead(2, lost=3)
    job.settle()
    assert job.machine.outcome is not None
    assert job.machine.outcome.why == "3 events of the damaged story could not be read"
    assert job.machine.outcome.result == ("failed" if when == "start" else "cancelled")


def test_next_epoch_is_claimed_when_the_leader_is_silent() -> None:
    """When the leader of epoch 4 is silent for longer than the patience, then epoch 5 is claimed."""
    lease = Lease(patience=3.0, at=0.0)
    lease.heard(4, 1.0)
    assert lease.claim(3.9) is None
    assert lease.claim(4.0) == 5


def test_leader_of_an_older_epoch_is_ignored() -> None:
    """When a controller of an older epoch still sends messages, then they do not count as messages
    of the leader. The next epoch is claimed after the patience."""
    lease = Lease(patience=3.0, at=0.0)
    lease.heard(2, 1.0)
    lease.heard(1, 3.5)
    assert lease.claim(4.0) == 3


def test_first_of_two_claims_is_accepted() -> None:
    """When two controllers claim the same epoch, then the story, the shared record of events,
    accepts the first claim. The second controller waits for the patience again and then claims the
    next epoch."""
    story, second = SharedStory(), Lease(patience=3.0, at=0.0)
    assert story.append(Led(at=3.0, epoch=1), 1)
    epoch = second.claim(3.0)
    assert epoch == 1
    assert not story.append(Led(at=3.0, epoch=epoch), epoch)
    second.heard(story.epoch, 3.0)
    assert second.claim(5.9) is None
    assert second.claim(6.0) == 2


def test_story_refuses_events_of_an_older_epoch() -> None:
    """When another epoch has begun, then the story, the shared record of events, accepts no event
    of the older epoch."""
    story = SharedStory()
    assert story.append(Led(at=0.0, epoch=1), 1)
    assert story.append(Led(at=1.0, epoch=2), 2)
    assert not story.append(Led(at=2.0, epoch=1), 1)
    assert len(story.events) == 2
