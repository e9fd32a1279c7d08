"""
The story of a run: every event of the job machine, a line of JSON each, written before the
orders that follow from it. A controller that is started again reads it and goes on from there;
`tft replay` judges it once more.

A line is `{"n", "at", "kind", "body"}`, with `"from"` and `"number"` for reports; `n` counts from
1 without a hole over all runs in the directory. `"then"` says in short what was commanded (see
`fingerprint`); it is left out where that is not known. A run begins with a line of kind `Opened`.
"""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self, assert_never, get_args

import msgspec
import xxhash

from tft.core.commands import Command, Tell
from tft.core.events import DeadlinePassed, Event, Led, Received, Stalled
from tft.core.machine import Machine
from tft.core.policy import Policy
from tft.errors import MalformedMessage, StoryCorrupt, UsageError
from tft.protocol.codec import from_plain, to_plain
from tft.protocol.messages import Report

REPORTS: tuple[type, ...] = get_args(Report)
OWN: dict[str, type[DeadlinePassed | Stalled | Led]] = {
    "DeadlinePassed": DeadlinePassed, "Stalled": Stalled, "Led": Led,
}  # fmt: skip
"""The events that nobody sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """
    What the machine of a run is made with: all of it, so that no default can change under it.
    """

    job: str
    run: str
    """One start of `tft run`: a controller that is started again goes on with its own run only."""
    world: int
    policy: Policy
    checkpoints: str
    """The directory for last checkpoints."""
    checkpoint_name: str = "step-{step:08d}"
    """What they are called; what it is here is how it was before there was a choice."""
    resume: tuple[str, int] | None
    older: tuple[tuple[str, int], ...] = ()
    """Checkpoints of earlier steps, which the run began with knowing."""
    first_incident: int
    at: float

    def machine(self) -> Machine:
        """
        The machine of this run, to which nothing has happened yet.
        """
        return Machine(
            self.world,
            self.policy,
            job=self.job,
            checkpoints=self.checkpoints,
            checkpoint_name=self.checkpoint_name,
            at=self.at,
            resume=self.resume,
            older=self.older,
            first_incident=self.first_incident,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """
    One event, as a story tells it.
    """

    line: int
    event: Event
    then: str | None
    """The fingerprint of what was commanded; None where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """
    One run of a story, from its beginning as far as it is told.
    """

    opened: Opened
    told: tuple[Told, ...]


def fingerprint(commands: Sequence[Command]) -> str:
    """
    What was commanded, in short: how many of which kind, and a digest of all they say. Empty for
    nothing. A `Tell` does not count: it is words for the log, which nobody carries out.
    """
    done = [command for command in commands if not isinstance(command, Tell)]
    if not done:
        return ""
    plain = [[type(each).__name__, msgspec.to_builtins(each, str_keys=True)] for each in done]
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return f"{_kinds(done)}: {xxhash.xxh3_64_hexdigest(text.encode())}"


def _kinds(commands: Sequence[Command]) -> str:
    counts = Counter(type(command).__name__ for command in commands)
    return ", ".join(kind if n == 1 else f"{n} {kind}" for kind, n in counts.items())


# ---------------------------------------------------------------- writing


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
        self._write(opened_line(opened))

    def event(self, event: Event, then: Sequence[Command] | None) -> None:
        """
        Writes one event and what is commanded upon it, or None where the machine failed at it;
        when this returns, the kernel has it, and the commands may go out.
        """
        self._write(event_line(event, None if then is None else fingerprint(then)))

    def _write(self, line: dict[str, Any]) -> None:  # Any: JSON
        self._lines += 1
        left = memoryview(numbered(line, self._lines).encode() + b"\n")
        while left:  # a disk that is full takes a part of it, and then raises
            left = left[os.write(self._file, left) :]


def numbered(line: dict[str, Any], number: int) -> str:  # Any: JSON
    """
    The text of a line of a story.
    """
    return json.dumps({"n": number, **line}, separators=(",", ":"))


def opened_line(opened: Opened) -> dict[str, Any]:  # Any: JSON
    """
    The line a run begins with.
    """
    body = msgspec.to_builtins(opened, order="deterministic")
    return {"at": opened.at, "kind": "Opened", "body": body}


def event_line(event: Event, then: str | None) -> dict[str, Any]:  # Any: JSON
    """
    The line of an event.
    """
    followed = {} if then is None else {"then": then}
    return {**_plain(event), **followed}


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


# ---------------------------------------------------------------- reading


