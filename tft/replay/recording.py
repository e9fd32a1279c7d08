"""
The story of a run: a file with all events of the job machine (the state machine that makes the
decisions of the controller), each as one line of JSON. An event is written before the orders that
follow from the event are sent. A controller that is started again reads the story and continues
from there. `tft replay` gives the events to the job machine again.

A line is a JSON object with the keys `n`, `at`, `kind` and `body`, and for reports also `from` and
`number`. `n` numbers the lines from 1 without gaps, over all runs in the file. `then` is the
fingerprint of the commands that the machine returned for the event (see `fingerprint`). This key is
absent when the commands are not known. A run begins with a line of kind `Opened`.
"""

import json
import os
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

import msgspec
import xxhash

from tft.core.job.commands import Command, Tell
from tft.core.job.events import Event, Led, Own, Received
from tft.core.job.machine import Machine
from tft.core.job.origin import Origin
from tft.core.job.policy import Policy
from tft.errors import MalformedMessage, StoryCorrupt, UsageError
from tft.files import NO_ROOM
from tft.protocol.codec import from_plain, to_plain
from tft.protocol.messages import Report

_SHORTEST = 50
"""The smallest number of bytes that a line of a story can have. From this number and the size of an
unreadable part of the file, the reader computes how many lines the part may have had at most."""
_WAIT = 10.0
"""How many seconds a write waits for room on a full disk. It is shorter than `pulse.LIMIT`, after
which a controller counts as hanging. It is long enough that a controller that gives up and is started
again does not use up its restarts (`Restarts`)."""
_AGAIN = 0.1
"""The pause in seconds before a failed write is tried again."""
REPORTS: tuple[type, ...] = get_args(Report)
OWN: dict[str, type[Own]] = {kind.__name__: kind for kind in get_args(Own)}
"""The classes of the events that the controller itself creates, by class name. All other events are
reports that the controller has received."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """
    All arguments with which the job machine of a run is created. Every argument is recorded, so
    that a later change of a default value cannot change the result of a replay.
    """

    job: str
    run: str
    """The identifier of one start of `tft run`. A restarted controller continues only its own run.
    """
    world: int
    policy: Policy
    checkpoints: str
    """The directory in which the job writes its checkpoints."""
    checkpoint_name: str = "step-{step:08d}"
    """The pattern of the checkpoints' names. The default applies to stories of earlier versions of
    tft, which did not record the pattern and always used the default."""
    resume: tuple[str, int] | None
    """The path and the step of the checkpoint from which the run resumes. None if the training
    starts from the beginning."""
    older: tuple[tuple[str, int], ...] = ()
    """The path and the step of each checkpoint from before the step of `resume` that was known when
    the run began."""
    first_incident: int
    at: float

    def machine(self) -> Machine:
        """
        Return a new job machine for this run, which has handled no event yet.
        """
        origin = Origin(
            job=self.job,
            checkpoints=self.checkpoints,
            checkpoint_name=self.checkpoint_name,
            resume=self.resume,
            older=self.older,
            first_incident=self.first_incident,
        )
        return Machine(self.world, self.policy, origin, at=self.at)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryEvent:
    """
    One event of a story, with the fingerprint of the commands that the job machine returned for the
    event when the run was recorded.
    """

    line: int
    event: Event
    then: str | None
    """The fingerprint of the commands for this event (see `fingerprint`). None if the commands are
    not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """
    One recorded run of a story: the arguments of its job machine, and its events.
    """

    opened: Opened
    events: tuple[StoryEvent, ...]


