"""
The story that all controllers of a simulated cluster share: whoever leads writes it, and nobody who
has been followed by another one does.
"""

from collections.abc import Sequence
from pathlib import Path

from tft.controller.story import Opened, Story
from tft.core.events import Event, Led
from tft.testing.cluster.schedule import Schedule
from tft.testing.cluster.stage import START

EARLIER = "/run/checkpoints/earlier"
"""The checkpoint that a resumed job starts from."""


class SharedStory:
    """
    Compare and set: an entry is taken from the newest epoch only, and each epoch begins once.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.epoch = 0

    def append(self, event: Event, epoch: int) -> bool:
        """
        Write an event; False when another controller has taken over, and nothing was written.
        """
        newer = isinstance(event, Led) and epoch > self.epoch
        if not newer and (epoch != self.epoch or isinstance(event, Led)):
            return False
        self.epoch = epoch
        self.events.append(event)
        return True


def opened(schedule: Schedule) -> Opened:
    """
    What a schedule's job begins with.
    """
    return Opened(
        job="simulated",
        run="1",
        world=schedule.world,
        policy=schedule.policy,
        checkpoints="/run/checkpoints",
        resume=(EARLIER, schedule.resume) if schedule.resume else None,
        first_incident=1,
        at=START,
    )


def write_story(path: Path, schedule: Schedule, events: Sequence[Event]) -> None:
    """
    Write the events as a controller would have.
    """
    path.unlink(missing_ok=True)
    beginning = opened(schedule)
    machine = beginning.machine()
    with Story(path) as story:
        story.opened(beginning)
        for event in events:
            try:
                commands = machine.handle(event)
            except Exception:
                story.event(event, None)
                raise
            story.event(event, commands)
