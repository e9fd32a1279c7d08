"""
Measure the step time of the example with tft against the ordinary script, in short runs of 500
steps in turns. The noise is the result of the same measurement with the ordinary script on both
sides.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.e2e.jobs import ROOT
from tft.worker.audit import STEPS as AUDITED

PAIRS = 10
STEPS = 85
WARM = AUDITED + 5
"""Steps left out at the beginning of a run: they are audited, buckets are rebuilt, caches fill. What the audit costs is
measured by `audit_cost`."""


def main() -> None:
    """
    Print one line: the median of the ratios of the pairs, and the noise.
    """
    plain: list[float] = []
    with_tft: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        for pair in range(PAIRS):
            # alternate the order, so that a machine that slows down slows both kinds equally
            for kind in ("plain", "tft") if pair % 2 else ("tft", "plain"):
                where = Path(directory, f"{kind}-{pair}")
                (plain if kind == "plain" else with_tft).append(step_time(kind, where))
    ratios = [a / b for a, b in zip(with_tft, plain, strict=True)]
    again = [max(a, b) / min(a, b) for a, b in zip(plain[::2], plain[1::2], strict=True)]
    print(
        json.dumps(
            {
                "benchmark": "step_ratio",
                "unit": "step time with tft / without",
                "median": round(statistics.median(ratios), 4),
                "noise": round(statistics.median(again) - 1, 4),
                "ratios": [round(r, 3) for r in ratios],
                "plain_ms": round(1e3 * statistics.median(plain), 2),
                "tft_ms": round(1e3 * statistics.median(with_tft), 2),
                "limit": 1.01,
                "steps": PAIRS * (STEPS - WARM),
            }
        )
    )


def step_time(kind: str, where: Path) -> float:
    """
    Return the median step time of one run of four ranks in seconds, as rank 0 recorded it.
    """
    example = ROOT / "examples" / "gpt"
    if kind == "tft":
        command = [
            sys.executable, "-m", "tft", "run", "--nproc-per-node", "4", "--run-dir", str(where),
            str(example / "train.py"), "--steps", str(STEPS),
        ]  # fmt: skip
    else:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone",
            str(example / "plain.py"), "--steps", str(STEPS), "--out", str(where),
        ]  # fmt: skip
    quiet = subprocess.DEVNULL
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        command, stdout=quiet, stderr=quiet, check=True, cwd=ROOT, timeout=120, env=environment
    )
    rows = [json.loads(line) for line in (where / "steps-rank0.jsonl").read_text().splitlines()]
    times: list[float] = [row["time"] for row in rows][WARM:]
    return statistics.median(b - a for a, b in itertools.pairwise(times))


if __name__ == "__main__":
    main()
