"""
`tft replay`: gives the recorded events of a run to the job machine (the controller's state machine)
again. The command prints what happened, and whether the job machine now returns the same commands
as in the recorded run.
"""

from pathlib import Path

import click

from tft.core.job.events import Received
from tft.errors import UsageError
from tft.launcher.run_directory import STORY
from tft.replay.judging import Replay, Turn, as_test, replay
from tft.replay.recording import Run, fingerprint, runs_of
from tft.replay.sentences import commanded
from tft.replay.timeline import timeline

SAME = 0
DIFFERENT = 1
# the number of differences that are shown: later differences mostly follow from the first ones
_SHOWN = 3


def replay_story(path: Path, which: int | None) -> int:
    """
    Print what happened in the runs of a story (the recorded events), and return the exit code of
    `tft replay`.

    `path` is the story or its run directory. `which` is the number of the only run to print; None
    means all runs.
    """
    same = True
    for place, run in read(path, which).items():
        judged = replay(run)
        click.echo(f"run {place}: {_of(run)}")
        click.echo("\n".join(timeline(judged)))
        click.echo()
        for line in verdict(judged):
            click.echo(f"run {place}: {line}")
        same = same and judged.same
    return SAME if same else DIFFERENT


def print_test(path: Path, which: int | None) -> int:
    """
    Print the source text of a test that replays one run of a story: the run number `which`, or the
    last run if `which` is None.
    """
    [(place, run)] = read(path, -1 if which is None else which).items()
    click.echo(as_test(replay(run), f"test_the_story_of_run_{place}"))
    return SAME


def read(path: Path, which: int | None) -> dict[int, Run]:
    """
    Return the runs of a story by their number.

    `path` is the story or its run directory. `which` is the number of the only run to return; None
    means all runs.

    Raises `UsageError` if the run does not exist or the file cannot be read, and `StoryCorrupt` if
    the story is damaged.
    """
    file = path / STORY if path.is_dir() else path
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    runs = runs_of(content, str(file), which)
    if not runs:
        raise UsageError(
            f"{file} contains no record of a run: name the run directory of a job that was "
            f"started, or the file {STORY} in such a directory"
        )
    return runs


def verdict(judged: Replay) -> list[str]:
    """
    Return lines that say whether the job machine (the controller's state machine) has returned the
    same commands as in the recorded run. The lines also name the first events at which the commands
    differ.
    """
    known = sum(turn.recorded.then is not None for turn in judged.turns)
    different = judged.differences
    first = f"{len(judged.turns)} of {len(judged.run.events)} events judged; "
    if known < len(judged.turns):
        first += f"what followed then is known of {known}; "
    first += f"other commands in {len(different)} of them" if different else "the same commands"
    lines = [first, *(line for turn in different[:_SHOWN] for line in _difference(turn))]
    if len(different) > _SHOWN:
        lines.append(f"and {len(different) - _SHOWN} more")
    if (failed := judged.failed_at) is not None:
        then = "it failed then too" if failed.then is None else f"then: {failed.then or 'nothing'}"
        lines.append(f"line {failed.line}: the machine fails: {judged.failure} ({then})")
    return lines


def _difference(turn: Turn) -> list[str]:
    event = turn.recorded.event
    kind = type(event.message if isinstance(event, Received) else event).__name__
    return [
        f"line {turn.recorded.line}, {kind}",
        f"  then: {turn.recorded.then or 'nothing'}",
        f"  now: {fingerprint(turn.commands) or 'nothing'}",
        *(f"    {line}" for line in commanded(turn.commands)),
    ]


def _of(run: Run) -> str:
    ranks = "1 rank" if run.opened.world == 1 else f"{run.opened.world} ranks"
    return f"{ranks}, {len(run.events)} events"


def replay_command() -> click.Command:
    """
    Return the command `tft replay`.
    """

    def command(story: Path, run: int | None, as_test: bool) -> int:
        return print_test(story, run) if as_test else replay_story(story, run)

    return click.Command(
        "replay",
        callback=command,
        params=[
            click.Argument(["story"], type=click.Path(path_type=Path)),
            click.Option(
                ["--run"],
                type=click.INT,
                metavar="N",
                help="Only this run of the file: 1 is the first, -1 the last.",
            ),
            click.Option(
                ["--as-test"],
                is_flag=True,
                help="Print the run as a test to be pasted, the last one unless --run is given.",
            ),
        ],
        help=(
            "Judge the run in STORY again (a story.jsonl, or the run directory it is in), print "
            "what happened, and say whether the commands are the same as in the run.\n\nExits 0 "
            "when they are, 1 when they are not, 2 when the story cannot be read."
        ),
    )
