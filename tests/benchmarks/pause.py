"""
Measure the pause of a job when a rank is killed at a random moment, with a warm process and without.

The pause is the time from the kill until all ranks have completed a step again, without the time of
an undisturbed step. It is also given as a multiple of the time that four processes need to form a
gloo group anew: no recovery with new process groups can be faster than that.
"""

import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests.benchmarks.bare_group import reform_seconds
from tests.e2e.jobs import Job, Outcome, job, reached, until

WORLD = 4
KILLS = 20
"""The number of kills in one job."""
JOBS = 2
"""The number of jobs with a warm process, and without one."""
EVERY = 25
"""The steps between two kills: enough that a warm process waits again."""
STEP = 0.03
"""A kill comes up to this many seconds after its step has begun."""

Rows = dict[int, dict[int, float]]
"""The time (CLOCK_MONOTONIC, seconds) at which a rank computed the loss of a step, by rank and step."""


def main() -> None:
    """
    Print one line for each kind of job.
    """
    draw = random.Random(11)
    pauses: dict[int, list[float]] = {0: [], 1: []}
    detections: dict[int, list[float]] = {0: [], 1: []}
    bare: list[float] = []
    for _ in range(JOBS):
        for warm in pauses:
            bare += reform_seconds(WORLD)
            found, detected = _measure(warm, draw)
            pauses[warm] += found
            detections[warm] += detected
    reform = statistics.median(bare)
    for warm, found in pauses.items():
        ordered = sorted(found)
        print(
            json.dumps(
                {
                    "benchmark": "pause",
                    "warm_ranks": warm,
                    "kills": len(found),
                    "unit": "s",
                    "median": round(statistics.median(found), 4),
                    "percentile_95": round(ordered[int(0.95 * len(ordered))], 4),
                    "reform": round(reform, 4),
                    "median / reform": round(statistics.median(found) / reform, 2),
                    "percentile_95 / reform": round(ordered[int(0.95 * len(ordered))] / reform, 2),
                    "detect_median": round(statistics.median(detections[warm]), 4),
                }
            ),
            flush=True,
        )


def _measure(warm: int, draw: random.Random) -> tuple[list[float], list[float]]:
    """
    Run a job with kills. Return the pauses, and the seconds from each kill to its first evidence.
    """
    steps = (KILLS + 1) * EVERY
    limits = ("--max-incidents", "1000", "--max-rank-faults", "1000", "--audit", "off")
    with (
        tempfile.TemporaryDirectory() as directory,
        job(
            Path(directory, "run"), "--warm-ranks", str(warm), *limits,
            arguments=("--steps", str(steps)), nproc=WORLD,
        ) as running,
    ):  # fmt: skip
        kills = [_kill(running, (number + 1) * EVERY, draw) for number in range(KILLS)]
        outcome = running.end(300)
        if outcome.code:
            sys.exit(outcome.output)
        return _pauses(outcome, kills)


def _kill(running: Job, step: int, draw: random.Random) -> float:
    """
    Kill a rank shortly after rank 0 has begun `step`, and return the time.
    """
    until(reached(running, step), f"step {step}", 60.0)
    time.sleep(draw.uniform(0, STEP))
    victim = running.pid(f"rank-{draw.randrange(WORLD)}")
    killed = time.monotonic()
    with suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    return killed


def _pauses(outcome: Outcome, kills: list[float]) -> tuple[list[float], list[float]]:
    rows: Rows = {
        rank: {
            row["step"]: row["time"]
            for row in map(
                json.loads,
                (outcome.run_dir / f"steps-rank{rank}.jsonl").read_text().splitlines(),
            )
        }
        for rank in range(WORLD)
    }
    ordinary = statistics.median(b - a for a, b in itertools.pairwise(rows[0].values()))
    incidents = outcome.incidents
    if len(incidents) != len(kills):
        sys.exit(f"{len(kills)} kills made {len(incidents)} incidents")
    story = map(json.loads, (outcome.run_dir / "story.jsonl").read_text().splitlines())
    evidence = [event["at"] for event in story if event.get("kind") in ("Exited", "Faulted")]
    pauses, detections = [], []
    for killed, incident in zip(kills, incidents, strict=True):
        again = incident["step"] + 1
        pauses.append(max(rows[rank][again] for rank in rows) - killed - ordinary)
        detections.append(min(at for at in evidence if at > killed) - killed)
    return pauses, detections


if __name__ == "__main__":
    main()
