"""
Sentences of a report: what happened in an incident, how the job ended, and what to do next.
"""

import re
import signal
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from tft.replay.sentences import ranks_of
from tft.report.facts import RUNNING, UNFINISHED, Facts
from tft.report.goodput import AGAIN, END, INCIDENT, PAUSE, STANDING, START, TRAINING, Part

Entry = dict[str, Any]  # Any: parsed JSON, described in `docs/reference/report.md`

_FAULTS = {
    "process": "lost {its} process",
    "node": "{was} lost with {its} node",
    "memory": "ran out of memory",
    "network": "lost a connection",
    "numeric": "computed bad numbers",
    "hang": "stood still",
    "straggler": "{was} too slow",
    "corruption": "held a wrong copy of the state",
    "software": "met an error of the script",
}
"""What happened to the ranks of a fault, by its kind."""
_NO_RANK = {
    "network": "connections were lost",
    "hang": "the job stood still",
    "corruption": "copies of the state differed",
    "numeric": "bad numbers were computed",
}
"""The same for faults of which no rank is known."""
_ENDED_BY = re.compile(r"^was ended by signal (\d+)")
_LEFT_WITH = re.compile(r"^left with code (\d+)")

_THEN = {
    "retry": "all processes were kept",
    "recover": "replaced",
    "scale_in": "the others went on without the lost ranks",
    "scale_out": "ranks came back",
    "migrate": "moved to other processes",
}
"""What was done, by strategy."""

KINDS = {
    TRAINING: "training that was kept",
    AGAIN: "steps that were computed again",
    INCIDENT: "incidents",
    START: "start, until the first step",
    PAUSE: "paused",
    STANDING: "no step completed, without an incident",
    END: "last checkpoint and end",
}
"""How the parts of the time are called."""


def seconds(value: float | None) -> str:
    """
    Return a duration as people write it, such as `25 ms`, `0.34 s`, `45 s`, `3 min 20 s` or `2 h 5 min`.
    """
    if value is None:
        return "not known"
    if value < 0.0995:
        return f"{1000 * value:.0f} ms" if value >= 0.0005 or not value else "less than 1 ms"
    if value < 0.995:
        return f"{value:.2g} s"
    if value < 9.95:
        return f"{value:.2f} s"
    if value < 119.5:
        return f"{value:.0f} s"
    minutes, left = divmod(round(value), 60)
    if minutes < 120:
        return f"{minutes} min {left} s"
    return f"{minutes // 60} h {minutes % 60} min"


def moment(unix: float | None) -> str:
    """
    Return a time of day, given in seconds since 1970; empty if it is not known.
    """
    return "" if unix is None else f"{datetime.fromtimestamp(unix, UTC):%Y-%m-%d %H:%M:%S} UTC"


def incident_sentence(incident: Entry) -> str:
    """
    Return one sentence about an incident: what happened, what was done, and what it cost.
    """
    what = "; ".join(_faults(incident["faults"])) or _asked(incident)
    parts = [what, _then(incident), _cost(incident)]
    sentence = "; ".join(part for part in parts if part)
    return f"{sentence[0].upper()}{sentence[1:]}."


def _faults(faults: Sequence[Entry]) -> list[str]:
    """
    Return what happened to the ranks. Ranks with the same fault in the same step are named together.
    """
    alike: dict[tuple[str, int], list[int | None]] = {}
    for fault in faults:
        alike.setdefault((_verb(fault), int(fault["step"])), []).append(fault["rank"])
    told = []
    for (verb, step), found in alike.items():
        ranks = [rank for rank in found if rank is not None]
        was, its = ("was", "its") if len(ranks) == 1 else ("were", "their")
        text = verb.format(was=was, its=its) if ranks else verb
        who = f"{ranks_of(ranks)} " if ranks else ""
        told.append(f"{who}{text}" + (f" in step {step}" if step else ""))
    return told


