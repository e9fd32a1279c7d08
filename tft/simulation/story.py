"""
The story (the record of all events of the job machine) that all controllers of a simulated cluster
share. Only the controller of the newest epoch can write the story.
"""

from collections.abc import Sequence
from pathlib import Path

from tft.core.job.commands import Command
from tft.core.job.events import Event, Led
from tft.replay.judging import replayed
from tft.replay.recording import (
    Opened,
    Story,
    event_line,
    fingerprint,
    numbered,
    opened_line,
)
from tft.simulation.clock import START
from tft.simulation.schedule import Schedule

EARLIER = "/run/checkpoints/earlier"
"""The directory of the checkpoint from which a resumed job starts."""


class SharedStory:
    """
    The events that the controllers of a job have handled, in order. An event is accepted only from
    the controller of the newest epoch, and each epoch can be claimed once.
    """

    def __init__(self, *, tells_all: bool = False) -> None:
        self.events: list[Event] = []
        self.then: list[str] | None = [] if tells_all else None
        """The fingerprints of the commands after each event. None if the fingerprints are not
        recorded."""
        self.epoch = 0

    def append(self, event: Event, epoch: int) -> bool:
        """
        Append an event to the story. Return False, without writing, when another controller has
        claimed the epoch.
        """
        newer = isinstance(event, Led) and epoch > self.epoch
        if not newer and (epoch != self.epoch or isinstance(event, Led)):
            return False
        self.epoch = epoch
        self.events.append(event)
        return True

    def judged(self, commands: Sequence[Command]) -> None:
        """
        Record the commands that the job machine returned for the last event.
        """
        if self.then is not None:
            self.then.append(fingerprint(commands))

    def differs(self, schedule: Schedule) -> str:
        """
        Write the story as text, read the text, and replay its events. Return a text that names the
        events whose commands differ from the recorded ones, or the failure of the replay. Return ""
        when no commands differ, or when the commands were not recorded.
        """
        if self.then is None:
            return ""
        told = zip(self.events, self.then, strict=True)
        lines = [opened_line(opened(schedule)), *(event_line(event, then) for event, then in told)]
        replay = replayed("\n".join(numbered(line, n) for n, line in enumerate(lines, start=1)))
        return replay.failure or "; ".join(str(turn.recorded.event) for turn in replay.differences)


def opened(schedule: Schedule) -> Opened:
    """
    Return the first entry of the story: the arguments of the job machine for a schedule.
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
    Write the events to a story file at `path`, as a controller would.
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
