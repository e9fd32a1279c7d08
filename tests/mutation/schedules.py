"""
The first of the schedules of `tests/sim`, one test for each: what they run of the judgement, and
how long, is told apart, and a mutant is tried with those that reach it.
"""

import pytest

from tft.testing.cluster.run import run
from tft.testing.cluster.schedule import draw

SCHEDULES = 100
"""Some four seconds, which every mutant costs that survives them."""


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_every_promise_is_kept_under_this_schedule(seed: int) -> None:
    """
    When what this seed draws goes wrong, then no promise is broken.
    """
    assert not run(draw(seed)).broken
