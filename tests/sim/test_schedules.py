"""
Random schedules of the simulated cluster: all promises of tft hold under each.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tft.core.job.transitions import UNREACHABLE
from tft.simulation.many import Tally, run_many, show, show_pairs
from tft.simulation.rare import rare
from tft.simulation.run import run
from tft.simulation.schedule import ASKED, draw
from tft.simulation.shrink import explain

SCHEDULES = 400
"""The number of drawn schedules. The soak has the next 800, and a hundred thousand others."""
SELDOM = (652, 707, 1082, 1136)
"""Seeds of schedules in which an event comes in a state in which no other schedule here has it."""

pytestmark = pytest.mark.timeout(300)  # it takes 15 seconds on two idle cores


@pytest.fixture(scope="module")
def tally(tell: Callable[[str], None]) -> Tally:
    """
    Print the results of the random schedules.
    """
    tally = run_many((*range(SCHEDULES), *SELDOM), jobs=os.cpu_count() or 1)
    tell(show(tally))
    return tally


@pytest.fixture(scope="module")
def written(tell: Callable[[str], None]) -> Tally:
    """
    Print the results of the small schedules that were written for rare events.
    """
    tally = run_many((), jobs=os.cpu_count() or 1, written=rare())
    tell(show(tally))
    return tally


def test_every_promise_is_kept_under_every_schedule(
    tally: Tally, written: Tally, tmp_path: Path
) -> None:
    """When ranks, nodes, links and controllers fail at any moment, together and in any order, then
    no promise is broken. For a broken promise the test prints its smallest schedule and its story.
    """
    failed = [*tally.failed, *written.failed]
    broken = [explain(each.schedule, tmp_path) for each in failed[:3]]
    assert not failed, "\n".join([f"{len(failed)} schedules", *broken])


def test_every_possible_pair_of_event_and_state_occurs(
    tally: Tally, written: Tally, tell: Callable[[str], None]
) -> None:
    """When hundreds of schedules have run, then every kind of event has come in every state of the
    job machine. The only missing pairs are exactly the pairs that the table `UNREACHABLE` lists."""
    both = Tally()
    both.merge(tally)
    both.merge(written)
    tell(show_pairs(both))
    assert both.missed == UNREACHABLE.keys()


def test_drawn_schedules_are_large_and_have_up_to_five_faults() -> None:
    """When schedules are drawn, then half of them have 16 ranks or more, and a quarter have 48 or
    more. None has more than five faults."""
    drawn = [draw(seed) for seed in range(SCHEDULES)]
    worlds = sorted(schedule.world for schedule in drawn)
    assert worlds[len(worlds) // 2] >= 16
    assert worlds[len(worlds) * 3 // 4] >= 48
    faults = [sum(m.what not in ASKED for m in schedule.mishaps) for schedule in drawn]
    assert (min(faults), max(faults)) == (0, 5)


def test_at_least_two_faults_occur_per_schedule_on_average(tally: Tally) -> None:
    """When schedules run, then at least two faults occur in each schedule on average. Faults
    without a remaining target, and events that a user requested, are not counted."""
    assert sum(faults * runs for faults, runs in tally.faults.items()) >= 2 * tally.runs
    assert set(tally.faults) == set(range(6))


def test_same_schedule_gives_the_same_run() -> None:
    """When the same schedule runs twice, then result, duration and observed events are equal."""
    for seed in range(20):
        first, second = run(draw(seed)), run(draw(seed))
        assert (first.result, first.seconds, first.seen) == (
            second.result, second.seconds, second.seen,
        )  # fmt: skip
