"""
Measure the time of a step whose numbers are judged (`--numerics refuse`, the defaults) against a
step without it. Both kinds take turns in one run of the example, on all ranks at once.
"""

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

PAIRS = 700


def main() -> None:
    """
    Print two lines for a script that clips its gradients, and two for a script that does not: for
    the time of a step, and for the processor time of the training thread in it. On a machine with
    other work only the second says something.
    """
    for words in ((), ("--no-clip",)):
        for clock, ratios in measure(words).items():
            low, high = interval_95(statistics.median, ratios)
            print(
                json.dumps(
                    {
                        "benchmark": "numerics_step",
                        "unit": f"{clock} of a step with --numerics refuse / without",
                        "clips": not words,
                        "median": round(statistics.median(ratios), 4),
                        "interval_95": [round(low, 4), round(high, 4)],
                        "limit": 1.01,
                        "pairs": len(ratios),
                    }
                )
            )


def measure(words: Sequence[str]) -> dict[str, list[float]]:
    """
    Return the ratios of the pairs of one run of two ranks, for each clock.
    """
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory, "run")
        command = [
            sys.executable, "-m", "tft", "run", "--nproc-per-node", "2", "--run-dir", str(where),
            "--numerics", "refuse", str(ROOT / "tests" / "benchmarks" / "numerics_job.py"),
            "--pairs", str(PAIRS), *words,
        ]  # fmt: skip
        subprocess.run(
            command, stdout=subprocess.DEVNULL, check=True, cwd=ROOT, timeout=900,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        ratios: dict[str, list[float]] = json.loads((where / "ratios.json").read_text())
    return ratios


if __name__ == "__main__":
    main()
