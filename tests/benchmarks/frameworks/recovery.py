"""
Measure recoveries of the script of `examples/NAME` for a framework and of the plain loop of
`examples/gpt`, in turns: jobs with the same number of ranks, with a rank killed every few steps.

    .venv-NAME/bin/python -m tests.benchmarks.frameworks.recovery NAME

NAME is lightning, transformers or torchtitan.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.jobs import ROOT, TRAIN, run

TURNS = 3
KILLS = 6
EVERY = 9
"""Steps between two kills."""
STEPS = (KILLS + 1) * EVERY
PHASES = ("forward", "backward", "collective", "update", "between")
EXAMPLES = ROOT / "examples"
SMALL = ("--module", "small", "--config", "small_llama", "--training.steps", str(STEPS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """
    How the example of a framework is started.
    """

    script: Path
    arguments: Callable[[Path], list[str]]
    """Returns the arguments of the script for a directory of its own."""
    ranks: int = 2
    phases: tuple[str, ...] = PHASES


LOOPS = {
    "lightning": Example(
        script=EXAMPLES / "lightning" / "train.py",
        arguments=lambda place: ["--dir", str(place), "--epochs", "4"],  # 64 steps
    ),
    "transformers": Example(
        script=EXAMPLES / "transformers" / "train.py",
        arguments=lambda place: ["--steps", str(STEPS), "--output", str(place)],
    ),
    "torchtitan": Example(
        script=EXAMPLES / "torchtitan" / "train_tft.py",
        arguments=lambda place: [*SMALL, "--dump_folder", str(place)],
        ranks=4,
        phases=("forward", "backward", "update", "between"),  # `collective` is for DDP
    ),
}


def main(name: str) -> None:
    """
    Print one line: medians of the seconds of an incident, and of its parts.
    """
    loop = LOOPS[name]
    ddp = Example(
        script=TRAIN, arguments=lambda place: ["--steps", str(STEPS)],
        ranks=loop.ranks, phases=loop.phases,
    )  # fmt: skip
    found: dict[str, list[dict[str, float]]] = {"ddp": [], name: []}
    with tempfile.TemporaryDirectory() as directory:
        for turn in range(TURNS):
            for which, seconds in found.items():
                options = ["--adaptor", name] if which == name else []
                example = loop if which == name else ddp
                seconds += _incidents(Path(directory, f"{which}{turn}"), example, options)
    result = {
        which: {
            part: round(statistics.median(each[part] for each in seconds), 3)
            for part in ("total", "await", "rebuild", "repair")
        }
        for which, seconds in found.items()
    }
    print(json.dumps({"benchmark": f"{name}_recovery", "unit": "s", **result}))


def _incidents(place: Path, example: Example, options: list[str]) -> list[dict[str, float]]:
    kills = [
        f"kill:rank={kill % example.ranks},step={(kill + 1) * EVERY},"
        f"phase={example.phases[kill % len(example.phases)]}"
        for kill in range(KILLS)
    ]
    chaos = [word for kill in kills for word in ("--chaos", kill)]
    outcome = run(
        place / "run", *options, *chaos, script=example.script, nproc=example.ranks,
        arguments=example.arguments(place / "own"),
    )  # fmt: skip
    if outcome.code:
        raise SystemExit(f"{outcome.output}\nexit code {outcome.code}")
    return [incident["seconds"] for incident in outcome.incidents]


if __name__ == "__main__":
    main(sys.argv[1])
