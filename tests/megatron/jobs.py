"""
Jobs of real megatron-core, and those without a fault that others are compared with.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import ROOT, Outcome, run, run_once

JOB = ROOT / "tests" / "megatron" / "job.py"
STEPS = 8

SHAPES: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "TP1DP2": (2, ()),
    "TP1DP4": (4, ()),
    "TP1DP4-one": (4, ("--instances", "1")),
    "TP1DP4-plain": (4, ("--instances", "0")),
    "TP2DP2": (4, ("--tp", "2")),
    "TP2DP2-plain": (4, ("--tp", "2", "--instances", "0")),
    "PP2DP2": (4, ("--pp", "2")),
    "PP2DP2-plain": (4, ("--pp", "2", "--instances", "0")),
    "EP2DP4": (4, ("--ep", "2")),
    "EP2DP4-plain": (4, ("--ep", "2", "--instances", "0")),
    "TP2DP4": (8, ("--tp", "2")),
    "PP2DP4": (8, ("--pp", "2")),
}
"""Ranks, and what the job is told. Distributed optimizers have two instances, where nothing else is
said."""


def limit_of(nproc: int) -> float:
    """
    Seconds a job of so many ranks may take.
    """
    return 25.0 * nproc


def train(
    run_dir: Path,
    shape: str,
    *specs: str,
    more: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
    **how: Any,
) -> Outcome:
    """
    The job, with what chaos does to it; `Any`: keywords of `run`. `more` goes to the job, `options` to
    `tft run`.
    """
    nproc, arguments = SHAPES[shape]
    how.setdefault("limit", limit_of(nproc))
    chaos = [word for spec in specs for word in ("--chaos", spec)]
    steps = ("--steps", str(how.pop("steps", STEPS)))
    outcome = run(
        run_dir, "--adaptor", "megatron", *chaos, *options,
        script=JOB, arguments=(*steps, *arguments, *more), nproc=nproc, **how,
    )  # fmt: skip
    return outcome


class Undisturbed:
    """
    Outcomes without a fault, each run when it is first asked for, once per test run.
    """

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory

    def __call__(self, shape: str, *more: str) -> Outcome:
        """
        Of this shape, and of what else the job was told.
        """
        name = "".join([shape, *more])
        return run_once(self._factory, name, lambda where: train(where, shape, more=more))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """
    Without any fault.
    """
    return Undisturbed(tmp_path_factory)
