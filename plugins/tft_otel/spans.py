"""
Converts incidents and events of the controller to spans and log events. This module reads no clock
and imports nothing of OpenTelemetry. Times are in nanoseconds since 1970.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

MOST = 1000
"""The maximum number of phases of an incident that become spans. If an incident has more phases,
only the longest are exported. A larger number could overflow the queue of the SDK, which holds 2048
spans by default."""
SEVERITIES = {
    "fault": "WARN",
    "update_refused": "WARN",
    "checkpoint_missed": "WARN",
    "checkpoint_failed": "WARN",
    "rank_slow": "WARN",
}
"""The severity of those events that do not have the severity `INFO`. The event `job_ends` is
missing here: it has the severity `ERROR` if the job has failed."""

Attribute = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]
Attributes = Mapping[str, Attribute]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanFacts:
    """
    A span to be exported, with its child spans.
    """

    name: str
    start: int
    end: int
    attributes: Attributes
    failed: str = ""
    """Why the span is exported with the status `error`. Empty if it has no error."""
    children: Sequence["SpanFacts"] = field(default=())


def trace_ids(run: str, incident: int) -> tuple[int, int]:
    """
    Return the trace id of an incident and the span id of its root span. The ids depend only on the
    run and the incident's number. So a controller that continues the run of an earlier controller
    uses the same ids, and what both export belongs together.
    """
    digest = sha256(f"tft incident {run} {incident}".encode()).digest()
    # use 1 instead of 0, because OpenTelemetry does not allow the id 0
    return int.from_bytes(digest[:16], "big") or 1, int.from_bytes(digest[16:24], "big") or 1


def incident_span(incident: Mapping[str, object], began: float) -> SpanFacts:
    """
    Return the span of an incident. `incident` is the entry of the incident in the report. The times
    in the entry count from the time `began`, which is in seconds since 1970.
    """
    faults = _listed(incident.get("faults"))
    phases = _listed(incident.get("phases"))
    kept = sorted(phases, key=lambda phase: (phase.get("rank") is not None, -_length(phase)))
    strategy = str(incident.get("strategy", ""))
    attributes: dict[str, object] = {
        "tft.incident.id": incident.get("id"),
        "tft.incident.strategy": strategy,
        "tft.incident.step": incident.get("step"),
        "tft.incident.steps_lost": incident.get("steps_lost"),
        "tft.incident.processes_started": incident.get("processes_started"),
        "tft.incident.inexact": incident.get("inexact"),
        "tft.fault.kinds": [str(fault["kind"]) for fault in faults],
        "tft.fault.ranks": [fault["rank"] for fault in faults if fault["rank"] is not None],
    }
    if len(phases) > MOST:
        attributes["tft.incident.phases_left_out"] = len(phases) - MOST
    seconds = incident.get("seconds")
    total = seconds.get("total") if isinstance(seconds, Mapping) else 0.0
    lost = "the job ended without a last checkpoint" if strategy == "exit" else ""
    return SpanFacts(
        name="incident",
        start=_nanoseconds(began),
        end=_nanoseconds(began + _seconds(total)),
        attributes=attributes_of(attributes),
        failed=lost,
        children=[_phase_span(phase, began) for phase in kept[:MOST]],
    )


def severity(event: str, facts: Mapping[str, object]) -> str:
    """
    Return the severity of an event: `INFO`, `WARN` or `ERROR`.
    """
    if event == "job_ends":
        return "ERROR" if facts.get("result") == "failed" else "INFO"
    return SEVERITIES.get(event, "INFO")


def attributes_of(facts: Mapping[str, object], prefix: str = "") -> Attributes:
    """
    Return `facts` as attributes of OpenTelemetry, with `prefix` before each name. Texts, numbers,
    and lists of values of one type stay as they are. Other values are converted to JSON. Facts with
    the value None are left out.
    """
    return {prefix + name: _attribute(value) for name, value in facts.items() if value is not None}


def _attribute(value: object) -> Attribute:
    if isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple):
        for kind in (str, int, float):
            if all(type(each) is kind for each in value):
                return [*value]
    return json.dumps(value, default=str)


def _phase_span(phase: Mapping[str, object], began: float) -> SpanFacts:
    return SpanFacts(
        name=str(phase["name"]),
        start=_nanoseconds(began + _seconds(phase["start"])),
        end=_nanoseconds(began + _seconds(phase["end"])),
        attributes=attributes_of({"tft.rank": phase.get("rank")}),
    )


def _length(phase: Mapping[str, object]) -> float:
    return _seconds(phase["end"]) - _seconds(phase["start"])


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _listed(value: object) -> list[Mapping[str, object]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []
