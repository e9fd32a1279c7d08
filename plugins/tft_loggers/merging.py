"""
Merges the files of values that the ranks have logged into one file, `values.jsonl`, which has the
values of each final step once. A step is final when every rank has ended it completely.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import structlog

from tft_loggers.final import Final
from tft_loggers.places import MERGED, STATE, VALUES, read, write

Values = dict[str, float]

log = structlog.get_logger()


class _RankFile:
    """
    The file of values of one rank, and the offset in bytes up to which its rows were merged.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset

    def rows(self, final: int) -> Iterator[tuple[int, float, Values]]:
        """
        Yield the rows that were not merged yet, up to the step `final`. Each is yielded as a tuple
        of its step, its time and its values.
        """
        # open the file anew in each call, because a network file system may otherwise not show the
        # newest rows that another machine has written
        with self.path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self.offset:
                self.offset = 0
            file.seek(self.offset)
            for line in file:
                row = _parsed(line)
                if not line.endswith(b"\n") or (row is not None and row[0] > final):
                    return
                self.offset += len(line)
                if row is None:
                    log.warning("values_not_read", file=self.path.name, row=repr(line[:80]))
                else:
                    yield row


class Merger:
    """
    Appends the values of final steps to `values.jsonl`. If several ranks log a value under the same
    name in one step, the value of the lowest rank is used. If a rank does so several times, its
    last value is used.

    A row with the key `again` belongs to a step that is in the file already. The row may correct
    values, because the job has gone back to a step before a final step. It may also add names,
    because the file of a rank was visible only later on a network file system.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._path = run_dir / VALUES
        self._state = run_dir / STATE / MERGED
        found = read(self._state)
        self._offsets: dict[str, int] = dict(found.get("offsets", {}))
        self._backs = int(found.get("backs", 0))
        """How many entries of `Final.backs` (returns of the job to an earlier step) were handled
        already."""
        self._anew: tuple[int, int] = (found.get("after", -1), found.get("until", -1))
        """The range of steps that the job computes again: the steps after the first number, up to
        the second number. For these steps, new rows may correct values in the file. (-1, -1) means
        that there are no such steps."""
        self._last = _mend(self._path)
        """The last step in `values.jsonl`. -1 if the file has no rows."""
        self._known: dict[int, Values] | None = None
        """The values in `values.jsonl`, by step. None if the file is not in memory: it is read only
        when a row for an earlier step comes."""

    def merge(self, final: Final) -> bool:
        """
        Append the values of the steps that have become final since the last call. `final` says
        which steps are final. Return True if rows were appended.
        """
        if len(final.backs) > self._backs:
            # read the files of the ranks from the beginning, because the ranks replace the rows of
            # the steps that they compute again
            after = min(final.backs[self._backs :])
            pending = self._anew[0] if self._anew[1] >= 0 else after
            self._anew = min(after, pending), max(self._last, self._anew[1])
            self._backs, self._offsets = len(final.backs), {}
        offsets = dict(self._offsets)
        steps = self._collect(final.step, offsets)
        lines = [line for step in sorted(steps) if (line := self._line(step, *steps[step]))]
        if lines:
            with self._path.open("ab") as file:
                file.write(b"".join(lines))
            self._last = max(self._last, *steps)
        if final.step >= self._anew[1]:
            self._anew = -1, -1
        self._known = None if self._anew[1] < 0 else self._known
        if offsets != self._offsets:
            self._offsets = offsets
            after, until = self._anew
            write(
                self._state,
                {"offsets": offsets, "backs": self._backs, "after": after, "until": until},
            )
        return bool(lines)

    def _collect(self, final: int, offsets: dict[str, int]) -> dict[int, tuple[float, Values]]:
        """
        Return the values that are new in the files of the ranks, up to the step `final`. The result
        maps each step to the time of one of its rows and to its values. `offsets` maps the name of
        each file to the offset in bytes up to which it was read, and is updated.
        """
        steps: dict[int, tuple[float, Values]] = {}
        # read the file of the highest rank first, so that the values of lower ranks replace its
        # values
        for path in sorted(self._run_dir.glob("values-rank*.jsonl"), key=_rank, reverse=True):
            file = _RankFile(path, offsets.get(path.name, 0))
            for step, unix, values in file.rows(final):
                steps[step] = unix, steps.get(step, (unix, {}))[1] | values
            offsets[path.name] = file.offset
        return steps

    def _line(self, step: int, unix: float, values: Values) -> bytes:
        """
        Return the row to append for a step, as a line of JSON. Return an empty line if the file has
        all `values` of this step already.
        """
        again = step <= self._last
        if again:
            known = self._values_of(step)
            corrects = self._anew[0] < step <= self._anew[1]
            values = {
                name: value
                for name, value in values.items()
                if name not in known or (corrects and repr(known[name]) != repr(value))
            }
            known.update(values)
        if not values:
            return b""
        row = {"step": step, "unix": unix, "values": values, **({"again": True} if again else {})}
        return json.dumps(row).encode() + b"\n"

    def _values_of(self, step: int) -> Values:
        if self._known is None:
            self._known = {}
            for line in self._path.read_bytes().splitlines():
                row = _parsed(line)
                if row is not None:
                    self._known.setdefault(row[0], {}).update(row[2])
        return self._known.setdefault(step, {})


def _rank(path: Path) -> int:
    text = path.stem.removeprefix("values-rank")
    return int(text) if text.isdigit() else -1


def _parsed(line: bytes) -> tuple[int, float, Values] | None:
    """
    Return step, time and values of a row. Return None if the row is damaged, for example after a
    power failure.
    """
    try:
        row: Mapping[str, object] = json.loads(line)
        step, unix, values = row["step"], row["unix"], row["values"]
    except (ValueError, KeyError, TypeError):
        return None
    if not isinstance(step, int) or not isinstance(unix, float) or not isinstance(values, dict):
        return None
    return step, unix, values


def _mend(path: Path) -> int:
    """
    Remove an incomplete row at the end of the file `path`, which a process may have left when it
    was killed. Return the last step in the file, or -1 if the file has no step.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return -1
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
    for line in reversed(content[:whole].splitlines()):
        row = _parsed(line)
        # steps increase from row to row, except for rows with the key `again`
        if row is not None and not json.loads(line).get("again"):
            return row[0]
    return -1
