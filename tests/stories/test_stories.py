"""
Stories of simulated jobs in which no promise was broken. Commands and reports must stay the same,
word for word and limit for limit, until a change is intended.
"""

from difflib import unified_diff
from pathlib import Path

import pytest

from tests.stories.transcript import judged, read

STORIES = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("story", STORIES, ids=lambda path: path.stem)
def test_recorded_story_gives_the_same_orders_and_reports(story: Path) -> None:
    """When the events of a recorded story happen again, then the orders, events, deadlines and
    reports are the same as recorded."""
    then = story.read_text()
    now = judged(*read(then))
    difference = unified_diff(then.splitlines(), now.splitlines(), "then", "now", lineterm="", n=2)
    assert now == then, "\n".join(
        [f"{story.name}; meant to be so? `python -m tests.stories` keeps it", *difference]
    )
