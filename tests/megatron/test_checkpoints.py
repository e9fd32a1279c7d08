"""
Tests of the checkpoints that the survivors of real megatron-core jobs write without process groups.

A resumed job and megatron-core alone continue from these checkpoints bit for bit.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import ROOT, Outcome, identical
from tests.megatron.jobs import SHAPES, STEPS, Undisturbed, limit_of, train
from tft import checkpoint

PLAIN = ROOT / "tests" / "megatron" / "plain.py"
NAME = ("--checkpoint-name", "iter_{step:07d}")
pytestmark = pytest.mark.timeout(360)  # a test runs up to four jobs of up to eight ranks
SAVED = 4
"""The step after which the last checkpoint is written."""


def soak(*shapes: str) -> list[Any]:
    """
    Return these shapes as test parameters that only `make soak` runs.
    """
    return [pytest.param(shape, marks=pytest.mark.soak) for shape in shapes]


def dumped(run_dir: Path, shape: str, rank: int, *more: str) -> Outcome:
    """
    Run a job that loses `rank` in the step after `SAVED` and may only save a last checkpoint.
    """
    spec = f"kill:rank={rank},step={SAVED + 1},phase=forward"
    outcome = train(run_dir, shape, spec, more=more, options=(*NAME, "--enable", "dump"))
    assert outcome.code == 3, outcome.output
    return outcome


def plainly(checkpoints: Path, out: Path, shape: str, *more: str) -> Outcome:
    """
    Resume from the newest checkpoint under `checkpoints` with megatron-core alone.
    """
    nproc, arguments = SHAPES[shape]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(nproc), "--standalone",
        str(PLAIN), "--load", str(checkpoints), "--out", str(out), "--steps", str(STEPS), *arguments, *more,
    ]  # fmt: skip
    log = out.with_suffix(".out")
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        code = process.wait(timeout=limit_of(nproc))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Outcome(code=code, output=log.read_text(errors="replace"), run_dir=out)


def from_step(outcome: Outcome, first: int) -> dict[tuple[int, int], str]:
    """
    Return the losses from step `first` on, by rank and step.
    """
    return {(rank, step): loss for (rank, step), loss in outcome.rows().items() if step >= first}


@pytest.mark.parametrize(
    "shape",
    [
        *soak("TP1DP2", "TP1DP4", "TP1DP4-plain", "TP2DP2", "TP2DP2-plain", "PP2DP2"),
        *soak("PP2DP2-plain", "EP2DP4", "EP2DP4-plain", "TP2DP4", "PP2DP4"),
    ],
)
def test_a_last_checkpoint_is_resumed_bit_for_bit(
    shape: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """When a rank is killed and the others write a last checkpoint, then `--resume` ends as the
    undisturbed run."""
    run_dir = tmp_path / "run"
    dumped(run_dir, shape, rank=min(2, SHAPES[shape][0] - 1))
    place = run_dir / "checkpoints" / f"iter_{SAVED:07d}"
    assert checkpoint.verify(place).step == SAVED
    assert {".metadata", "metadata.json", "common.pt"} <= {each.name for each in place.iterdir()}

    resumed = train(run_dir, shape, options=(*NAME, "--resume"))
    assert resumed.code == 0, resumed.output
    identical(resumed, undisturbed(shape))


@pytest.mark.soak
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "TP1DP4-one"])
def test_megatron_core_alone_resumes_from_a_last_checkpoint(
    shape: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """When a rank is killed and the others write a last checkpoint, then megatron-core alone
    resumes from it with the losses of the undisturbed run."""
    run_dir = tmp_path / "run"
    dumped(run_dir, shape, rank=min(2, SHAPES[shape][0] - 1))
    alone = plainly(run_dir / "checkpoints", tmp_path / "plain", shape)
    assert alone.code == 0, alone.output
    assert alone.rows() == from_step(undisturbed(shape), SAVED + 1)


@pytest.mark.soak
@pytest.mark.parametrize(
    "more", [("--tied",), ("--fp32",), ("--fp16",), ("--overlap",)], ids="-".join
)
@pytest.mark.parametrize("shape", ["TP1DP4", "PP2DP2"])
def test_checkpoints_of_other_models_are_resumed_bit_for_bit(
    shape: str, more: Sequence[str], tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """When a model ties its embeddings and output weights, has other sizes, or has several buckets,
    then the last checkpoint of its job is resumed bit for bit too."""
    run_dir = tmp_path / "run"
    dumped(run_dir, shape, 1, *more)
    alone = plainly(run_dir / "checkpoints", tmp_path / "plain", shape, *more)
    assert alone.code == 0, alone.output
    assert alone.rows() == from_step(undisturbed(shape, *more), SAVED + 1)
    resumed = train(run_dir, shape, more=tuple(more), options=(*NAME, "--resume"))
    assert resumed.code == 0, resumed.output
    identical(resumed, undisturbed(shape, *more))


@pytest.mark.parametrize(
    ("shape", "killed"),
    [
        pytest.param("TP1DP4-one", (2,), id="no replica", marks=pytest.mark.soak),
        pytest.param("TP1DP4", (1, 3), id="both copies", marks=pytest.mark.soak),
        pytest.param("TP2DP2", (0, 2), id="both copies of a slice", marks=pytest.mark.soak),
        pytest.param("PP2DP2", (2, 3), id="both copies of a stage", marks=pytest.mark.soak),
        pytest.param("EP2DP4", (1, 3), id="both copies of experts", marks=pytest.mark.soak),
        pytest.param("TP1DP4-plain", (0, 1, 2, 3), id="all", marks=pytest.mark.soak),
    ],
)
def test_a_job_that_lost_all_holders_returns_to_its_newest_checkpoint(
    shape: str, killed: Sequence[int], tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """When all holders of a shard are killed at once, then all ranks return to the newest
    checkpoint, and the end is that of the undisturbed run without any checkpoint."""
    spec = f"kill:ranks={'+'.join(map(str, killed))},step=6,phase=forward"
    options = (*NAME, "--checkpoint-every", "2")
    outcome = train(tmp_path / "run", shape, spec, options=options)
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed(shape))
    assert {incident["strategy"] for incident in outcome.incidents} == {"recover"}
    checkpoints = tmp_path / "run" / "checkpoints"
    there = {checkpoint.verify(each).step for each in checkpoints.iterdir() if each.is_dir()}
    # The killed ranks may not have written their parts of the newest checkpoint. The report then
    # lists this checkpoint under `missed`.
    missed = {each["step"] for each in outcome.report["missed"]}
    assert (there | missed, there & missed) == (set(range(2, STEPS + 1, 2)), set())
    assert missed <= {4}
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == str(STEPS)
