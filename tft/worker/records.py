"""
Rows that a script writes for each step. If a step is computed again, its new rows replace its old
rows.

    records-rank{rank}.jsonl    {"step": 7, "loss": 1.25}
    values-rank{rank}.jsonl     {"step": 7, "unix": 1790000000.5, "values": {"loss": 1.25}}

The first file has the rows of `session.record`, the second one the values of `session.log`. If the
process is killed, a row is in the file completely or not at all. If the machine fails, a row may be
damaged.
"""

import errno
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, SupportsFloat

from tft.clock import unix_time
from tft.errors import UsageError

_STEP, _AFTER = "step", "after"

_BLOCK = 16 * 1024
"""How many bytes at the end of a file are read first, to find the rows of steps that are to be
computed again. More bytes are read if these do not suffice."""

Row = Mapping[str, object]


class Records:
    """
    The files of one rank to which its script adds rows.

    `check` is called before each row is added. It raises an exception if the values of the row may
    be wrong, because collectives were aborted.
    """

    def __init__(self, run_dir: Path, rank: int, check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        self._rows = _RowFile(run_dir / f"records-rank{rank}.jsonl", "session.record")
        self._values = _RowFile(run_dir / f"values-rank{rank}.jsonl", "session.log")
        self._step: int | None = None
        """The step after which functions of `after_step` are being called now. None: no such
        function runs."""

    def begin_after(self, step: int) -> None:
        """
        From now on, write all rows as rows of `step`, and mark them with the key `after`: functions
        that are called after the step write these rows.
        """
        self._step = step

    def end_after(self) -> None:
        """
        Stop marking rows, because the functions that are called after a step have returned.
        """
        self._step = None

    def write(self, step: int, row: Row) -> None:
        """
        Add a row to the rank's file of records. The row belongs to `step` or, between `begin_after`
        and `end_after`, to the step that `begin_after` was given.

        Raises `UsageError` if the row is not serialisable as JSON, or has a key that tft adds
        (`step`, `after`). Raises `OSError` when the disk is full.
        """
        taken = sorted({_STEP, _AFTER} & row.keys())
        if taken:
            raise UsageError(
                f"the row that session.record was given has the key {taken[0]!r}, which tft adds "
                "to each row itself: rename the key"
            )
        self._check()
        self._rows.write(self._where(step), row)

    def log(self, step: int, values: Row) -> None:
        """
        Add values to the rank's file of values. The values belong to `step` or, between
        `begin_after` and `end_after`, to the step that `begin_after` was given.

        Raises `UsageError` if a name is no text or a value is no number. Raises `OSError` when the
        disk is full.
        """
        numbers = {name: _number(name, value) for name, value in values.items()}
        if numbers:
            self._check()
            self._values.write(self._where(step), {"unix": unix_time(), "values": numbers})

    def drop_later(self, step: int) -> None:
        """
        Drop the rows of steps later than `step`, because these steps will be computed again and
        write new rows.
        """
        self._step = None
        for file in (self._rows, self._values):
            file.keep(step, lambda row: row[_STEP] <= step)

    def drop_after(self, step: int) -> None:
        """
        Drop the rows that functions called after `step` or after later steps have written, because
        these functions are called again.
        """
        for file in (self._rows, self._values):
            file.keep(step - 1, lambda row: row[_STEP] < step or _AFTER not in row)

    def _where(self, step: int) -> Row:
        return {_STEP: step} if self._step is None else {_STEP: self._step, _AFTER: True}


class _RowFile:
    """
    One file of rows. `written_by` is the call of the script that writes them, for error messages.
    """

    def __init__(self, path: Path, written_by: str) -> None:
        self._path = path
        self._written_by = written_by
        self._file: int | None = None

    def write(self, where: Row, row: Row) -> None:
        """
        Add a row with the keys of `where`, which include the step, and those of `row`.

        Raises `UsageError` if the row is not serialisable as JSON. Raises `OSError` when the disk
        is full.
        """
        try:
            line = json.dumps({**where, **row}).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"the row that {self._written_by} was given for step {where[_STEP]} cannot be "
                f"written as JSON: {error}"
            ) from None
        if self._file is None:
            self._file = os.open(
                self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
            )
        written = os.write(self._file, line)
        # if the disk is full, remove the incomplete row, because the next row would be appended to
        # it
        if written < len(line):
            os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def keep(
        self,
        step: int,
        wanted: Callable[[dict[str, Any]], bool],  # Any: any JSON value
    ) -> None:
        """
        Among the rows of steps later than `step`, drop those for which `wanted` returns False.

        The rows of these steps are near the end of the file, and only this end is read. Reading the
        whole file would take longer after each further step of the job.
        """
        if not self._path.exists():
            return
        begin, lines = _later(self._path, step)
        kept = [line for line in lines if line.endswith(b"\n") and wanted(_read(line))]
        if kept == lines[: len(kept)]:
            if len(kept) < len(lines):
                os.truncate(self._path, begin + sum(map(len, kept)))
            return
        if self._file is not None:
            os.close(self._file)
            self._file = None
        part = self._path.with_suffix(".part")
        with self._path.open("rb") as file:
            part.write_bytes(file.read(begin) + b"".join(kept))
        part.replace(self._path)


def _number(name: object, value: object) -> int | float:
    """
    Return a value of `session.log` as a number.

    Raises `UsageError` if the name is no text or the value is no number.
    """
    if not isinstance(name, str):
        raise UsageError(f"session.log was given {name!r} as a name: names of values are texts")
    if isinstance(value, int | float):
        return value
    if isinstance(value, SupportsFloat):
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):  # a tensor with several elements, for example
            pass
    raise UsageError(
        f"session.log was given {value!r} for {name!r}: a value is a number, or an object with one "
        "number such as a tensor with one element"
    )


def _later(path: Path, step: int) -> tuple[int, list[bytes]]:
    """
    Return the lines of a file of records from the first line of a step later than `step` on, and
    the offset in bytes at which they begin. A damaged line counts as a line of a later step.

    The file is read from its end, up to a block that begins with a line of `step` or of an earlier
    step. Behind that line, the steps need not ascend.
    """
    size = path.stat().st_size
    block = _BLOCK
    with path.open("rb") as file:
        while True:
            begin = max(0, size - block)
            file.seek(begin)
            lines = file.read(size - begin).splitlines(keepends=True)
            if begin:
                begin += len(lines.pop(0))  # skip a line whose beginning is not in the block
            early = [line.endswith(b"\n") and _read(line)[_STEP] <= step for line in lines]
            first = early.index(False) if False in early else len(lines)
            if first or size <= block:
                return begin + sum(map(len, lines[:first])), lines[first:]
            block *= 4


def _read(line: bytes) -> dict[str, Any]:  # Any: any JSON value
    """
    Decode one row. For a row that cannot be read, for example after a power failure, return
    `sys.maxsize` as its step, so that every rollback drops it.
    """
    try:
        row: dict[str, Any] = json.loads(line)
        return row if isinstance(row.get(_STEP), int) else {_STEP: sys.maxsize}
    except (ValueError, AttributeError):
        return {_STEP: sys.maxsize}
