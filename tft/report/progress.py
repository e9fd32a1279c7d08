"""
Reads `progress.jsonl`, which the controller writes (`tft.controller.progress`).
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

JUMP = 5.0
"""The time since the last row is measured by CLOCK_MONOTONIC and by the time of day. The results
may differ by this many seconds. If they differ by more, the controller counts as one on another
machine, or on a restarted machine, so that its CLOCK_MONOTONIC counts from another moment."""
_TAIL = 1 << 16
"""How much of the end of the file is read, in bytes, to find the newest step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """
    The highest step that all training ranks had completed at the time `at`, and how many ranks
    trained.
    """

    at: float
    step: int
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """
    A new state of the job.
    """

    at: float
    state: str
    incident: int
    """The number of the open incident; 0 if none is open."""
    result: str = ""
    """How the job ends; empty if that is not decided."""


@dataclass(slots=True, kw_only=True)
class RunProgress:
    """
    The rows of one run. All times are in seconds on the clock of the first controller of the run.
    """

    run: str
    opened: float
    unix: float
    """The time of `opened`, in seconds since 1970."""
    world: int
    from_step: int
    first_incident: int
    leads: list[float] = field(default_factory=list)
    """The times at which controllers began to lead: more than one if a controller was restarted."""
    changes: list[Change] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    last: float = 0.0
    """The time of the last row."""
    last_unix: float = 0.0
    shift: float = 0.0
    """How many seconds to add to the times of the present controller to get times on the clock of
    the first controller."""

    @property
    def ended(self) -> bool:
        """
        True if the job was over at the end of this run.
        """
        return bool(self.changes) and self.changes[-1].state == "ended"

    @property
    def step(self) -> int:
        """
        The last step that the rows have.
        """
        return self.samples[-1].step if self.samples else self.from_step

    @property
    def began_after(self) -> int:
        """
        The step after which the run has begun to train. It is earlier than `from_step` if the ranks
        could not load the checkpoint of `from_step`, and have loaded an older one. Then it is
        estimated from the first row about steps, so it may be some steps too late.
        """
        return min([self.from_step, *(sample.step - 1 for sample in self.samples[:1])])


def runs_of(text: str) -> tuple[list[RunProgress], int]:
    """
    Return the runs in the text of a `progress.jsonl`, and the number of rows that cannot be read.
    Blank rows do not count as unreadable: a controller may write one to end a row that an earlier
    controller has not completed.
    """
    runs: list[RunProgress] = []
    return runs, _take(runs, text)


class ProgressReader:
    """
    Reads a `progress.jsonl` while a controller writes it: each call of `read` adds what is new.
    """

    def __init__(self, path: Path) -> None:
        self.runs: list[RunProgress] = []
        """The runs that were read until now."""
        self.unread = 0
        """The number of rows that cannot be read."""
        self._path = path
        self._place = 0

    def read(self) -> None:
        """
        Read the complete rows that were added since the last call. Nothing is read while there is
        no file. Raises `OSError` if the file cannot be read.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._place)
                content = file.read()
        except FileNotFoundError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._place += len(whole)
        self.unread += _take(self.runs, whole.decode(errors="replace"))


def newest_step(path: Path) -> int | None:
    """
    Return the step of the newest row about steps. If a run has begun since that row, return the
    step from which this run continues. Only the end of the file is read. Return None if it has no
    such row, or if the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            rows = file.read().split(b"\n")
    except OSError:
        return None
    for text in reversed(rows):
        with suppress(ValueError, KeyError, TypeError):  # a row may be incomplete or damaged
            row = json.loads(text)
            if "step" in row:
                return int(row["step"])
            if row.get("epoch") == 1:
                return int(row["from_step"])
    return None


def _take(runs: list[RunProgress], text: str) -> int:
    """
    Add the rows in `text` to the runs. Return the number of rows that cannot be read.
    """
    unread = 0
    for line in filter(str.strip, text.split("\n")):
        try:
            row = json.loads(line)
            if "run" in row:
                _lead(runs, row)
            else:
                _add(runs[-1], row)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            unread += 1
    return unread


# the rows are parsed JSON; if a row has another form, an exception is raised that `_take` handles
def _lead(runs: list[RunProgress], row: dict[str, float]) -> None:
    at, unix, opened = float(row["at"]), float(row["unix"]), float(row["opened"])
    run = str(row["run"])
    if runs and (runs[-1].run, runs[-1].opened) == (run, opened):
        last = runs[-1]
        moved = (at + last.shift - last.last) - (unix - last.last_unix)
        if abs(moved) > JUMP:
            last.shift -= moved
        last.leads.append(at + last.shift)
        last.last, last.last_unix = max(last.last, at + last.shift), unix
        return
    runs.append(
        RunProgress(
            run=run,
            opened=opened,
            unix=unix - (at - opened),
            world=int(row["world"]),
            from_step=int(row["from_step"]),
            first_incident=int(row["first_incident"]),
            leads=[at],
            last=at,
            last_unix=unix,
        )
    )


def _add(run: RunProgress, row: dict[str, float]) -> None:
    at = float(row["at"]) + run.shift
    if "state" in row:
        change = Change(
            at=at,
            state=str(row["state"]),
            incident=int(row["incident"]),
            result=str(row.get("result", "")),
        )
        run.changes.append(change)
    else:
        run.samples.append(Sample(at=at, step=int(row["step"]), ranks=int(row["ranks"])))
    run.last, run.last_unix = max(run.last, at), float(row["unix"])


def least_ranks(samples: Sequence[Sample]) -> int:
    """
    Return the lowest number of ranks with which the job has trained; 0 if there are fewer than two
    samples. A lower number in a single sample is ignored, because the sample may be from the moment
    in which a rank was lost.
    """
    return min((max(one.ranks, next_.ranks) for one, next_ in pairwise(samples)), default=0)
