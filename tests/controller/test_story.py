"""
The story of a run on disk: complete, in order, and sufficient to continue from and to replay.
"""

import errno
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tft.core.job.commands import Command, JobOver, Tell
from tft.core.job.events import DeadlinePassed, Event, Led, Received, Stalled
from tft.core.job.machine import Machine
from tft.core.job.policy import Policy
from tft.errors import StoryCorrupt, UsageError
from tft.protocol.messages import Exited, Position, Spawn
from tft.replay import recording
from tft.replay.recording import (
    Opened,
    Story,
    StoryEvent,
    fingerprint,
    last_run,
    runs_of,
    salvaged_run,
)

OPENED = Opened(
    job="j", run="r", world=2, policy=Policy(enable=frozenset({"dump"}), max_incidents=3),
    checkpoints="/c", resume=("/c/step-00000007", 7),
    older=(("/c/step-00000005", 5),), first_incident=2, at=1.0,
)  # fmt: skip
EVENTS: list[Event] = [
    Led(at=1.5, epoch=1),
    Received(
        at=2.0,
        sender="node.0/0",
        number=4,
        message=Exited(
            node=0, rank=1, incarnation=0, code=-9, position=Position(step=3, window=True),
            stack="", local_state={3: "00ff", 4: "01"}, at=1.9,
        ),
    ),
    Stalled(at=3.0, silence=2.5, limit=2.0),
    DeadlinePassed(at=4.0),
]  # fmt: skip
SPAWN = Spawn(epoch=1, node=0, rank=1, incarnation=1, cause="lost")


def write(
    path: Path, opened: Opened, events: list[Event], then: Sequence[Command] | None = ()
) -> None:
    """
    Write one run, and close the story.
    """
    with Story(path) as story:
        story.opened(opened)
        for event in events:
            story.event(event, then)


def test_written_story_is_read_back(tmp_path: Path) -> None:
    """When a controller is started again, then it reads the opening of the run and every event."""
    path = tmp_path / "story.jsonl"
    write(path, OPENED, EVENTS)
    assert last_run(path, "j", "r") == (OPENED, EVENTS)


def test_story_records_every_limit_of_the_policy(tmp_path: Path) -> None:
    """When a limit of the policy is not the default, then the same value is read back. A later
    version with other defaults uses the recorded limits."""
    path = tmp_path / "story.jsonl"
    policy = Policy(freeze=0.25, attempts=7, enable=frozenset({"retry", "dump"}))
    write(path, replace(OPENED, policy=policy), [])

    run = runs_of(path.read_bytes(), "s")[1]
    assert run.opened.policy == policy
    assert json.loads(path.read_text())["body"]["policy"]["enable"] == ["dump", "retry"]


def test_story_of_another_job_is_not_used(tmp_path: Path) -> None:
    """When the last run in the directory belongs to another job, or there is no run, then no run is
    returned. When there are several runs, then the last one is returned."""
    path = tmp_path / "story.jsonl"
    assert last_run(path, "j", "r") is None
    path.touch()
    assert last_run(path, "j", "r") is None
    write(path, OPENED, EVENTS)
    assert last_run(path, "k", "r") is None
    write(path, replace(OPENED, job="k"), EVENTS[:1])
    told = last_run(path, "k", "r")
    assert told is not None
    assert told[1] == EVENTS[:1]


def test_one_run_of_a_story_can_be_selected_by_its_number(tmp_path: Path) -> None:
    """When a story has several runs, then a run can be selected by its number from either end. An
    old run in an unknown format does not prevent the read of a later run."""
    path = tmp_path / "story.jsonl"
    earlier = {"n": 1, "at": 1.0, "kind": "Opened", "body": {"job": "j", "run": "r", "enable": []}}
    path.write_text(json.dumps(earlier) + "\n")
    write(path, OPENED, EVENTS)
    write(path, replace(OPENED, run="s"), EVENTS[:1])
    content = path.read_bytes()

    assert [len(run.events) for run in runs_of(content, "s", 2).values()] == [4]
    assert list(runs_of(content, "s", -1)) == [3]
    with pytest.raises(
        UsageError, match="line 1: the story was written by an earlier version of tft"
    ):
        runs_of(content, "s")
    for absent in (0, 4, -4):
        with pytest.raises(UsageError, match=f"contains 3 runs; there is no run {absent}"):
            runs_of(content, "s", absent)


