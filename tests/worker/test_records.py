"""
Records of a script: rows that are written exactly once for each step.
"""

import json
import resource
from pathlib import Path

import pytest

from tft.errors import UsageError
from tft.worker.records import Records


def rows(directory: Path) -> list[dict[str, object]]:
    """
    Return the rows that rank 2 has written.
    """
    path = directory / "records-rank2.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_steps_that_are_trained_again_replace_their_rows(tmp_path: Path) -> None:
    """When training goes back to a step, then the rows of later steps are removed, and the rows of
    this step and earlier steps stay. A new process continues the same file."""
    records = Records(tmp_path, 2)
    for step in (1, 2, 3):
        records.write(step, {"loss": step / 4})
    records.drop_later(2)
    records.write(3, {"loss": 9.0})
    Records(tmp_path, 2).write(4, {"loss": 1.0})
    assert rows(tmp_path) == [
        {"step": 1, "loss": 0.25}, {"step": 2, "loss": 0.5}, {"step": 3, "loss": 9.0}, {"step": 4, "loss": 1.0},
    ]  # fmt: skip


def test_repeated_call_after_a_step_replaces_only_its_own_rows(tmp_path: Path) -> None:
    """When the functions after a step are called again, then only the rows of these functions are
    removed. The rows of the step itself stay."""
    records = Records(tmp_path, 2)
    records.write(3, {"loss": 0.5})
    records.begin_after(3)
    records.write(4, {"accuracy": 0.1})
    records.end_after()
    records.drop_later(3)
    assert rows(tmp_path)[-1] == {"step": 3, "after": True, "accuracy": 0.1}
    records.drop_after(3)
    assert rows(tmp_path) == [{"step": 3, "loss": 0.5}]


def test_incomplete_row_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    """When a process was killed while it wrote a row, then the next process removes the incomplete
    row."""
    (tmp_path / "records-rank2.jsonl").write_bytes(b'{"step": 1}\n{"st')
    records = Records(tmp_path, 2)
    records.drop_later(1)
    records.write(2, {})
    assert rows(tmp_path) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("row", [{"step": 1}, {"after": 1}, {"loss": object()}])
def test_invalid_rows_are_refused(tmp_path: Path, row: dict[str, object]) -> None:
    """When a row has a field name that tft reserves, or a value that JSON does not support, then
    the row is refused and no file is written."""
    with pytest.raises(UsageError):
        Records(tmp_path, 2).write(1, row)
    assert not (tmp_path / "records-rank2.jsonl").exists()


def test_full_disk_leaves_only_complete_rows(tmp_path: Path) -> None:
    """When there is no disk space for a row, then an error is raised and no part of the row
    remains. The next row can be written and read."""
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


@pytest.mark.parametrize("last", [1, 10, 700, 5000])
@pytest.mark.parametrize("width", [1, 300])
def test_late_rows_are_dropped_from_a_long_file(tmp_path: Path, last: int, width: int) -> None:
    """When training goes back in a long run, then exactly the rows of later steps are removed,
    however many they are, and the open file goes on after them."""
    records = Records(tmp_path, 2)
    for step in range(1, 5001):
        records.write(step, {"text": "x" * width})
    records.drop_later(last)
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, last + 1))
    records.write(last + 1, {})
    assert rows(tmp_path)[-1] == {"step": last + 1}
    assert len(rows(tmp_path)) == last + 1


def test_rows_between_dropped_ones_stay(tmp_path: Path) -> None:
    """When rows of the functions after a step are removed, then a row of the next step that stands
    after them stays."""
    records = Records(tmp_path, 2)
    records.write(1, {})
    records.begin_after(1)
    records.write(1, {"accuracy": 0.1})
    records.end_after()
    records.write(2, {})
    records.drop_after(1)
    assert rows(tmp_path) == [{"step": 1}, {"step": 2}]


def test_all_rows_of_a_run_that_begins_again_are_dropped(tmp_path: Path) -> None:
    """When training goes back to its beginning, then no row stays, not even a damaged one."""
    (tmp_path / "records-rank2.jsonl").write_bytes(b"\0" * 40 + b"\n" + b'{"step": 1}\n')
    Records(tmp_path, 2).drop_later(0)
    assert rows(tmp_path) == []
