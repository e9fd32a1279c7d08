"""
Makes the faults of one spec on several ranks at the same time. All these ranks (victims) wait for
each other at the place of the fault, so that tft sees one incident.
"""

import threading
import time
from dataclasses import dataclass

from tft_chaos.actions import ChaosMissed
from tft_chaos.barrier_files import BarrierFiles
from tft_chaos.record import Ledger

PATIENCE = 30.0
"""Seconds within which all victims must reach the place of the fault. This is longer than a step of
the slowest model in the tests."""

PAUSE = 0.001
"""Seconds between two checks for the other victims. The first and the last victim make the fault
within about this time."""


@dataclass(frozen=True, slots=True)
class Victim:
    """
    One of the ranks at which a spec (an argument of `--chaos`) is aimed.
    """

    index: int
    """The number of the spec on the command line, counted from 0."""
    ranks: tuple[int, ...]
    """All ranks at which the spec (the argument of `--chaos`) is aimed, with `rank` among them."""
    rank: int

    @property
    def name(self) -> str:
        """
        The name under which the ledger, the record of all faults made by chaos, records the faults
        that the spec makes on this rank.
        """
        return str(self.index) if len(self.ranks) == 1 else f"{self.index}.rank{self.rank}"

    def await_others(self, time_number: int, ledger: Ledger, marks: BarrierFiles) -> None:
        """
        Wait until every other victim waits for the same fault, or has already got this fault.

        `time_number` is the number of this fault among the faults that the spec makes, counted from
        1. Return at once if the spec has only one victim. Raises `ChaosMissed` after `PATIENCE`
        seconds.
        """
        others = [Victim(self.index, self.ranks, r) for r in self.ranks if r != self.rank]
        if not others:
            return
        firing = f"{self.index}-{time_number}"
        marks.wait(firing)
        pause = threading.Event()  # nobody sets this event, so `pause.wait` sleeps between checks
        deadline = time.monotonic() + PATIENCE
        while missing := [
            each.rank
            for each in others
            if marks.waits(each.rank) != firing and ledger.fired(each.name) < time_number
        ]:
            if time.monotonic() > deadline:
                raise ChaosMissed(
                    f"chaos: the ranks {missing} did not reach the place of the fault within "
                    f"{PATIENCE:.0f} s, so the fault could not be made on the ranks "
                    f"{list(self.ranks)} at the same time"
                )
            pause.wait(PAUSE)
