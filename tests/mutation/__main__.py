"""
`make mutate`: makes small mistakes in the judgement, one at a time, and checks that a test fails
for each.

`settings.toml` names the files and the tests. The files in `survivors` explain every mutant that no
test kills. The command fails if too few mutants are killed, if a survivor is not explained, or if
an explained mutant is killed.
"""

import argparse
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.harness import Harness, Verdict
from tests.mutation.operators import Mutant, mutants, optional_names

SETTINGS = Path(__file__).with_name("settings.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """
    The content of `settings.toml` and of the explanations.
    """

    files: dict[str, Path]
    """Module to its source."""
    tests: tuple[str, ...]
    least: float
    """The share of all mutants that the tests have to kill."""
    patience: float
    """Seconds of CPU time for a test that takes none, before its mutant counts as endless."""
    explained: dict[str, str]
    """Survivor to the reason why it may live."""


def read(path: Path) -> Settings:
    """
    Read the settings in a file, and the explanations beside it. Paths in the file are relative to
    the working directory.
    """
    said = tomllib.loads(path.read_text())
    told = [tomllib.loads(p.read_text()) for p in sorted(path.parent.glob("survivors/*.toml"))]
    files = [Path(name).resolve() for name in said["files"]]
    here = Path.cwd()
    return Settings(
        files={".".join(f.relative_to(here).with_suffix("").parts): f for f in files},
        tests=tuple(said["tests"]),
        least=said["least"],
        patience=said["patience"],
        explained={
            name: group["why"]
            for file in told
            for group in file["survivors"]
            for name in group["mutants"]
        },
    )


def made(settings: Settings, chosen: Sequence[str]) -> list[Mutant]:
    """
    Return all mutants, or those whose names contain one of the texts in `chosen`.
    """
    rooms = {path.parent for path in settings.files.values()}
    near = [Path("tft/protocol/messages.py"), *(p for room in rooms for p in room.glob("*.py"))]
    optional = frozenset[str]().union(*(optional_names(p.read_text()) for p in near if p.exists()))
    every = [
        mutant
        for module, path in settings.files.items()
        for mutant in mutants(module, path.read_text(), optional)
    ]
    return [m for m in every if not chosen or any(text in m.name for text in chosen)]


def main(settings: Settings, chosen: Sequence[str]) -> int:
    """
    Try the mutants, print the table, and return True if there are no complaints.
    """
    began = time.monotonic()
    candidates = made(settings, chosen)
    harness = Harness(settings.files, settings.tests, candidates, settings.patience)
    harness.run()
    if harness.refused:
        print(harness.refused)
        return 2
    verdicts = harness.verdicts
    print(table(settings, verdicts))
    print(f"{len(verdicts)} mutants in {time.monotonic() - began:.0f} s")
    wrong = complaints(settings, verdicts, everything=not chosen)
    for line in wrong:
        print(line)
    return 1 if wrong else 0


def table(settings: Settings, verdicts: Sequence[Verdict]) -> str:
    """
    Print a line for each file, and one for all files.
    """
    lines = [f"{'':28}{'mutants':>9}{'killed':>9}{'late':>7}{'explained':>11}{'alive':>7}{'':>9}"]
    for module in (*settings.files, "all"):
        these = [v for v in verdicts if module in ("all", v.mutant.module)]
        killed = [v for v in these if v.killer]
        late = [v for v in killed if v.killer == "timeout"]
        explained = [v for v in these if not v.killer and v.mutant.name in settings.explained]
        alive = len(these) - len(killed) - len(explained)
        share = f"{len(killed) / len(these):.1%}" if these else "-"
        lines.append(
            f"{module:28}{len(these):9}{len(killed):9}{len(late):7}{len(explained):11}{alive:7}"
            f"{share:>9}"
        )
    return "\n".join(lines)


def complaints(settings: Settings, verdicts: Sequence[Verdict], *, everything: bool) -> list[str]:
    """
    Return why the command fails; empty if it does not.
    """
    alive = sorted((v for v in verdicts if not v.killer), key=_place)
    wrong = [
        f"{settings.files[v.mutant.module].name}:{v.mutant.line}: survived {v.tests} tests: "
        f"{v.mutant.name}"
        for v in alive
        if v.mutant.name not in settings.explained
    ]
    if everything:
        names = {v.mutant.name for v in alive}
        wrong += [
            f"explained, but not among the survivors: {name}"
            for name in settings.explained
            if name not in names
        ]
        share = 1 - len(alive) / max(1, len(verdicts))
        if share < settings.least:
            wrong.append(f"{share:.1%} are killed; at least {settings.least:.0%} have to be")
    return wrong


def _place(verdict: Verdict) -> tuple[str, int, str]:
    return verdict.mutant.module, verdict.mutant.line, verdict.mutant.name


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="mutate")
    parser.add_argument("--settings", type=Path, default=SETTINGS)
    parser.add_argument("text", nargs="*", help="try only mutants in whose names one of these is")
    given = parser.parse_args()
    sys.exit(main(read(given.settings), given.text))
