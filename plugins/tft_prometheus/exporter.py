"""
Passes the events and heartbeats that the controller's hooks receive to the metrics of the job, and
starts the server from which Prometheus reads the metrics.
"""

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import structlog

from tft.spi import RankBeat
from tft_prometheus.address import Address
from tft_prometheus.job import Health, JobMetrics, Reading

SIGN = 1.0
"""Seconds between two calls on the controller's event loop by which this plugin records that the
loop runs. If the calls stop, the loop is blocked, and `/healthz` reports this."""
KEPT = frozenset({"failed", "dumped"})
"""Results of a job after which the file with the address of the metrics is not removed. Prometheus
then still knows the target, which no longer answers. So the alert in the example configuration
tells the operator that the job has ended."""

log = structlog.get_logger()


class Exporter:
    """
    The metrics of one job, in the process of its controller. The hooks are called in the event loop
    of the controller, and the numbers are read on the threads of the server.
    """

    def __init__(self, address: Address, file: Path, run_dir: str) -> None:
        """
        `address` is the address at which to serve the metrics. The address that is really used is
        written to `file`, with the run directory of the job, `run_dir`, as a label for Prometheus.
        """
        self._address = address
        self._file = file
        self._run_dir = run_dir
        self._metrics = JobMetrics(time.monotonic())
        self._lock = threading.Lock()
        self._result = ""
        self._over = False

    def start(self) -> None:
        """
        Start to serve the metrics, on a thread of its own. The thread ends with the process.
        """
        threading.Thread(target=self._serve, name="metrics", daemon=True).start()

    def show_that_the_loop_turns(self) -> None:
        """
        Record that the controller's event loop runs now. Repeat this every `SIGN` seconds. Call
        this method in the event loop.
        """
        with self._lock:
            self._metrics.turned(time.monotonic())
        asyncio.get_running_loop().call_later(SIGN, self.show_that_the_loop_turns)

    def event(self, event: str, facts: Mapping[str, object]) -> None:
        """
        Update the metrics by an event of the controller.
        """
        with self._lock:
            self._metrics.event(event, facts, time.monotonic())
        if event == "job_ends":
            self._result = str(facts.get("result", ""))
        if event == "state" and facts.get("state") == "ended" and self._result not in KEPT:
            self._over = True
            self._remove_file()

    def beat(self, node: int, ranks: Sequence[RankBeat]) -> None:
        """
        Update the metrics by the heartbeat of a node.
        """
        with self._lock:
            self._metrics.beat(node, ranks, time.monotonic())

    def read(self) -> Reading:
        """
        Return all numbers of the job.
        """
        with self._lock:
            return self._metrics.read(time.monotonic())

    def health(self) -> Health:
        """
        Return whether the job is healthy, and why.
        """
        with self._lock:
            return self._metrics.health(time.monotonic())

    def _remove_file(self) -> None:
        with suppress(OSError):
            self._file.unlink()

    def _serve(self) -> None:
        try:
            # imported here, on a separate thread, because the import takes long and must not block
            # the controller's event loop
            from tft_prometheus.server import application, open_server

            app = application(self.read, self.health)
            server = open_server(self._address, self._file, self._run_dir, app)
            if self._over:  # the job has ended before the server was ready
                self._remove_file()
            server.serve_forever()
        # only log an error of any kind, because the job can continue without metrics
        except Exception as error:
            log.exception("metrics_not_served", at=self._address.target, why=str(error))
