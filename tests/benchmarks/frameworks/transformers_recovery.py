"""
Measure recoveries of the Trainer of `examples/transformers` and of the plain loop of `examples/gpt`,
in turns: jobs of two ranks, with a rank killed every few steps.

Run it in the environment of the adaptor for Transformers: `.venv-transformers/bin/python -m
tests.benchmarks.frameworks.transformers_recovery`.
"""

import json
import statistics
import tempfile
from pathlib import Path

from tests.e2e.jobs import ROOT, TRAIN, run

TURNS = 3
KILLS = 6
EVERY = 9
"""Steps between two kills."""
PHASES = ("forward", "backward", "collective", "update", "between")
SCRIPT = ROOT / "examples" / "transformers" / "train.py"


def main() -> None:
    """
    Print one line: medians of the seconds of an incident, and of its parts.
    """
    found: dict[str, list[dict[str, float]]] = {"ddp": [], "transformers": []}
    with tempfile.TemporaryDirectory() as directory:
        for turn in range(TURNS):
            for name, seconds in found.items():
                seconds += _incidents(Path(directory, f"{name}{turn}"), name)
    result = {
        name: {
            part: round(statistics.median(each[part] for each in seconds), 3)
            for part in ("total", "await", "rebuild", "repair")
        }
        for name, seconds in found.items()
    }
    print(json.dumps({"benchmark": "transformers_recovery", "unit": "s", **result}))


def _incidents(place: Path, name: str) -> list[dict[str, float]]:
    specs = [
        f"kill:rank={kill % 2},step={(kill + 1) * EVERY},phase={PHASES[kill % len(PHASES)]}"
        for kill in range(KILLS)
    ]
    options = [word for spec in specs for word in ("--chaos", spec)]
    steps = ["--steps", str((KILLS + 1) * EVERY)]
    if name == "transformers":
        options += ["--adaptor", name]
        steps += ["--output", str(place / "output")]
    script = SCRIPT if name == "transformers" else TRAIN
    outcome = run(place / "run", *options, script=script, arguments=steps, nproc=2)
    if outcome.code:
        raise SystemExit(outcome.output)
    return [incident["seconds"] for incident in outcome.incidents]


if __name__ == "__main__":
    main()
