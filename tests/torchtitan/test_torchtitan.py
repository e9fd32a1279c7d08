"""
TorchTitan's Trainer in a job whose ranks are killed. All that it logs and saves is that of plain
TorchTitan under torchrun.
"""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.jobs import MARK, ROOT, Outcome, left_behind, run

JOB = ROOT / "tests" / "torchtitan" / "titan_job.py"
WORLD = 4
PHASES = ("forward", "backward", "collective", "update", "between", "tail", "evaluation")
LIMIT = 250.0
"""Seconds for a job: to import TorchTitan takes long on a busy machine."""


def plain(out: Path, *arguments: str) -> Path:
    """
    Train with plain TorchTitan under torchrun. Return the directory with its results.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={WORLD}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", str(JOB), str(out), "--plain"),
        *arguments,
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", MARK: str(out)},
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=LIMIT)
    finally:
        for pid in left_behind(out):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert process.returncode == 0, said[-6000:]
    return out


def survived(tmp_path: Path, specs: Sequence[str], *arguments: str, **how: Any) -> Outcome:
    """
    Train with tft under faults. Return the outcome of a job that is complete. Its results are in
    the directory `out`.
    """
    outcome = run(
        tmp_path / "run",
        *(word for spec in specs for word in ("--chaos", spec)),
        *how.pop("options", ()),
        limit=LIMIT,
        script=JOB,
        arguments=(str(tmp_path / "out"), *arguments),
        **how,
    )
    assert outcome.code == 0, outcome.output[-6000:]
    assert len(outcome.chaos()) == len(specs)
    return outcome


def metrics(out: Path) -> dict[tuple[str, int, str], Any]:
    """
    Return what each rank has logged, by rank, step and kind. A row that was logged twice must be
    the same both times.
    """
    found: dict[tuple[str, int, str], Any] = {}
    for path in sorted(out.glob("metrics-rank*.jsonl")):
        for row in map(json.loads, path.read_text().splitlines()):
            for kind in row.keys() - {"step"}:
                assert found.setdefault((path.name, row["step"], kind), row[kind]) == row[kind]
    return found


def logged_once(outcome: Outcome) -> list[tuple[int, list[str]]]:
    """
    Return what rank 0 has given to `session.log`, in order.
    """
    lines = (outcome.run_dir / "values-rank0.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [(row["step"], [float(v).hex() for v in row["values"].values()]) for row in rows]


def checkpoints(out: Path) -> dict[str, Any]:
    """
    Return the content of each checkpoint of TorchTitan, by its name.
    """
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    found: dict[str, Any] = {}
    for directory in sorted((out / "checkpoint").iterdir()):
        whole = out / f"{directory.name}.pt"
        dcp_to_torch_save(directory, whole)
        found[directory.name] = torch.load(whole, weights_only=False)
    return found


def same(left: Any, right: Any) -> bool:
    """
    Return True if two values from checkpoints are equal, bit for bit.
    """
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, io.BytesIO):
        return left.getvalue() == right.getvalue()
    return bool(left == right)


def same_results(out: Path, expected: Path) -> None:
    """
    Check that two trainings have logged and saved the same.
    """
    assert metrics(out) == metrics(expected)
    found, wanted = checkpoints(out), checkpoints(expected)
    assert found.keys() == wanted.keys()
    assert [name for name in found if not same(found[name], wanted[name])] == []


def finals(out: Path) -> list[dict[str, str]]:
    """
    Return the digests of each rank at the end of a job.
    """
    return [json.loads((out / f"final-rank{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.timeout(300)
def test_kills_leave_metrics_and_checkpoints_of_plain_torchtitan(tmp_path: Path) -> None:
    """When a rank is killed while TorchTitan saves a checkpoint, and another one in an update, then
    what TorchTitan logs and saves is that of plain TorchTitan under torchrun."""
    arguments = ("--steps", "6", "--accumulates", "--tensorboard")
    expected = plain(tmp_path / "plain", *arguments)
    outcome = survived(
        tmp_path, ["kill:rank=0,step=5,phase=update"], *arguments, "--die-saving", "1,3",
        options=("--adaptor", "torchtitan"),
    )  # fmt: skip
    assert [(i["strategy"], i["steps_lost"], i["inexact"]) for i in outcome.incidents] == [
        ("recover", 0, [])
    ] * 2
    same_results(tmp_path / "out", expected)
    rows = metrics(expected)
    assert logged_once(outcome) == [
        (step, rows["metrics-rank0.jsonl", step, "metrics"]) for step in range(1, 7)
    ]
    assert scalars(tmp_path / "out") == scalars(expected)


def scalars(out: Path) -> dict[str, list[tuple[int, float]]]:
    """
    Return what TensorBoard shows of the only run in `out`, without times and memory.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (directory,) = (out / "tb").iterdir()
    events = EventAccumulator(str(directory))
    events.Reload()
    names = [n for n in events.Tags()["scalars"] if n.startswith(("loss", "grad", "lr", "valid"))]
    timed = ("throughput", "memory")
    return {
        name: sorted({(each.step, each.value) for each in events.Scalars(name)})
        for name in names
        if not any(word in name for word in timed)
    }
