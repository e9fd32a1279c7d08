"""
Measure what the plugins `integrity` and `numerics` add to a step: two blocks of steps at a time, one
with the plugin and one without it, within one job of two ranks. The ratio of the two is one sample.
The noise is the same for a job in which nothing is switched.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.bootstrap import interval_95
from tests.e2e.jobs import ROOT

JOB = ROOT / "tests" / "benchmarks" / "toggled_job.py"
NUMERICS = ("--numerics", "refuse", "--numerics-spike", "1000")
"""No spike is refused: after a thousand steps, the smallest model has real ones in its gradients."""
CASES = {
    "nothing": ((), ()),
    "integrity 50": (("--integrity", "50"), ()),
    "integrity 10": (("--integrity", "10"), ()),
    "integrity 1": (("--integrity", "1"), ()),
    "numerics": (NUMERICS, ()),
    "numerics of a script that does not clip": (NUMERICS, ("--no-clip",)),
}
"""By name: the options of the job and those of its script."""

BLOCKS = 1100
"""With so many, the interval of the time is at most 0.01 wide on a machine without other work. One
case takes five minutes."""
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "4000000000", "MALLOC_TRIM_THRESHOLD_": "4000000000"}
"""Settings with which malloc gives no memory back to the system. Otherwise some steps have 3,000 page
faults and others none, which takes 10 ms, and small allocations decide which."""
BATCH = 16
"""The samples of a batch. A step takes about 60 ms with it. With the example's batch of 2 samples, a
step takes 14 ms, and its time varies by 4 ms: the processes of the job wait for each other."""


def main() -> None:
    """
    Print two lines for each case, or for the cases named as arguments: the mean ratio with its
    95 % interval, for the time of a step and for the processor time of the training thread in it.
    The second has less noise, and leaves out what other processes do.
    """
    for name in sys.argv[1:] or CASES:
        options, words = CASES[name]
        for clock, ratios in measured(options, words).items():
            low, high = interval_95(mean_ratio, ratios)
            print(
                json.dumps(
                    {
                        "benchmark": "observer_cost",
                        "case": name,
                        "unit": f"{clock} of a step with / without",
                        "mean": round(mean_ratio(ratios), 4),
                        "low": round(low, 4),
                        "high": round(high, 4),
                        "samples": len(ratios),
                    }
                ),
                flush=True,
            )


def measured(options: Sequence[str], words: Sequence[str]) -> dict[str, list[float]]:
    """
    Return, for each clock, the ratio of each block with the plugin and the next one without it.
    """
    with tempfile.TemporaryDirectory() as directory:
        command = [
            sys.executable, "-m", "tft", "run", "--nproc-per-node", "2", "--run-dir",
            f"{directory}/run", "--audit", "off", *options, str(JOB),
            "--blocks", str(BLOCKS), "--batch", str(BATCH), *words,
        ]  # fmt: skip
        subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, cwd=ROOT,
            timeout=2700, env={**os.environ, "OMP_NUM_THREADS": "1", **KEEP_MEMORY},
        )  # fmt: skip
        told = json.loads(Path(directory, "run", "times.json").read_text())
    return {
        clock: _ratios(times[told["warm"] :], told["block"], told["second"])
        for clock, times in told["times"].items()
    }


def mean_ratio(ratios: Sequence[float]) -> float:
    """
    Return the geometric mean of the ratios without the tenth at each end: there the machine did
    other work.
    """
    tenth = len(ratios) // 10
    return statistics.geometric_mean(sorted(ratios)[tenth : len(ratios) - tenth])


def _ratios(times: Sequence[float], size: int, second: Sequence[int]) -> list[float]:
    steps = [b - a for a, b in itertools.pairwise(times)]
    # the first step of a block has the end of the last step of the other kind in it
    blocks = [statistics.fmean(steps[i + 1 : i + size]) for i in range(0, len(steps), size)]
    pairs = zip(blocks[::2], blocks[1::2], second, strict=False)
    return [b / a if swapped else a / b for a, b, swapped in pairs]


if __name__ == "__main__":
    main()
