"""
A story that is followed while it is written: the incidents are those that its controller knows.
"""

from pathlib import Path

from tests.controller.test_replay import OPENED, recovers, scripted
from tft.replay.following import StoryFollower
from tft.replay.judging import write_story


def story(path: Path) -> bytes:
    """
    Write the story of a job that loses two ranks in one incident, and return it.
    """
    job, machine = scripted()
    job.start()
    recovers(job)
    write_story(path, OPENED, machine.told)
    return path.read_bytes()


def test_incident_is_open_until_its_end_is_written(tmp_path: Path) -> None:
    """When a story is read line by line, then the incident opens, gets its faults, and closes, as
    the controller has judged."""
    path = tmp_path / "story.jsonl"
    content = story(path)
    follower = StoryFollower(path)
    seen: list[tuple[bool, int]] = []
    path.write_bytes(b"")
    with path.open("ab") as file:
        for line in content.splitlines(keepends=True):
            file.write(line[:20])
            file.flush()
            follower.read()  # an unfinished line is left for later
            file.write(line[20:])
            file.flush()
            follower.read()
            seen.append((follower.open is not None, len(follower.closed)))

    assert follower.failure == ""
    assert list(dict.fromkeys(seen)) == [(False, 0), (True, 0), (False, 1)]
    described = follower.described(follower.closed[0])
    assert [fault["rank"] for fault in described["faults"]] == [1, 3]
    assert described["strategy"] == "recover"
    assert (follower.count, follower.last_step) == (1, 4)
    assert follower.members == frozenset(range(4))
    assert follower.pids[1, 1] > 0


def test_damaged_story_is_said_and_what_was_known_stays(tmp_path: Path) -> None:
    """When a line of the story is damaged, then the follower says so, and goes no further."""
    path = tmp_path / "story.jsonl"
    content = story(path)
    follower = StoryFollower(path)
    follower.read()
    path.write_bytes(content + b"{}\n")
    follower.read()
    path.write_bytes(content)
    follower.read()

    assert "is not a line of a story" in follower.failure
    assert len(follower.closed) == 1


def test_story_that_does_not_exist_yet_says_nothing(tmp_path: Path) -> None:
    """When there is no story yet, then nothing is known, and nothing has failed."""
    follower = StoryFollower(tmp_path / "story.jsonl")
    follower.read()

    assert (follower.failure, follower.members, follower.last_step) == ("", None, None)
    assert (follower.open, follower.count) == (None, 0)
