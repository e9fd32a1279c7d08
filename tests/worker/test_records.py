"""
Rows that are written once for each step.
"""

import json
import resource
from pathlib import Path

import pytest

from tft.errors import UsageError
from tft.worker.records import Records


def rows(directory: Path) -> list[dict[str, object]]:
    """
    What rank 2 has written.
    """
    path = directory / "records-rank2.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_steps_that_are_computed_again_replace_their_rows(tmp_path: Path) -> None:
    """
    When training goes back, then rows of later steps go, and those of the step itself and earlier ones stay; another
    process goes on in the same file.
    """
    records = Records(tmp_path, 2)
    for step in (1, 2, 3):
        records.write(step, {"loss": step / 4})
    records.drop_later(2)
    records.write(3, {"loss": 9.0})
    Records(tmp_path, 2).write(4, {"loss": 1.0})
    assert rows(tmp_path) == [
        {"step": 1, "loss": 0.25}, {"step": 2, "loss": 0.5}, {"step": 3, "loss": 9.0}, {"step": 4, "loss": 1.0},
    ]  # fmt: skip


def test_what_is_called_again_after_a_step_replaces_its_rows_alone(tmp_path: Path) -> None:
    """
    When what is called after a step is called again, then its rows go, and those of the step itself stay.
    """
    records = Records(tmp_path, 2)
    records.write(3, {"loss": 0.5})
    records.begin_after(3)
    records.write(4, {"accuracy": 0.1})
    records.end_after()
    records.drop_later(3)
    assert rows(tmp_path)[-1] == {"step": 3, "after": True, "accuracy": 0.1}
    records.drop_after(3)
    assert rows(tmp_path) == [{"step": 3, "loss": 0.5}]


def test_half_a_row_of_a_killed_process_is_dropped(tmp_path: Path) -> None:
    """
    When a process was killed while it wrote a row, then the next one drops that.
    """
    (tmp_path / "records-rank2.jsonl").write_bytes(b'{"step": 1}\n{"st')
    records = Records(tmp_path, 2)
    records.drop_later(1)
    records.write(2, {})
    assert rows(tmp_path) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("row", [{"step": 1}, {"after": 1}, {"loss": object()}])
def test_rows_that_cannot_be_kept_are_refused(tmp_path: Path, row: dict[str, object]) -> None:
    """
    When a row names what tft adds, or holds what JSON does not have, then it is refused, and nothing is written.
    """
    with pytest.raises(UsageError):
        Records(tmp_path, 2).write(1, row)
    assert not (tmp_path / "records-rank2.jsonl").exists()


def test_a_full_disk_leaves_whole_rows(tmp_path: Path) -> None:
    """
    When there is no room for a row, then that is raised, and no half of it is left: the next row can be read.
    """
    records = Records(tmp_path, 2)
    records.write(1, {"loss": 0.5})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, hard))
    try:
        with pytest.raises(OSError, match="No space left"):
            records.write(2, {"loss": 0.25})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    records.write(2, {"loss": 0.25})
    assert rows(tmp_path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]
