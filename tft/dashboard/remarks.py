"""
The remarks about slow ranks, while the job runs. The controller writes them to a file of the run
directory, and the report has them at the end of the job.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tft.sentences import remark_text


@dataclass(slots=True, kw_only=True)
class Remarks:
    """
    The ranks that are slow, and the ranks that hold up the job, according to the file of the
    remarks, which the controller writes.
    """

    path: Path
    """The file with the remarks, which is followed while the controller writes it."""
    slow: dict[int, str] = field(default_factory=dict)
    """For each slow rank: a sentence about it."""
    behind: dict[int, str] = field(default_factory=dict)
    """For each rank that holds up the job: a sentence about it. The caller clears these sentences
    when the job continues."""
    _run: str = ""
    _place: int = 0

    def read(self, run: str) -> None:
        """
        Read what was added to the file about the run `run`. If the file cannot be read, it counts
        as one to which nothing was added.
        """
        if run != self._run:
            self._run, self._place = run, 0
            self.slow.clear()
            self.behind.clear()
        try:
            with self.path.open("rb") as file:
                file.seek(self._place)
                content = file.read()
        except OSError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._place += len(whole)
        for row in _rows(whole):
            if row.get("run") == run:
                self._take(str(row.get("event")), row.get("facts"))

    def _take(self, event: str, facts: Any) -> None:  # Any: parsed JSON
        rank = facts.get("rank") if isinstance(facts, dict) else None
        if not isinstance(rank, int):
            return
        match event:
            case "rank_slow":
                self.slow[rank] = remark_text(event, facts)
            case "rank_slow_over":
                self.slow.pop(rank, None)
            case "rank_behind":
                self.behind[rank] = remark_text(event, facts)
            case _:
                pass


def _rows(content: bytes) -> Iterator[dict[str, Any]]:  # Any: parsed JSON
    for line in content.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row
