"""
How a rank measures its own work in a step.
"""

from collections.abc import Iterator

import pytest

from tft.page import Page
from tft.protocol.messages import StepWork
from tft.worker import work_clock
from tft.worker.work_clock import WorkClock


class Rank:
    """
    A rank whose time and waits the test sets.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.waits = 0.0
        self.page = Page.create()
        self.clock = WorkClock(self.page)
        self.clock.meter = self
        patch.setattr(work_clock, "monotonic", lambda: self.now)

    def step_begins(self) -> None:
        pass

    def waited(self) -> float:
        return self.waits

    def works(self, seconds: float) -> None:
        self.now += seconds

    def waits_for_others(self, seconds: float) -> None:
        self.now += seconds
        self.waits += seconds


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    made = Rank(monkeypatch)
    yield made
    made.page.close()


def train(rank: Rank, step: int) -> None:
    """
    Compute a step: 1 s of input, 2 s of computing, 4 s of update, and waits everywhere.
    """
    rank.works(1)
    rank.waits_for_others(0.5)  # for the batch that another rank broadcasts
    rank.clock.computing()
    rank.works(1)
    rank.waits_for_others(8)
    rank.clock.computing()  # the second micro-batch
    rank.works(1)
    rank.clock.arrives()
    rank.waits_for_others(16)  # at the barrier
    rank.clock.opens()
    rank.works(4)
    rank.waits_for_others(32)  # for the parameters that other ranks update
    rank.clock.closes(step)


def test_own_work_is_the_step_without_its_waits(rank: Rank) -> None:
    """When a rank waits for others in each part of a step, then the parts have its own work only,
    and the waits are counted beside them. The tail and the functions after a step do not count."""
    rank.clock.step_begins()
    train(rank, 3)
    rank.works(64)
    rank.clock.step_begins()
    train(rank, 4)
    assert rank.page.work(0) == tuple(
        StepWork(step=step, input=1.0, compute=2.0, update=4.0, waited=56.5) for step in (3, 4)
    )


def test_the_first_step_is_not_measured(rank: Rank) -> None:
    """When a rank has entered the loop, or an incident has taken it out, then the step is not
    measured, since nobody knows when its work began."""
    train(rank, 1)
    rank.clock.step_begins()
    rank.works(1)
    rank.clock.forget()
    train(rank, 2)
    rank.clock.step_begins()
    train(rank, 3)
    assert [work.step for work in rank.page.work(0)] == [3]


def test_a_step_without_a_forward_pass_has_its_work_as_input(rank: Rank) -> None:
    """When the adaptor sees no forward pass in a step, then all work before the window is input."""
    rank.clock.step_begins()
    rank.works(3)
    rank.clock.arrives()
    rank.clock.opens()
    rank.clock.closes(1)
    assert rank.page.work(0) == (StepWork(step=1, input=3.0, compute=0.0, update=0.0, waited=0.0),)


def test_nothing_is_measured_if_the_adaptor_cannot_tell_waits(rank: Rank) -> None:
    """When the adaptor cannot say how long the rank waits, then no times are written."""
    rank.clock.meter = None
    rank.clock.step_begins()
    train(rank, 1)
    assert rank.page.worked() == 0
