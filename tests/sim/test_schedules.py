"""
Thousands of schedules nobody thought of: under each, everything that tft promises is kept.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tft.testing.cluster.many import Tally, run_many
from tft.testing.cluster.run import run
from tft.testing.cluster.schedule import draw
from tft.testing.cluster.shrink import explain

SCHEDULES = 2000


pytestmark = pytest.mark.timeout(300)  # half a minute on two cores that have nothing else to do


@pytest.fixture(scope="module")
def tally(tell: Callable[[Tally], None]) -> Tally:
    """
    What came of them.
    """
    tally = run_many(range(SCHEDULES), jobs=os.cpu_count() or 1)
    tell(tally)
    return tally


def test_every_promise_is_kept_under_every_schedule(tally: Tally, tmp_path: Path) -> None:
    """
    When ranks, nodes, links and controllers fail at any moment, together and in any order, then
    no promise is broken; one that is comes with its smallest schedule and its story.
    """
    broken = [explain(each.schedule, tmp_path) for each in tally.failed[:3]]
    assert not tally.failed, "\n".join([f"{len(tally.failed)} schedules", *broken])


def test_the_schedules_are_large_and_rough(tally: Tally) -> None:
    """
    When schedules are drawn, then half of them have 16 ranks or more and a quarter 48 or more, and
    two things go wrong in each on average, or more.
    """
    worlds = sorted(tally.worlds)
    assert worlds[len(worlds) // 2] >= 16
    assert worlds[len(worlds) * 3 // 4] >= 48
    assert sum(count * times for count, times in tally.mishaps.items()) >= 2 * tally.runs


def test_a_seed_decides_everything() -> None:
    """
    When the same schedule runs twice, then the same happens twice.
    """
    for seed in range(20):
        first, second = run(draw(seed)), run(draw(seed))
        assert (first.result, first.seconds, first.seen) == (
            second.result, second.seconds, second.seen,
        )  # fmt: skip
