"""
The lines that the command `tft run` prints at the end of a job. These lines name each incident, the
tracebacks of bugs in user code, the periodic checkpoints that could not be written, and copies that
were different at the start.
"""

from collections.abc import Sequence
from typing import Any


def summary(
    incidents: list[dict[str, Any]],  # Any: parsed JSON, described in `docs/reference/report.md`
    missed: list[dict[str, Any]],
    begins_unlike: Sequence[str] = (),
) -> list[str]:
    """
    Return the lines to print for the lists `incidents`, `missed` and `begins_unlike` of a job's
    report. `missed` are the periodic checkpoints that could not be written. `begins_unlike` says
    which ranks began to train with different copies.
    """
    lines = [line for incident in incidents for line in _lines(incident)]
    unlike = [
        f"{why}; copies were not found equal later. Unless the script makes them equal, the ranks "
        "train different models: seed all ranks alike before the model is built"
        for why in begins_unlike
    ]
    return [*lines, *(_missing(each) for each in missed), *unlike]


def _missing(missed: dict[str, Any]) -> str:  # Any: parsed JSON
    more = missed["times"] - 1
    others = f" and {more} later {'one' if more == 1 else 'ones'}" if more else ""
    where = "" if missed["rank"] is None else f"{_where(missed)}: "
    return f"no checkpoint of step {missed['step']}{others}: {where}{missed['why']}"


def _lines(incident: dict[str, Any]) -> list[str]:  # Any: parsed JSON
    faults = incident["faults"]
    what = "; ".join(f"{f['kind']} at {_where(f)} in step {f['step']}" for f in faults)
    lines = [
        f"incident {incident['id']}: {what or _asked(incident)}: {incident['strategy']}, "
        f"{_cost(incident)}, {incident['seconds']['total']:.2f} s"
    ]
    if incident["strategy"] in ("dump", "exit"):
        lines += [f"  not {tried['strategy']}: {tried['why_not']}" for tried in incident["tried"]]
    lines += [_refused(each) for each in incident.get("refused", ())]
    for fault in faults:
        if fault["kind"] == "software":
            lines.append(f"  {_where(fault)}, step {fault['step']}:")
            lines += [f"    {line}" for line in fault["evidence"].splitlines()]
    return lines


def _refused(refused: dict[str, Any]) -> str:  # Any: parsed JSON
    times = "once" if refused["times"] == 1 else f"{refused['times']} times"
    left_out = f", batches left out: {refused['skipped']}" if refused["skipped"] else ""
    ranks = "".join(f", rank {rank}" for rank in refused["ranks"])
    return (
        f"  the update of step {refused['step']} was refused {times}{left_out}; the cause: "
        f"{refused['cause']}{ranks}"
    )


def _cost(incident: dict[str, Any]) -> str:  # Any: parsed JSON
    if incident["strategy"] == "exit":
        return "nothing was saved"
    lost = incident["steps_lost"]
    return f"{lost} {'step' if lost == 1 else 'steps'} lost"


def _asked(incident: dict[str, Any]) -> str:  # Any: parsed JSON
    return "ranks came back" if incident["strategy"] == "scale_out" else "asked to stop"


def _where(fault: dict[str, Any]) -> str:  # Any: parsed JSON
    return "no one rank" if fault["rank"] is None else f"rank {fault['rank']}"
