"""
The logger `mlflow`. It sends all values of a job to one run of MLflow. Later processes of the
loggers and resumed runs of the job continue that run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tft.spi import LoggerJob, write_whole

STATUS = {"completed": "FINISHED", "dumped": "KILLED", "failed": "FAILED", "cancelled": "KILLED"}
MOST = 1000
"""The maximum number of values that MLflow accepts in one request."""
PART = "part"
"""The name of a file that exists while the values of one step are sent in several requests. The
file contains the number of the step. If it exists later, a request has failed, and MLflow may have
only a part of the values of that step."""


class Mlflow:
    """
    Sends values to the run `run_id` of MLflow. A request always has all values of a step, so the
    last step in MLflow is complete. Only a step with more than `MOST` values needs several
    requests. Meanwhile a file in `directory` contains that step, so that all its values are sent
    again if one of the requests fails.
    """

    # Any: `client` is an object of MLflow, which this module imports only in `open_logger`
    def __init__(self, client: Any, run_id: str, directory: Path) -> None:
        self._client = client
        self._run_id = run_id
        self._part = directory / PART
        self._waiting: list[list[Any]] = []  # Any: a class of MLflow

    def log(self, step: int, values: Mapping[str, float], at: float, *, again: bool) -> None:
        from mlflow.entities import Metric

        self._waiting.append(
            [Metric(name, float(value), round(1000 * at), step) for name, value in values.items()]
        )

    def last_step(self) -> int | None:
        names = self._client.get_run(self._run_id).data.metrics
        last: int | None = max(
            (
                metric.step
                for name in names
                for metric in self._client.get_metric_history(self._run_id, name)
            ),
            default=None,
        )
        if last is not None and self._part.exists() and self._part.read_text() == str(last):
            return last - 1
        return last

    def flush(self) -> bool:
        while self._waiting:
            rows = metrics = 0
            for row in self._waiting:
                if rows and metrics + len(row) > MOST:
                    break
                rows, metrics = rows + 1, metrics + len(row)
            self._send([metric for row in self._waiting[:rows] for metric in row])
            del self._waiting[:rows]
        return True

    def _send(self, metrics: list[Any]) -> None:  # Any: a class of MLflow
        """
        Send the values of some steps in one request, or the more than `MOST` values of one step in
        several requests.
        """
        if len(metrics) > MOST:
            write_whole(self._part, str(metrics[0].step))
        for first in range(0, len(metrics), MOST):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + MOST])
        if len(metrics) > MOST:
            self._part.unlink()

    def close(self, result: str) -> None:
        if result:
            self._client.set_terminated(self._run_id, STATUS.get(result, "FAILED"))


def open_logger(job: LoggerJob) -> Mlflow:
    """
    Return the logger of a job. The address of the server and the name of the experiment come from
    MLflow's own environment variables.
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
    return Mlflow(mlflow.MlflowClient(), run_id, job.directory)
