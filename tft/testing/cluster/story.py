"""
The story that all controllers of a simulated cluster share: whoever leads writes it, and nobody who
has been followed by another one does.
"""

from collections.abc import Sequence
from pathlib import Path

from tft.controller.story import (
    Opened,
    Story,
    event_line,
    fingerprint,
    numbered,
    opened_line,
)
from tft.core.commands import Command
from tft.core.events import Event, Led
from tft.testing.cluster.schedule import Schedule
from tft.testing.cluster.stage import START
from tft.testing.story import replayed

EARLIER = "/run/checkpoints/earlier"
"""The checkpoint that a resumed job starts from."""


class SharedStory:
    """
    Compare and set: an entry is taken from the newest epoch only, and each epoch begins once.
    """

    def __init__(self, *, tells_all: bool = False) -> None:
        self.events: list[Event] = []
        self.then: list[str] | None = [] if tells_all else None
        """What was commanded upon each, in short; None where nobody will look at it."""
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

    def judged(self, commands: Sequence[Command]) -> None:
        """
        What was commanded upon the last event.
        """
        if self.then is not None:
            self.then.append(fingerprint(commands))

    def differs(self, schedule: Schedule) -> str:
        """
        What is commanded otherwise when the story is written down, read and judged once more.
        """
        if self.then is None:
            return ""
        told = zip(self.events, self.then, strict=True)
        lines = [opened_line(opened(schedule)), *(event_line(event, then) for event, then in told)]
        replay = replayed("\n".join(numbered(line, n) for n, line in enumerate(lines, start=1)))
        return replay.failure or "; ".join(str(turn.told.event) for turn in replay.differences)


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
