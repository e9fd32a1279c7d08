"""
The metrics of a step of TorchTitan, which each rank logs once.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torchtitan")


class Processor:
    """
    Stands for TorchTitan's MetricsProcessor.
    """

    def __init__(self) -> None:
        self.data_loading_times: list[float] = []
        self.logged: list[int] = []

    def log(self, step: int, *numbers: float) -> None:
        """
        Note the step.
        """
        self.logged.append(step)


def test_metrics_are_logged_once_by_all_processes_of_a_rank(tmp_path: Path) -> None:
    """When a step is logged again after an incident, or in a job that was resumed, then TorchTitan
    logs it no second time."""
    from tft_torchtitan.loggers import MetricLoggers
    from tft_torchtitan.progress import Progress

    given: list[Any] = []
    session: Any = SimpleNamespace(run_dir=tmp_path, rank=0, log=given.append)
    processor, progress = Processor(), Progress()
    for step in (1, 2, 2, 1, 3):
        progress.step, progress.row = step, {"args": [step, 0.5, 0.6, 0.7], "kwargs": {}}
        MetricLoggers(session, None).log(processor, progress)
    assert processor.logged == [1, 2, 3]
    assert len(given) == 5  # session.log keeps each step once by itself


def test_a_validation_with_an_aborted_collective_is_not_logged() -> None:
    """When a collective of a validation was aborted on a device, then its loss is not logged."""
    from tft_torchtitan.job import TitanJob

    logged: list[float] = []
    aborted = [True, False]

    def synchronize() -> None:
        if aborted.pop(0):
            raise ConnectionError

    job: Any = SimpleNamespace(session=SimpleNamespace(synchronize=synchronize))
    log = TitanJob._checked(job, logged.append)
    with pytest.raises(ConnectionError):
        log(0.0)
    log(1.0)
    assert logged == [1.0]
