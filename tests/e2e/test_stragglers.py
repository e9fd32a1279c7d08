"""
Slow ranks in real jobs: which rank is named, when, and with which cause.
"""

import os
import re
from pathlib import Path

import pytest

from tests.e2e.jobs import Job, job

SCRIPT = Path(__file__).with_name("slow_job.py")
SINCE = 30
LIMIT = 240.0
NAMED = re.compile(r"event=rank_slow rank=(\d+) .*?step=(\d+) cause=(\w+)")

Named = tuple[int, int, str]
"""The rank that was named as slow, the step, and the cause."""


def named(running: Job) -> list[Named]:
    """
    Return the ranks that the controller has named, once the job is over.
    """
    outcome = running.end(LIMIT)
    assert outcome.code == 0, outcome.output[-3000:]
    text = (running.run_dir / "logs" / "controller.log").read_text()
    return [(int(rank), int(step), cause) for rank, step, cause in NAMED.findall(text)]


def slow(
    run_dir: Path, *, rank: int, part: str, percent: int, world: int = 4, wait: float = 0.0
) -> list[Named]:
    """
    Train with one rank that becomes slow in one part of its steps. Return who was named.
    """
    arguments = (str(rank), part, str(percent), str(SINCE), str(SINCE + 40), str(wait))
    with job(run_dir, nproc=world, script=SCRIPT, arguments=arguments) as running:
        return named(running)


def check(found: list[Named], rank: int, part: str) -> None:
    """
    Check that only this rank was named, in time, with the cause that fits the part.
    """
    cause = "compute" if part in ("forward", "backward") else part
    assert [(one, why) for one, _, why in found] == [(rank, cause)]
    assert SINCE < found[0][1] <= SINCE + 20


def need_cores(world: int) -> None:
    """
    Skip the test where ranks have to share cores.
    """
    cores = len(os.sched_getaffinity(0))
    if cores < world:
        pytest.skip(
            f"{world} ranks share {cores} cores, so the times of a step vary by a tenth from step to "
            "step, and 16 steps cannot show less than that"
        )


@pytest.mark.soak
def test_the_slow_rank_of_a_job_is_named(tmp_path: Path) -> None:
    """When the backward pass of a rank becomes slow, then this rank is named within 20 steps, and
    no other rank is, although the steps of all take longer."""
    found = slow(tmp_path / "run", rank=1, part="backward", percent=100, world=3, wait=0.03)
    check(found, 1, "backward")


@pytest.mark.soak
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("percent", [30, 100])
@pytest.mark.parametrize("part", ["forward", "backward", "input", "update"])
def test_each_kind_of_slowness_is_named(
    tmp_path: Path, part: str, percent: int, world: int
) -> None:
    """When a rank becomes slow by 30 or 100 % in a part of its steps, then it is named with the
    cause within 20 steps, if each rank has a core of its own."""
    need_cores(world)
    check(slow(tmp_path / "run", rank=1, part=part, percent=percent, world=world), 1, part)


@pytest.mark.soak
@pytest.mark.parametrize("part", ["forward", "backward", "input", "update"])
def test_a_tenth_is_enough_where_times_hardly_vary(tmp_path: Path, part: str) -> None:
    """When the work of all ranks is mostly a timed wait, and one becomes slow by 30 % in a part,
    which is a tenth of its work or less, then it is named."""
    check(slow(tmp_path / "run", rank=0, part=part, percent=30, wait=0.05), 0, part)


@pytest.mark.soak
def test_nobody_is_named_when_all_become_slow(tmp_path: Path) -> None:
    """When all ranks become slow in the same step, then nobody is named."""
    assert slow(tmp_path / "run", rank=-1, part="forward", percent=100) == []
