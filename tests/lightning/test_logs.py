"""
Each row reaches the loggers of a trainer once.
"""

import csv
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger
from tft_lightning.logs import LogLedger


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
