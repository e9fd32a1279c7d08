"""
Measure what the comparison of copies adds to an incident, against one read of the state by one
thread. Incidents with and without the comparison take turns in the same job, with the same faults: a
failed link, after which all processes are kept, and a killed rank.
"""

import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.bootstrap import interval_95
from tests.benchmarks.compared_in_turns.turns import TURN, compares
from tests.e2e.jobs import run

SCRIPT = Path(__file__).with_name("incident_job.py")
IN_TURNS = Path(__file__).with_name("compared_in_turns")
RANKS = 2
JOBS = 2
EVERY = 5
"""Steps between two faults, and between two readings."""
FAULTS = {1024: 30 * 2 * TURN, 2560: 4 * 2 * TURN}
"""The number of faults in each job, by the width of the layers. An incident takes 10 to 100 times as
long as one reading of the state, so many are needed to see what the comparison adds."""

Times = dict[tuple[str, str], list[float]]
"""The seconds of incidents, by strategy and part: `total`, `before wrappers` (until the ranks begin to
build wrappers: all that the comparison can delay), and `compare` (what the ranks took for it)."""


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
    with_it, without = defaultdict[Any, list[float]](list), defaultdict[Any, list[float]](list)
    readings: list[float] = []
    for _ in range(JOBS):
        readings += _job(width, with_it, without)
    reading = statistics.median(readings)
    for strategy in sorted({strategy for strategy, _ in without}):
        result: dict[str, object] = {
            "benchmark": "incident_comparison",
            "strategy": strategy,
            "incidents": len(with_it[strategy, "total"]),
            "unit": "times one reading of the state",
            "reading_seconds": round(reading, 4),
            "compare": round(statistics.median(with_it[strategy, "compare"]) / reading, 3),
            "megabytes": round(12 * width * width * 12 / 2**20),
        }
        for part in ("before wrappers", "total"):
            arms = with_it[strategy, part], without[strategy, part]
            low, high = interval_95(_added, *arms)
            result[f"added, {part}"] = round(_added(*arms) / reading, 3)
            result[f"interval_95, {part}"] = [round(low / reading, 3), round(high / reading, 3)]
            result[f"seconds, {part}"] = [round(statistics.median(arm), 4) for arm in arms]
        print(json.dumps(result), flush=True)


def _added(with_it: Sequence[float], without: Sequence[float]) -> float:
    return statistics.median(with_it) - statistics.median(without)


def _job(width: int, with_it: Times, without: Times) -> list[float]:
    """
    Run a job, add its incidents to `with_it` and `without`, and return the times of its readings.
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
            arguments=(str(width), str((count + 1) * EVERY), str(EVERY)),
            environment={"PYTHONPATH": str(IN_TURNS)}, limit=900,
        )  # fmt: skip
        if outcome.code:
            sys.exit(outcome.output)
        for incident in outcome.incidents:
            times = with_it if compares(incident["id"]) else without
            strategy, seconds = incident["strategy"], incident["seconds"]
            times[strategy, "total"].append(seconds["total"])
            times[strategy, "compare"].append(seconds["compare"] or 0.0)
            times[strategy, "before wrappers"].append(_until_wrappers(incident))
        return [float(line) for line in (outcome.run_dir / "readings").read_text().splitlines()]


def _until_wrappers(incident: Mapping[str, Any]) -> float:
    """
    Return the seconds until the first rank began to build its wrapper. The first `rebuild` phase of
    each rank is that in which it formed process groups.
    """
    begun = defaultdict[int, list[float]](list)
    for phase in incident["phases"]:
        if phase["name"] == "rebuild":
            begun[phase["rank"]].append(phase["start"])
    return min(sorted(starts)[1] for starts in begun.values())


if __name__ == "__main__":
    main()
