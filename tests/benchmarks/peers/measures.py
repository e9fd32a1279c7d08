"""
What the records of one job of the comparison say.
"""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.peers.workload import KILLED, RANKS, STEPS, VICTIM

Steps = Sequence[tuple[float, int]]
"""The steps that a rank has completed, in the order in which it has: the moment, and the number."""


def measured(directory: Path) -> dict[str, object]:
    """
    Return what the job has taken: `step`, an undisturbed step in seconds; `pause`, from the kill to
    the first step that all survivors have completed after it, less one step; `caught_up`, until all
    have completed the interrupted step, less one step; `whole`, until the lost rank has completed a
    step, less one step, or None; `repeated`, the steps that were computed again.
    """
    records = {rank: _steps(directory / f"steps-{rank}") for rank in range(RANKS)}
    killed = directory / "killed"
    finished = all(records[rank][-1:] and records[rank][-1][1] == STEPS for rank in _survivors())
    if not killed.exists() or not finished:
        return {"finished": finished}
    at = float(killed.read_text())
    step = _step(records[0], at)
    after = {rank: _after(steps, at) for rank, steps in records.items()}
    first = max(after[rank][0][0] for rank in _survivors())
    caught = max(_completed(after[rank], KILLED) for rank in _survivors())
    back = after[VICTIM]
    return {
        "finished": True,
        "step": round(step, 4),
        "pause": round(first - at - step, 3),
        "caught_up": round(caught - at - step, 3),
        "whole": round(back[0][0] - at - step, 3) if back else None,
        "repeated": sum(number < KILLED for _, number in after[0]),
    }


def parameters(directory: Path) -> dict[int, bytes]:
    """
    Return the parameters with which each rank has ended the job.
    """
    return {int(path.name[4:]): path.read_bytes() for path in directory.glob("end-*")}


def _survivors() -> list[int]:
    return [rank for rank in range(RANKS) if rank != VICTIM]


def _steps(path: Path) -> Steps:
    lines = path.read_text().splitlines() if path.exists() else []
    return [(float(at), int(number)) for at, number in map(str.split, lines)]


def _step(steps: Steps, until: float) -> float:
    """
    Return the median time of a step before the moment `until`.
    """
    moments = [at for at, _ in steps if at < until]
    return statistics.median(b - a for a, b in itertools.pairwise(moments[10:]))


def _after(steps: Steps, at: float) -> Steps:
    """
    Return the steps that a rank has completed because of the recovery: those after the moment `at`,
    without the step before that of the kill, if the rank was still in it.
    """
    before = [number for moment, number in steps if moment <= at]
    later = [each for each in steps if each[0] > at]
    goes_on = bool(before and later) and later[0][1] == before[-1] + 1 < KILLED
    return later[1:] if goes_on else later


def _completed(steps: Steps, number: int) -> float:
    return next(at for at, each in steps if each >= number)
