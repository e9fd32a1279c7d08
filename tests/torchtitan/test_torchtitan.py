"""
TorchTitan's Trainer in a job whose ranks are killed. All that it logs and saves is that of plain
TorchTitan under torchrun.
"""

import io
import json
import os
import shutil
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
"""Two replicas of a model that two ranks share."""
PHASES = ("forward", "backward", "update", "between", "tail", "evaluation")
LIMIT = 400.0
"""Seconds for a job: to import TorchTitan takes long on a busy machine."""


def plain(out: Path, *arguments: str, world: int = WORLD) -> Path:
    """
    Train with plain TorchTitan under torchrun. Return the directory with its results.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}"),
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
        tmp_path / how.pop("name", "run"),
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


def checkpoints(out: Path, below: str = "checkpoint") -> dict[str, Any]:
    """
    Return the content of each checkpoint of TorchTitan below a directory of `out`, by its name.
    """
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    found: dict[str, Any] = {}
    for directory in sorted((out / below).iterdir()):
        whole = out / f"{below}-{directory.name}.pt"
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
        return bool(left.getvalue() == right.getvalue())
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
    """When a rank is killed while TorchTitan saves a checkpoint, and another one in an update, and
    items draw from the generators of the process, then what TorchTitan logs and saves is that of plain TorchTitan under torchrun."""
    arguments = ("--steps", "6", "--accumulates", "--random", "--tensorboard")
    expected = plain(tmp_path / "plain", *arguments, world=2)
    outcome = survived(
        tmp_path, ["kill:rank=0,step=5,phase=update"], *arguments, "--die-saving", "1,3",
        options=("--adaptor", "torchtitan"), nproc=2,
    )  # fmt: skip
    exact(outcome, 2)
    same_results(tmp_path / "out", expected)
    rows = metrics(expected)
    assert logged_once(outcome) == [
        (step, rows["metrics-rank0.jsonl", step, "metrics"]) for step in range(1, 7)
    ]
    assert scalars(tmp_path / "out") == scalars(expected)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("turn", range(WORLD))
def test_kills_in_all_phases_leave_everything_unchanged(turn: int, tmp_path: Path) -> None:
    """When ranks of two replicas of a sharded model are killed in each phase of a step, in a
    validation, and while another rank is replaced, then metrics, checkpoints and final state are
    those without a fault."""
    arguments = ("--steps", "19", "--saves", "5")
    expected = plain(tmp_path / "plain", *arguments)
    specs = [
        f"kill:rank={(turn + n) % WORLD},step={3 * n + 2},phase={phase}"
        for n, phase in enumerate(PHASES[:-1])
    ]
    specs += [
        f"kill:rank={turn},step=16,phase=evaluation",
        f"kill:rank={turn},step=18,phase=forward",
        f"kill:rank={(turn + 1) % WORLD},step=18,phase=repair",
    ]
    outcome = survived(tmp_path, specs, *arguments)
    exact(outcome, len(PHASES) + 1)
    same_results(tmp_path / "out", expected)
    calm = run(tmp_path / "calm", script=JOB, arguments=(str(tmp_path / "c"), *arguments))
    assert calm.code == 0, calm.output[-6000:]
    same_results(tmp_path / "c", expected)
    assert finals(tmp_path / "out") == finals(tmp_path / "c")


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "more", [("--tensor", "2", "--recomputes"), ("--workers", "1")], ids=["tensor", "workers"]
)
def test_other_ways_to_train(more: Sequence[str], tmp_path: Path) -> None:
    """When ranks are killed in a training with tensor parallelism and activation checkpointing, or
    with workers that load the data, then metrics and checkpoints are those of plain TorchTitan."""
    arguments = ("--steps", "7", *more)
    expected = plain(tmp_path / "plain", *arguments)
    specs = ("kill:rank=1,step=3,phase=backward", "kill:rank=2,step=6,phase=forward")
    exact(survived(tmp_path, specs, *arguments), 2)
    assert metrics(tmp_path / "out") == metrics(expected)
    found, wanted = checkpoints(tmp_path / "out"), checkpoints(expected)
    for each in (*found.values(), *wanted.values()):
        if (
            "--workers" in more
        ):  # the same position in another form: tft asks the workers more often
            del each["dataloader"]
    assert found.keys() == wanted.keys()
    assert [name for name in found if not same(found[name], wanted[name])] == []


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_checkpoint_of_tft_becomes_one_of_torchtitan(tmp_path: Path) -> None:
    """When a job resumes only to export its checkpoint, then it writes the checkpoint that plain
    TorchTitan saves after this step, and trains no step."""
    arguments = ("--steps", "6", "--saves", "3")
    expected = plain(tmp_path / "plain", *arguments)
    survived(tmp_path, [], *arguments, options=("--checkpoint-every", "3", "--last-step", "3"))
    place = tmp_path / "out" / "exported"
    options = ("--resume", "--export", str(place), "--export-only")
    outcome = survived(tmp_path, [], *arguments, options=options)
    assert outcome.report["steps"] == 3
    (written,) = checkpoints(tmp_path / "out", "exported").values()
    assert same(written, checkpoints(expected)["step-3"])


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_either_continues_from_a_checkpoint_of_the_other(tmp_path: Path) -> None:
    """When plain TorchTitan continues from a checkpoint of a job with a kill, and when such a job
    continues from a checkpoint of plain TorchTitan, then the rest is that of the whole training.
    The kill in the first step after the checkpoint loads it again."""
    arguments = ("--steps", "9", "--saves", "4")
    expected = plain(tmp_path / "plain", *arguments)
    outcome = survived(tmp_path, ["kill:rank=2,step=2,phase=backward"], *arguments)
    exact(outcome, 1)
    same_results(tmp_path / "out", expected)
    for name in ("out", "plain"):
        for late in ("step-8", "step-9"):
            shutil.rmtree(tmp_path / name / "checkpoint" / late)
    whole = metrics(expected)
    after = {key: row for key, row in whole.items() if key[1] > 4}
    for name in ("out", "plain"):
        for path in (tmp_path / name).glob("metrics-*"):
            path.unlink()
    plain(tmp_path / "out", *arguments)
    assert metrics(tmp_path / "out") == after
    (tmp_path / "plain").rename(tmp_path / "again")
    again = run(
        tmp_path / "run2", "--chaos", "kill:rank=1,step=1,phase=backward",
        script=JOB, arguments=(str(tmp_path / "again"), *arguments), limit=LIMIT,
    )  # fmt: skip
    assert again.code == 0, again.output[-6000:]
    assert metrics(tmp_path / "again") == after
    found, wanted = checkpoints(tmp_path / "again"), checkpoints(tmp_path / "out")
    assert found.keys() == wanted.keys()
    assert [name for name in found if not same(found[name], wanted[name])] == []


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_loss_that_is_not_finite_ends_the_job_as_in_torchtitan(tmp_path: Path) -> None:
    """When the loss is not finite, then TorchTitan's guard ends the job, with the guard's sentence.
    The update of that step has not been made."""
    outcome = run(
        tmp_path / "run", script=JOB, arguments=(str(tmp_path / "out"), "--infinite-loss", "3"),
        nproc=2, limit=LIMIT,
    )  # fmt: skip
    assert outcome.code not in (0, 1), outcome.output[-6000:]
    assert "Loss is not finite" in outcome.output
    assert {step for _, step, _ in metrics(tmp_path / "out")} == {1, 2}


def exact(outcome: Outcome, incidents: int) -> None:
    """
    Check that the job had this number of incidents, each of them without a lost step.
    """
    assert [(i["strategy"], i["steps_lost"], i["inexact"]) for i in outcome.incidents] == [
        ("recover", 0, [])
    ] * incidents


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