class _Line(
    msgspec.Struct, forbid_unknown_fields=True, rename={"sender": "from"}
):  # a struct for its strictness, and because `from` is no name for a field in Python
    n: int
    at: float
    kind: str
    body: dict[str, Any]  # Any: its shape follows from `kind`, and is checked after that is known
    sender: str = ""
    number: int = 0
    then: str | None = None


def last_run(path: Path, job: str, run: str) -> tuple[Opened, list[Event]] | None:
    """
    The beginning and the events of the last run in the file, if it is this one. Raises
    `StoryCorrupt` for a file that is not as it was written, whichever run the damage is in.
    """
    if not path.exists():
        return None
    chapters = _chapters(path.read_bytes(), str(path))
    if not chapters:
        return None
    last = chapters[-1]
    if (last[0].body.get("job"), last[0].body.get("run")) != (job, run):
        return None
    told = _run(last, str(path))
    return told.opened, [each.event for each in told.told]


def runs_of(content: bytes, name: str, which: int | None = None) -> dict[int, Run]:
    """
    The runs of a story by their place in it, from 1; `which` takes only that one, -1 the last.
    `name` is what the story is called in sentences. Raises `StoryCorrupt`, and `UsageError` for
    a run that is not there or was told in the form of another version.
    """
    chapters = dict(enumerate(_chapters(content, name), start=1))
    if which is not None:
        place = which if which > 0 else len(chapters) + 1 + which
        if place not in chapters:
            raise UsageError(f"{name} tells {len(chapters)} runs, and run {which} is none of them")
        chapters = {place: chapters[place]}
    return {place: _run(chapter, name) for place, chapter in chapters.items()}


def _chapters(content: bytes, name: str) -> list[list[_Line]]:
    """
    The lines of each run in turn. A last line that its writer did not live to finish is none.
    """
    chapters: list[list[_Line]] = []
    for number, text in enumerate(content.split(b"\n")[:-1], start=1):
        line = _line(text, number, name)
        if line.kind == "Opened":
            chapters.append([])
        elif not chapters:
            raise _corrupt(name, number, f"a {line.kind} before any run was opened")
        chapters[-1].append(line)
    return chapters


def _line(text: bytes, number: int, name: str) -> _Line:
    try:
        line = msgspec.convert(json.loads(text), _Line)
    except msgspec.ValidationError as error:
        raise _corrupt(name, number, f"no line of a story ({error})") from None
    except (ValueError, RecursionError) as error:
        raise _corrupt(name, number, f"it cannot be read as JSON ({error})") from None
    if line.n != number:
        raise _corrupt(name, number, f"it says that it is line {line.n}")
    return line


def _run(chapter: list[_Line], name: str) -> Run:
    return Run(
        opened=_opened(chapter[0], name),
        told=tuple(
            Told(line=line.n, event=_event(line, name), then=line.then) for line in chapter[1:]
        ),
    )


def _opened(line: _Line, name: str) -> Opened:
    policy = line.body.get("policy")
    if not isinstance(policy, dict):
        raise UsageError(
            f"{name}, line {line.n}: the story of an earlier tft, which did not write down by "
            "which limits it judged and what it commanded: it can be read with that tft only"
        )
    unknown = {*line.body} - _names(Opened) | {*policy} - _names(Policy)
    if unknown:
        raise UsageError(
            f"{name}, line {line.n}: the story of another tft, which knows "
            f"{', '.join(sorted(unknown))}: it can be read with that tft only"
        )
    try:
        return msgspec.convert(line.body, Opened)
    except msgspec.ValidationError as error:
        raise _corrupt(name, line.n, f"no beginning of a run ({error})") from None


def _names(declared: type[Opened | Policy]) -> set[str]:
    return {field.name for field in fields(declared)}


def _event(line: _Line, name: str) -> Event:
    try:
        if line.kind in OWN:
            return msgspec.convert({**line.body, "at": line.at}, OWN[line.kind])
        message = from_plain(line.kind, line.body)
    except (msgspec.ValidationError, MalformedMessage) as error:
        raise _corrupt(name, line.n, str(error)) from None
    if not isinstance(message, REPORTS):
        raise _corrupt(name, line.n, f"a {line.kind} is nothing that a controller is told")
    return Received(
        at=line.at,
        sender=line.sender,
        number=line.number,
        message=message,  # type: ignore[arg-type] # narrowed by REPORTS
    )


def _corrupt(name: str, number: int, what: str) -> StoryCorrupt:
    return StoryCorrupt(
        f"{name}, line {number}: {what}. A story that is not as it was written is not gone on "
        "with. Put the whole file back, or move it away and continue from the last checkpoint "
        "with `tft run --resume`"
    )
