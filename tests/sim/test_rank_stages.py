"""
The stages of training threads in simulated jobs, compared with the table of stages.
"""

import pytest

from tft.core.rank.machine import RankMachine
from tft.core.rank.protocol import RankCommand, RankEvent
from tft.core.rank.transitions import TRANSITIONS, Stage
from tft.simulation.run import run
from tft.simulation.schedule import draw

SCHEDULES = range(1, 200)
SELDOM = frozenset(
    {
        # an order that waited for the end of another order begins at once
        (Stage.BUSY, Stage.CHECKING),
        (Stage.BUSY, Stage.LOOP),
        (Stage.CHECKING, Stage.BUSY),
        (Stage.CHECKING, Stage.LOOP),
        (Stage.LOOP, Stage.CHECKING),
        # the script raises at a step boundary at which the rank is held
        (Stage.HELD, Stage.IDLE),
        (Stage.HELD, Stage.BUSY),
        (Stage.HELD, Stage.CHECKING),
        (Stage.CHECKING_HELD, Stage.CHECKING),
        # few schedules ask for a check while ranks are out of the loop
        (Stage.IDLE, Stage.CHECKING),
        (Stage.CHECKING, Stage.IDLE),
        (Stage.CHECKING_HELD, Stage.LOOP),
    }
)
"""Moves that these schedules need not reach."""


@pytest.mark.soak
def test_training_threads_make_exactly_the_moves_of_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When jobs are simulated, then every move of a training thread is in the table. Every move of
    the table occurs, except for the rare moves in `SELDOM`."""
    seen: set[tuple[Stage, Stage]] = set()
    handle = RankMachine.handle

    def watched(self: RankMachine, event: RankEvent) -> list[RankCommand]:
        before = self.stage
        commands = handle(self, event)
        if self.stage is not before:
            seen.add((before, self.stage))
        return commands

    monkeypatch.setattr(RankMachine, "handle", watched)
    for seed in SCHEDULES:
        run(draw(seed))

    possible = {(a, b) for a, after in TRANSITIONS.items() for b in after if a is not b}
    assert seen <= possible
    assert possible - seen <= SELDOM
