"""
The story of a run on disk: whole, in order, and enough to go on from.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from tft.controller.story import Opened, Story, last_run
from tft.core.events import DeadlinePassed, Event, Led, Received, Stalled
from tft.errors import InternalError
from tft.protocol.messages import Exited, Position

OPENED = Opened(
    job="j", run="r", world=2, enable=("dump",), max_incidents=3, resume=("/c/step-00000007", 7),
    first_incident=2, at=1.0,
)  # fmt: skip
EVENTS: list[Event] = [
    Led(at=1.5, epoch=1),
    Received(
        at=2.0,
        sender="node.0/0",
        number=4,
        message=Exited(
            node=0, rank=1, incarnation=0, code=-9, position=Position(step=3, window=True),
            stack="", private={3: "00ff", 4: "01"}, at=1.9,
        ),
    ),
    Stalled(at=3.0, silence=2.5, limit=2.0),
    DeadlinePassed(at=4.0),
]  # fmt: skip


def write(path: Path, opened: Opened, events: list[Event]) -> None:
    """
    One run, written and closed.
    """
    with Story(path) as story:
        story.opened(opened)
        for event in events:
            story.event(event)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    """
    When a controller is started again, then it gets the run's beginning and every event.
    """
    path = tmp_path / "story.jsonl"
    write(path, OPENED, EVENTS)
    assert last_run(path, "j", "r") == (OPENED, EVENTS)


def test_the_story_of_another_run_is_not_taken_for_ones_own(tmp_path: Path) -> None:
    """
    When the last run in the directory is another job's, or there is none, then there is nothing
    to go on from; when there are several, then it is the last one.
    """
    path = tmp_path / "story.jsonl"
    assert last_run(path, "j", "r") is None
    write(path, OPENED, EVENTS)
    assert last_run(path, "k", "r") is None
    write(path, replace(OPENED, job="k"), EVENTS[:1])
    told = last_run(path, "k", "r")
    assert told is not None
    assert told[1] == EVENTS[:1]
    assert path.read_bytes().count(b"\n") == 7


def test_a_line_its_writer_did_not_live_to_finish_is_cut_off(tmp_path: Path) -> None:
    """
    When the controller dies in the middle of a line, then nothing had followed from it yet: the
    next one goes on behind the last whole line, without a hole in the numbers.
    """
    path = tmp_path / "story.jsonl"
    write(path, OPENED, EVENTS[:2])
    with path.open("ab") as file:
        file.write(b'{"n":4,"at":9')
    assert last_run(path, "j", "r") == (OPENED, EVENTS[:2])
    with Story(path) as story:
        story.event(EVENTS[2])
    assert last_run(path, "j", "r") == (OPENED, EVENTS[:3])


def test_a_hole_in_the_story_is_said(tmp_path: Path) -> None:
    """
    When a line is missing, then the story is not believed.
    """
    path = tmp_path / "story.jsonl"
    write(path, OPENED, EVENTS)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2] + lines[3:]))
    with pytest.raises(InternalError, match="line 3 says it is line 4"):
        last_run(path, "j", "r")
