"""
Measure what the comparison of copies adds to an incident, against one read of the state by one
thread. Jobs with and without the comparison run in turns, with the same faults: a failed link, after
which all processes are kept, and a killed rank.
"""

import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.benchmarks.bootstrap import interval_95
from tests.e2e.jobs import run

SCRIPT = Path(__file__).with_name("incident_job.py")
UNCOMPARED = Path(__file__).with_name("uncompared")
RANKS = 2
TURNS = 3
EVERY = 5
"""Steps between two faults."""
FAULTS = {1024: 60, 2560: 8}
"""The number of faults in each job, by the width of the layers. An incident takes 10 to 100 times as
long as one reading of the state, so many are needed to see what the comparison adds."""

Totals = dict[str, list[float]]
"""By strategy, the seconds of incidents. By strategy and " compare", what the ranks themselves took."""


def main() -> None:
    """
    Print one line for each size of the state and each kind of incident.
    """
    for width in FAULTS:
        measure(width)


def measure(width: int) -> None:
    """
    Print what the comparison adds to incidents of a job with layers of this width.
    """
    with_it, without = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    readings: list[float] = []
    for _ in range(TURNS):
        readings += _job(width, without, {"PYTHONPATH": str(UNCOMPARED)})
        readings += _job(width, with_it, {})
    reading = statistics.median(readings)
    for strategy in sorted(strategy for strategy in without if " " not in strategy):
        arms = with_it[strategy], without[strategy]
        low, high = interval_95(_added, *arms)
        print(
            json.dumps(
                {
                    "benchmark": "incident_comparison",
                    "strategy": strategy,
                    "incidents": len(with_it[strategy]),
                    "unit": "times one reading of the state",
                    "added": round(_added(*arms) / reading, 3),
                    "interval_95": [round(low / reading, 3), round(high / reading, 3)],
                    "reading_seconds": round(reading, 4),
                    "compare_seconds": round(statistics.median(with_it[f"{strategy} compare"]), 4),
                    "with_seconds": round(statistics.median(with_it[strategy]), 4),
                    "without_seconds": round(statistics.median(without[strategy]), 4),
                    "megabytes": round(12 * width * width * 12 / 2**20),
                }
            ),
            flush=True,
        )


def _added(with_it: Sequence[float], without: Sequence[float]) -> float:
    return statistics.median(with_it) - statistics.median(without)


def _job(width: int, totals: Totals, environment: Mapping[str, str]) -> list[float]:
    """
    Run a job, add its incidents to `totals`, and return the times of its readings.
    """
    count = FAULTS[width]
    faults = [
        f"raise:rank={number // 2 % RANKS},step={(number + 1) * EVERY},phase=backward,kind=network"
        if number % 2
        else f"kill:rank={number // 2 % RANKS},step={(number + 1) * EVERY},phase=backward"
        for number in range(count)
    ]
    options = [word for fault in faults for word in ("--chaos", fault)]
    with tempfile.TemporaryDirectory() as directory:
        outcome = run(
            Path(directory, "run"), *options, "--audit", "off", "--max-incidents", "1000",
            "--max-rank-faults", "1000", script=SCRIPT, nproc=RANKS,
            arguments=(str(width), str((count + 1) * EVERY)), environment=environment, limit=900,
        )  # fmt: skip
        if outcome.code:
            sys.exit(outcome.output)
        for incident in outcome.incidents:
            totals[incident["strategy"]].append(incident["seconds"]["total"])
            totals[f"{incident['strategy']} compare"].append(incident["seconds"]["compare"] or 0.0)
        readings: list[float] = json.loads((outcome.run_dir / "readings.json").read_text())
        return readings


if __name__ == "__main__":
    main()