def test_incomplete_last_line_of_a_story_is_removed(tmp_path: Path) -> None:
    """When the controller dies in the middle of a line, then the incomplete line is removed. The
    next controller continues after the last complete line, without a gap in the line numbers."""
    path = tmp_path / "story.jsonl"
    write(path, OPENED, EVENTS[:2])
    with path.open("ab") as file:
        file.write(b'{"n":4,"at":9')
    assert last_run(path, "j", "r") == (OPENED, EVENTS[:2])
    with Story(path) as story:
        story.event(EVENTS[2], [])
    assert last_run(path, "j", "r") == (OPENED, EVENTS[:3])


# ---------------------------------------------------------------- recorded commands


@pytest.mark.parametrize("full", [3, 30])
def test_story_waits_for_room_on_a_full_disk(
    full: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the disk is full in the middle of a line, then the rest is written as soon as there is
    room. If there is none for long, an error is raised."""
    written, tries = os.write, 0

    def write_some(file: int, content: memoryview) -> int:
        nonlocal tries
        tries += 1
        if 1 < tries < full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(file, content[:9] if tries == 1 else content)

    path = tmp_path / "story.jsonl"
    write(path, OPENED, [])
    with Story(path) as story, monkeypatch.context() as patch:
        patch.setattr(os, "write", write_some)
        patch.setattr(recording, "_WAIT", 0.3)
        if full == 30:
            with pytest.raises(OSError, match="No space left"):
                story.event(EVENTS[0], ())
        else:
            story.event(EVENTS[0], ())
    with Story(path):
        pass  # removes an unfinished line
    assert last_run(path, "j", "r") == (OPENED, EVENTS[:1] if full == 3 else [])


def test_story_records_the_commands_of_each_event(tmp_path: Path) -> None:
    """When commands follow from an event, then its line has their kinds and a digest of their
    content. When the machine failed at the event, then the line has no commands."""
    path = tmp_path / "story.jsonl"
    then: list[Command] = [SPAWN, replace(SPAWN, rank=0), JobOver(result="failed", code=4, why="w")]
    with Story(path) as story:
        story.opened(OPENED)
        story.event(EVENTS[0], then)
        story.event(EVENTS[2], [])
        story.event(EVENTS[3], None)

    assert fingerprint(then).startswith("2 Spawn, JobOver: ")
    run = runs_of(path.read_bytes(), "s")[1]
    assert run.events == (
        StoryEvent(line=2, event=EVENTS[0], then=fingerprint(then)),
        StoryEvent(line=3, event=EVENTS[2], then=""),
        StoryEvent(line=4, event=EVENTS[3], then=None),
    )


def test_fingerprint_ignores_log_messages_and_depends_on_orders() -> None:
    """When only log messages differ, then the fingerprint of the commands is the same. When an
    order changes or moves to another place, then the fingerprint differs."""
    other = replace(SPAWN, rank=0)
    said = fingerprint([SPAWN, other])

    assert fingerprint([SPAWN, Tell(event="e", facts={"any": object()}), other]) == said
    assert fingerprint([other, SPAWN]) != said
    assert fingerprint([SPAWN, replace(other, cause="losT")]) != said


def test_machine_is_built_from_the_opening_of_a_run() -> None:
    """When a machine is built from the opening of a run, then it has the step of the resumed
    checkpoint and the recorded start time."""
    machine = replace(OPENED, at=7.0).machine()

    assert isinstance(machine, Machine)
    assert machine.last_step == 7
    assert machine.incident.opened == 7.0


# ---------------------------------------------------------------- files that are no story


def damaged(path: Path, line: int, instead: bytes) -> StoryCorrupt:
    """
    Replace a line of a story, and return the message with which it is refused.
    """
    write(path, OPENED, EVENTS)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line - 1] = instead
    path.write_bytes(b"".join(lines))
    with pytest.raises(StoryCorrupt) as refused:
        last_run(path, "j", "r")
    return refused.value


@pytest.mark.parametrize(
    ("instead", "left", "lost"),
    [
        ({3: b""}, [0, 2, 3], 1),
        ({3: b"\0" * 9 + b"\n"}, [0, 2, 3], 1),
        ({3: b"\0" * 9, 4: b"\0" * 9 + b"\n"}, [0, 3], 2),
        ({5: b"\0" * 9 + b"\n"}, [0, 1, 2], 1),
        ({5: b"\0" * 70 + b"\n"}, [0, 1, 2], 2),
        ({3: b'{"n":3,"at":2,"kind":"Sung","body":{}}\n'}, [0, 2, 3], 1),
    ],
    ids=["missing", "garbage", "two in one", "last", "long", "unknown"],
)
def test_rest_of_a_damaged_story_is_read(
    tmp_path: Path, instead: Mapping[int, bytes], left: Sequence[int], lost: int
) -> None:
    """When lines are damaged or missing, then the other events are read, and the lost ones are
    counted. They do not count any more after a leader that knows of them."""
    path = tmp_path / "story.jsonl"
    write(path, OPENED, EVENTS)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(instead.get(at, line) for at, line in enumerate(lines, start=1)))

    events = [EVENTS[index] for index in left]
    assert salvaged_run(path, "j", "r") == (OPENED, events, lost)
    assert salvaged_run(path, "j", "another") is None
    salvaging = Led(at=9.0, epoch=9, lost=lost)
    with Story(path) as story:
        story.event(salvaging, [])
    assert salvaged_run(path, "j", "r") == (OPENED, [*events, salvaging], 0)


def test_story_without_its_beginning_is_not_read(tmp_path: Path) -> None:
    """When the line with which a run begins is damaged, then nothing of the run is used."""
    path = tmp_path / "story.jsonl"
    write(path, OPENED, EVENTS)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"?\n" + b"".join(lines[1:]))
    assert salvaged_run(path, "j", "r") is None


@pytest.mark.parametrize(
    ("instead", "what"),
    [
        (b"", "line 3: it has the number 4, so a line is missing or repeated"),
        (b'{"n":3,"at":2.0,"fr\n', "line 3: it cannot be read as JSON"),
        (b"\0" * 40 + b"\n", "line 3: it cannot be read as JSON"),
        (b"\xff\xfe\n", "line 3: it cannot be read as JSON"),
        (b"[" * 100_000 + b"\n", "line 3: it cannot be read as JSON"),
        (b"[3]\n", "line 3: it is not a line of a story (Expected `object`, got `array`)"),
        (b'{"n":3,"at":"2","kind":"Led","body":{}}\n', "line 3: it is not a line of a story (Expected `float`"),
        (b'{"n":3,"at":2,"kind":"Led","body":{}}\n', "line 3: Object missing required field `epoch`"),
        (b'{"n":3,"at":2,"kind":"Sung","body":{}}\n', "line 3: a message of kind 'Sung', which"),
        (b'{"n":3,"at":2,"kind":"Exited","body":{}}\n', "line 3: a message of kind Exited that cannot be read"),
        (
            b'{"n":3,"at":2,"kind":"Lead","body":{"epoch":1,"heard":{}}}\n',
            "line 3: a message of kind Lead is not an event of a controller",
        ),
    ],
)  # fmt: skip
def test_error_names_a_damaged_line(tmp_path: Path, instead: bytes, what: str) -> None:
    """When a line is missing, incomplete or malformed, then the error names the line, the damage
    and what to do."""
    path = tmp_path / "story.jsonl"
    sentence = str(damaged(path, 3, instead))

    assert sentence.startswith(f"{path}, {what}")
    assert "Restore the whole file" in sentence
    assert "tft run --resume" in sentence


def test_error_names_a_damaged_opening_line(tmp_path: Path) -> None:
    """When the opening line of a run is damaged or missing, then the error names line 1 and the
    damage."""
    path = tmp_path / "story.jsonl"
    opening = b'{"n":1,"at":1.0,"kind":"Opened","body":{"job":"j","run":"r","policy":{}}}\n'
    assert "line 1: it is not the first line of a run" in str(damaged(path, 1, opening))
    path.unlink()
    led = b'{"n":1,"at":1.0,"kind":"Led","body":{"epoch":1}}\n'
    assert "line 1: an event of kind Led comes before the first line of a run" in str(
        damaged(path, 1, led)
    )


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (
            {"enable": ["dump"], "max_incidents": 3},
            "the story was written by an earlier version of tft",
        ),
        (
            {"policy": {"mercy": 1, "freeze": 2.0}},
            "the story was written by another version of tft, and has fields that this version does "
            "not know: mercy;",
        ),
    ],
)
def test_story_of_another_version_is_refused(
    tmp_path: Path, body: dict[str, object], what: str
) -> None:
    """When a story was written by a version with other policy fields, then the story is refused."""
    path = tmp_path / "story.jsonl"
    line = {"n": 1, "at": 1.0, "kind": "Opened", "body": {"job": "j", "run": "r", **body}}
    path.write_text(json.dumps(line) + "\n")

    with pytest.raises(UsageError, match=f"line 1: {what}"):
        last_run(path, "j", "r")
    assert last_run(path, "j", "the next run") is None
