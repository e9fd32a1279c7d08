"""
A Megatron step's time with tft against one without, side by side in one job. The noise is what the same measure
says of two without.

    python -m tests.benchmarks.megatron_step [SHAPE...]
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

from tests.e2e.jobs import ROOT, run
from tests.megatron.jobs import SHAPES

JOB = ROOT / "tests" / "megatron" / "cost_job.py"
STEPS = 160
WARM = 10
"""Steps left out at the beginning: memory is allocated, caches fill."""


def main() -> None:
    """
    Print one line for each shape.
    """
    for shape in sys.argv[1:] or ("TP1DP4", "TP1DP4-plain", "TP2DP2"):
        with tempfile.TemporaryDirectory() as directory:
            print(json.dumps(compare(shape, Path(directory, "run"))), flush=True)


def compare(shape: str, run_dir: Path) -> dict[str, object]:
    """
    Return the median of the ratios of the step times.
    """
    nproc, arguments = SHAPES[shape]
    outcome = run(
        run_dir, "--adaptor", "megatron", script=JOB, nproc=nproc,
        arguments=("--steps", str(STEPS), *arguments), limit=400,
    )  # fmt: skip
    if outcome.code:
        raise SystemExit(outcome.output)
    rows = json.loads((run_dir / "cost-rank0.json").read_text())[WARM:]
    kept, other, another = zip(*rows, strict=True)
    ratios = [a / b for a, b in zip(kept, other, strict=True)]
    again = [a / b for a, b in zip(another, other, strict=True)]
    return {
        "benchmark": "megatron_step",
        "shape": shape,
        "unit": "step time with tft / without",
        "median": round(statistics.median(kept) / statistics.median(other), 4),
        "median_of_ratios": round(statistics.median(ratios), 4),
        "noise": round(abs(statistics.median(again) - 1), 4),
        "with_tft_ms": round(1e3 * statistics.median(kept), 2),
        "without_ms": round(1e3 * statistics.median(other), 2),
        "steps": len(rows),
    }


if __name__ == "__main__":
    main()
