"""
Make the report of a job from the incidents of the job. The format of the report has the version 1.
`docs/reference/report.md` describes all fields.
"""

from collections.abc import Callable, Mapping, Sequence

from tft.core.job.commands import JobOver
from tft.core.job.incident import Fault, Incident
from tft.core.job.refusals import RefusedStep

SECONDS = (
    "detect",
    "freeze",
    "clear",
    "compare",
    "await",
    "rebuild",
    "repair",
    "rollback",
    "resume",
)
"""The names of the phases of an incident, in the order in which the phases usually begin. The
report lists the seconds of each of these phases for every incident, even if they are 0."""

Moment = Callable[[Fault], float | None]
"""A function that returns the time at which a fault really happened, or None if only the time of
the first evidence is known."""


def incident_began(incident: Incident, moment: Moment) -> float:
    """
    Return when the first fault of an incident happened or, if that is not known, when it was first
    seen (CLOCK_MONOTONIC, in seconds). Times in the report count from this moment.
    """
    return min(_known(incident, moment), default=_seen(incident))


def incident_report(incident: Incident, moment: Moment) -> dict[str, object]:
    """
    Return the entry of one incident in the field `incidents` of the report. The function `moment`
    returns when a fault really happened. Times in the entry are in seconds since `incident_began`.
    """
    roots, seen = incident.roots(), _seen(incident)
    known = _known(incident, moment)
    began = min(known, default=seen)
    phases = [
        {"name": p.name, "rank": p.rank, "start": p.start - began, "end": p.end - began}
        for p in sorted(incident.phases, key=lambda p: (p.start, p.end))
    ]
    seconds: dict[str, float | None] = {
        name: _span(incident, name) for name in SECONDS if name not in ("detect", "compare")
    }
    seconds["compare"] = _longest(incident, "compare")
    if known:
        phases.insert(0, {"name": "detect", "rank": None, "start": 0.0, "end": seen - began})
    ended = incident.closed if incident.closed is not None else _last(incident)
    return {
        "id": incident.number,
        "faults": [_fault_report(incident, fault, moment, began) for fault in roots],
        "strategy": incident.decision.strategy,
        "tried": [{"strategy": name, "why_not": why} for name, why in incident.decision.tried],
        "repeated": list(dict.fromkeys(incident.decision.repeated)),
        "step": incident.progress.step,
        "steps_lost": incident.progress.steps_lost,
        "inexact": list(incident.exactness.sentences),
        "unprotected": list(dict.fromkeys(incident.turnover.unprotected)),
        "refused": [_refused_report(record) for record in incident.exactness.refused],
        "pids_kept": _pids_kept(incident),
        "processes_started": incident.turnover.started,
        "phases": phases,
        "seconds": {
            "detect": seen - began if known else None,
            **seconds,
            "total": ended - began,
        },
    }


def missed_report(
    missed: Mapping[tuple[int | None, str], Sequence[int]],
) -> list[dict[str, object]]:
    """
    Return the entries of the field `missed` of the report, which is about periodic checkpoints that
    could not be written. `missed` maps a rank and a reason to the steps of these checkpoints. There
    is one entry for each rank and reason.
    """
    return [
        {"rank": rank, "why": why, "step": steps[0], "times": len(steps)}
        for (rank, why), steps in missed.items()
    ]


def job_report(
    outcome: JobOver,
    steps: int,
    incidents: Sequence[dict[str, object]],
    missed: Sequence[dict[str, object]],
    unprotected_steps: int = 0,
    begins_unlike: Sequence[str] = (),
    remarks: Sequence[dict[str, object]] = (),
) -> dict[str, object]:
    """
    Return the whole report of a job. `incidents` and `missed` have the entries of the report fields
    with these names. If the job was resumed, the entries of earlier runs come first.
    `unprotected_steps` is the number of steps in which the loss of a node would have lost
    rank-local state (generators, data position). `begins_unlike` has sentences that say which ranks
    began to train with different copies of a shard. `remarks` has the remarks of plugins.
    """
    return {
        "schema": 1,
        "result": outcome.result,
        "why": outcome.why,
        "steps": steps,
        "exit_code": outcome.code,
        "incidents": list(incidents),
        "missed": list(missed),
        "unprotected_steps": unprotected_steps,
        "begins_unlike": list(begins_unlike),
        "remarks": list(remarks),
    }


def _known(incident: Incident, moment: Moment) -> list[float]:
    return [at for fault in incident.roots() if (at := moment(fault)) is not None]


def _seen(incident: Incident) -> float:
    return min((fault.seen for fault in incident.faults), default=incident.opened)


def _fault_report(
    incident: Incident, fault: Fault, moment: Moment, began: float
) -> dict[str, object]:
    at = moment(fault)
    none = 0, ""
    known = incident.turnover.at_fault
    pid, host = none if fault.rank is None else known.get((fault.rank, fault.seen), none)
    return {
        "kind": fault.kind,
        "rank": fault.rank,
        "step": fault.step,
        "at": (fault.seen if at is None else at) - began,
        "pid": pid or None,
        "host": host,
        "evidence": fault.evidence,
    }


def _refused_report(record: RefusedStep) -> dict[str, object]:
    return {
        "step": record.step,
        "times": record.refused,
        "cause": record.cause,
        "ranks": list(record.ranks),
        "skipped": record.skipped,
        "why": [f"rank {rank}: {why}" for rank, why in sorted(record.reasons.items())],
    }


def _span(incident: Incident, name: str) -> float:
    stretches = [phase for phase in incident.phases if phase.name == name]
    if not stretches:
        return 0.0
    return max(p.end for p in stretches) - min(p.start for p in stretches)


def _longest(incident: Incident, name: str) -> float:
    """
    Return the seconds that the slowest rank has spent in the phase `name` of the incident. A rank
    may go through a phase several times, so the seconds of all these times are added up.
    """
    taken: dict[int | None, float] = {}
    for phase in incident.phases:
        if phase.name == name:
            taken[phase.rank] = taken.get(phase.rank, 0.0) + phase.end - phase.start
    return max(taken.values(), default=0.0)


def _last(incident: Incident) -> float:
    return max((phase.end for phase in incident.phases), default=incident.opened)


def _pids_kept(incident: Incident) -> bool | None:
    if incident.decision.strategy == "exit" or incident.decision.base == "dump":
        return None
    named = set() if incident.decision.base == "retry" else incident.faulty()
    return all(kept for rank, kept in incident.turnover.kept.items() if rank not in named)
