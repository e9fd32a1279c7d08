"""
The lines that the command `tft run` prints at the end of a job: what a signal leads to, how far the
job came, what incidents have cost, where its records are, and why it ended.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tft.core.job.policy import Policy
from tft.core.job.transitions import State
from tft.sentences import (
    comes_again,
    counted,
    incident_file,
    ranks_of,
    refusal_text,
    seconds,
    why_not,
)

_TRACEBACKS = 3
"""The maximum number of different tracebacks that are printed."""


def asked_to_end(state: str, *, placed: bool) -> str:
    """
    Return what a signal that asks for the end of the job leads to. `state` is the state of the job.
    `placed` is True under another launcher, where a second signal changes nothing.
    """
    if state in (State.EXITING, State.ENDED):
        told = (
            f"the job is over, and scripts that still run after {Policy().wind_up:.0f} s are ended"
        )
    elif placed:
        return "the job is to end after a last checkpoint"
    else:
        told = "the job ends after a last checkpoint"
    return told if placed else f"{told}; a second signal kills it"


def summary(
    steps: int,
    incidents: Sequence[dict[str, Any]],  # Any: parsed JSON, see `docs/reference/report.md`
    took: float,
    run_dir: Path,
) -> list[str]:
    """
    Return the lines about a run of `took` seconds. `incidents` are those of this run, and `steps` is
    the last step of the job.
    """
    told = f"{counted(steps, 'step')} in {seconds(took)}; "
    if incidents:
        lost = sum(incident["steps_lost"] for incident in incidents)
        spent = sum(incident["seconds"]["total"] for incident in incidents)
        steps_lost = counted(lost, "step") if lost else "no step"
        if incidents[-1]["strategy"] == "exit":
            # the report counts only steps that are computed again, so none for such an incident
            steps_lost = "all steps since the newest checkpoint"
        told += f"{counted(len(incidents), 'incident')}: {steps_lost} and {seconds(spent)} lost"
    else:
        told += "no incident"
    return [told, f"`tft report {run_dir}` writes a page about the job from its records"]


def remaining(
    missed: Sequence[dict[str, Any]],  # Any: parsed JSON
    begins_unlike: Sequence[str] = (),
) -> list[str]:
    """
    Return the lines about what went wrong without an incident. `missed` are the periodic checkpoints
    that could not be written. `begins_unlike` says which ranks began to train with different copies.
    """
    unlike = [
        f"{why}; copies were not found equal later. Unless the script makes them equal, the ranks "
        "train different models: seed all ranks alike before the model is built"
        for why in begins_unlike
    ]
    return [*(_missing(each) for each in missed), *unlike]


def reasons(incidents: Sequence[dict[str, Any]]) -> list[str]:  # Any: parsed JSON
    """
    Return the lines that say why the last incident has ended the job: the error of the script, or
    why the job could not go on. There are none if no incident has ended it.
    """
    last = incidents[-1] if incidents else None
    # if an operator has ended the job, the incident has no faults, and the report says why
    if last is None or last["strategy"] not in ("dump", "exit") or not last["faults"]:
        return []
    software = [fault for fault in last["faults"] if fault["kind"] == "software"]
    if software:
        # print only the error. A bug of the script is not retried, so the reasons why each strategy
        # was impossible would only distract from the error
        lines = _errors(software, last["id"])
    else:
        # a job without a last checkpoint has the same reasons in the field `why` of its report,
        # which is printed anyway
        lines = why_not(last) if last["strategy"] == "dump" else []
    return [*lines, *map(refusal_text, last.get("refused", ()))]


def to_go_on(incidents: Sequence[dict[str, Any]], again: str) -> str:  # Any: parsed JSON
    """
    Return the advice `again`, which says how to continue the job. If the same error would end the
    job again, the advice says to change the script first.
    """
    if comes_again(incidents):
        return f"change the script first, or the same error comes again; then {again}"
    return again


def _errors(faults: Sequence[dict[str, Any]], incident: int) -> list[str]:  # Any: parsed JSON
    alike: dict[tuple[str, int], list[int]] = {}
    for fault in faults:
        if "\n" not in fault["evidence"]:
            continue  # the process has exited by itself, and has printed its error
        alike.setdefault((fault["evidence"], fault["step"]), []).append(fault["rank"])
    lines = []
    for (evidence, step), ranks in list(alike.items())[:_TRACEBACKS]:
        lines += [f"the error of {ranks_of(ranks)} in step {step}:"]
        lines += [f"  {line}" for line in evidence.splitlines()]
    if (more := len(alike) - _TRACEBACKS) > 0:
        lines.append(f"{counted(more, 'more error')}: see {incident_file(incident)}")
    return lines


def _missing(missed: dict[str, Any]) -> str:  # Any: parsed JSON
    more = missed["times"] - 1
    others = f" and {more} later {'one' if more == 1 else 'ones'}" if more else ""
    where = "" if missed["rank"] is None else f"rank {missed['rank']}: "
    return f"no checkpoint of step {missed['step']}{others}: {where}{missed['why']}"
