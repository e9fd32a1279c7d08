"""
`python -m tests.stories` judges all stories anew; read the difference before you keep it. `python
-m tests.stories 4711` adds the story of a schedule, given by its seed for `draw`.
"""

import sys
from pathlib import Path

from tests.stories.transcript import exact, judged, read
from tft.simulation.run import set_up, until_over
from tft.simulation.schedule import draw
from tft.simulation.story import opened

STORIES = Path(__file__).parent


def renew() -> None:
    """
    Write the present commands and reports of every story.
    """
    for path in STORIES.glob("*.txt"):
        path.write_text(judged(*read(path.read_text())))


def add(seed: int) -> None:
    """
    Write the story of a schedule. Its name lists the mishaps of the schedule.
    """
    schedule = draw(seed)
    stage = set_up(schedule)
    until_over(stage)  # raises if a promise is broken, because such a story is not kept
    name = "-".join(
        [*(mishap.kind or mishap.what for mishap in schedule.mishaps), str(seed)]
    ).replace(" ", "_")
    text = judged(opened(schedule), [exact(event) for event in stage.story.events])
    (STORIES / f"{name}.txt").write_text(text)


if __name__ == "__main__":
    for given in sys.argv[1:]:
        add(int(given))
    if not sys.argv[1:]:
        renew()
