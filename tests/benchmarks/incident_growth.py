"""
Measure what each incident leaves behind in the ranks that survive it. One rank of the example is
killed every few steps, and the resident memory, the open files and the threads of the other ranks
are read between the kills. The same steps without kills are measured beside it.

    python -m tests.benchmarks.incident_growth [KILLS]
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

from tests.e2e.jobs import Job, job, reached, until

KILLS = 160
"""Enough to see whether the growth ends: in the first hundred incidents the allocator still grows."""
EVERY = 6
"""Steps between two kills."""
WORLD = 4
VICTIM = WORLD - 1
LIMIT = 600.0

Sample = dict[str, float]


def main() -> None:
    """
    Print a line for the job with kills, and one for the job without.
    """
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else KILLS
    for each in (True, False):
        print(json.dumps(measured(kills, each)), flush=True)


def measured(kills: int, broken: bool) -> dict[str, object]:
    """
    Run one job. `broken`: with kills. Return what grows in the survivors, on average for each kill
    of the second half: memory that is used once is there by then.
    """
    specs = [f"kill:rank={VICTIM},step={(n + 1) * EVERY},phase=forward" for n in range(kills)]
    options = [word for spec in specs for word in ("--chaos", spec)] if broken else []
    limits = ("--max-incidents", str(kills + 1), "--max-rank-faults", str(kills + 1))
    steps = ("--steps", str((kills + 2) * EVERY))
    samples: list[list[Sample]] = []
    with (
        tempfile.TemporaryDirectory() as directory,
        job(Path(directory, "run"), *limits, *options, arguments=steps) as running,
    ):
        for kill in range(kills + 1):
            wanted = kill * EVERY + EVERY // 2 + 1
            until(reached(running, wanted), f"step {wanted}", LIMIT)
            samples.append([sample(running, f"rank-{rank}") for rank in range(VICTIM)])
        outcome = running.end(LIMIT)
        if outcome.code:
            raise SystemExit(outcome.output)
        incidents = len(outcome.incidents)
    half = kills // 2
    growth = {
        name: [
            round((samples[-1][rank][name] - samples[half][rank][name]) / (kills - half), 4)
            for rank in range(VICTIM)
        ]
        for name in samples[0][0]
    }
    return {
        "benchmark": "incident_growth",
        "unit": "per incident and rank; memory in MB",
        "incidents": incidents,
        "memory": [round(statistics.mean(each["memory"] for each in row), 2) for row in samples],
        "files": [max(each["files"] for each in row) for row in samples],
        "threads": [max(each["threads"] for each in row) for row in samples],
        "growth": growth,
    }


def sample(running: Job, name: str) -> Sample:
    """
    Return the memory in MB, the number of open files and the number of threads of a part of the
    job, such as `rank-0`.
    """
    process = Path("/proc", str(running.pid(name)))
    status = dict(
        line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line
    )
    return {
        "memory": int(status["RssAnon"].split()[0]) / 1024,
        "files": float(len(list((process / "fd").iterdir()))),
        "threads": float(status["Threads"]),
    }


if __name__ == "__main__":
    main()
