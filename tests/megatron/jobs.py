"""
Functions that run jobs of real megatron-core, with faults or without.

Tests compare the jobs with faults with the jobs without.
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
"""By name of a shape: the number of ranks, and the arguments of the job. Distributed optimizers
have two instances, unless the arguments say otherwise."""


def limit_of(nproc: int) -> float:
    """
    Return the time limit in seconds for a job of `nproc` ranks.
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
    Run the GPT job of a shape in `SHAPES` and return its outcome.

    `specs` are the faults for `--chaos`. `more` are further arguments of the job, and `options` are
    further options of `tft run`. `how` are further keywords of `run`, hence `Any`.
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
    Outcomes of jobs without a fault. Each job runs once per test run, when a test first asks for
    it.
    """

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory

    def __call__(self, shape: str, *more: str) -> Outcome:
        """
        Return the outcome of the fault-free job of this shape, run with the further arguments
        `more`.
        """
        name = "".join([shape, *more])
        return run_once(self._factory, name, lambda where: train(where, shape, more=more))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """
    Return the outcomes of jobs without a fault, shared by the whole test run.
    """
    return Undisturbed(tmp_path_factory)
