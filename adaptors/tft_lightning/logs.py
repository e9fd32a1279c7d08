"""
The loggers of the trainer. A replacement process continues the logs of the lost process. Rows that
were logged before an incident are not logged again when their step is repeated.
"""

import csv
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

_KEPT = ".kept"


class LogLedger:
    """
    Counts the calls of `log_metrics` of all loggers, and skips calls whose row was written before.

    After an incident the loop continues at the end of a step, so it makes the same calls in the
    same order again. A call is identified by two numbers: the step that is computed at the time of
    the call, and how many calls were made before it in this step.
    """

    def __init__(self, run_dir: Path, rank: int, step: Callable[[], int]) -> None:
        """
        Read which call was the last one that an earlier process of rank 0 has passed on. `step`
        returns the step that is being computed, 0 before training.
        """
        self._path = run_dir / "lightning" / "logged"
        self._step = step
        self._writes = rank == 0
        self._next = (0, 0)
        self._over = False
        self._delivered = (-1, -1)
        if self._writes and self._path.exists():
            last, number = self._path.read_text().split()
            self._delivered = (int(last), int(number))

    def goes_on(self) -> None:
        """
        Set the counter of calls back to the beginning of the present step, because the loop repeats
        the step and makes the same calls again.
        """
        self._next = (self._step(), 0)

    def ends(self) -> None:
        """
        Pass on all later calls without counting them. The training is complete on all ranks, so no
        step and no call will be repeated.
        """
        self._over = True

    def watch(self, logger: Logger) -> None:
        """
        Count the calls of `logger` from now on.
        """
        native = logger.log_metrics

        def log_metrics(*args: Any, **kwargs: Any) -> None:
            if self._over:
                native(*args, **kwargs)
                return
            present = self._step()
            step, number = self._next if self._next[0] == present else (present, 0)
            self._next = (step, number + 1)
            if (step, number) > self._delivered:
                native(*args, **kwargs)
                self._note(logger, step, number)

        logger.log_metrics = log_metrics

    def _note(self, logger: Logger, step: int, number: int) -> None:
        if self._writes:
            # make the logger write the row to its file before the call is noted: once the call is
            # noted, no process makes it again
            logger.save()
            self._delivered = (step, number)
            draft = self._path.with_suffix(f".{os.getpid()}")
            draft.write_text(f"{step} {number}")
            draft.replace(self._path)


def continue_log(logger: Logger, agree: Callable[[Any], Any], incarnation: int, run: str) -> None:
    """
    Make `logger` use the same directory, or the same run of wandb, in all processes of the job.
    `agree` takes the value of this rank, and returns the value that rank 0 had when the job was
    started. `incarnation` is the number of this process of the rank. `run` is the identifier for a
    run of wandb, if the script has given it none.

    A CSV file that an earlier process has begun is continued. Lightning alone would remove it.
    """
    if isinstance(logger, WandbLogger):
        logger._wandb_init["id"] = logger._id = logger._wandb_init.get("id") or run
        logger._wandb_init["resume"] = "allow"
    if isinstance(logger, TensorBoardLogger) and incarnation:
        # TensorBoard names files after the second of their creation: without a suffix, the files of
        # two processes could have the same name
        logger._kwargs.setdefault("filename_suffix", f".{incarnation}")
    if hasattr(logger, "_version"):
        logger._version = agree(logger.version if rank_zero_only.rank == 0 else None)
    if isinstance(logger, CSVLogger) and rank_zero_only.rank == 0:
        _continue_csv(logger)


def _continue_csv(logger: Any) -> None:
    file = Path(logger.log_dir) / "metrics.csv"
    kept = file.with_name(file.name + _KEPT)
    if file.exists() and not kept.exists():
        file.rename(kept)
    with warnings.catch_warnings():
        # hide Lightning's warning that it removes the earlier rows, because they are kept here
        warnings.filterwarnings("ignore", message="Experiment logs directory")
        writer = logger.experiment
    if kept.exists():
        with kept.open(newline="") as rows:
            writer.metrics_keys = next(csv.reader(rows), [])
        kept.replace(file)
