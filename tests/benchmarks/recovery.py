"""
Measure recoveries: twenty kills of ranks in turn, in every phase, in one job of four ranks. `own`
is the time of tft itself: the report's `total` without `await` (the start of a process and its
imports) and without the median undisturbed step.
"""

import itertools
import json
import statistics
import tempfile
from pathlib import Path

from tests.e2e.jobs import Outcome, run

KILLS = 20
EVERY = 12
"""Steps between two kills: enough for an undisturbed median between them."""
PHASES = ("forward", "backward", "collective", "update", "between")


def main() -> None:
    """
    Print one line: medians and worst cases in seconds.
    """
    specs = [
        f"kill:rank={kill % 4},step={(kill + 1) * EVERY},phase={PHASES[kill % 5]}"
        for kill in range(KILLS)
    ]
    options = [word for spec in specs for word in ("--chaos", spec)]
    steps = str((KILLS + 1) * EVERY)
    with tempfile.TemporaryDirectory() as directory:
        outcome = run(Path(directory, "run"), *options, arguments=("--steps", steps), limit=400)
        if outcome.code:
            raise SystemExit(outcome.output)
        print(json.dumps(measure(outcome)))


def measure(outcome: Outcome) -> dict[str, object]:
    """
    Return the times of a run.
    """
    rows = [
        json.loads(line)
        for line in (outcome.run_dir / "steps-rank1.jsonl").read_text().splitlines()
    ]
    times = [row["time"] for row in rows]
    step = statistics.median(b - a for a, b in itertools.pairwise(times))
    seconds = [incident["seconds"] for incident in outcome.incidents]
    own = [s["total"] - s["await"] - step for s in seconds]
    detect = [s["detect"] for s in seconds if s["detect"] is not None]
    phases = {
        name: round(statistics.median(s[name] for s in seconds), 4)
        for name in ("freeze", "clear", "await", "rebuild", "repair", "rollback", "resume")
    }
    return {
        "benchmark": "recovery",
        "unit": "s",
        "incidents": len(seconds),
        "total_median": round(statistics.median(s["total"] for s in seconds), 4),
        "total_worst": round(max(s["total"] for s in seconds), 4),
        "own_median": round(statistics.median(own), 4),
        "own_worst": round(max(own), 4),
        "detect_median": round(statistics.median(detect), 4),
        "detect_worst": round(max(detect), 4),
        "step_median": round(step, 4),
        "phases": phases,
        "limits": {"own_median": 0.5, "own_worst": 1.0, "detect": 0.05},
    }


if __name__ == "__main__":
    main()
