"""
The lease: when a controller that stands by takes over.
"""

from tft.core.job.events import Led
from tft.core.link.leases import Lease
from tft.simulation.story import SharedStory


def test_a_leader_that_is_heard_is_left_alone() -> None:
    """
    When the leader is heard again and again, then nobody claims anything.
    """
    lease = Lease(patience=3.0, at=0.0)
    for at in (1.0, 2.0, 4.5, 7.0):
        lease.heard(1, at)
        assert lease.claim(at + 2.0) is None
    assert lease.next_deadline() == 10.0


def test_silence_is_answered_with_the_next_epoch() -> None:
    """
    When the leader of epoch 4 is silent for longer than the patience, then epoch 5 is claimed.
    """
    lease = Lease(patience=3.0, at=0.0)
    lease.heard(4, 1.0)
    assert lease.claim(3.9) is None
    assert lease.claim(4.0) == 5


def test_a_leader_of_an_older_epoch_does_not_count() -> None:
    """
    When one that was followed by another still talks, then it does not pass for the leader.
    """
    lease = Lease(patience=3.0, at=0.0)
    lease.heard(2, 1.0)
    lease.heard(1, 3.5)
    assert lease.claim(4.0) == 3


def test_of_two_claims_one_is_taken_and_the_other_waits_again() -> None:
    """
    When two claim the same epoch, then the story takes the first, and the second goes on waiting,
    for the patience and for the epoch after that.
    """
    story, second = SharedStory(), Lease(patience=3.0, at=0.0)
    assert story.append(Led(at=3.0, epoch=1), 1)
    epoch = second.claim(3.0)
    assert epoch == 1
    assert not story.append(Led(at=3.0, epoch=epoch), epoch)
    second.heard(story.epoch, 3.0)
    assert second.claim(5.9) is None
    assert second.claim(6.0) == 2


def test_whoever_was_followed_writes_nothing_more() -> None:
    """
    When another epoch has begun, then the story takes nothing from the older one.
    """
    story = SharedStory()
    assert story.append(Led(at=0.0, epoch=1), 1)
    assert story.append(Led(at=1.0, epoch=2), 2)
    assert not story.append(Led(at=2.0, epoch=1), 1)
    assert len(story.events) == 2
