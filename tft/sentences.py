"""
Sentences about a job, for people: what happened in an incident, and what the controller has
remarked about ranks. `tft run`, `tft status`, `tft top` and `tft report` print the same sentences.
"""

import re
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

Entry = dict[str, Any]  # Any: parsed JSON, described in `docs/reference/report.md`

_FAULTS = {
    "process": "lost {its} process",
    "node": "{was} lost with {its} node",
    "memory": "met a memory fault of {its} device",
    "network": "lost a connection",
    "numeric": "computed bad numbers",
    "hang": "stood still",
    "straggler": "{was} too slow",
    "corruption": "held a wrong copy of the state",
    "software": "met an error of the script",
}
"""For each kind of fault: the predicate of a sentence whose subject is the faulty ranks."""
_NO_RANK = {
    "network": "connections were lost",
    "hang": "the job stood still",
    "corruption": "copies of the state differed",
    "numeric": "bad numbers were computed",
}
"""For each kind of fault: the sentence if no faulty rank is known."""
_REFUSED = "tft.errors.UsageError: "
"""The beginning of the line in a traceback that says what tft has refused."""
_LEFT_OUT = "batches left out on all ranks "
"""The beginning of a sentence in the report field `inexact` that says how many batches were left
out."""
_REPLACED = ("no retry: ", "a recovery plugin has advised it")
"""The beginnings of the evidence in the report if tft itself has ended a process to replace it."""
_ENDED_BY = re.compile(r"^was ended by signal (\d+)")
_LEFT_WITH = re.compile(r"^left with code (\d+)")

_THEN = {
    "retry": "all processes were kept",
    "recover": "replaced",
    "scale_in": "the others went on without the lost ranks",
    "scale_out": "ranks came back",
    "migrate": "moved to other processes",
}
"""For each strategy: what the job has done to recover from an incident."""

_PARTS = {"input": "its input", "compute": "its computation", "update": "its update"}
"""What takes longer on a slow rank, by the cause that a remark names."""


# ---------------------------------------------------------------- words


