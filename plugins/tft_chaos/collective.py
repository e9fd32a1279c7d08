"""
Makes sure that a fault of the phase `collective` comes at the right moment: when every other rank
(peer) is inside a collective that the victim, the rank that gets the fault, has not entered.

When a peer has computed its last gradient, it writes a marker file and starts its last collective.
There it sleeps until all ranks have entered that collective. The victim waits when it has computed
its first gradient, before it enters a collective. It makes the fault when all peers have written
their marker files and sleep.

A peer whose model is on a device only starts its collectives. The device waits in them, and the
process may be awake meanwhile. So the victim does not check that such a peer sleeps. It only waits
as long as the checks of a sleeping peer take, which is enough time for the peer to start its last
collective.
"""

import threading
import time
from collections.abc import Sequence

from tft_chaos.actions import ChaosMissed
from tft_chaos.barrier_files import BarrierFiles, Entry
from tft_chaos.proc import main_thread

PATIENCE = 30.0
"""Seconds within which all peers must enter the collective. This is longer than a step of the
slowest model in the tests."""

GLANCES = 6
"""The number of successive checks that must find every peer asleep. If a peer has run between two
of these checks, the count starts again."""

PAUSE = 0.005
"""Seconds between two checks. This is longer than a thread takes to fall asleep."""


Glance = dict[int, dict[str, object] | None]
"""The result of one check of all peers: the facts about each peer that is inside its collective, by
rank. None for a peer that is not inside."""


def await_peers(marks: BarrierFiles, peers: Sequence[int], step: int) -> dict[str, object]:
    """
    Wait until all peers sleep inside their last collective of `step`. Return evidence that all
    peers sleep there, for the record of the fault.

    Raises `ChaosMissed` if this takes more than `PATIENCE` seconds.
    """
    pause = threading.Event()  # nobody sets this event, so `pause.wait` sleeps between checks
    deadline = time.monotonic() + PATIENCE
    glances: list[Glance] = []
    while len(glances) < GLANCES:
        if time.monotonic() > deadline:
            raise ChaosMissed(
                f"chaos: the ranks {list(peers)} were not all inside a collective of step {step} "
                f"within {PATIENCE:.0f} s, so no fault was made; what was last seen of these "
                f"ranks: {glances[-1:]}"
            )
        entries = {rank: marks.inside(rank, step) for rank in peers}
        glance = {rank: _seen(entry) for rank, entry in entries.items()}
        if not all(glance.values()):
            glances = []
        elif glances and glance != glances[-1]:
            # all peers (ranks that get no fault) sleep now, but one has run since the last check.
            # So count the successive checks from this one on
            glances = [glance]
        else:
            glances.append(glance)
        pause.wait(PAUSE)
    return {
        "peers": {str(rank): seen for rank, seen in glances[-1].items()},
        "asleep_for": (GLANCES - 1) * PAUSE,
    }


def _seen(entry: Entry | None) -> dict[str, object] | None:
    thread = None if entry is None else main_thread(entry.pid)
    if entry is None or thread is None:
        return None
    if entry.on_device:
        return {"pid": entry.pid, "on_device": True}
    if thread.state != "S":
        return None
    return {"pid": entry.pid, "state": thread.state, "switches": thread.switches}