def _verb(fault: Entry) -> str:
    kind, evidence = str(fault["kind"]), str(fault.get("evidence", ""))
    if fault["rank"] is None:
        return _NO_RANK.get(kind, f"a fault of the kind {kind}, without a known rank,")
    if kind == "process" and (ended := _ENDED_BY.match(evidence)):
        name = _signal(int(ended[1]))
        return f"{{was}} killed by {name}" if name == "SIGKILL" else f"{{was}} ended by {name}"
    if kind == "process" and (left := _LEFT_WITH.match(evidence)):
        return f"left with exit code {left[1]}"
    return _FAULTS.get(kind, f"had a fault of the kind {kind}".replace("{", "").replace("}", ""))


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _asked(incident: Entry) -> str:
    if incident.get("open"):
        return "no fault is known yet"
    if incident["strategy"] == "scale_out":
        return "ranks that had left could come back"
    return "the job was asked to end" if incident["strategy"] in ("dump", "exit") else "no fault"


def _then(incident: Entry) -> str:
    strategy, took = incident["strategy"], seconds(incident["seconds"]["total"])
    if incident.get("open"):
        return f"not over when this was written ({strategy or 'no strategy was chosen yet'})"
    if strategy == "dump":
        return "the job ended with a last checkpoint"
    if strategy == "exit":
        return "the job ended without a last checkpoint"
    if strategy == "recover" and not incident["processes_started"]:
        return f"repaired in the same processes in {took}"
    return f"{_THEN.get(strategy, f'strategy {strategy}')} in {took}"


def _cost(incident: Entry) -> str:
    lost = incident["steps_lost"]
    if incident.get("open") or incident["strategy"] == "exit":
        return ""
    if not lost:
        return "no step lost"
    return f"{lost} {'step' if lost == 1 else 'steps'} computed again"


# ---------------------------------------------------------------- the job


def ending(facts: Facts) -> str:
    """
    Return one sentence that says how the job ended.
    """
    steps = f"{facts.steps} {'step' if facts.steps == 1 else 'steps'}"
    return {
        "completed": f"The job has completed, with {steps}.",
        "dumped": f"The job has ended with a last checkpoint, after {steps}.",
        "cancelled": f"The job was cancelled by a signal, after {steps}.",
        "failed": f"The job has failed, after {steps}.",
        RUNNING: f"The job is unfinished: it still runs. The last known step is {facts.steps}.",
        UNFINISHED: (
            f"The job is unfinished: it has written no report. The last known step is {facts.steps}."
        ),
    }.get(facts.result, f"The job has ended with the result {facts.result}, after {steps}.")


def next_steps(facts: Facts) -> list[str]:
    """
    Return sentences that say what an operator should do now.
    """
    if facts.result == RUNNING:
        return ["Nothing: the job runs. Call `tft report` again for a newer page."]
    advice = []
    faults = facts.incidents[-1]["faults"] if facts.incidents else []
    if facts.result == "completed":
        advice.append("Nothing: the job is done.")
    elif any(fault["kind"] == "software" for fault in faults):
        number = facts.incidents[-1]["id"]
        advice.append(f"Mend the error of the script that incident {number} shows.")
    if facts.result == UNFINISHED:
        advice.append(
            "Look at the end of the files in `logs/` of the run directory: the controller was "
            "killed, or its machine was lost."
        )
    if facts.result != "completed":
        advice.append(
            f"Call the same `tft run` again with `--resume`. It continues from {facts.checkpoint}."
            if facts.checkpoint
            else "There is no checkpoint to continue from: begin anew in another run directory, "
            "and write periodic checkpoints with `--checkpoint-every`."
        )
    if any(incident["inexact"] for incident in facts.incidents):
        advice.append("Read in the incidents why training may not be bit for bit the same.")
    if facts.report.get("begins_unlike"):
        advice.append(
            "Seed all ranks alike before the model is built: copies differed at the start."
        )
    if facts.report.get("missed"):
        advice.append("Look at the checkpoints that could not be written.")
    return advice


def part_name(part: Part) -> str:
    """
    Return what a part of the time is called.
    """
    if part.kind == INCIDENT:
        return f"incidents: {part.strategy}"
    return KINDS[part.kind]


def part_times(part: Part) -> str:
    """
    Return how often a part occurs, such as `3 incidents`; empty where that says nothing.
    """
    names = {
        INCIDENT: ("incident", "incidents"),
        AGAIN: ("step", "steps"),
        PAUSE: ("pause", "pauses"),
        STANDING: ("time", "times"),
    }
    if part.kind not in names or not part.times:
        return ""
    one, many = names[part.kind]
    return f"{part.times} {one if part.times == 1 else many}"
