"""
Measure the memory of training with megatron-core under tft, in bytes per parameter on the rank with
the most, after a step and before its gradients are freed. The formulas of `tft replicas` are
printed beside it.
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.jobs import ROOT, run
from tft.placement.memory_cost import Gradients, cost

JOB = ROOT / "tests" / "megatron" / "memory_job.py"
RANKS = 4
LIMIT = 0.02
"""How far from the formula it may be: padding, and what is not cut into shares, such as the numbers of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """
    One configuration of training.
    """

    instances: int
    """Of the distributed optimizer; 0: it is not distributed."""
    gradients: Gradients

    @property
    def what(self) -> str:
        """
        Return a description of the configuration.
        """
        return f"{self.instances} instances" if self.instances else "not distributed"

    @property
    def formula(self) -> str:
        """
        Return the formula for its bytes as text.
        """
        return cost(self.gradients, RANKS, self.instances or RANKS).formula

    @property
    def expected(self) -> float:
        """
        Return the result of the formula.
        """
        return cost(self.gradients, RANKS, self.instances or RANKS).total


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """
    The memory that one rank holds.
    """

    parameters: int
    padded: int
    """The numbers in the buffer of gradients: parameters begin at multiples of 64, and buckets end at one."""
    kept: int
    """Of how many numbers the optimizer has the masters and moments."""
    bytes: int


def rows() -> Iterator[Row]:
    """
    Return all configurations.
    """
    for gradients in Gradients:
        for instances in (0, 1, 2, RANKS):
            yield Row(instances=instances, gradients=gradients)


def measure(row: Row, run_dir: Path) -> list[Held]:
    """
    Return the memory of each rank of a job.
    """
    arguments = ["--instances", str(row.instances)]
    if row.gradients is Gradients.HALF:
        arguments.append("--half")
    outcome = run(run_dir, "--adaptor", "megatron", script=JOB, arguments=arguments, nproc=RANKS)
    assert outcome.code == 0, outcome.output
    files = sorted(run_dir.glob("memory-rank*.json"))
    return [Held(**json.loads(path.read_text())) for path in files]


def main() -> None:
    """
    Print one line for each configuration.
    """
    with tempfile.TemporaryDirectory() as directory:
        for number, row in enumerate(rows()):
            held = measure(row, Path(directory, str(number)))
            worst = max(each.bytes / each.parameters for each in held)
            told = {
                "benchmark": "megatron_memory",
                "unit": "bytes per parameter, on the rank that has most",
                "what": row.what,
                "gradients": row.gradients.value,
                "formula": row.formula,
                "expected": row.expected,
                "measured": round(worst, 3),
                "holds": abs(worst / row.expected - 1) <= LIMIT,
            }
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
