"""
Functions that run jobs of `Model.train`: `model_job.py` under `tft run`.

The environment contains the variable `MS_ENABLE_TFT`, as a user of MindSpore would set it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.e2e.jobs import Outcome, run

JOB = Path(__file__).with_name("model_job.py")
ALL = "{TTP:1,UCE:1,HCCE:1,ARF:1}"
LAST = "{TTP:1}"

Fault = list[Any]
"""A fault: rank, step, place and text. Any: JSON."""


def train(
    run_dir: Path,
    *words: str,
    faults: Sequence[Fault] = (),
    nproc: int = 2,
    epochs: int = 3,
    enable: str = ALL,
    **options: Any,  # Any: JSON
) -> Outcome:
    """
    Run a job to its end and return the outcome. `words` are options for `tft run`.
    """
    told = json.dumps({"faults": list(faults), **options})
    return run(
        run_dir, "--adaptor", "mindspore", *words,
        script=JOB, arguments=(str(run_dir), str(epochs), told), nproc=nproc,
        environment={"MS_ENABLE_TFT": enable},
    )  # fmt: skip


def layout(directory: Path, **more: Any) -> dict[str, Any]:  # Any: JSON
    """
    Return the callback's arguments for checkpoints in the layout of MindSpore Transformers.
    """
    return {"ckpt_save_path": str(directory), "prefix": "llama2_13b", **more}


def files(directory: Path) -> list[str]:
    """
    Return the checkpoint files under a directory.
    """
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*.ckpt"))


def same(outcome: Outcome, calm: Outcome, *, without: Sequence[tuple[int, int]] = ()) -> None:
    """
    Check that a job equals the job without faults, bit for bit.

    `without` lists the losses, by rank and step, that are missing. The rank was lost in its update
    of this step after the other ranks had completed it, so the replacement did not compute the step
    again.
    """
    assert outcome.code == 0, outcome.output
    rows, expected = outcome.rows(), calm.rows()
    assert rows == {place: loss for place, loss in expected.items() if place not in without}
    assert outcome.finals() == calm.finals()
    assert calm.finals()


def told(outcome: Outcome) -> list[tuple[str, list[tuple[str, int]], int]]:
    """
    Return each incident's strategy, its faults by kind and rank, and its number of started
    processes.
    """
    return [
        (
            each["strategy"],
            [(f["kind"], f["rank"]) for f in each["faults"]],
            each["processes_started"],
        )
        for each in outcome.incidents
    ]
