"""
What a run tells at its end: a line for each incident, and the traceback of a user's own bug, once.
"""

from typing import Any


def summary(incidents: list[dict[str, Any]]) -> list[str]:  # Any: JSON, as in `docs/contracts.md`
    """
    The lines for the incidents of a report.
    """
    return [line for incident in incidents for line in _lines(incident)]


def _lines(incident: dict[str, Any]) -> list[str]:  # Any: JSON
    faults = incident["faults"]
    what = "; ".join(f"{f['kind']} at {_where(f)} in step {f['step']}" for f in faults)
    lost = incident["steps_lost"]
    lines = [
        f"incident {incident['id']}: {what or _asked(incident)}: {incident['strategy']}, "
        f"{lost} {'step' if lost == 1 else 'steps'} lost, {incident['seconds']['total']:.2f} s"
    ]
    if incident["strategy"] in ("dump", "exit"):
        lines += [f"  not {tried['strategy']}: {tried['why_not']}" for tried in incident["tried"]]
    for fault in faults:
        if fault["kind"] == "software":
            lines.append(f"  {_where(fault)}, step {fault['step']}:")
            lines += [f"    {line}" for line in fault["evidence"].splitlines()]
    return lines


def _asked(incident: dict[str, Any]) -> str:  # Any: JSON
    return "ranks came back" if incident["strategy"] == "scale_out" else "asked to stop"


def _where(fault: dict[str, Any]) -> str:  # Any: JSON
    return "no one rank" if fault["rank"] is None else f"rank {fault['rank']}"
