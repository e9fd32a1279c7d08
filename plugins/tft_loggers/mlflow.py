"""
The logger `mlflow`: one run of MLflow, which later processes and runs of the job go on with.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tft.spi import LoggerJob, write_whole

STATUS = {"completed": "FINISHED", "dumped": "KILLED", "failed": "FAILED", "cancelled": "KILLED"}
MOST = 1000
"""So many values MLflow takes in one request."""


class Mlflow:
    """
    Sends values to the run `run_id` of MLflow.
    """

    def __init__(self, client: Any, run_id: str) -> None:  # Any: MLflow is imported late
        self._client = client
        self._run_id = run_id
        self._waiting: list[Any] = []  # Any: a class of MLflow

    def log(self, step: int, values: Mapping[str, float], at: float, *, again: bool) -> None:
        from mlflow.entities import Metric

        self._waiting += [
            Metric(name, float(value), round(1000 * at), step) for name, value in values.items()
        ]

    def last_step(self) -> int | None:
        names = self._client.get_run(self._run_id).data.metrics
        return max(
            (
                metric.step
                for name in names
                for metric in self._client.get_metric_history(self._run_id, name)
            ),
            default=None,
        )

    def flush(self) -> bool:
        while self._waiting:
            self._client.log_batch(self._run_id, metrics=self._waiting[:MOST])
            del self._waiting[:MOST]
        return True

    def close(self, result: str) -> None:
        if result:
            self._client.set_terminated(self._run_id, STATUS.get(result, "FAILED"))


def open_logger(job: LoggerJob) -> Mlflow:
    """
    Return the logger of a job. MLflow's own variables say where the server is and what the
    experiment is called.
    """
    import mlflow

    note: Path = job.directory / "run_id"
    known = note.read_text() if note.exists() else None
    # MLflow reads the variables MLFLOW_EXPERIMENT_NAME and MLFLOW_RUN_ID in this call only
    run = mlflow.start_run(run_id=known, run_name=job.run_dir.name)
    run_id: str = run.info.run_id
    if known is None:
        write_whole(note, run_id)
        mlflow.set_tags({"tft.job": job.job, "tft.run_dir": str(job.run_dir)})
    return Mlflow(mlflow.MlflowClient(), run_id)
