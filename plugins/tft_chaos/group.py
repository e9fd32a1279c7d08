"""
Specs that are aimed at several ranks. All victims wait for each other at the place of the fault, so
that they are struck at the same time and tft sees one incident.
"""

import threading
import time
from dataclasses import dataclass

from tft_chaos.actions import ChaosMissed
from tft_chaos.barrier_files import BarrierFiles
from tft_chaos.record import Ledger

PATIENCE = 30.0
"""Seconds for the other victims to come: a step of the slowest model in use."""

PAUSE = 0.001
"""Seconds between two looks. It bounds the time between the first and the last fault."""


@dataclass(frozen=True, slots=True)
class Victim:
    """
    One rank of the target of a spec.
    """

    index: int
    """The number of the spec on the command line, counted from 0."""
    ranks: tuple[int, ...]
    """All ranks of the target."""
    rank: int

    @property
    def name(self) -> str:
        """
        The name of the spec in the ledger of this rank.
        """
        return str(self.index) if len(self.ranks) == 1 else f"{self.index}.rank{self.rank}"

    def await_others(self, time_number: int, ledger: Ledger, marks: BarrierFiles) -> None:
        """
        Wait until every other victim waits for the same firing, or has got its fault.

        Return at once if the spec has one victim. Raises `ChaosMissed` after `PATIENCE` seconds.
        """
        others = [Victim(self.index, self.ranks, r) for r in self.ranks if r != self.rank]
        if not others:
            return
        firing = f"{self.index}-{time_number}"
        marks.wait(firing)
        pause = threading.Event()  # never set: waiting on it lets other threads run
        deadline = time.monotonic() + PATIENCE
        while missing := [
            each.rank
            for each in others
            if marks.waits(each.rank) != firing and ledger.fired(each.name) < time_number
        ]:
            if time.monotonic() > deadline:
                raise ChaosMissed(
                    f"chaos: the ranks {missing} did not come within {PATIENCE:.0f} s to the place "
                    f"where the ranks {list(self.ranks)} are struck together"
                )
            pause.wait(PAUSE)
