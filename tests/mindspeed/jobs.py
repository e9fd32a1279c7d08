"""
Functions that run the program with MindSpeed-LLM's high availability, with faults or without.

Tests compare the jobs with faults with the jobs without.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import Job, Outcome, job, left_behind

PROGRAM = Path(__file__).parent / "program.py"
SOURCE = os.environ.get("MINDSPEED_LLM", "")
"""A directory of MindSpeed-LLM. If empty, the jobs use the stand-in for MindSpeed-LLM."""
LIMIT = 240.0
"""The time limit of a job in seconds. Each rank and each replacement imports torch and
megatron-core."""

Options = Mapping[str, Any]
"""Options of the program, as JSON."""
MODELS: Mapping[str, Options] = {
    "dense": {},
    "moe": {"num_experts": 4, "expert_model_parallel_size": 2},
}
"""Two models: `dense` has one chained optimizer, and `moe` has two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """
    The results of a job that has ended.
    """

    outcome: Outcome
    directory: Path

    def finals(self) -> dict[str, Any]:
        """
        Return each rank's final state: digests of parameters and optimizer state, scheduler, data
        position.
        """
        return {
            path.stem: json.loads(path.read_text()) for path in self.directory.glob("final-*.json")
        }

    def losses(self) -> dict[tuple[str, int], set[str]]:
        """
        Return the losses of the micro-batches and of all ranks, by rank and step.

        A set holds several entries if repeated steps differ.
        """
        found: dict[tuple[str, int], set[str]] = {}
        for path in self.directory.glob("steps-*.jsonl"):
            for line in path.read_text().splitlines():
                step = json.loads(line)
                told = json.dumps([step["ranks"], step["local"], step["loss"]])
                found.setdefault((path.stem, step["step"]), set()).add(told)
        return found

    @property
    def strategies(self) -> list[str]:
        """
        The strategy of each incident, in order.
        """
        return [str(incident["strategy"]) for incident in self.outcome.incidents]


@contextmanager
def training(directory: Path, options: Options, *run_options: str, nproc: int = 4) -> Iterator[Job]:
    """
    Start the program on `nproc` ranks and yield the running job.
    """
    directory.mkdir(parents=True, exist_ok=True)
    told = {**({"source": SOURCE} if SOURCE else {}), **options}
    with job(
        directory / "run", "--adaptor", "mindio", *run_options, script=PROGRAM, nproc=nproc,
        arguments=(str(directory), json.dumps(told)),
        environment={"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
    ) as running:  # fmt: skip
        yield running


def train(directory: Path, options: Options, *run_options: str, **how: Any) -> Trained:
    """
    Run a job to its end and return its results. Fails if the job leaves a process behind.
    """
    with training(directory, options, *run_options, **how) as running:
        outcome = running.end(LIMIT)
        assert left_behind(directory / "run") == [], "processes were left behind"
    return Trained(outcome=outcome, directory=directory)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """
    Return a function that trains a model without a fault, once for all tests.
    """
    known: dict[str, Trained] = {}

    def found(model: str) -> Trained:
        if model not in known:
            known[model] = train(tmp_path_factory.mktemp(model) / "job", MODELS[model])
            assert known[model].outcome.code == 0, known[model].outcome.output[-6000:]
        return known[model]

    return found
