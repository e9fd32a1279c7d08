"""
Replays stories: gives the recorded events of a run to the job machine of this version, and compares
the commands that the machine returns with the recorded commands. The job machine is the state
machine that makes the decisions of the controller.

    replayed(text) -> Replay              for a story that was pasted into a test
    replay(run) -> Replay                 for a run that was read (`tft.replay.recording.runs_of`)
    write_story(path, opened, events)     writes the run of a simulated cluster as a story, which
                                          `tft replay` and `as_test` can read
    as_test(replay, name) -> str          returns the text of a test, to be pasted into a test file
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tft.core.job.commands import Command, JobOver
from tft.core.job.events import Event, Received
from tft.core.job.machine import Machine
from tft.protocol.messages import Answered, Exited
from tft.replay.recording import (
    Opened,
    Run,
    Story,
    StoryEvent,
    event_line,
    fingerprint,
    numbered,
    opened_line,
    runs_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """
    The part of the job machine's state that the timeline of a run shows. It is read before and
    after each event. The job machine is the state machine of the controller.
    """

    state: str
    incident: int
    open: bool
    """True if the newest incident, which has the number `incident`, is not closed."""
    round: int
    strategy: str
    tried: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """
    One recorded event, and the commands that the job machine returns for this event in the replay.
    """

    recorded: StoryEvent
    commands: tuple[Command, ...]
    before: Stand
    after: Stand

    @property
    def differs(self) -> bool:
        """
        True if the job machine now returns other commands for this event than the recorded
        commands. False if no commands were recorded for the event.
        """
        return self.recorded.then is not None and self.recorded.then != fingerprint(self.commands)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """
    A recorded run, and the result of feeding its events to the job machine of this version of tft.
    """

    run: Run
    machine: Machine
    """The job machine after the last event that was replayed."""
    turns: tuple[Turn, ...]
    failed_at: StoryEvent | None = None
    """The event at which the job machine raised an exception; later events were not replayed. None
    if the job machine raised no exception."""
    failure: str = ""
    """The exception of the job machine, as text. Empty if the job machine raised no exception."""

    @property
    def differences(self) -> list[Turn]:
        """
        The events for which the job machine now returns other commands than the recorded commands.
        """
        return [turn for turn in self.turns if turn.differs]

    @property
    def same(self) -> bool:
        """
        True if this version of the machine returns exactly the recorded commands.

        If the machine raises an exception at an event, `same` is False when the commands for that
        event were recorded. If no commands were recorded for the event, the exception does not
        count as a difference: the machine may have failed there when the run was recorded, too.
        """
        known = self.failed_at is not None and self.failed_at.then is not None
        return not self.differences and not known

    @property
    def state(self) -> str:
        """
        The name of the state of the job after the last replayed event.
        """
        return str(self.machine.state)

    @property
    def result(self) -> tuple[str, int] | None:
        """
        The result and the exit code of the job; None if the job has not ended.
        """
        over: JobOver | None = self.machine.outcome
        return None if over is None else (over.result, over.code)

    @property
    def incidents(self) -> list[tuple[str, int | None, int]]:
        """
        For each incident: the strategy, the first step to train after the incident, and how many
        completed steps have to be computed again. The first step is None if it is not known.
        """
        all_of_them = {each.number: each for each in self.machine.incidents}
        if self.machine.incident.number:
            all_of_them.setdefault(self.machine.incident.number, self.machine.incident)
        return [
            (each.decision.strategy, each.progress.step, each.progress.steps_lost)
            for each in all_of_them.values()
        ]


def replayed(text: str) -> Replay:
    """
    Replay the last run of a story, and return the result. `text` is the text of the story.
    """
    [run] = runs_of(f"{text.strip()}\n".encode(), "the story", -1).values()
    return replay(run)


def replay(run: Run) -> Replay:
    """
    Feed the events of a recorded run to the job machine of this version, and return the result. The
    machine is created with the recorded arguments, including the policy (the limits and settings of
    the job).
    """
    machine = run.opened.machine()
    turns: list[Turn] = []
    for recorded in run.events:
        before = _stand(machine)
        try:
            commands = tuple(machine.handle(recorded.event))
            machine.check()
        except Exception as broken:  # noqa: BLE001 # a machine with a bug may raise any exception
            failure = f"{type(broken).__name__}: {broken}"
            turns_done = tuple(turns)
            return Replay(
                run=run, machine=machine, turns=turns_done, failed_at=recorded, failure=failure
            )
        turns.append(
            Turn(recorded=recorded, commands=commands, before=before, after=_stand(machine))
        )
    return Replay(run=run, machine=machine, turns=tuple(turns))


def write_story(
    path: Path, opened: Opened, events: Iterable[tuple[Event, Sequence[Command] | None]]
) -> None:
    """
    Append a run to the story file `path`.

    `opened` holds the arguments of the job machine. `events` holds each event with the commands
    that the machine returned for the event. The commands are None for an event at which the machine
    raised an exception.
    """
    with Story(path) as story:
        story.opened(opened)
        for event, then in events:
            story.event(event, then)


def as_test(replay: Replay, name: str) -> str:
    """
    Return the source text of a test module, which contains the recorded run and a test function
    called `name`. The test feeds the run to the job machine and expects the result that this
    version of tft gives. If this result is wrong, replace it in the pasted test by the correct
    result.

    The test does not contain the recorded commands, because these may be the wrong behaviour that
    the test is about. The name of the job is replaced, because a process that knows the name can
    fetch state from the ranks of the job. Captured rank-local state is cut to eight characters.
    """
    opened = replace(replay.run.opened, job="job", run="run")
    lines = [opened_line(opened), *(event_line(_brief(t.event), None) for t in replay.run.events)]
    # escape apostrophes in the JSON text of the run, because three apostrophes would end the string
    # literal of the test
    story = [numbered(line, n).replace("'", r"\u0027") for n, line in enumerate(lines, start=1)]
    return "\n".join(
        [
            "from tft.replay.judging import replayed",
            "",
            "STORY = r'''",
            *story,
            "'''",
            "",
            "",
            f"def {name}() -> None:",
            '    """',
            "    When this happens, then it is judged as it should be.",
            '    """',
            "    replay = replayed(STORY)",
            "",
            '    assert replay.failure == ""',
            f"    assert replay.state == {replay.state!r}",
            f"    assert replay.result == {replay.result!r}",
            f"    assert replay.incidents == {replay.incidents!r}",
        ]
    )


def _brief(event: Event) -> Event:
    match event:
        case Received(message=Exited() | Answered() as message):
            local_state = {step: state[:8] for step, state in message.local_state.items()}
            return replace(event, message=replace(message, local_state=local_state))
        case _:
            return event


def _stand(machine: Machine) -> Stand:
    incident = machine.incident
    return Stand(
        state=str(machine.state),
        incident=incident.number,
        open=incident.is_open,
        round=incident.round,
        strategy=incident.decision.strategy,
        tried=tuple(incident.decision.tried),
    )
