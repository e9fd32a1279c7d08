"""
Thousands of schedules nobody thought of: under each, everything that tft promises is kept.
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

SCHEDULES = 2000


pytestmark = pytest.mark.timeout(300)  # half a minute on two cores that have nothing else to do


@pytest.fixture(scope="module")
def tally(tell: Callable[[str], None]) -> Tally:
    """
    What came of them.
    """
    tally = run_many(range(SCHEDULES), jobs=os.cpu_count() or 1)
    tell(show(tally))
    return tally


@pytest.fixture(scope="module")
def written(tell: Callable[[str], None]) -> Tally:
    """
    What came of the small ones that were written for what hardly ever happens.
    """
    tally = run_many((), jobs=os.cpu_count() or 1, written=rare())
    tell(show(tally))
    return tally


def test_every_promise_is_kept_under_every_schedule(
    tally: Tally, written: Tally, tmp_path: Path
) -> None:
    """
    When ranks, nodes, links and controllers fail at any moment, together and in any order, then
    no promise is broken; one that is comes with its smallest schedule and its story.
    """
    failed = [*tally.failed, *written.failed]
    broken = [explain(each.schedule, tmp_path) for each in failed[:3]]
    assert not failed, "\n".join([f"{len(failed)} schedules", *broken])


def test_every_event_comes_in_every_state_in_which_it_can(
    tally: Tally, written: Tally, tell: Callable[[str], None]
) -> None:
    """
    When thousands of schedules have run, then every kind of event has come in every state of the
    job machine, but for those pairs that the table says cannot be; and none of these has.
    """
    both = Tally()
    both.merge(tally)
    both.merge(written)
    tell(show_pairs(both))
    assert both.missed == UNREACHABLE.keys()


def test_the_schedules_are_large_and_rough() -> None:
    """
    When schedules are drawn, then half of them have 16 ranks or more and a quarter 48 or more, and
    none has more than five faults.
    """
    drawn = [draw(seed) for seed in range(SCHEDULES)]
    worlds = sorted(schedule.world for schedule in drawn)
    assert worlds[len(worlds) // 2] >= 16
    assert worlds[len(worlds) * 3 // 4] >= 48
    faults = [sum(m.what not in ASKED for m in schedule.mishaps) for schedule in drawn]
    assert (min(faults), max(faults)) == (0, 5)


def test_two_faults_come_to_pass_in_a_schedule_or_more(tally: Tally) -> None:
    """
    When schedules run, then on average two faults come to pass in each, or more: those that nothing
    was left for are not counted, neither is what somebody has asked for.
    """
    assert sum(faults * runs for faults, runs in tally.faults.items()) >= 2 * tally.runs
    assert set(tally.faults) == set(range(6))


def test_a_seed_decides_everything() -> None:
    """
    When the same schedule runs twice, then the same happens twice.
    """
    for seed in range(20):
        first, second = run(draw(seed)), run(draw(seed))
        assert (first.result, first.seconds, first.seen) == (
            second.result, second.seconds, second.seen,
        )  # fmt: skip
