"""
Schedules that broke a promise once, each as small as it could be made.
"""

from dataclasses import replace

import pytest

from tft.testing.cluster.run import run
from tft.testing.cluster.schedule import QUICK, Mishap, Schedule, Trouble

FOUND = {
    "a last replacement that is on its way was counted as one too many, and nobody told a rank "
    "outside that all was done": Schedule(
        seed=0,
        world=2,
        steps=6,
        policy=replace(QUICK, respawns=1),
        mishaps=(Mishap(what="kill", target=1, when="phase", name="window", number=6),),
    ),
    "with its node every copy of a shard was ended": Schedule(
        seed=0,
        world=2,
        steps=6,
        policy=replace(QUICK, replace="node"),
        mishaps=(Mishap(what="kill", target=1, when="phase", name="sums", number=3),),
    ),
    "a rank that came back took the data position of a step it had not done": Schedule(
        seed=198,
        world=12,
        nodes=4,
        topology="unsharded",
        steps=4,
        policy=replace(QUICK, respawns=1),
        standbys=2,
        trouble=Trouble(double=0.2),
        mishaps=(Mishap(what="kill", target=9, when="phase", name="sums", number=2),),
    ),
    "a node that was lost before its first beat was never missed": Schedule(
        seed=1650,
        world=8,
        nodes=8,
        breaks=False,
        mishaps=(Mishap(what="node", delay=0.129, loud=False),),
    ),
    "a controller that took over at the very end spoke in the epoch of the one before": Schedule(
        seed=0,
        world=23,
        steps=7,
        standbys=2,
        trouble=Trouble(delay=0.02, loss=0.02),
        mishaps=(Mishap(what="deposed", when="state", name="rolling back"),),
    ),
}


@pytest.mark.parametrize("schedule", FOUND.values(), ids=FOUND.keys())
def test_what_was_found_once_does_not_come_again(schedule: Schedule) -> None:
    """
    When a schedule that once broke a promise runs again, then every promise is kept.
    """
    assert not run(schedule).how
