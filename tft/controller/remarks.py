"""
The remarks of plugins about a job, kept in a file so that a restarted controller knows them.
"""

import json
from collections import deque
from pathlib import Path
from typing import Any

import structlog

from tft.spi.types import Remark

log = structlog.get_logger()

REMARKS = "remarks.jsonl"
"""The name of the file with the remarks in the run directory."""
KEPT = 1000
"""How many remarks the report contains: the newest. Without a limit, a rank that becomes slow and
fast again for days would fill the report."""
WRITTEN = 10 * KEPT
"""The maximum number of remarks that one controller writes to the file."""


class Remarks:
    """
    The remarks of one run of a job.
    """

    def __init__(self, path: Path, run: str) -> None:
        """
        Read the remarks that an earlier controller of the same run has written to the file `path`.
        """
        self._path = path
        self._run = run
        self._written = 0
        self.rows: deque[dict[str, Any]] = deque(self._read(), maxlen=KEPT)
        """The newest remarks, oldest first, as they are in the report. Any: parsed JSON."""

    def add(self, remark: Remark, at: float) -> None:
        """
        Keep a remark that was made at the time `at` (CLOCK_MONOTONIC, seconds). If it cannot be
        written to the file, the failure is logged once, and a restarted controller will not know
        the remark.
        """
        row = {"event": remark.event, "at": at, "facts": dict(remark.facts)}
        self.rows.append(row)
        if self._written >= WRITTEN:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"run": self._run, **row}) + "\n")
            self._written += 1
        except OSError as error:
            self._written = WRITTEN
            log.warning("remarks_not_written", path=str(self._path), why=str(error))

    def _read(self) -> list[dict[str, Any]]:  # Any: parsed JSON
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
        rows = []
        for line in lines:
            try:
                row = json.loads(line)
                if row.pop("run") == self._run:
                    rows.append(row)
            except (ValueError, KeyError, AttributeError, TypeError):
                continue  # a row that a killed controller has not written completely
        return rows
