"""
A job in which ranks are killed a thousand times, at random moments. The losses and the state at the
end are those of the undisturbed job, and late incidents take no more than early ones.
"""

import json
import os
import random
import re
import signal
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.benchmarks.incident_growth import Sample, sample
from tests.e2e.jobs import Job, identical, job, run

KILLS = 1000
EVERY = 6
"""The steps between two kills, on average."""
WORLD = 4
SPARED = 0
"""The rank that is never killed, so that its memory can be watched."""
STEP = 0.02
"""A kill comes up to this many seconds after its step has begun."""
LIMIT = 3000.0
STILL = 60.0
"""The time in seconds after which a job that trains no step counts as hanging."""
GROWTH = 0.01
"""The most MB by which a process may grow in each incident of the second half."""
LEFT = re.compile(rf"^\[rank {SPARED}\] .*group_left_behind.* groups=.*?(\d+)", re.MULTILINE)
"""The warning of the spared rank that gloo's groups could not be freed: how many. Each of them keeps
threads, descriptors and gradients for half an hour (docs/explanation/limits.md)."""
RECORD = 0.014
"""What the controller keeps of each incident in MB: the report has all of them at the end."""
THREADS, FILES, GRADIENTS = 5, 8, 1.9
"""The most threads and descriptors that a group keeps, and the gradients of the model in MB."""


def last_step(path: Path) -> int:
    """
    Return the step of the last whole row in a file of losses, or 0 if there is none.
    """
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 400))
        rows = [row for row in file.read().split(b"\n")[:-1] if row.endswith(b"}")]
    with suppress(IndexError, ValueError):
        return int(json.loads(rows[-1])["step"])
    return 0


def wait_for(running: Job, step: int) -> None:
    """
    Wait until the spared rank has begun `step`. Fail if the job does not come further for long.
    """
    path = running.run_dir / f"steps-rank{SPARED}.jsonl"
    seen, since = 0, time.monotonic()
    while (now := last_step(path)) < step:
        if now != seen:
            seen, since = now, time.monotonic()
        assert running.process.poll() is None, running.output()[-3000:]
        assert time.monotonic() - since < STILL, f"no step after {seen}: {running.output()[-3000:]}"
        time.sleep(0.003)


def moments(draw: random.Random) -> list[tuple[int, float, int]]:
    """
    Return for each kill the step after whose beginning it comes, the seconds after that, and the
    rank.
    """
    victims = [rank for rank in range(WORLD) if rank != SPARED]
    found, step = [], EVERY
    for _ in range(KILLS):
        found.append((step, draw.uniform(0, STEP), draw.choice(victims)))
        step += draw.randint(1, 2 * EVERY - 1)
    return found


def sizes(running: Job) -> dict[str, Sample]:
    """
    Return the sizes of the processes that live through the whole job.
    """
    names = (f"rank-{SPARED}", "controller", "broker", "agent-0")
    there = [name for name in names if (running.run_dir / "pids" / f"{name}.pid").exists()]
    return {name: sample(running, name) for name in there}


def kill_all(running: Job, kills: Sequence[tuple[int, float, int]]) -> list[dict[str, Sample]]:
    """
    Kill ranks at these moments. Return the sizes of the lasting processes after each tenth of the
    kills.
    """
    seen = []
    for number, (step, after, rank) in enumerate(kills, start=1):
        wait_for(running, step)
        time.sleep(after)
        with suppress(ProcessLookupError):
            os.kill(running.pid(f"rank-{rank}"), signal.SIGKILL)
        if not number % (KILLS // 10):
            wait_for(running, step + 1)
            seen.append(sizes(running))
    return seen


def growth(seen: Sequence[dict[str, Sample]], name: str, what: str) -> float:
    """
    Return by how much a process has grown between the middle of the job and its end.
    """
    return seen[-1][name][what] - seen[len(seen) // 2 - 1][name][what]


@pytest.mark.soak
@pytest.mark.timeout(2 * LIMIT)
def test_a_job_survives_a_thousand_kills(tmp_path: Path) -> None:
    """When ranks are killed a thousand times, then the job completes as the undisturbed one does.
    It loses at most 1 % of its steps. Its last incidents take as long as the early ones, and
    processes that live through all of them do not grow."""
    kills = moments(random.Random(7))
    steps = kills[-1][0] + 2 * EVERY
    arguments = ("--steps", str(steps))
    calm = run(tmp_path / "calm", arguments=arguments, limit=LIMIT)
    assert calm.code == 0, calm.output
    limits = ("--max-incidents", str(2 * KILLS), "--max-rank-faults", str(2 * KILLS))
    with job(tmp_path / "run", *limits, arguments=arguments) as running:
        seen = kill_all(running, kills)
        outcome = running.end(LIMIT)
    assert outcome.code == 0, outcome.output[-6000:]
    identical(outcome, calm)
    incidents = outcome.incidents
    totals = [incident["seconds"]["total"] for incident in incidents]
    early, late = statistics.median(totals[5:105]), statistics.median(totals[-100:])
    left = sum(map(int, LEFT.findall(outcome.output)))
    lost = sum(incident["steps_lost"] for incident in incidents)
    found = {
        "incidents": len(incidents), "groups left": left, "steps": steps, "steps_lost": lost, "sizes": seen,
        "seconds, early": round(early, 3), "seconds, late": round(late, 3),
    }  # fmt: skip
    (tmp_path / "found.json").write_text(json.dumps(found))
    assert len(incidents) > 0.9 * KILLS
    assert lost <= 0.01 * steps
    assert late <= 1.25 * early
    for name in seen[-1]:
        groups = left if name == f"rank-{SPARED}" else 0
        kept = GRADIENTS * groups + (RECORD * KILLS / 2 if name == "controller" else 0)
        assert growth(seen, name, "memory") <= GROWTH * KILLS / 2 + kept, (name, seen)
        assert growth(seen, name, "files") <= 4 + FILES * groups, (name, seen)
        assert growth(seen, name, "threads") <= 4 + THREADS * groups, (name, seen)
