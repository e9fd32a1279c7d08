"""
The plugin `tft_otel`: which spans and attributes an incident has, and what is refused.
"""

from collections.abc import Mapping
from typing import Any

import pytest
from structlog.testing import capture_logs
from tft_otel import ExportingPlugin, Plugin, exports
from tft_otel.spans import MOST, attributes_of, incident_span, severity, trace_ids

from tft.errors import UsageError


def incident(*phases: Mapping[str, object], **more: object) -> dict[str, object]:
    """
    Return the entry of an incident in the report.
    """
    fault = {"kind": "process", "rank": 3, "step": 7, "at": 0.0, "evidence": "a long text"}
    return {
        "id": 2, "faults": [fault, {**fault, "rank": None}], "strategy": "recover", "step": 8,
        "steps_lost": 0, "processes_started": 1, "inexact": [], "phases": list(phases),
        "seconds": {"total": 1.5}, **more,
    }  # fmt: skip


def phase(name: str, rank: int | None, start: float, end: float) -> dict[str, object]:
    """
    Return a phase of an incident in the report.
    """
    return {"name": name, "rank": rank, "start": start, "end": end}


def test_incident_becomes_a_span_with_its_phases() -> None:
    """When an incident is over, then its span has the total time and the facts of the report, and
    each phase is a child at its own time."""
    span = incident_span(incident(phase("freeze", None, 0.25, 0.5), phase("repair", 3, 0.5, 1)), 10)
    assert (span.name, span.start, span.end) == ("incident", 10 * 10**9, 11_500_000_000)
    assert span.attributes == {
        "tft.incident.id": 2, "tft.incident.strategy": "recover", "tft.incident.step": 8,
        "tft.incident.steps_lost": 0, "tft.incident.processes_started": 1,
        "tft.incident.inexact": [], "tft.fault.kinds": ["process", "process"],
        "tft.fault.ranks": [3],
    }  # fmt: skip
    assert [(child.name, child.start, child.attributes) for child in span.children] == [
        ("repair", 10_500_000_000, {"tft.rank": 3}),
        ("freeze", 10_250_000_000, {}),
    ][::-1]
    assert not span.failed


def test_job_that_ends_without_a_checkpoint_is_an_error() -> None:
    """When an incident ends the job, then its span says so. Other strategies are no errors."""
    assert incident_span(incident(strategy="exit"), 10).failed
    assert not incident_span(incident(strategy="dump"), 10).failed


def test_longest_phases_of_a_large_job_are_kept() -> None:
    """When an incident has more phases than are exported, then those of the whole job and the
    longest ones of ranks are, and the span says how many are missing."""
    ranks = [phase("clear", rank, 0.0, rank / 1000) for rank in range(MOST + 5)]
    span = incident_span(incident(*ranks, phase("freeze", None, 0.0, 0.0)), 10)
    assert span.children[0].name == "freeze"
    found = [child.attributes["tft.rank"] for child in span.children[1:]]
    assert found == [*range(MOST + 4, 5, -1)]
    assert span.attributes["tft.incident.phases_left_out"] == 6


def test_facts_of_any_form_become_attributes() -> None:
    """When facts are texts, numbers or lists of one kind, then they are attributes as they are.
    Others become JSON, and None is left out."""
    facts = {"rank": 3, "why": "x", "ranks": (0, 1), "mixed": [1, "a"], "of": {"a": 1}, "no": None}
    assert attributes_of(facts, "tft.") == {
        "tft.rank": 3, "tft.why": "x", "tft.ranks": [0, 1], "tft.mixed": '[1, "a"]',
        "tft.of": '{"a": 1}',
    }  # fmt: skip


def test_only_what_needs_attention_has_a_severity() -> None:
    """When an event is a fault or the end of a failed job, then its severity is higher."""
    assert severity("fault", {}) == "WARN"
    assert severity("job_ends", {"result": "failed"}) == "ERROR"
    assert severity("job_ends", {"result": "completed"}) == "INFO"
    assert severity("strategy_chosen", {}) == "INFO"


def test_each_incident_of_each_run_has_a_trace_of_its_own() -> None:
    """When run or incident differ, then the ids do. For the same incident they are the same."""
    found = {trace_ids(run, number) for run in ("a", "b") for number in (1, 2)}
    assert len({trace for trace, _ in found}) == len({span for _, span in found}) == 4
    assert trace_ids("a", 1) in found


def options(**given: Any) -> dict[str, Any]:  # Any: values of options
    """
    Return options of `tft run`.
    """
    return {"otlp": "http://c:4318", "led_elsewhere": False, "node_rank": 0, **given}


def test_url_is_passed_on_by_node_0_only() -> None:
    """When the option is given, then the controller's node gets the URL, and others do not."""
    asked = Plugin().tft_environment
    assert asked(options(otlp="http://c:4318/")) == {"TFT_OTLP": "http://c:4318"}
    assert asked(options(node_rank=1)) == {}
    assert asked(options(otlp=None)) == {}


@pytest.mark.parametrize("url", ["localhost:4318", "grpc://c:4317", "http://", "http://c/?a=1"])
def test_what_is_no_url_of_a_receiver_is_refused(url: str) -> None:
    """When the URL cannot be one, then the error has an example."""
    with pytest.raises(UsageError, match="such as http://localhost:4318"):
        Plugin().tft_environment(options(otlp=url))


def test_option_beside_tft_lead_is_refused() -> None:
    """When `tft lead` runs the controller, then the error names the variable to set there."""
    with pytest.raises(UsageError, match=r"set the environment variable TFT_OTLP=http://c:4318"):
        Plugin().tft_environment(options(led_elsewhere=True))


def test_standard_variables_are_enough_and_can_switch_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a standard variable names a receiver, then tft exports, unless the SDK is disabled."""
    assert not exports()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", "http://c:4318/v1/logs")
    assert exports()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not exports()


def test_protocol_that_tft_does_not_speak_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the variables ask for gRPC, then nothing is exported, and the log says why."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    plugin = ExportingPlugin()
    with capture_logs() as logs:
        plugin.tft_on_event("leads", {"run": "r"})
        plugin.tft_on_incident_closed(incident(), 10.0)
    (entry,) = logs
    assert entry["event"] == "telemetry_not_exported"
    assert "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'" in entry["why"]
