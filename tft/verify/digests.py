"""
Reads the digests that the ranks of a run have recorded of every step (`--record-digests`).
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Part = tuple[str, str]
"""A part of the state: its kind, and its name within that kind, such as ("generators", "torch")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """
    All digests, and all rows written by the training script, that the ranks of one run have
    recorded.
    """

    steps: Mapping[tuple[int, int], Mapping[Part, str]]
    """By (rank, step): the digest of each part of the state. If a rank was killed in a step, some
    parts may be missing."""
    ends: Mapping[int, int]
    """For each rank: the last step whose end the rank has recorded."""
    functions: Mapping[int, tuple[str, ...]]
    """For each step: the names of the user's functions that rank 0 called after the step
    (`session.evaluate`, `session.after_step`)."""
    rows: Mapping[int, tuple[Mapping[str, Any], ...]]  # Any: parsed JSON
    """For each rank: the rows that the training script has written with `session.record`."""

    @property
    def unrecorded(self) -> tuple[str, ...]:
        """
        Return which of the two kinds `losses` and `batches` no rank has recorded in any step,
        because the adaptor or the script does not show them to tft.
        """
        return tuple(
            kind
            for kind in ("losses", "batches")
            if all(found.get((kind, ""), "[]") == "[]" for found in self.steps.values())
        )

    @property
    def last(self) -> int:
        """
        Return the last step whose end all ranks have recorded, or 0 if there is no such step.
        """
        return min(self.ends.values(), default=0)


def read_digests(run_dir: Path, ranks: int) -> Digests:
    """
    Return the digests and the rows that the ranks of a run have recorded. A process that was killed
    may have left an incomplete line in a file. Such a line is left out.

    NaN and Inf in rows are read as tuples of one word, because a number that is NaN does not equal
    itself.
    """
    steps: dict[tuple[int, int], dict[Part, str]] = {}
    ends: dict[int, int] = {}
    functions: dict[int, tuple[str, ...]] = {}
    for rank in range(ranks):
        for line in _lines(run_dir / f"digests-rank{rank}.jsonl"):
            step = line["step"]
            found = steps.setdefault((rank, step), {})
            if line["edge"] == "window":
                found.clear()  # the step is computed again, so its earlier records do not count
                found |= _window(line)
            elif line["edge"] == "end":
                found |= _end(line)
                ends[rank] = step
            elif rank == 0:
                functions[step] = tuple(line["functions"])
    rows = {rank: tuple(_lines(run_dir / f"records-rank{rank}.jsonl")) for rank in range(ranks)}
    return Digests(steps=steps, ends=ends, functions=functions, rows=rows)


def _window(line: Mapping[str, Any]) -> dict[Part, str]:  # Any: parsed JSON
    local: Mapping[str, str] = line["local"]
    return {
        ("batches", ""): json.dumps(line["batches"]),
        ("losses", ""): json.dumps(line["losses"]),
        **{
            ("data" if name == "data" else "generators", name): digest
            for name, digest in local.items()
            if name != _LOCAL
        },
    }


def _end(line: Mapping[str, Any]) -> dict[Part, str]:  # Any: parsed JSON
    found = {("rank-local", ""): line["local"][_LOCAL]}
    for name, digest in line["state"].items():
        shard, _, part = name.rpartition("/")
        if digest:  # an empty digest marks a part that belongs to this rank's rank-local state
            found[_KINDS.get(part, "others"), f"{part} of shard {shard}"] = digest
    return found


_LOCAL = "rank-local state"

_KINDS = {
    "model": "parameters",
    "master": "optimizer",
    "optim": "optimizer",
    "settings": "settings",
    "scheduler": "scheduler",
    "modes": "modes",
    "description": "modes",
}
"""The kind of state to which each part of a shard belongs, by the part's name. A part that is not
listed is one of the script's other objects (kind `others`)."""


def _lines(path: Path) -> Iterator[dict[str, Any]]:  # Any: parsed JSON
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line, parse_constant=lambda word: (word,))
        except ValueError:
            continue
