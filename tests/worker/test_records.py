"""
Records of a script: rows that are written exactly once for each step.
"""

import json
import math
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


def test_late_rows_before_early_ones_are_dropped(tmp_path: Path) -> None:
    """When a row of an earlier step stands behind rows of later steps, then these are dropped all
    the same, and the earlier one stays."""
    records = Records(tmp_path, 2)
    for step in (1, 2, 3, 4, 5, 1):
        records.write(step, {"text": "x" * 30})
    records.drop_later(4)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 1]
    records.write(5, {})
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 1, 5]


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


# ---------------------------------------------------------------- values of session.log


def values(directory: Path) -> list[tuple[int, dict[str, float]]]:
    """
    Return the steps and values that rank 2 has logged.
    """
    path = directory / "values-rank2.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["step"], row["values"]) for row in found]


def test_logged_values_follow_the_rows_back(tmp_path: Path) -> None:
    """When training goes back, or the functions after a step are called again, then their values
    are removed as their rows are."""
    records = Records(tmp_path, 2)
    records.log(1, {"loss": 0.5})
    records.log(2, {"loss": 0.25})
    records.drop_later(1)
    records.log(2, {"loss": 0.125})
    records.begin_after(2)
    records.log(3, {"val/loss": 1.5})
    records.drop_after(2)
    assert values(tmp_path) == [(1, {"loss": 0.5}), (2, {"loss": 0.125})]


class Tensor:
    """
    A tensor as frameworks have them, with one element or with two.
    """

    def __init__(self, *elements: float) -> None:
        self._elements = elements

    def __float__(self) -> float:
        (element,) = self._elements
        return element


def test_logged_numbers_keep_all_their_bits(tmp_path: Path) -> None:
    """When a script logs numbers, then the file has them as they are, whatever their type."""
    logged = {"third": 1 / 3, "big": 2**70, "tensor": Tensor(0.1), "flag": True, "inf": math.inf}
    Records(tmp_path, 2).log(1, logged)
    [(_, found)] = values(tmp_path)
    assert found == {**logged, "tensor": 0.1}
    assert isinstance(found["big"], int)


@pytest.mark.parametrize("value", ["0.5", None, Tensor(1.0, 2.0), [1.0], 1j])
def test_value_that_is_no_number_is_refused(tmp_path: Path, value: object) -> None:
    """When a script logs something that is no number, then the error names it, and nothing is
    written."""
    with pytest.raises(UsageError, match=r"session\.log was given .* for 'x'"):
        Records(tmp_path, 2).log(1, {"loss": 0.5, "x": value})
    assert not (tmp_path / "values-rank2.jsonl").exists()
