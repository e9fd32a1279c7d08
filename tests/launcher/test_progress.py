"""
The line about the progress of a job, from messages that the test makes.
"""

import asyncio
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest

from tests.exhausted import no_more_threads
from tft.launcher.console import PlainConsole
from tft.launcher.look import Watch
from tft.launcher.progress import Losses, Part, Progress, _intervals, fitted, show_progress
from tft.launcher.run_directory import JobThere
from tft.protocol.messages import Beat, Envelope, Lead, Message, Position, Pulse


def says(watch: Watch, message: Message) -> None:
    """
    Let the look hear a message.
    """
    watch.heard(Envelope(job="j", sender="s", number=0, message=message))


def beat(*steps: int, at: float, closed: float, training: bool = True) -> Beat:
    """
    Return a heartbeat of node 0 whose ranks have these steps, the last of which ended at `closed`.
    """
    pulses = [
        Pulse(
            rank=rank, incarnation=0, position=Position(step=step, window=False),
            training=training, moved=closed,
        )
        for rank, step in enumerate(steps)
    ]  # fmt: skip
    return Beat(node=0, pulses=tuple(pulses), at=at)


def line(watch: Watch, columns: int = 0, world: int = 2) -> str:
    """
    Return the line about what is known now.
    """
    parts = Progress(world).parts(watch)
    return fitted(parts, columns) if parts else ""


def training(incident: int = 0) -> Watch:
    """
    Return what is known of a healthy job of two ranks whose steps take 0.05 s.
    """
    watch = Watch()
    says(watch, Lead(epoch=1, heard={}, state="healthy", incident=incident))
    says(watch, beat(100, 100, at=5.01, closed=5.0))
    says(watch, beat(121, 120, at=6.01, closed=6.0))
    return watch


def test_healthy_job_has_step_step_time_and_ranks() -> None:
    """When a job trains, then the line has the step of the slowest rank, the time of a step and the
    ranks that train. Incidents are counted when there are any."""
    assert line(training()) == "tft: step 120, 0.05 s/step, 2 ranks"
    assert line(training(1)) == "tft: step 120, 0.05 s/step, 2 ranks, 1 incident"
    assert line(training(), world=4) == "tft: step 120, 0.05 s/step, 2 of 4 ranks"


def test_job_without_progress_says_so() -> None:
    """When no rank makes progress, then the line says for how long, in place of the step time."""
    watch = training()
    says(watch, beat(121, 120, at=51.0, closed=6.0))
    assert line(watch) == "tft: step 120, no progress for 45 s, 2 ranks"


def test_job_in_an_incident_has_its_state() -> None:
    """When the job is not healthy, then the line begins with its state and what this means."""
    watch = training()
    says(watch, Lead(epoch=1, heard={}, state="rebuilding", incident=1))
    says(watch, beat(121, at=6.2, closed=6.0))
    assert line(watch) == (
        "tft: rebuilding, wrappers are built, step 121, 1 of 2 ranks, 1 incident"
    )


def test_job_that_starts_or_ends_has_no_step() -> None:
    """When no rank trains yet, then the line has the state alone. There is none before anything is
    known, and none when the ranks leave."""
    watch = Watch()
    assert line(watch) == ""
    says(watch, Lead(epoch=1, heard={}, state="awaiting"))
    says(watch, beat(0, 0, at=1.0, closed=0.0, training=False))
    assert line(watch) == "tft: awaiting, processes are starting"
    says(watch, Lead(epoch=1, heard={}, state="exiting"))
    assert line(watch) == ""


@pytest.mark.parametrize("columns", [10, 25, 39, 40, 79])
def test_narrow_terminal_gets_what_matters(columns: int) -> None:
    """When the terminal is narrow, then parts are left out, the step last, and the line fits."""
    watch = training(12)
    told = line(watch, columns)
    assert len(told) <= columns
    assert told.startswith("tft: step ")
    assert ("0.05 s/step" in told) == (columns >= 39)


def test_slow_steps_are_timed_from_line_to_line() -> None:
    """When steps take longer than a look, then their time is that between two lines."""
    progress, watch = Progress(2), Watch()
    says(watch, Lead(epoch=1, heard={}, state="healthy"))
    says(watch, beat(10, 10, at=100.0, closed=99.0))
    assert fitted(progress.parts(watch)) == "tft: step 10, 2 ranks"
    watch = Watch()
    says(watch, Lead(epoch=1, heard={}, state="healthy"))
    says(watch, beat(13, 13, at=220.0, closed=219.0))
    assert fitted(progress.parts(watch)) == "tft: step 13, 40 s/step, 2 ranks"


def test_intervals_grow_so_that_the_log_of_a_month_stays_small() -> None:
    """When no interval is given, then the first lines come soon, and a month has less than 5,000.
    A given interval stays the same."""
    assert list(islice(_intervals(None), 7)) == [30, 60, 120, 240, 480, 600, 600]
    assert list(islice(_intervals(5), 3)) == [5, 5, 5]


def test_newest_loss_is_that_of_the_lowest_rank(tmp_path: Path) -> None:
    """When ranks record losses, then the newest one of the lowest rank is shown. Rows without a loss,
    damaged rows and the row that is being written do not count."""
    losses = Losses(tmp_path)
    assert losses.newest() is None
    rows = [json.dumps({"step": step, "loss": step / 4}) for step in range(1000)]
    other = json.dumps({"step": 999, "lr": 0.1})
    (tmp_path / "records-rank10.jsonl").write_text('{"step": 1, "loss": 7.0}\n')
    (tmp_path / "records-rank2.jsonl").write_text(
        "\n".join([*rows, other, "{", '{"step": 1000, "loss": 1'])
    )
    assert losses.newest() == 999 / 4
    (tmp_path / "records-rank2.jsonl").write_text('{"step": 1, "loss": NaN}\n')
    assert losses.newest() is None
    (tmp_path / "records-rank2.jsonl").unlink()
    assert losses.newest() is None


def test_part_that_matters_least_goes_first() -> None:
    """When parts do not fit, then those with the highest numbers go first."""
    parts = [Part(text="aaaa", rank=0), Part(text="bbbb", rank=2), Part(text="cccc", rank=1)]
    assert fitted(parts) == "tft: aaaa, bbbb, cccc"
    assert fitted(parts, 20) == "tft: aaaa, cccc"
    assert fitted(parts, 10) == "tft: aaaa"
    assert fitted(parts, 7) == "tft: aa"


class Lines:
    """
    A display that is no terminal, and keeps what it is shown.
    """

    live = False

    def __init__(self) -> None:
        self.shown: list[Sequence[Part]] = []

    def show(self, parts: Sequence[Part]) -> None:
        """
        Keep a line.
        """
        self.shown.append(parts)


async def test_no_look_is_taken_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the system has no more threads, then no line is made, because libzmq would abort the
    process, and the job with it."""
    there = JobThere(job="j", broker="127.0.0.1:1", log=Path("controller.log"), curve=None)
    opened: list[JobThere] = []
    monkeypatch.setattr("tft.launcher.progress.watching", opened.append)
    with no_more_threads(), pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await show_progress(there, 1, 2, Lines(), 0)
    assert opened == []


def test_line_is_left_out_without_threads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When the system has no more threads, then a line is left out, and later ones are printed."""
    with PlainConsole(tmp_path) as console:
        with no_more_threads():
            console.show([Part(text="step 1", rank=0)])
        console.show([Part(text="step 2", rank=0)])
    assert capsys.readouterr().err == "tft: step 2\n"
