"""
Phase `collective`: every peer is inside the same collective, and the victim has not entered it.

A peer whose last gradient has come leaves a mark, launches its last collective and goes to sleep
until all ranks have joined in. The victim stands at its first gradient, which comes before any
collective of its own, and waits there until all peers have left their marks and sleep.
"""

import threading
import time
from collections.abc import Sequence

from tft_chaos.actions import ChaosMissed
from tft_chaos.marks import Marks
from tft_chaos.proc import MainThread, main_thread

PATIENCE = 30.0
"""Seconds for the peers to come: a step of the slowest model anybody tries this on."""

GLANCES = 6
"""So many looks in a row must find every peer asleep, and none may have run in between."""

PAUSE = 0.005
"""Seconds between two looks; longer than a thread on its way to sleep takes for it."""


def await_peers(marks: Marks, peers: Sequence[int], step: int) -> dict[str, object]:
    """
    Return once all peers are inside; what was seen of them, as evidence. Raises `ChaosMissed`
    when they do not come.
    """
    pause = threading.Event()  # never set: a wait that lets other threads run
    deadline = time.monotonic() + PATIENCE
    glances: list[dict[int, MainThread | None]] = []
    while len(glances) < GLANCES:
        if time.monotonic() > deadline:
            raise ChaosMissed(
                f"chaos: the ranks {list(peers)} were not all inside a collective of step {step} "
                f"within {PATIENCE:.0f} s; last seen: {glances[-1:]}"
            )
        pids = {rank: marks.inside(rank, step) for rank in peers}
        glance = {rank: None if pid is None else main_thread(pid) for rank, pid in pids.items()}
        if any(seen is None or seen.state != "S" for seen in glance.values()):
            glances = []
        elif glances and glance != glances[-1]:
            glances = [glance]  # all sleep, but one has run since
        else:
            glances.append(glance)
        pause.wait(PAUSE)
    return {
        "peers": {str(rank): {"pid": pids[rank], "state": "S"} for rank in peers},
        "asleep_for": (GLANCES - 1) * PAUSE,
    }
