"""
Makes sure that a fault of the phase `collective` comes at the right moment: when every other rank
(peer) is inside a collective that the victim, the rank that gets the fault, has not entered.

When a peer has computed its last gradient, it writes a marker file and starts its last collective.
There it sleeps until all ranks have entered that collective. The victim waits when it has computed
its first gradient, before it enters a collective. It makes the fault when all peers have written
their marker files and sleep.
"""

import threading
import time
from collections.abc import Sequence

from tft_chaos.actions import ChaosMissed
from tft_chaos.barrier_files import BarrierFiles
from tft_chaos.proc import MainThread, main_thread

PATIENCE = 30.0
"""Seconds within which all peers must enter the collective. This is longer than a step of the
slowest model in the tests."""

GLANCES = 6
"""The number of successive checks that must find every peer asleep. If a peer has run between two
of these checks, the count starts again."""

PAUSE = 0.005
"""Seconds between two checks. This is longer than a thread takes to fall asleep."""


def await_peers(marks: BarrierFiles, peers: Sequence[int], step: int) -> dict[str, object]:
    """
    Wait until all peers sleep inside their last collective of `step`. Return evidence that all
    peers sleep there, for the record of the fault.

    Raises `ChaosMissed` if this takes more than `PATIENCE` seconds.
    """
    pause = threading.Event()  # nobody sets this event, so `pause.wait` sleeps between checks
    deadline = time.monotonic() + PATIENCE
    glances: list[dict[int, MainThread | None]] = []
    while len(glances) < GLANCES:
        if time.monotonic() > deadline:
            raise ChaosMissed(
                f"chaos: the ranks {list(peers)} were not all inside a collective of step {step} "
                f"within {PATIENCE:.0f} s, so no fault was made; what was last seen of these "
                f"ranks: {glances[-1:]}"
            )
        pids = {rank: marks.inside(rank, step) for rank in peers}
        glance = {rank: None if pid is None else main_thread(pid) for rank, pid in pids.items()}
        if any(seen is None or seen.state != "S" for seen in glance.values()):
            glances = []
        elif glances and glance != glances[-1]:
            # all peers (ranks that get no fault) sleep now, but one has run since the last check.
            # So count the successive checks from this one on
            glances = [glance]
        else:
            glances.append(glance)
        pause.wait(PAUSE)
    return {
        "peers": {str(rank): {"pid": pids[rank], "state": "S"} for rank in peers},
        "asleep_for": (GLANCES - 1) * PAUSE,
    }
