"""
A hundred thousand random schedules of the simulated cluster.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tft.simulation.many import run_many, show
from tft.simulation.shrink import explain

SCHEDULES = (*range(400, 1200), *range(10_000, 110_000))
"""The seeds. `test_schedules.py` has the first 400."""


@pytest.mark.soak
@pytest.mark.timeout(7200)  # each schedule takes 25 ms on one core
def test_every_promise_is_kept_under_a_hundred_thousand_schedules(
    tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """When 250 times as many schedules run, then no promise is broken."""
    tally = run_many(SCHEDULES, jobs=os.cpu_count() or 1)
    tell(show(tally))
    broken = [explain(each.schedule, tmp_path) for each in tally.failed[:3]]
    assert not tally.failed, "\n".join([f"{len(tally.failed)} schedules", *broken])
