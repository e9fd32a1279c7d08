"""
`tft replay` on a run directory, on a damaged story, and on a story that is printed as a test.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.controller.test_replay import OPENED, is_stopped, lived, recovers
from tft.cli.replay import print_test, read, replay_story
from tft.errors import StoryCorrupt, UsageError
from tft.replay.recording import Story


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """
    Return a run directory with two runs: one that was stopped, and one that recovered and
    completed.
    """
    story = tmp_path / "run" / "story.jsonl"
    story.parent.mkdir()
    lived(is_stopped, story)
    lived(recovers, story)
    return story.parent


def damage(run_dir: Path, line: int, **changed: object) -> Path:
    """
    Change fields of one line of the story.
    """
    story = run_dir / "story.jsonl"
    lines = story.read_text().splitlines()
    lines[line - 1] = json.dumps({**json.loads(lines[line - 1]), **changed})
    story.write_text("\n".join(lines) + "\n")
    return story


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """
    Run Python in `folder` with another hash seed, so that sets of strings have another order.
    """
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONHASHSEED": "77"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_replay_reports_every_run_of_a_story(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When a story has several runs, then each run is printed and judged, and equal commands are
    reported as the same."""
    assert replay_story(run_dir, None) == 0

    first, second = (len(run.events) for run in read(run_dir, None).values())
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line.startswith("run ")] == [
        f"run 1: 4 ranks, {first} events",
        f"run 1: {first} of {first} events judged; the same commands",
        f"run 2: 4 ranks, {second} events",
        f"run 2: {second} of {second} events judged; the same commands",
    ]
    assert "chosen: recover" in said
    assert "the job is over: cancelled, exit code 143" in said


def test_replay_of_one_run_can_be_selected(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When a run number is given, then only that run is printed. A number that the story does not
    have is refused."""
    assert replay_story(run_dir / "story.jsonl", -1) == 0
    assert "run 1: " not in capsys.readouterr().out
    with pytest.raises(UsageError, match="contains 2 runs; there is no run 3"):
        replay_story(run_dir, 3)
    with pytest.raises(UsageError, match="contains 2 runs; there is no run 0"):
        print_test(run_dir, 0)


def test_replay_reports_commands_that_differ(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When the recorded commands differ from the commands that the replay gives, then replay prints
    the line, the event and both commands, and returns 1."""
    said_then = json.loads((run_dir / "story.jsonl").read_text().splitlines()[2])["then"]
    count = len(read(run_dir, 1)[1].events)
    damage(run_dir, 3, then="2 Kill: 00")
    damage(run_dir, 5, then="Stop: 11")

    assert replay_story(run_dir, 1) == 1
    assert capsys.readouterr().out.splitlines()[-8:] == [
        f"run 1: {count} of {count} events judged; other commands in 2 of them",
        "run 1: line 3, NodeJoined",
        "run 1:   then: 2 Kill: 00",
        f"run 1:   now: {said_then}",
        "run 1:     start ranks 0-1 on node 0: the job starts",
        "run 1: line 5, StoreOpened",
        "run 1:   then: Stop: 11",
        "run 1:   now: nothing",
    ]


@pytest.mark.parametrize(
    ("content", "error", "sentence"),
    [
        (None, UsageError, "cannot be read: No such file or directory"),
        ("", UsageError, "contains no record of a run"),
        ("{}\n", StoryCorrupt, "line 1: it is not a line of a story"),
        (
            '{"n":1,"at":1.0,"kind":"Opened","body":{"job":"j","run":"r","world":4}}\n',
            UsageError,
            "line 1: the story was written by an earlier version of tft",
        ),
    ],
)
def test_missing_or_unreadable_story_is_refused(
    tmp_path: Path, content: str | None, error: type[Exception], sentence: str
) -> None:
    """When the story is missing, empty, unreadable or of an earlier tft, then reading it is refused
    and one sentence gives the reason."""
    if content is not None:
        (tmp_path / "story.jsonl").write_text(content)

    with pytest.raises(error, match=sentence):
        read(tmp_path, None)


def test_replay_ignores_an_incomplete_last_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When the last line of a story is not complete yet, then the lines before it are replayed."""
    with Story(tmp_path / "story.jsonl") as story:
        story.opened(OPENED)
    with (tmp_path / "story.jsonl").open("a") as file:
        file.write('{"n":2,"at"')

    assert replay_story(tmp_path, None) == 0
    assert "run 1: 0 of 0 events judged" in capsys.readouterr().out


def test_replay_in_another_process_is_equal_and_its_test_passes(run_dir: Path) -> None:
    """When another process, with another order of text sets, replays a story, then the commands are
    the same. The test that `--as-test` prints passes."""
    told = python(run_dir, "-m", "tft", "replay", ".")
    printed = python(run_dir, "-m", "tft", "replay", "--as-test", ".")
    (run_dir / "test_pasted.py").write_text(printed.stdout)
    tested = python(run_dir, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_pasted.py")

    assert told.returncode == 0, told.stdout + told.stderr
    assert "def test_the_story_of_run_2() -> None:" in printed.stdout
    assert tested.returncode == 0, tested.stdout
    assert "1 passed" in tested.stdout


def test_replay_exits_with_2_when_a_line_is_unreadable(run_dir: Path) -> None:
    """When a line of the story cannot be read, then the replay command names the line and exits
    with 2."""
    damage(run_dir, 4, kind="Sung")
    ended = python(run_dir.parent, "-m", "tft", "replay", "run")

    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("tft: run/story.jsonl, line 4: a message of kind 'Sung'")
    assert ended.stderr.count("\n") == 1
