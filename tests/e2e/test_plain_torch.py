"""A last checkpoint resumed by plain torch without tft, with other numbers of ranks."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.jobs import LIMIT, MARK, ROOT, left_behind, run

SCRIPT = ROOT / "tests" / "e2e" / "split_job.py"
SAVED = 20
"""The last step that is whole when the job ends."""
STEPS = SAVED + 50


def losses(directory: Path) -> dict[int, list[float]]:
    """Return the losses of all ranks by step. For a step that was computed again, the last result
    counts."""
    found: dict[int, dict[str, float]] = {}
    for path in directory.glob("losses-rank*.jsonl"):
        for line in path.read_text().splitlines():
            step, loss = json.loads(line)
            found.setdefault(step, {})[path.name] = float.fromhex(loss)
    return {step: [by_rank[name] for name in sorted(by_rank)] for step, by_rank in found.items()}


def finished(command: list[str], where: Path) -> tuple[int, str]:
    """Return the exit code and the output of a command. No process of it is left."""
    process = subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", MARK: str(where)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = process.communicate(timeout=LIMIT)
    finally:
        for pid in left_behind(where):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return process.returncode, said


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[float]]:
    """Return the outcome of the undisturbed job of four ranks."""
    where = tmp_path_factory.mktemp("whole")
    arguments = ("--out", str(where / "out"), "--steps", str(STEPS))
    outcome = run(where / "run", script=SCRIPT, arguments=arguments)
    assert outcome.code == 0, outcome.output
    return losses(where / "out")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the last checkpoint of step `SAVED`, from a job of four ranks that lost a rank in the
    next step."""
    where = tmp_path_factory.mktemp("saved")
    outcome = run(
        where / "run",
        *("--enable", "dump", "--chaos", f"kill:rank=1,step={SAVED + 1},phase=forward"),
        script=SCRIPT,
        arguments=("--out", str(where / "out"), "--steps", str(STEPS)),
    )
    assert outcome.code == 3, outcome.output
    return where / "run" / "checkpoints" / f"step-{SAVED:08}"


@pytest.mark.soak
@pytest.mark.parametrize("world", [2, 4, 8])
def test_plain_torch_resumes_a_last_checkpoint_with_any_number_of_ranks(
    world: int, whole: dict[int, list[float]], checkpoint: Path, tmp_path: Path
) -> None:
    """When plain torch loads the last checkpoint of four ranks and trains on with the same global
    batch, then its losses are those of the undisturbed job for fifty steps: bit for bit with four
    ranks, and otherwise up to the order of gradient reduction."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(SCRIPT)),
        *("--out", str(tmp_path), "--steps", str(STEPS)),
        *("--first", str(SAVED + 1), "--resume", str(checkpoint)),
    ]
    code, said = finished(command, tmp_path)
    assert code == 0, said
    found = losses(tmp_path)
    assert sorted(found) == list(range(SAVED + 1, STEPS + 1))
    for step, each in found.items():
        assert len(each) == world
        if world == 4:
            assert each == whole[step], step
        assert sum(each) / world == pytest.approx(sum(whole[step]) / 4, abs=1e-5, rel=0), step
