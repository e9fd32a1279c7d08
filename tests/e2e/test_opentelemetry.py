"""
Incidents of real jobs arrive at a receiver of OpenTelemetry, with the times of the report.
"""

import gzip
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.e2e.jobs import ROOT, job, logged_events, run, strike, until

FAKE = ROOT / "tests" / "e2e" / "fake_job.py"
EXACT = 2e-6
"""Seconds by which times may differ: a float has no more digits for the seconds since 1970."""


def plain(value: AnyValue) -> Any:  # Any: values of protobuf
    """
    Return a text or number.
    """
    return getattr(value, str(value.WhichOneof("value")))


def attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:  # Any: values of protobuf
    """
    Return attributes as Python values.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        if pair.value.HasField("array_value"):
            found[pair.key] = [plain(each) for each in pair.value.array_value.values]
        else:
            found[pair.key] = plain(pair.value)
    return found


class Receiver:
    """
    What a receiver has got. With `stuck`, it takes requests and answers none before the end.
    """

    def __init__(self, *, stuck: bool = False) -> None:
        self.spans: list[Span] = []
        self.logs: list[LogRecord] = []
        self.resources: list[dict[str, Any]] = []  # Any: as above
        self.asked = threading.Event()
        self.over = threading.Event()
        self.stuck = stuck
        self.url = ""

    def take(self, path: str, body: bytes) -> None:
        """
        Decode the body of a request.
        """
        if path.endswith("/v1/traces"):
            for traces in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resources.append(attributes(traces.resource.attributes))
                self.spans += [span for scope in traces.scope_spans for span in scope.spans]
        elif path.endswith("/v1/logs"):
            for logs in ExportLogsServiceRequest.FromString(body).resource_logs:
                self.resources.append(attributes(logs.resource.attributes))
                self.logs += [one for scope in logs.scope_logs for one in scope.log_records]


@contextmanager
def receiver(*, stuck: bool = False) -> Iterator[Receiver]:
    """
    Run a receiver of OTLP over HTTP at a free port.
    """
    got = Receiver(stuck=stuck)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.asked.set()
            if got.stuck:
                got.over.wait()
                return
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            got.take(self.path, body)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    got.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield got
    finally:
        got.over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def is_healthy(record: LogRecord) -> bool:
    """
    Return whether an event says that the job trains.
    """
    return attributes(record.attributes).get("tft.state") == "healthy"


def seconds(nanoseconds: int) -> float:
    """
    Return a time of OpenTelemetry in seconds.
    """
    return nanoseconds / 1e9


def times(span: Span, began: float) -> tuple[float, float]:
    """
    Return the start and the end of a span, in seconds since `began`.
    """
    return seconds(span.start_time_unix_nano) - began, seconds(span.end_time_unix_nano) - began


def test_spans_of_an_incident_are_the_phases_of_the_report(tmp_path: Path) -> None:
    """When a rank is killed, then the receiver gets a span for the incident with a child span for
    each phase of the report, and the events of the controller as log events in its trace."""
    with receiver() as got:
        outcome = run(
            tmp_path / "run", "--otlp", f"{got.url}/", "--adaptor", "fake",
            "--chaos", "kill:rank=1,step=20,phase=between",
            script=FAKE, arguments=("60",), nproc=2,
            environment={"OTEL_RESOURCE_ATTRIBUTES": "team=speech,service.name=trainer"},
        )  # fmt: skip
    assert outcome.code == 0, outcome.output
    (incident,) = outcome.incidents
    (root,) = (span for span in got.spans if span.name == "incident")
    children = [span for span in got.spans if span.name != "incident"]
    assert all(span.trace_id == root.trace_id for span in children)
    assert all(span.parent_span_id == root.span_id for span in children)

    began = seconds(root.start_time_unix_nano)
    found = sorted(
        (span.name, str(attributes(span.attributes).get("tft.rank")), *times(span, began))
        for span in children
    )
    expected = sorted(
        (phase["name"], str(phase["rank"]), phase["start"], phase["end"])
        for phase in incident["phases"]
    )
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    for (*_, start, end), (*_, first, last) in zip(found, expected, strict=True):
        assert start == pytest.approx(first, abs=EXACT)
        assert end == pytest.approx(last, abs=EXACT)
    assert seconds(root.end_time_unix_nano) - began == pytest.approx(
        incident["seconds"]["total"], abs=EXACT
    )
    facts = attributes(root.attributes)
    assert facts["tft.incident.id"] == 1
    assert facts["tft.incident.strategy"] == incident["strategy"] == "recover"
    assert (facts["tft.fault.kinds"], facts["tft.fault.ranks"]) == (["process"], [1])
    assert root.status.code == Status.STATUS_CODE_UNSET

    names = [record.event_name for record in got.logs]
    assert names == [f"tft.{name}" for name in logged_events(outcome.run_dir)]
    (fault,) = (record for record in got.logs if record.event_name == "tft.fault")
    assert (fault.trace_id, fault.span_id) == (root.trace_id, root.span_id)
    assert fault.severity_text == "WARN"
    assert attributes(fault.attributes)["tft.rank"] == 1
    assert abs(seconds(fault.time_unix_nano) - began) < 5

    (resource, *others) = got.resources
    assert all(each == resource for each in others)
    assert resource["tft.ranks"] == 2
    assert resource["tft.run_dir"] == str(outcome.run_dir)
    assert (resource["service.name"], resource["team"]) == ("trainer", "speech")


@pytest.mark.soak
def test_receiver_that_never_answers_ends_no_job(tmp_path: Path) -> None:
    """When the receiver takes requests and answers none, then the job trains and completes, and
    the controller says at its end that not all was exported. The standard variable is enough."""
    with receiver(stuck=True) as got:
        outcome = run(
            tmp_path / "run", "--adaptor", "fake", script=FAKE, arguments=("20",), nproc=2,
            environment={"OTEL_EXPORTER_OTLP_ENDPOINT": got.url},
        )  # fmt: skip
    assert outcome.code == 0, outcome.output
    assert got.asked.is_set()
    log = (outcome.run_dir / "logs" / "controller.log").read_text()
    assert "event=telemetry_not_all_exported" in log


@pytest.mark.soak
def test_controllers_of_one_run_use_the_same_trace(tmp_path: Path) -> None:
    """When the controller is killed in an incident, then the next one exports the span of this
    incident, in the trace of the events that the first one has exported."""
    with receiver() as got:
        with job(
            tmp_path / "run", "--otlp", got.url, "--adaptor", "fake",
            script=FAKE, arguments=("400", "--seconds", "0.03"), nproc=2,
            environment={"OTEL_BLRP_SCHEDULE_DELAY": "50"},
        ) as running:  # fmt: skip
            until(lambda: any(is_healthy(r) for r in got.logs), "the ranks train")
            strike(running, "rank-1")
            until(lambda: any(r.event_name == "tft.fault" for r in got.logs), "the fault is told")
            strike(running, "controller")
            outcome = running.end()
        assert outcome.code == 0, outcome.output
    (root,) = (span for span in got.spans if span.name == "incident")
    (fault,) = (record for record in got.logs if record.event_name == "tft.fault")
    assert (fault.trace_id, fault.span_id) == (root.trace_id, root.span_id)


@pytest.mark.soak
def test_incident_that_ends_the_job_is_exported_as_an_error(tmp_path: Path) -> None:
    """When a bug of the script ends the job without a checkpoint, then the span of this incident
    has the status `error`, and the end of the job is an error too."""
    with receiver() as got:
        outcome = run(
            tmp_path / "run", "--otlp", got.url, "--adaptor", "fake", "--enable", "retry,recover",
            script=FAKE, arguments=("40", "--bug", "0,20"), nproc=2,
        )  # fmt: skip
    assert outcome.code == 4, outcome.output
    (root,) = (span for span in got.spans if span.name == "incident")
    assert root.status.code == Status.STATUS_CODE_ERROR
    (end,) = (record for record in got.logs if record.event_name == "tft.job_ends")
    assert end.severity_text == "ERROR"
