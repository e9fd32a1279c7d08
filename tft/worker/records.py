"""
Rows that a script writes for each step, once: a step that is computed again replaces its rows.

    records-rank{rank}.jsonl    {"step": 7, "loss": 1.25}

A row is written whole or not at all, as far as a process is killed and not its machine.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tft.errors import UsageError

_STEP, _AFTER = "step", "after"


class Records:
    """
    Those of one rank.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._path = run_dir / f"records-rank{rank}.jsonl"
        self._file: int | None = None
        self._step: int | None = None
        """While what is called after a step runs: that step."""

    def begin_after(self, step: int) -> None:
        """
        From here on rows belong to what is called after this step.
        """
        self._step = step

    def end_after(self) -> None:
        """
        No longer.
        """
        self._step = None

    def write(self, step: int, row: Mapping[str, object]) -> None:
        """
        Add a row of this step. Raises `UsageError` for one that JSON cannot hold, or that names what is ours.
        """
        taken = sorted({_STEP, _AFTER} & row.keys())
        if taken:
            raise UsageError(f"a row has a key of its own {taken[0]!r}: tft adds that")
        where: dict[str, object] = {_STEP: step}
        if self._step is not None:
            where = {_STEP: self._step, _AFTER: True}
        try:
            line = json.dumps({**where, **row}).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise UsageError(f"a row of step {step} cannot be written as JSON: {error}") from None
        if self._file is None:
            self._file = os.open(
                self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
            )
        os.write(self._file, line)

    def drop_later(self, step: int) -> None:
        """
        Training goes on after this step: rows of later ones will be written again.
        """
        self._step = None
        self._keep(lambda row: row[_STEP] <= step)

    def drop_after(self, step: int) -> None:
        """
        What is called after this step is called again.
        """
        self._keep(lambda row: row[_STEP] < step or _AFTER not in row)

    def _keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:  # Any: JSON
        if not self._path.exists():
            return
        lines = self._path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith(b"\n") and wanted(json.loads(line))]
        if kept == lines:
            return
        if self._file is not None:
            os.close(self._file)
            self._file = None
        part = self._path.with_suffix(".part")
        part.write_bytes(b"".join(kept))
        part.replace(self._path)