def fingerprint(commands: Sequence[Command]) -> str:
    """
    Return a short text that identifies a list of commands of the job machine: the number of
    commands of each kind, and a digest of their content. Commands of the kind `Tell` are left out,
    because they only inform operators and plugins. The text is empty when no other commands are in
    the list.
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


# ---------------------------------------------------------------- writing a story


class Story:
    """
    The file of a story, open for appending lines.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._lines = 0
        self._never = threading.Event()

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
        Remove an unfinished last line of the file. The controller that wrote the line has died
        before the line was complete, so it has sent no command for the event of that line.
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
        Write the line with which a run begins. The line has the arguments of the run's job machine.
        """
        self._write(opened_line(opened))

    def event(self, event: Event, then: Sequence[Command] | None) -> None:
        """
        Write one event, with the fingerprint of `then`, the commands that the machine returned for
        the event. `then` is None if the machine raised an exception at the event.

        When this method returns, the kernel has received the line, so the line is not lost if this
        process dies. The commands may be sent only after this method has returned.
        """
        self._write(event_line(event, None if then is None else fingerprint(then)))

    def _write(self, line: dict[str, Any]) -> None:  # Any: any JSON value
        self._lines += 1
        left = memoryview(numbered(line, self._lines).encode() + b"\n")
        # a disk that becomes full accepts only a part of the line, and reports the error at the
        # next write: so write until the whole line is accepted or an error is reported
        waited = 0.0
        while left:
            try:
                left = left[os.write(self._file, left) :]
            except OSError as error:
                if error.errno not in NO_ROOM or waited >= _WAIT:
                    raise
                self._never.wait(_AGAIN)
                waited += _AGAIN


def numbered(line: dict[str, Any], number: int) -> str:  # Any: any JSON value
    """
    Return the JSON text of a line of a story. `number` is the number of the line, which becomes its
    field `n`.
    """
    return json.dumps({"n": number, **line}, separators=(",", ":"))


def opened_line(opened: Opened) -> dict[str, Any]:  # Any: any JSON value
    """
    Return the line with which a run begins. The line has the arguments of the run's job machine.
    """
    body = msgspec.to_builtins(opened, order="deterministic")
    return {"at": opened.at, "kind": "Opened", "body": body}


def event_line(event: Event, then: str | None) -> dict[str, Any]:  # Any: any JSON value
    """
    Return the line of an event for the story file. `then` is the fingerprint of the commands for
    this event, or None if the commands are not known.
    """
    followed = {} if then is None else {"then": then}
    return {**_plain(event), **followed}


def _plain(event: Event) -> dict[str, Any]:  # Any: any JSON value
    match event:
        case Received(at=at, sender=sender, number=number, message=message):
            kind, body = to_plain(message)
            return {"at": at, "from": sender, "number": number, "kind": kind, "body": body}
        case _:
            body = msgspec.to_builtins(event)
            return {"at": body.pop("at"), "kind": type(event).__name__, "body": body}


# ---------------------------------------------------------------- reading a story


class _Line(
    msgspec.Struct,
    forbid_unknown_fields=True,
    rename={"sender": "from"},
    # this class is a struct and not a dataclass, because a struct can refuse unknown fields. A
    # struct can also rename a field: the key `from` of a line is a Python keyword
):
    n: int
    at: float
    kind: str
    body: dict[str, Any]  # Any: the keys depend on `kind`, and are checked once `kind` is known
    sender: str = ""
    number: int = 0
    then: str | None = None


class StoryReader:
    """
    Reads a story while a controller writes it: each call of `news` returns what was added.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._lines = 0

    def news(self) -> list[Opened | StoryEvent]:
        """
        Return the complete lines that were added since the last call: for the first line of a run
        an `Opened`, and for each other line a `StoryEvent`. Return nothing while there is no story.

        Raises `StoryCorrupt` if a line is damaged, and `UsageError` if another version of tft has
        written it.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        found: list[Opened | StoryEvent] = []
        for text in whole.split(b"\n")[:-1]:
            name = str(self._path)
            line = _line(text, self._lines + 1, name)
            self._lines += 1
            if line.kind == "Opened":
                found.append(_opened(line, name))
            else:
                found.append(StoryEvent(line=line.n, event=_event(line, name), then=line.then))
        self._read += len(whole)
        return found


def last_run(path: Path, job: str, run: str) -> tuple[Opened, list[Event]] | None:
    """
    Return the arguments of the job machine and the events of the last run in the story file `path`.
    Return None if the last run is not the run `run` of the job `job`, or if the file has no run.

    Raises `StoryCorrupt` when the file is damaged anywhere, even in an earlier run. Raises
    `UsageError` when another version of tft has written the last run.
    """
    if not path.exists():
        return None
    chapters = _chapters(path.read_bytes(), str(path))
    if not chapters:
        return None
    last = chapters[-1]
    if (last[0].body.get("job"), last[0].body.get("run")) != (job, run):
        return None
    found = _run(last, str(path))
    return found.opened, [each.event for each in found.events]


def salvaged_run(path: Path, job: str, run: str) -> tuple[Opened, list[Event], int] | None:
    """
    Return the readable part of the last run in a damaged story file. The three results are the
    arguments of the job machine, the readable events, and the number of events that cannot be read.
    Unreadable events that an earlier controller has already reported (`Led.lost`) are not counted
    again.

    Return None if no first line of a run (with the arguments of the job machine) can be read. Also
    return None if the last run is not the run `run` of the job `job`.
    """
    opened: Opened | None = None
    events: list[Event] = []
    last = lost = unread = 0
    for text in path.read_bytes().split(b"\n")[:-1]:
        try:
            line = _read(text, last + 1, str(path))
            if line.kind == "Opened":
                opened, events, lost = _opened(line, str(path)), [], 0
            else:
                events.append(_event(line, str(path)))
                jumped = line.n - last - 1
                lost += jumped if jumped > 0 else unread
        except (StoryCorrupt, UsageError):
            # the damage may have overwritten line ends, so the unreadable `text` may have been
            # several lines: count the highest number of lines that fit into its length
            unread += 1 + len(text) // _SHORTEST
            continue
        last, unread = line.n, 0
        if events and isinstance(events[-1], Led) and events[-1].lost:
            lost = 0
    if opened is None or (opened.job, opened.run) != (job, run):
        return None
    return opened, events, lost + unread


def runs_of(content: bytes, name: str, which: int | None = None) -> dict[int, Run]:
    """
    Read the runs of a story. Return the runs by their number in the story, counted from 1.
    `content` is the content of the story file. `which` selects one run by its number; -1 selects
    the last run, and None selects all runs. `name` names the story in error messages.

    Raises `StoryCorrupt` when the story is damaged. Raises `UsageError` when the run does not
    exist, or was written by another version of tft.
    """
    chapters = dict(enumerate(_chapters(content, name), start=1))
    if which is not None:
        place = which if which > 0 else len(chapters) + 1 + which
        if place not in chapters:
            raise UsageError(f"{name} contains {len(chapters)} runs; there is no run {which}")
        chapters = {place: chapters[place]}
    return {place: _run(chapter, name) for place, chapter in chapters.items()}


def _chapters(content: bytes, name: str) -> list[list[_Line]]:
    """
    Return, for each run in the content of a story file, the lines of the run. An unfinished last
    line of the file is left out.
    """
    chapters: list[list[_Line]] = []
    for number, text in enumerate(content.split(b"\n")[:-1], start=1):
        line = _line(text, number, name)
        if line.kind == "Opened":
            chapters.append([])
        elif not chapters:
            why = f"an event of kind {line.kind} comes before the first line of a run"
            raise _corrupt(name, number, why)
        chapters[-1].append(line)
    return chapters


def _line(text: bytes, number: int, name: str) -> _Line:
    line = _read(text, number, name)
    if line.n != number:
        raise _corrupt(
            name, number, f"it has the number {line.n}, so a line is missing or repeated"
        )
    return line


def _read(text: bytes, number: int, name: str) -> _Line:
    try:
        return msgspec.convert(json.loads(text), _Line)
    except msgspec.ValidationError as error:
        raise _corrupt(name, number, f"it is not a line of a story ({error})") from None
    except (ValueError, RecursionError) as error:
        raise _corrupt(name, number, f"it cannot be read as JSON ({error})") from None


def _run(chapter: list[_Line], name: str) -> Run:
    return Run(
        opened=_opened(chapter[0], name),
        events=tuple(
            StoryEvent(line=line.n, event=_event(line, name), then=line.then)
            for line in chapter[1:]
        ),
    )


def _opened(line: _Line, name: str) -> Opened:
    policy = line.body.get("policy")
    if not isinstance(policy, dict):
        raise UsageError(
            f"{name}, line {line.n}: the story was written by an earlier version of tft, which did "
            "not record its limits and commands: read this story with that version of tft"
        )
    unknown = {*line.body} - _names(Opened) | {*policy} - _names(Policy)
    if unknown:
        raise UsageError(
            f"{name}, line {line.n}: the story was written by another version of tft, and has "
            f"fields that this version does not know: {', '.join(sorted(unknown))}; read this "
            "story with that version of tft"
        )
    try:
        return msgspec.convert(line.body, Opened)
    except msgspec.ValidationError as error:
        raise _corrupt(name, line.n, f"it is not the first line of a run ({error})") from None


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
        what = f"a message of kind {line.kind} is not an event of a controller"
        raise _corrupt(name, line.n, what)
    return Received(
        at=line.at,
        sender=line.sender,
        number=line.number,
        message=message,  # type: ignore[arg-type] # narrowed by REPORTS
    )


def _corrupt(name: str, number: int, what: str) -> StoryCorrupt:
    return StoryCorrupt(
        f"{name}, line {number}: {what}. A damaged story cannot be continued. Restore the whole "
        "file, or move it away and continue from the last checkpoint with `tft run --resume`"
    )
