"""
The loggers of metrics (TensorBoard, wandb) of a TorchTitan training. They live as long as the
process, and a process that replaces rank 0 continues the same run.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan.components.metrics import LoggerContainer, TensorBoardLogger

from tft import Session
from tft_torchtitan.progress import Progress

_NAMES = ("loss_metrics/global_avg_loss", "loss_metrics/global_max_loss", "grad_norm")
"""The names under which TorchTitan logs the first three numbers of `MetricsProcessor.log`."""


class MetricLoggers:
    """
    Builds TorchTitan's loggers once in a process, and logs the metrics of each step once.
    """

    def __init__(self, session: Session, config: Any) -> None:  # Any: TorchTitan has no types
        self._session = session
        self._config = config
        self._logger: Any = None
        self._noted = session.run_dir / f"torchtitan-logged-rank{session.rank}"
        """The file in which the number `_logged` is stored for a replacement process."""
        self._logged = int(self._noted.read_text()) if self._noted.exists() else 0
        """The last step whose metrics this rank has logged, in this process or an earlier one."""

    def open(self, trainer: Any) -> Any:  # Any: TorchTitan has no types
        """
        Return the logger of this process. The first call builds it.
        """
        if self._logger is None:
            self._logger = self._build(trainer)
        return self._logger

    def log(self, processor: Any, progress: Progress) -> None:  # Any: TorchTitan has no types
        """
        Log the metrics of the last step with `session.log`, and with TorchTitan's loggers. Do not
        call TorchTitan's loggers if this rank has done so for this step before, in this process or
        an earlier one.
        """
        args, kwargs = progress.row["args"], progress.row["kwargs"]
        numbers = dict(zip(_NAMES, args[1:4], strict=False))
        self._session.log({**numbers, **(kwargs.get("extra_metrics") or {})})
        if progress.step <= self._logged:
            return
        if not processor.data_loading_times:
            # This process replaces one that has computed the step, so it has no data loading times
            # of the step. TorchTitan divides by the number of these times, so there must be one.
            processor.data_loading_times.append(0.0)
        type(processor).log(processor, *args, **kwargs)
        self.flush()
        self._logged = progress.step
        draft = self._noted.with_suffix(".new")
        draft.write_text(str(progress.step))
        draft.replace(self._noted)

    def flush(self) -> None:
        """
        Write the buffered events of TensorBoard to their file, because they would be lost if this
        process was killed.
        """
        for each in getattr(self._logger, "_loggers", ()):
            if isinstance(each, TensorBoardLogger):
                each.writer.flush()

    def close(self) -> None:
        """
        Close the logger of this process.
        """
        if self._logger is not None:
            self._logger.close()

    def _build(self, trainer: Any) -> Any:  # Any: TorchTitan has no types
        metrics, note = self._config.metrics, self._note()
        continues = metrics.enable_tensorboard and note.exists()
        if continues:
            metrics = replace(metrics, enable_tensorboard=False)
        built = trainer.metrics_processor._build_metric_logger(
            config=metrics,
            parallel_dims=trainer.parallel_dims,
            dump_folder=self._config.dump_folder,
            pp_schedule=self._config.parallelism.pipeline_parallel_schedule,
            config_dict=trainer.config.to_dict(),
        )
        if continues:
            if not isinstance(built, LoggerContainer):
                built = LoggerContainer()
            built.add_logger(TensorBoardLogger(note.read_text()))
        for each in getattr(built, "_loggers", ()):
            if isinstance(each, TensorBoardLogger):
                note.write_text(each.writer.log_dir)
        return built

    def _note(self) -> Path:
        """
        Return the path of a file in which the directory of TensorBoard's events is noted.
        TorchTitan names this directory after the time at which a process starts. A replacement
        process reads the file, and continues in the directory of the lost process.
        """
        return self._session.run_dir / f"torchtitan-tensorboard-rank{self._session.rank}"
