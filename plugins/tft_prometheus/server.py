"""
Serves the metrics of a job over HTTP, on separate threads in the process of the controller.

This module imports `prometheus_client`, so it is imported only where metrics are served.
"""

import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import structlog
from prometheus_client import CollectorRegistry, make_wsgi_app

from tft_prometheus.address import Address
from tft_prometheus.families import JobCollector
from tft_prometheus.job import Health, Reading

AGAIN = 5.0
"""Seconds after which the server tries again to listen at a port that is in use."""
PATIENCE = 10.0
"""Seconds after which a connection that sends nothing is closed."""
AT_ONCE = 8
"""The maximum number of requests that are answered at the same time. Further connections are closed
at once, so that no client can fill the controller with threads."""

log = structlog.get_logger()

# `Any`, because WSGI has values of several types in it
App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class _Quiet(WSGIRequestHandler):
    """
    Handles a request without a line in the log.
    """

    timeout = PATIENCE

    def log_message(self, format: str, *args: object) -> None:
        pass


class MetricsServer(socketserver.ThreadingMixIn, WSGIServer):
    """
    An HTTP server that answers each request on a thread of its own.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: Address, app: App) -> None:
        self.address_family = address.family
        self._free = threading.BoundedSemaphore(AT_ONCE)
        super().__init__((address.host, address.port), _Quiet)
        self.set_app(app)

    def server_bind(self) -> None:
        # do not call the method of the base class: it looks up the name of this host, which may
        # take very long
        socketserver.TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()

    # `Any`: socketserver gives the address of the client as the socket has it
    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any) -> None:  # fmt: skip
        if not self._free.acquire(blocking=False):
            return self.shutdown_request(request)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started now
            self._free.release()
            raise
        return None

    def process_request_thread(self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any) -> None:  # fmt: skip # Any: as above
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        # log only at the level debug: the usual cause is a client that has closed its connection,
        # which is no fault of the job
        log.debug("metrics_request_failed", client=str(client_address))


def application(read: Callable[[], Reading], health: Callable[[], Health]) -> App:
    """
    Return the WSGI application with `/metrics` and `/healthz`.
    """
    registry = CollectorRegistry()
    registry.register(JobCollector(read))
    metrics: App = make_wsgi_app(registry)

    # `Any`, because WSGI has values of several types in it
    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return metrics(environ, start_response)
        if path == "/healthz":
            found = health()
            status, text = "200 OK" if found.ok else "503 Service Unavailable", found.why
        else:
            status, text = "404 Not Found", "there are /metrics and /healthz"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{text}\n".encode()]

    return app


def open_server(address: Address, file: Path, run_dir: str, app: App) -> MetricsServer:
    """
    Return a server that listens at `address`, and whose `serve_forever` answers with `app`. The
    address is written to `file`, with the run directory of the job as a label for Prometheus.

    If the address is in use, log this once, and try again every `AGAIN` seconds without end. If
    `address` leaves the port to the system (port 0), use the port of an earlier controller of this
    job again if that port is free.
    """
    server = _listen(address, file, app)
    # if the server listens at all addresses of this machine, Prometheus must use the machine's name
    host = socket.gethostname() if address.host in ("0.0.0.0", "::") else address.host
    chosen = Address(host=host, port=server.server_port)
    _write(file, chosen, run_dir)
    log.info("metrics_served", url=f"http://{chosen.target}/metrics")
    return server


def _listen(address: Address, file: Path, app: App) -> MetricsServer:
    said, earlier = False, earlier_port(file, address)
    pause = threading.Event()
    while True:
        try:
            if earlier:
                try:
                    return MetricsServer(Address(host=address.host, port=earlier), app)
                except OSError:
                    earlier = 0  # another process has the port now
            return MetricsServer(address, app)
        except OSError as refused:
            if not said:
                log.warning(
                    "metrics_not_served", at=address.target, why=str(refused), again_s=AGAIN
                )
            said = True
            pause.wait(AGAIN)


def earlier_port(file: Path, address: Address) -> int:
    """
    Return the port that the system chose for an earlier controller of this job. It is read from
    `file`, to which that controller wrote its address. Return 0 if there was no such controller, or
    if `address` already names a port.
    """
    if address.port:
        return 0
    try:
        ((target,),) = (entry["targets"] for entry in json.loads(file.read_text()))
        port = int(str(target).rpartition(":")[2])
        return port if 0 < port < 2**16 else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _write(file: Path, address: Address, run_dir: str) -> None:
    entry = {"targets": [address.target], "labels": {"run_dir": run_dir}}
    draft = file.with_name(f".{file.name}.new")
    try:
        draft.write_text(json.dumps([entry]) + "\n")
        draft.replace(file)
    except OSError as error:
        log.warning("metrics_address_not_written", file=str(file), why=str(error))
