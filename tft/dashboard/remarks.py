"""
The remarks about slow ranks in the log of the controller, while the job runs. The report has them
only at the end of the job.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

_EVENTS = ("rank_slow", "rank_slow_over", "rank_behind")
_LINE = re.compile(rf" event=({'|'.join(_EVENTS)}) ")
_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S*)')
_EARLY = 2.0
"""Seconds by which the log of a run may seem to begin before the run, because files have their
times from another clock."""


@dataclass(slots=True, kw_only=True)
class Remarks:
    """
    Which ranks are slow, and which hold up the job, as the log of the controller says.
    """

    path: Path
    """The log, which is followed while the controller writes it."""
    since: float
    """The time in seconds since 1970 when the run began. Older lines belong to earlier runs."""
    slow: dict[int, str] = field(default_factory=dict)
    """By rank that is slow: a sentence."""
    behind: dict[int, str] = field(default_factory=dict)
    """By rank that holds up the job: a sentence. The caller clears it when the job goes on."""
    _place: int = 0

    def read(self) -> None:
        """
        Read what was added to the log. A log that cannot be read has no remarks.
        """
        try:
            with self.path.open("rb") as file:
                if self.path.stat().st_size < self._place:
                    self._place = 0  # another run has begun the file anew
                file.seek(self._place)
                content = file.read()
        except OSError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._place += len(whole)
        for event, facts in _events(whole.decode(errors="replace"), self.since - _EARLY):
            self._take(event, facts)

    def _take(self, event: str, facts: Mapping[str, str]) -> None:
        try:
            rank = int(facts["rank"])
        except (KeyError, ValueError):
            return
        match event:
            case "rank_slow":
                self.slow[rank] = remark(event, facts)
            case "rank_slow_over":
                self.slow.pop(rank, None)
            case _:
                self.behind[rank] = remark(event, facts)


def remark(event: str, facts: Mapping[str, object]) -> str:
    """
    Return a remark about a slow rank as a sentence. Return "" for other remarks.
    """
    rank = facts.get("rank", "?")
    match event:
        case "rank_slow":
            return (
                f"rank {rank} is slow since step {facts.get('step', '?')}: its "
                f"{facts.get('cause', 'work')} takes {facts.get('percent', '?')} % longer "
                f"(compared with {facts.get('compared_with', 'others')})"
            )
        case "rank_slow_over":
            return f"rank {rank} is as fast as the others again"
        case "rank_behind":
            line = f" at {facts['line']}" if facts.get("line") else ""
            return f"rank {rank} holds up the job{line}: {facts.get('why', '')}"
        case _:
            return ""


def _events(text: str, since: float) -> Iterator[tuple[str, Mapping[str, str]]]:
    """
    Yield the remarks in a part of the log, each with its facts as text.
    """
    for line in text.splitlines():
        if (found := _LINE.search(line)) is None:
            continue
        facts = {name: _value(text) for name, text in _FIELD.findall(line)}
        try:
            at = datetime.fromisoformat(facts.get("at", "")).timestamp()
        except ValueError:
            continue
        if at >= since:
            yield found[1], facts


def _value(text: str) -> str:
    if not text.startswith('"'):
        return text
    return text[1:-1].replace("\\n", " ").replace('\\"', '"')
