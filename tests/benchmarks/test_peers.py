"""
Tests of what the comparison with other systems reads from the records of a job.
"""

from pathlib import Path

import pytest

from tests.benchmarks.peers import page
from tests.benchmarks.peers.measures import measured
from tests.benchmarks.peers.page import row
from tests.benchmarks.peers.workload import KILLED, RANKS, STEPS, VICTIM

STEP = 0.02


def write(directory: Path, rank: int, steps: list[tuple[float, int]]) -> None:
    """
    Write the record of a rank: the moments at which it has completed its steps.
    """
    (directory / f"steps-{rank}").write_text("".join(f"{at} {number}\n" for at, number in steps))


def before(last: int) -> list[tuple[float, int]]:
    """
    Return the steps of a rank up to and including `last`.
    """
    return [(STEP * number, number) for number in range(1, last + 1)]


def job(directory: Path, *, pause: float, first: int, victim: bool) -> dict[str, object]:
    """
    Return what is measured in a job that goes on with step `first` after `pause` seconds. With
    `victim`, the lost rank comes back at once. Rank 0 completes the step before the kill late.
    """
    killed = STEP * KILLED
    (directory / "killed").write_text(str(killed))
    later = [(killed + pause + STEP * (n - first), n) for n in range(first, STEPS + 1)]
    for rank in range(RANKS):
        ran = before(KILLED - 1 if rank else KILLED - 2)
        ran += [] if rank else [(killed + 0.001, KILLED - 1)]
        write(directory, rank, ran + (later if victim or rank != VICTIM else []))
    return measured(directory)


def test_pause_of_a_system_that_goes_on_with_the_interrupted_step(tmp_path: Path) -> None:
    """When all ranks complete the interrupted step after the kill, then the pause is the time
    until then, without one step. A step that a slow rank completes meanwhile does not count."""
    found = job(tmp_path, pause=0.3, first=KILLED, victim=True)
    assert found["pause"] == found["caught_up"] == found["whole"] == pytest.approx(0.28)
    assert (found["finished"], found["repeated"]) == (True, 0)


def test_pause_of_a_system_that_goes_back_to_a_checkpoint(tmp_path: Path) -> None:
    """When the ranks go back four steps, then they have caught up four steps later than the first
    step after the pause. A lost rank that never comes back has no time."""
    found = job(tmp_path, pause=1.0, first=KILLED - 4, victim=False)
    assert found["pause"] == pytest.approx(0.98)
    assert found["caught_up"] == pytest.approx(0.98 + 4 * STEP)
    assert (found["whole"], found["repeated"]) == (None, 4)


def test_job_that_does_not_end_has_no_pause(tmp_path: Path) -> None:
    """When a survivor does not reach the last step, then the job has not finished. Its row says how
    many jobs have."""
    (tmp_path / "killed").write_text(str(STEP * KILLED))
    for rank in range(RANKS):
        write(tmp_path, rank, before(KILLED - 1))
    found = measured(tmp_path)
    assert found == {"finished": False}
    assert row("other", [{**found, "identical": False}]).startswith(
        "| other (0 of 1 jobs ended) | none"
    )


def test_picture_and_table_show_the_results_that_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the picture and the table of the comparison are made again from the stored results, then
    they are the same."""
    picture, text = tmp_path / "peers.svg", tmp_path / "peers.md"
    text.write_text(page.PAGE.read_text())
    stored = page.PICTURE.read_text(), page.PAGE.read_text()
    monkeypatch.setattr(page, "PICTURE", picture)
    monkeypatch.setattr(page, "PAGE", text)
    page.main()

    assert (picture.read_text(), text.read_text()) == stored
