"""
Measure a step on a real device with tft against the same step without it, with digests of slices
(`--integrity`), and with copies in host memory (`--backup-every`), in turns within one job. Then
measure the digests of the whole state against other ways to read it.

    python -m tests.benchmarks.device_step [--small]

The model has 100 million parameters of 32 bits, AdamW, and computes in bfloat16. One rank trains over
the backend of its device. Only copies of several ranks are digested, so two ranks share the device
for that, over gloo, and reduce no gradients. With `--small`, a small model shows that the benchmark
runs, also on a CPU.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.bootstrap import interval_95
from tests.e2e.jobs import ROOT

JOB = ROOT / "tests" / "benchmarks" / "device_job.py"
LIMIT = 80
"""The time limit of a job in seconds."""
ROUNDS = 15
"""The rounds of the jobs in which something is switched on and off."""
BLOCK = 10
COPIED = 10
"""The steps from one copy in host memory to the next: one in each block."""
CASES: dict[str, tuple[int, tuple[str, ...], tuple[tuple[str, str], ...]]] = {
    "tft": (1, (), (("tft", "plain"), ("tft", "waiting"))),
    "backup": (1, ("--backup-every", str(COPIED)), (("tft", "quiet"),)),
    "integrity": (2, ("--integrity", "50"), (("tft", "quiet"),)),
}
"""By name: the number of ranks, the options of the job, and the ways whose ratio is printed."""


def main() -> None:
    """
    Print a line for each ratio, and one for the reads of the state.
    """
    small = ["--small"] if "--small" in sys.argv[1:] else []
    if not small and not torch.accelerator.is_available():
        print(json.dumps({"benchmark": "device_step", "skipped": "there is no accelerator here"}))
        return
    for name, (ranks, options, pairs) in CASES.items():
        ways = ",".join(dict.fromkeys(way for pair in pairs for way in pair))
        more = ["--reads"] if name == "tft" else ["--rounds", str(ROUNDS)]
        more += ["--gloo"] if ranks > 1 else []
        told = measured(ranks, options, ["--ways", ways, *more, *small])
        for first, second in pairs:
            tell(name, told, first, second)
        if "reads" in told:
            tell_reads(told)


def measured(ranks: int, options: Sequence[str], words: Sequence[str]) -> dict[str, Any]:
    """
    Return what rank 0 of one job has written. Any: JSON.
    """
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory, "run")
        command = [
            sys.executable, "-m", "tft", "run", "--nproc-per-node", str(ranks), "--run-dir",
            str(where), "--audit", "off", *options, str(JOB), "--block", str(BLOCK), *words,
        ]  # fmt: skip
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            cwd=ROOT, timeout=LIMIT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(done.stdout)
        incidents = json.loads((where / "report.json").read_text())["incidents"]
        assert incidents == [], incidents
        told: dict[str, Any] = json.loads((where / "times.json").read_text())
    return told


def tell(case: str, told: dict[str, Any], first: str, second: str) -> None:  # Any: JSON
    """
    Print the ratio of the times of two ways of a job, and these times.
    """
    pairs = list(zip(told["times"][first], told["times"][second], strict=True))
    ratios = [one / other for one, other in pairs]
    added = [1e3 * (one - other) for one, other in pairs]
    low, high = interval_95(statistics.median, ratios)
    print(
        json.dumps(
            {
                "benchmark": "device_step",
                "case": case,
                "unit": f"time of a step, {first} / {second}",
                "median": round(statistics.median(ratios), 4),
                "interval_95": [round(low, 4), round(high, 4)],
                f"{first}_ms": round(1e3 * statistics.median(told["times"][first]), 3),
                f"{second}_ms": round(1e3 * statistics.median(told["times"][second]), 3),
                "added_ms": round(statistics.median(added), 3),
                "added_ms_interval_95": [
                    round(x, 3) for x in interval_95(statistics.median, added)
                ],
                "pairs": len(ratios),
                "parameters": told["parameters"],
                "device": told["device"],
            }
        ),
        flush=True,
    )


def tell_reads(told: dict[str, Any]) -> None:  # Any: JSON
    """
    Print how long each way to read the whole state takes.
    """
    size, *ways = told["reads"].items()
    print(
        json.dumps(
            {
                "benchmark": "device_step",
                "case": "one read of the state",
                "unit": "ms, GB/s",
                "gigabytes": round(size[1] / 1e9, 3),
                **{name: [round(1e3 * s, 2), round(size[1] / 1e9 / s, 2)] for name, s in ways},
                "device": told["device"],
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
