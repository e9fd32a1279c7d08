"""
The logger `tensorboard`: writes event files to `RUN_DIR/tensorboard`, with tensorboardX.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tft.spi import LoggerJob


class TensorBoard:
    """
    Writes event files. Each process of the loggers begins a new file, and tells TensorBoard to
    ignore the rows of earlier files from the first step of the new file on. An earlier process may
    have written these rows too, if it was killed before it recorded that it had sent them.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: Any = None  # Any: a class of tensorboardX, which is imported late

    def log(self, step: int, values: Mapping[str, float], at: float, *, again: bool) -> None:
        if self._writer is None:
            from tensorboardX import SummaryWriter

            earlier = any(self._directory.glob("events.*"))
            self._writer = SummaryWriter(
                str(self._directory), purge_step=step if earlier and not again else None
            )
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=at)

    def last_step(self) -> int | None:
        return None

    def flush(self) -> bool:
        if self._writer is not None:
            self._writer.flush()
        return True

    def close(self, result: str) -> None:
        if self._writer is not None:
            self._writer.close()


def open_logger(job: LoggerJob) -> TensorBoard:
    """
    Return the logger of a job.
    """
    return TensorBoard(job.run_dir / "tensorboard")
