"""
Each row reaches the loggers of a trainer once.
"""

import csv
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger
from tft_lightning.logs import LogLedger

from tests.e2e.jobs import ROOT, run


def values(logger: CSVLogger) -> list[str]:
    """
    Return the values that the logger has written, in order.
    """
    logger.save()
    with Path(logger.log_dir, "metrics.csv").open() as file:
        return [row["x"] for row in csv.DictReader(file)]


def test_rows_come_once_while_training_and_all_come_after_it(tmp_path: Path) -> None:
    """When the calls of a step come again, then their rows are not written again. When the training
    is complete, then all rows are written, such as those of `trainer.test`."""
    (tmp_path / "lightning").mkdir()
    step = 3
    ledger = LogLedger(tmp_path, 0, lambda: step)
    logger = CSVLogger(tmp_path)
    ledger.watch(logger)
    for _ in range(2):  # the second time after an incident
        ledger.goes_on()
        logger.log_metrics({"x": 1.0}, 3)
    step = 0
    ledger.ends()
    logger.log_metrics({"x": 2.0}, 3)
    logger.log_metrics({"x": 3.0}, 3)
    assert values(logger) == ["1.0", "2.0", "3.0"]


@pytest.mark.soak
def test_a_row_of_an_aborted_collective_is_not_written(tmp_path: Path) -> None:
    """When a rank is killed before it gathers a value, and collectives of the device return before
    they are complete, then the other rank does not log what it has gathered of it: each row has the
    values of both ranks."""
    outcome = run(
        tmp_path / "run", script=ROOT / "tests" / "lightning" / "gathering.py", nproc=2,
        arguments=(str(tmp_path),),
    )  # fmt: skip
    assert outcome.code == 0, outcome.output
    assert [i["strategy"] for i in outcome.incidents] == ["recover"]
    (file,) = tmp_path.rglob("metrics.csv")
    with file.open(newline="") as lines:
        found = [row["mean"] for row in csv.DictReader(lines) if row["mean"]]
    assert found == ["2.0", "2.0"]
