"""
Exports spans and log events with the SDK of OpenTelemetry, on the threads of the SDK.

This module imports the SDK, so it is imported only where something is exported. The SDK's packages
for logs have names with an underscore, because their interface may still change.
"""

import os
import threading
import time
from collections.abc import Mapping, Sequence

import structlog
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from tft_otel.spans import attributes_of, incident_span, severity, trace_ids

LIMIT = 5.0
"""Seconds for which the end of the job waits until the SDK has exported the remaining spans and log
events."""
SCOPE = "tft"
"""The name of the instrumentation scope, by which a receiver sees that tft has made a span or a log
event."""

log = structlog.get_logger()


class _Ids(RandomIdGenerator):
    """
    Makes the ids of traces and spans: random ids, unless `fixed` has the ids for the next span.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fixed: tuple[int, int] | None = None
        """The ids that the next trace and its root span get (see `trace_ids`). None if they get
        random ids."""

    def generate_trace_id(self) -> int:
        return super().generate_trace_id() if self.fixed is None else self.fixed[0]

    def generate_span_id(self) -> int:
        return super().generate_span_id() if self.fixed is None else self.fixed[1]


class Exporter:
    """
    Passes the incidents and events of one job to the SDK. Only the method `close` waits for the
    receiver, and only for a limited time.
    """

    def __init__(
        self, url: str | None, signals: Sequence[str], facts: Mapping[str, object]
    ) -> None:
        """
        Export to the receiver with the base URL `url`. If `url` is None, export to the receiver
        that the standard environment variables of OpenTelemetry name.

        `signals` says what to export: `traces`, `logs` or both. `facts` are the facts of the
        controller's event `leads`, which describe the job. Raises whatever the SDK raises, for
        example for a certificate that cannot be read.
        """
        self._run = str(facts["run"])
        self._ids = _Ids()
        resource = _resource(facts)
        self._traces = TracerProvider(
            resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        if "traces" in signals:
            spans = OTLPSpanExporter(endpoint=url and f"{url}/v1/traces")
            self._traces.add_span_processor(BatchSpanProcessor(spans))
        self._logs = LoggerProvider(resource=resource, shutdown_on_exit=False)
        if "logs" in signals:
            logs = OTLPLogExporter(endpoint=url and f"{url}/v1/logs")
            self._logs.add_log_record_processor(BatchLogRecordProcessor(logs))

    def event(self, event: str, facts: Mapping[str, object]) -> None:
        """
        Export an event of the controller as a log event. If the event belongs to an incident, the
        log event belongs to the span of that incident.
        """
        now, number, text = time.time_ns(), facts.get("incident"), severity(event, facts)
        self._logs.get_logger(SCOPE).emit(
            LogRecord(
                timestamp=now,
                observed_timestamp=now,
                context=_context(self._run, number) if isinstance(number, int) and number else None,
                severity_number=SeverityNumber[text],
                severity_text=text,
                event_name=f"tft.{event}",
                attributes=attributes_of(facts, "tft."),
            )
        )

    def incident(self, incident: Mapping[str, object], began: float) -> None:
        """
        Export a closed incident as a span with a child span for each phase. `incident` is the entry
        of the incident in the report. Its times count from the time `began`, which is in seconds
        since 1970.
        """
        number = incident.get("id")
        root = incident_span(incident, began)
        tracer = self._traces.get_tracer(SCOPE)
        self._ids.fixed = trace_ids(self._run, number if isinstance(number, int) else 0)
        span = tracer.start_span(
            root.name, context=Context(), start_time=root.start, attributes=root.attributes
        )
        self._ids.fixed = None
        inside = set_span_in_context(span, Context())
        for child in root.children:
            part = tracer.start_span(
                child.name, context=inside, start_time=child.start, attributes=child.attributes
            )
            part.end(child.end)
        if root.failed:
            span.set_status(Status(StatusCode.ERROR, root.failed))
        span.end(root.end)

    def close(self) -> None:
        """
        Export the remaining spans and log events. Wait at most `LIMIT` seconds for the receiver.
        """
        closing = threading.Thread(target=self._shut_down, name="otel-closing", daemon=True)
        try:
            closing.start()
        except RuntimeError:  # no thread can be started now
            return
        closing.join(LIMIT)
        if closing.is_alive():
            log.warning(
                "telemetry_not_all_exported",
                why=f"the receiver has not taken all within {LIMIT:.0f} s",
            )

    def _shut_down(self) -> None:
        self._traces.shutdown()
        self._logs.shutdown()


def _resource(facts: Mapping[str, object]) -> Resource:
    """
    Return the attributes that describe the job in all exports. Attributes in the environment
    variables `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` take precedence.
    """
    names = {"job": "tft.job", "run": "tft.run", "run_dir": "tft.run_dir", "ranks": "tft.ranks"}
    own = {
        "service.name": "tft",
        "service.instance.id": str(facts["run"]),
        "process.pid": os.getpid(),
        **attributes_of({name: facts.get(key) for key, name in names.items()}),
    }
    return Resource.create({}).merge(Resource(own)).merge(OTELResourceDetector().detect())


def _context(run: str, incident: int) -> Context:
    trace, span = trace_ids(run, incident)
    known = SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return set_span_in_context(NonRecordingSpan(known), Context())
