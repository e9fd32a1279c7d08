"""
The rows of `progress.jsonl`: when one is due, and what follows when the file cannot be written.
"""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tft.controller.progress import EVERY, ProgressFile, ProgressRows, Row
from tft.core.job.policy import Policy
from tft.core.job.transitions import State
from tft.protocol.messages import Beat, Position, Pulse
from tft.replay.recording import Opened

OPENED = Opened(
    job="j", run="r", world=4, policy=Policy(), checkpoints="/c", resume=("/c/7", 7),
    first_incident=2, at=1.0,
)  # fmt: skip


def beat(node: int, *steps: int, training: bool = True) -> Beat:
    """
    Return a heartbeat of a node whose ranks have completed these steps.
    """
    pulses = tuple(
        Pulse(
            rank=10 * node + place, incarnation=0, position=Position(step=step, window=False),
            training=training, moved=0.0,
        )
        for place, step in enumerate(steps)
    )  # fmt: skip
    return Beat(node=node, pulses=pulses, at=0.0)


def healthy() -> ProgressRows:
    """
    Return the judgement of a job that is healthy since the time 10.
    """
    rows = ProgressRows(OPENED)
    rows.state(State.HEALTHY, 0, "", 10.0)
    return rows


def test_row_has_the_lowest_step_of_all_nodes() -> None:
    """When two nodes have sent heartbeats, then the row has the lowest step and all ranks."""
    rows = healthy()
    assert rows.beat(beat(0, 5, 7), 10.1) is None
    assert rows.beat(beat(1, 6, 4), 10.15) is None

    assert rows.beat(beat(0, 5, 7), 10.2) == {"at": 10.2, "step": 4, "ranks": 4}


def test_rows_about_steps_are_a_second_apart() -> None:
    """When the step changes with each heartbeat, then there is one row for each second."""
    rows = healthy()
    found = [rows.beat(beat(0, step), 10 + step / 10) for step in range(1, 52)]
    times = [float(str(row["at"])) for row in found if row is not None]

    assert len(times) == 5
    assert all(later - at >= EVERY for at, later in pairwise(times))


def test_row_has_the_time_at_which_its_step_was_seen() -> None:
    """When the job stops between two rows, then the next row has the time of its last step, and not
    the time at which the row was due."""
    rows = healthy()
    found = [rows.beat(beat(0, min(n, 5)), 10 + n / 10) for n in range(1, 30)]
    assert [row for row in found if row] == [
        {"at": 10.2, "step": 2, "ranks": 1},
        {"at": 10.5, "step": 5, "ranks": 1},
    ]


def test_step_that_has_not_changed_gives_no_row() -> None:
    """When no rank completes a step for minutes, then there is no row until one does."""
    rows = healthy()
    found = [rows.beat(beat(0, 3), 10 + n / 10) for n in range(1, 1000)]
    assert [row["step"] for row in found if row] == [3]
    assert rows.beat(beat(0, 4), 110.2) == {"at": 110.2, "step": 4, "ranks": 1}


def test_last_step_comes_before_an_incident() -> None:
    """When an incident begins, then a row with the last step that was heard comes before it."""
    rows = healthy()
    rows.beat(beat(0, 5), 10.1)
    rows.beat(beat(0, 6), 10.2)
    rows.beat(beat(0, 9), 10.3)

    assert rows.state(State.FREEZING, 2, "", 10.35) == [
        {"at": 10.3, "step": 9, "ranks": 1},
        {"at": 10.35, "state": "freezing", "incident": 2},
    ]


def test_steps_are_only_recorded_while_the_job_trains() -> None:
    """When heartbeats arrive during an incident, then there is no row about them. After the incident,
    a node that is gone does not count."""
    rows = healthy()
    rows.beat(beat(1, 2), 10.1)
    rows.state(State.FREEZING, 2, "", 11.0)
    assert [rows.beat(beat(0, 5), 11 + n / 10) for n in range(1, 30)] == [None] * 29
    rows.state(State.HEALTHY, 0, "", 15.0)

    rows.beat(beat(0, 6), 15.1)
    assert rows.beat(beat(0, 6), 15.2) == {"at": 15.2, "step": 6, "ranks": 1}


def test_ranks_that_do_not_train_do_not_count() -> None:
    """When a node has only ranks outside of training, then it does not hold the step back."""
    rows = healthy()
    for _ in range(2):
        rows.beat(beat(1, 0, training=False), 10.1)
        row = rows.beat(beat(0, 8), 10.1)
    assert row == {"at": 10.1, "step": 8, "ranks": 1}


def test_same_state_is_written_once() -> None:
    """When an event changes neither the state nor the incident, then there is no row. A fault that
    leaves the state as it is gives one, because an incident is open then."""
    rows = ProgressRows(OPENED)
    assert len(rows.state(State.AWAITING, 0, "", 1.0)) == 1
    assert rows.state(State.AWAITING, 0, "", 2.0) == []
    assert rows.state(State.AWAITING, 1, "", 3.0) == [
        {"at": 3.0, "state": "awaiting", "incident": 1}
    ]
    ended = rows.state(State.ENDED, 0, "completed", 4.0)
    assert ended == [{"at": 4.0, "state": "ended", "incident": 0, "result": "completed"}]


def written(path: Path) -> list[Row]:
    """
    Return the rows of a file that can be read.
    """
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def test_every_row_has_the_time_of_day(tmp_path: Path) -> None:
    """When rows are written, then each has both times, and the first one says which run it is."""
    path = tmp_path / "progress.jsonl"
    file = ProgressFile(path, OPENED)
    file.leads(1, 1.5)
    file.state(State.AWAITING, 0, "", 1.6)

    first, second = written(path)
    assert first["run"] == "r"
    assert first["from_step"] == 7
    assert first["opened"] == 1.0
    assert float(str(second["unix"])) - float(str(first["unix"])) == pytest.approx(0.1, abs=0.02)


def test_row_after_an_unfinished_one_is_whole(tmp_path: Path) -> None:
    """When an earlier controller died while it wrote a row, then the next row has a line of its own."""
    path = tmp_path / "progress.jsonl"
    path.write_text('{"at":1,"step":')
    ProgressFile(path, OPENED).leads(2, 3.0)

    assert path.read_text().startswith('{"at":1,"step":\n{"at":3.0,')


@pytest.mark.parametrize("kind", ["directory", "full disk"])
def test_file_that_cannot_be_written_is_said_once(tmp_path: Path, kind: str) -> None:
    """When no row can be written, then nothing is raised, and the log says so once."""
    path = tmp_path / "progress.jsonl"
    if kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/full")
    file = ProgressFile(path, OPENED)
    with capture_logs() as logs:
        file.leads(1, 1.0)
        file.state(State.AWAITING, 0, "", 1.0)
        file.state(State.HEALTHY, 0, "", 2.0)

    assert [entry["event"] for entry in logs] == ["progress_not_written"]
    assert str(path) == logs[0]["path"]
