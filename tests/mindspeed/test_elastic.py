"""A job of MindSpeed-LLM's elastic training continues with fewer ranks, and later with all ranks
again."""

import json
from pathlib import Path

import pytest

from tests.e2e.jobs import Job, left_behind, until
from tests.mindspeed.jobs import LIMIT, Trained, training

pytestmark = pytest.mark.timeout(600)
BATCH = 12
"""The samples of a step: three micro-batches on each of four ranks, or four micro-batches on each
of three ranks."""


def _steps(directory: Path, rank: int) -> list[tuple[int, int]]:
    """Return the steps that a rank has computed, with the number of ranks in each."""
    path = directory / f"steps-{rank}.jsonl"
    told = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(each["step"], each["ranks"]) for each in told]


def _trains(directory: Path, ranks: int, steps: int = 3) -> None:
    """Wait until this number of ranks has trained some steps together."""
    enough = lambda: sum(each == ranks for _, each in _steps(directory, 0)) > steps  # noqa: E731
    until(enough, f"{ranks} ranks train", 120.0)


def _end(running: Job, directory: Path) -> Trained:
    outcome = running.end(LIMIT)
    assert left_behind(directory / "run") == [], "processes were left behind"
    return Trained(outcome=outcome, directory=directory)


@pytest.mark.soak
@pytest.mark.parametrize("lost", [1, 3])
def test_an_elastic_job_trains_with_three_ranks_until_the_fourth_returns(
    tmp_path: Path, lost: int
) -> None:
    """When a process is killed and lost processes are not to be replaced, then three ranks train on
    with all samples of each step. When another process is ready, four ranks train again. In the end
    all replicas are equal, and no sample is left out or counted twice."""
    directory = tmp_path / "job"
    options = {
        "enable_elastic_training": True, "enable_worker_reboot": False, "train_iters": 10_000,
        "done": "done", "warms": "warm", "faults": [[lost, 4, "forward", "kill"]],
    }  # fmt: skip
    with training(directory, options) as running:
        _trains(directory, 3)
        before = len(_steps(directory, 0))
        (directory / "warm").touch()
        enough = lambda: [each for _, each in _steps(directory, 0)[before:]].count(4) > 3  # noqa: E731
        until(enough, "all train again", 120.0)
        (directory / "done").touch()
        trained = _end(running, directory)
    assert trained.outcome.code == 0, trained.outcome.output[-8000:]
    assert trained.strategies == ["scale_in", "scale_out"]
    finals = trained.finals()
    steps = int((directory / "ends").read_text())
    for rank in range(4):
        mine, replica = finals[f"final-{rank}"], finals[f"final-{(rank + 2) % 4}"]
        assert mine["parameters"] == finals["final-0"]["parameters"]
        assert mine["optimizer"] == replica["optimizer"]
        assert (mine["iteration"], mine["scheduler"], mine["consumed"]) == (
            steps,
            steps * BATCH,
            steps * BATCH,
        )
        computed = {step for step, _ in _steps(directory, rank)}
        whole = set(range(1, steps + 1))
        assert computed == whole or (rank == lost and computed < whole)
    assert {json.dumps(told) for told in trained.losses()[f"steps-{0}", steps]}
