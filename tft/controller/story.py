"""
The story of a run: every event of the job machine, a line of JSON each, written before the
orders that follow from it. A controller that is started again reads it and goes on from there.

A line is `{"n", "at", "kind", "body"}`, with `"from"` and `"number"` for reports; `n` counts from
1 without a hole over all runs in the directory. A run begins with a line of kind `Opened`.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, assert_never

from tft.core.events import DeadlinePassed, Event, Led, Received, Stalled
from tft.errors import InternalError
from tft.protocol.codec import from_plain, to_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """
    What the machine of a run was made with.
    """

    job: str
    run: str
    """One start of `tft run`: a controller that is started again goes on with its own run only."""
    world: int
    enable: tuple[str, ...]
    max_incidents: int
    resume: tuple[str, int] | None
    first_incident: int
    at: float


class Story:
    """
    The file, open for appending.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._lines = 0

    def __enter__(self) -> Self:
        self._mend()
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._file)

    def _mend(self) -> None:
        """
        Cuts off a last line that its writer did not live to finish: nothing has followed from it.
        """
        if not self._path.exists():
            return
        content = self._path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) != len(content):
            os.truncate(self._path, len(whole))
        self._lines = whole.count(b"\n")

    def opened(self, opened: Opened) -> None:
        """
        A run begins.
        """
        self._write({"at": opened.at, "kind": "Opened", "body": asdict(opened)})

    def event(self, event: Event) -> None:
        """
        Writes one event; when this returns, the kernel has it.
        """
        self._write(_plain(event))

    def _write(self, line: dict[str, Any]) -> None:  # Any: JSON
        self._lines += 1
        text = json.dumps({"n": self._lines, **line}, separators=(",", ":"))
        left = memoryview(text.encode() + b"\n")
        while left:  # a disk that is full takes a part of it, and then raises
            left = left[os.write(self._file, left) :]


def last_run(path: Path, job: str, run: str) -> tuple[Opened, list[Event]] | None:
    """
    The beginning and the events of the last run in the file, if it is this one.
    """
    opened: Opened | None = None
    events: list[Event] = []
    for line in _lines(path):
        if line["kind"] == "Opened":
            body = line["body"]
            body["enable"] = tuple(body["enable"])
            body["resume"] = body["resume"] and tuple(body["resume"])
            opened, events = Opened(**body), []
        else:
            events.append(_event(line))
    if opened is None or (opened.job, opened.run) != (job, run):
        return None
    return opened, events


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # its writer did not live to finish it
            came = json.loads(line)
            if came["n"] != number:
                raise InternalError(f"{path}: line {number} says it is line {came['n']}")
            yield came


def _plain(event: Event) -> dict[str, Any]:  # Any: JSON
    match event:
        case Received(at=at, sender=sender, number=number, message=message):
            kind, body = to_plain(message)
            return {"at": at, "from": sender, "number": number, "kind": kind, "body": body}
        case DeadlinePassed(at=at):
            return {"at": at, "kind": "DeadlinePassed", "body": {}}
        case Stalled(at=at, silence=silence, limit=limit):
            return {"at": at, "kind": "Stalled", "body": {"silence": silence, "limit": limit}}
        case Led(at=at, epoch=epoch):
            return {"at": at, "kind": "Led", "body": {"epoch": epoch}}
        case _:
            assert_never(event)


def _event(line: dict[str, Any]) -> Event:  # Any: JSON
    at, kind, body = line["at"], line["kind"], line["body"]
    match kind:
        case "DeadlinePassed":
            return DeadlinePassed(at=at)
        case "Stalled":
            return Stalled(at=at, silence=body["silence"], limit=body["limit"])
        case "Led":
            return Led(at=at, epoch=body["epoch"])
        case _:
            message: Any = from_plain(kind, body)  # Any: only reports are ever written
            return Received(at=at, sender=line["from"], number=line["number"], message=message)