def seconds(value: float | None) -> str:
    """
    Return a duration in seconds as people write it, such as `25 ms`, `0.34 s`, `45 s`, `3 min 20 s`
    or `2 h 5 min`.
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


def ranks_of(ranks: Collection[int]) -> str:
    """
    Return a text that names the ranks, such as `rank 3` or `ranks 0-3, 7`.
    """
    stretches: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if stretches and rank == stretches[-1][-1] + 1:
            stretches[-1].append(rank)
        else:
            stretches.append([rank])
    told = [str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in stretches]
    one = len(stretches) == 1 and len(stretches[0]) == 1
    return f"{'rank' if one else 'ranks'} {', '.join(told) or 'none'}"


def counted(number: int, one: str, many: str = "") -> str:
    """
    Return a number with its noun, such as `1 step` or `2 steps`. `one` is the singular, `many` the
    plural; an empty `many` means `one` with an s.
    """
    return f"{number} {one if number == 1 else many or one + 's'}"


# ---------------------------------------------------------------- incidents


def incident_text(incident: Entry) -> str:
    """
    Return what happened in an incident, what was done, and what it cost. The text is a part of a
    sentence: it begins with a small letter and ends without a full stop.
    """
    parts = [what_happened(incident), _then(incident), _cost(incident), *_doubts(incident)]
    return "; ".join(part for part in parts if part)


def what_happened(incident: Entry) -> str:
    """
    Return what happened to which ranks, as the first part of a sentence.
    """
    return "; ".join(_faults(incident["faults"])) or _asked(incident)


def incident_sentence(incident: Entry) -> str:
    """
    Return one sentence about an incident: what happened, what was done, and what it cost.
    """
    text = incident_text(incident)
    return f"{text[0].upper()}{text[1:]}."


def incident_line(incident: Entry) -> str:
    """
    Return the line about an incident for a console, such as `incident 1: rank 2 (pid 3283 on
    127.0.0.1) was killed by SIGKILL in step 30; replaced in 0.34 s; no step lost`.
    """
    return f"incident {incident['id']}: {incident_text(incident)}"


def open_incident(incident: Entry) -> str:
    """
    Return what has happened in an incident that is not over, and the strategy that is followed.
    """
    strategy = f": {incident['strategy']}" if incident["strategy"] else ""
    return f"{what_happened({**incident, 'open': True})}{strategy}"


def _faults(faults: Sequence[Entry]) -> list[str]:
    """
    Return what happened to the ranks. Ranks with the same fault in the same step are named
    together.
    """
    faults = [fault for fault in faults if not _follows(fault, faults)]
    alike: dict[tuple[str, int], list[int | None]] = {}
    places: dict[tuple[str, int], str] = {}
    for fault in faults:
        key = _verb(fault), int(fault["step"])
        alike.setdefault(key, []).append(fault["rank"])
        places[key] = _process(fault)
    told = []
    for (verb, step), found in alike.items():
        ranks = sorted({rank for rank in found if rank is not None})
        was, its = ("was", "its") if len(ranks) == 1 else ("were", "their")
        text = verb.format(was=was, its=its) if ranks else verb
        # name the process only if there is one rank: with many processes, nobody could read the
        # text
        process = places[verb, step] if len(ranks) == 1 else ""
        who = f"{ranks_of(ranks)}{process} " if ranks else ""
        told.append(f"{who}{text}" + (f" in step {step}" if step else ""))
    return told


def _follows(fault: Entry, faults: Sequence[Entry]) -> bool:
    """
    Return whether a fault is only a consequence of another fault of the same rank: because of the
    other fault, tft has ended the process of the rank to replace it.
    """
    return (
        fault["kind"] == "process"
        and str(fault.get("evidence", "")).startswith(_REPLACED)
        and any(each["rank"] == fault["rank"] for each in faults if each["kind"] != "process")
    )


def _process(fault: Entry) -> str:
    """
    Return a text such as ` (pid 3283 on 10.0.0.7)` about the process of the rank in a fault. It
    comes after the rank in a sentence. Return an empty text if the process is not known.
    """
    if not fault.get("pid"):
        return ""
    host = f" on {fault['host']}" if fault.get("host") else ""
    return f" (pid {fault['pid']}{host})"


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


def _doubts(incident: Entry) -> list[str]:
    """
    Return texts that say how training differs, or may differ, from training without the incident.
    """
    if incident.get("open") or incident["strategy"] == "exit":
        return []
    why = incident.get("inexact") or ()
    left_out = [each for each in why if each.startswith(_LEFT_OUT)]
    doubts = []
    if left_out:
        number = sum(refused["skipped"] for refused in incident.get("refused") or ())
        doubts.append(f"{counted(number, 'batch', 'batches')} left out on each rank")
    if len(why) > len(left_out):
        doubts.append("training may not be bit for bit the same")
    return doubts


def is_long(incident: Entry) -> bool:
    """
    Return whether there is more to say about an incident than its sentence: stacks or a traceback,
    why something was tried again, or why training may not be the same.
    """
    evidence = [str(fault.get("evidence", "")).strip() for fault in incident["faults"]]
    fields = ("inexact", "repeated", "unprotected", "refused")
    return any("\n" in each for each in evidence) or any(incident.get(name) for name in fields)


def incident_file(number: int) -> str:
    """
    Return the name of the file, in the run directory, with the story of a long incident.
    """
    return f"logs/incident-{number}.txt"


def incident_story(incident: Entry) -> str:
    """
    Return everything that a person may want to know of an incident, as plain text.
    """
    lines = [incident_sentence(incident), ""]
    lines += _listed("Why no other strategy", why_not(incident))
    lines += _listed("What was tried again, and why", incident.get("repeated", ()))
    lines += _listed("Not bit for bit the same", incident["inexact"])
    lines += _listed("Lost with a node", incident.get("unprotected", ()))
    lines += _listed("Refused updates", map(refusal_text, incident.get("refused", ())))
    for fault in incident["faults"]:
        if evidence := str(fault.get("evidence", "")).strip():
            who = "no one rank" if fault["rank"] is None else f"rank {fault['rank']}"
            lines += [f"Evidence ({fault['kind']}, {who}{_process(fault)}):", "", evidence, ""]
    return "\n".join(lines)


def why_not(incident: Entry) -> list[str]:
    """
    Return one text for each strategy that comes before the one that tft has followed: why that
    strategy was not possible.
    """
    return [f"not {tried['strategy']}: {tried['why_not']}" for tried in incident["tried"]]


def comes_again(incidents: Sequence[Entry]) -> bool:
    """
    Return whether the last of these incidents ended the job with an error that will happen again
    until the script is changed: tft has refused something that the script does (`UsageError`).
    """
    last = incidents[-1] if incidents else None
    if last is None or last["strategy"] not in ("dump", "exit"):
        return False
    return any(
        line.startswith(_REFUSED)
        for fault in last["faults"]
        if fault["kind"] == "software"
        for line in str(fault["evidence"]).splitlines()
    )


def refusal_text(refused: Entry) -> str:
    """
    Return how often the update of a step was refused because of its numbers, and why.
    """
    times = "once" if refused["times"] == 1 else f"{refused['times']} times"
    left_out = f", batches left out: {refused['skipped']}" if refused["skipped"] else ""
    ranks = "".join(f", rank {rank}" for rank in refused["ranks"])
    return (
        f"the update of step {refused['step']} was refused {times}{left_out}; the cause: "
        f"{refused['cause']}{ranks}"
    )


def _listed(heading: str, entries: Iterable[str]) -> list[str]:
    listed = [f"- {entry}" for entry in entries]
    return [f"{heading}:", "", *listed, ""] if listed else []


# ---------------------------------------------------------------- remarks


def remark_text(event: str, facts: Mapping[str, Any]) -> str:  # Any: JSON
    """
    Return a remark about the job as a text. A remark of tft becomes a sentence. A remark of another
    plugin is shown as its name and its facts.
    """
    try:
        match event:
            case "rank_slow":
                return _slow(facts)
            case "rank_slow_over":
                return f"rank {facts['rank']} is as fast as the others again since step {facts['step']}"
            case "logger_failed":
                return (
                    f"the logger {facts['logger']} does not take values, and is tried again: "
                    f"{facts['why']}"
                )
            case "logger_failed_over":
                return f"the logger {facts['logger']} takes values again"
            case "values_not_sent":
                return f"no values of session.log are sent until they can be: {facts['why']}"
            case "values_not_sent_over":
                return "values of session.log are sent again"
            case "checkpoints_suspended":
                return (
                    f"{ranks_of(facts['ranks'])} left after step {facts['step']}: until they come "
                    "back, no periodic checkpoint is written"
                )
            case "checkpoints_resumed":
                return f"periodic checkpoints are written again since step {facts['step']}"
            case "report_waits":
                return (
                    f"the report cannot be written yet: {facts['why']}; the job ends when there is "
                    "room for it, or with a second signal without it"
                )
            case "job_stands":
                return _stands(facts)
            case "no_node_heard":
                return _deserted(facts)
            case "rank_behind":
                where = f"stands at {facts['line']}" if facts["line"] else "holds up the others"
                return f"rank {facts['rank']} {where}: {facts['why']}"
            case _:
                pass
    except (KeyError, TypeError, ValueError):
        pass  # the remark of another plugin with the same name, which has other facts
    told = ", ".join(f"{name} {value}" for name, value in facts.items())
    return f"remark {event}: {told}" if told else f"remark {event}"


def _deserted(facts: Mapping[str, Any]) -> str:  # Any: JSON
    left = seconds(facts["limit"] - facts["seconds"])
    return (
        f"no node has been connected to the bus for {seconds(facts['seconds'])}: if none comes back, "
        f"all nodes count as lost {left} from now"
    )


def _slow(facts: Mapping[str, Any]) -> str:  # Any: JSON
    part = _PARTS.get(facts["cause"], str(facts["cause"]))
    than, whose = "than in its first steps", "its work then"
    if facts["compared_with"] == "peers":
        than, whose = "than on its peers", "their work"
    return (
        f"rank {facts['rank']} on node {facts['node']} is slow since step {facts['step']}: {part} "
        f"takes {seconds(facts['seconds'])} longer in each step {than} ({facts['percent']:.0f} % of "
        f"{whose})"
    )


def _stands(facts: Mapping[str, Any]) -> str:  # Any: JSON
    text = f"no rank has made progress for {seconds(facts['seconds'])}"
    if facts["ranks"]:
        ranks = ranks_of(facts["ranks"])
        text += f": {ranks} {'holds' if len(facts['ranks']) == 1 else 'hold'} up the others"
    # name only the last parts of the path: the rest is the run directory, which the reader knows
    file = "/".join(PurePath(facts["stacks"]).parts[-2:])
    return f"{text}; the stacks of all ranks are in {file}" if file else text
