"""
Trainings of `job.py`: under Lightning's own strategy and torchrun, and under tft; and their comparison.
"""

import difflib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.e2e.jobs import LIMIT, ROOT, Outcome, run

JOB = ROOT / "tests" / "lightning" / "job.py"
RANKS = 2


def plain(where: Path, *arguments: str) -> Path:
    """
    Train without tft, as torchrun starts it. Return the directory of the training.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}",
        str(JOB), "--plain", "--dir", str(where), *arguments,
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=LIMIT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, output
    return where


def protected(where: Path, options: tuple[str, ...] = (), *arguments: str) -> Outcome:
    """
    Train under tft in the directory `where / "own"`. Return the outcome of the job.
    """
    return run(
        where / "run", *options, script=JOB, nproc=RANKS,
        arguments=("--dir", str(where / "own"), *arguments),
    )  # fmt: skip


def rows(where: Path, rank: int) -> list[tuple[Any, ...]]:
    """
    Return what the callback of a rank has recorded: for each batch its number, its counts, and its
    loss. Rows that an incident has repeated are equal, and count once.
    """
    lines = (where / f"batches-rank{rank}.jsonl").read_text().splitlines()
    return sorted({tuple(json.loads(line)) for line in lines})


def differences(left: Path, right: Path) -> list[str]:
    """
    Return what differs between two trainings: final states, batches and losses of each rank, logged
    metrics, and the content of the checkpoints.
    """
    found = []
    for rank in range(RANKS):
        name = f"final-rank{rank}.json"
        final, other = (json.loads((each / name).read_text()) for each in (left, right))
        found += [f"{part} of rank {rank}" for part in other if final.get(part) != other[part]]
        if rows(left, rank) != rows(right, rank):
            found.append(f"the batches of rank {rank}")
    logs = [(each / "lightning_logs/version_0/metrics.csv").read_text() for each in (left, right)]
    found += difflib.unified_diff(logs[1].splitlines(), logs[0].splitlines(), lineterm="", n=0)
    files = [
        {str(file.relative_to(each)) for file in each.rglob("*.ckpt")} for each in (left, right)
    ]
    found += [f"the checkpoint {name} is in one only" for name in files[0] ^ files[1]]
    for name in sorted(files[0] & files[1]):
        if content(left / name, left) != content(right / name, right):
            found.append(f"the content of the checkpoint {name}")
    return found


def content(path: Path, root: Path) -> Any:
    """
    Return the content of a checkpoint without the directory `root` of its training, for `==`.
    """
    return _comparable(torch.load(path, weights_only=False), root)


def _comparable(value: Any, root: Path) -> Any:
    """
    Return the content of a checkpoint without the directory in which it lies, for `==`.
    """
    if isinstance(value, str):
        return value.replace(str(root), "")
    if isinstance(value, dict):
        return {_comparable(key, root): _comparable(each, root) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_comparable(each, root) for each in value]
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), *value.shape, value.cpu().numpy().tobytes()]
    return value
