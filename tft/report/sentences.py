"""
Sentences of a report: how the job ended, and what to do next. Those about incidents are in
`tft.sentences`, because a running job prints them too.
"""

from datetime import UTC, datetime

from tft.report.facts import RUNNING, UNFINISHED, Entry, Facts
from tft.report.goodput import AGAIN, END, INCIDENT, PAUSE, STANDING, START, TRAINING, Part

KINDS = {
    TRAINING: "training that was kept",
    AGAIN: "steps that were computed again",
    INCIDENT: "incidents",
    START: "start, until the first step",
    PAUSE: "paused",
    STANDING: "no step completed, without an incident",
    END: "last checkpoint and end",
}
"""What each part of the time is called in a report."""


def moment(unix: float | None) -> str:
    """
    Return the date and time `unix`, in seconds since 1970, as text; empty if it is not known.
    """
    return "" if unix is None else f"{datetime.fromtimestamp(unix, UTC):%Y-%m-%d %H:%M:%S} UTC"


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
            f"Call the same `tft run` again with `--run-dir` of this run and `--resume`. It continues from {facts.checkpoint}."
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


def incident_title(facts: Facts, incident: Entry) -> str:
    """
    Return the title of an incident. If the job has several runs, the title names the run of the
    incident.
    """
    of_run = f" of run {incident['run']}" if len(facts.runs) > 1 and "run" in incident else ""
    return f"Incident {incident['id']}{of_run}"


def part_name(part: Part) -> str:
    """
    Return what a part of the time is called.
    """
    if part.kind == INCIDENT:
        return f"incidents: {part.strategy}"
    return KINDS[part.kind]


def part_times(part: Part) -> str:
    """
    Return how often a part occurs, such as `3 incidents`. Return an empty text if parts of this
    kind are not counted, or if the number is 0.
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
