"""
The report of `tft report` as Markdown, for an issue or a chat.
"""

import re
from collections.abc import Iterable

from tft.core.job.incident_report import SECONDS
from tft.report.facts import Entry, Facts
from tft.report.goodput import Goodput
from tft.report.sentences import ending, incident_title, moment, next_steps, part_name, part_times
from tft.sentences import incident_sentence, remark_text, seconds


def markdown(facts: Facts) -> str:
    """
    Return the page about a job, in Markdown.
    """
    lines = [f"# Report of {_text(facts.run_dir.name)}", "", f"**{ending(facts)}**", ""]
    if facts.why:
        lines += [f"Reason: {_text(facts.why)}", ""]
    lines += ["What to do next:", "", *(f"- {_advice(each)}" for each in next_steps(facts)), ""]
    lines += [f"Run directory: {_code(str(facts.run_dir))}", ""]
    if facts.command:
        lines += [f"Script: {_code(' '.join(facts.command))}", ""]
    lines += [*(f"Not complete: {_text(note)}.\n" for note in facts.notes)]
    if facts.goodput is not None:
        lines += _goodput(facts.goodput, len(facts.runs))
    lines += ["## Incidents", ""]
    if not facts.incidents:
        lines += ["None.", ""]
    for incident in facts.incidents:
        lines += _incident(facts, incident)
    lines += _more(facts)
    return "\n".join(lines).rstrip() + "\n"


def _goodput(goodput: Goodput, runs: int) -> list[str]:
    lines = [
        "## Goodput",
        "",
        f"{100 * goodput.share:.1f} % of {seconds(goodput.wall)} went into steps that were kept"
        + (f" ({runs} runs)." if runs > 1 else "."),
        "",
        "| part of the time | time | share | |",
        "|---|---|---|---|",
    ]
    for part in goodput.parts:
        share = 100 * part.seconds / goodput.wall if goodput.wall else 0.0
        if part.seconds:
            name = _text(part_name(part))
            lines.append(
                f"| {name} | {seconds(part.seconds)} | {share:.1f} % | {part_times(part)} |"
            )
    if goodput.step_time is not None:
        lines += ["", f"Median time of a step: {seconds(goodput.step_time)}."]
    return [*lines, ""]


def _incident(facts: Facts, incident: Entry) -> list[str]:
    lines = [f"### {incident_title(facts, incident)}", "", _text(incident_sentence(incident)), ""]
    if when := moment(incident.get("began_unix")):
        lines += [when, ""]
    lines += _listed(
        "Why no other strategy", (f"{t['strategy']}: {t['why_not']}" for t in incident["tried"])
    )
    lines += _listed("What was tried again, and why", incident.get("repeated", ()))
    lines += _listed("Not bit for bit the same", incident["inexact"])
    lines += _listed("Lost with a node", incident.get("unprotected", ()))
    lines += _listed("Refused updates", (w for r in incident.get("refused", ()) for w in r["why"]))
    took = [(n, s) for n in SECONDS if (s := incident["seconds"].get(n))]
    if took:
        lines += ["| phase | time |", "|---|---|"]
        lines += [f"| {name} | {seconds(spent)} |" for name, spent in took] + [""]
    for fault in incident["faults"]:
        if evidence := str(fault.get("evidence", "")).strip():
            who = "no one rank" if fault["rank"] is None else f"rank {fault['rank']}"
            lines += [f"Evidence ({fault['kind']}, {who}):", "", *_block(evidence), ""]
    return lines


def _more(facts: Facts) -> list[str]:
    missed = (
        f"step {m['step']}, {m['times']} times: {m['why']}" for m in facts.report.get("missed", ())
    )
    remarks = (remark_text(r["event"], r["facts"]) for r in facts.report.get("remarks", ()))
    return [
        *_listed("Checkpoints that could not be written", missed),
        *_listed("Different copies at the start", facts.report.get("begins_unlike", ())),
        *_listed("Remarks", remarks),
    ]


def _listed(heading: str, entries: Iterable[str]) -> list[str]:
    listed = [f"- {_text(entry)}" for entry in entries]
    return [f"{heading}:", "", *listed, ""] if listed else []


def _text(text: str) -> str:
    """
    Return a text as one line, with all characters escaped that would be markup in Markdown.
    """
    return _escaped(" ".join(text.split()))


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>#|~&])", r"\\\1", text)


def _advice(text: str) -> str:
    """
    Return a sentence of tft as Markdown. What is between backticks stays code, and the rest is
    escaped.
    """
    parts = text.split("`")
    return "".join(f"`{part}`" if place % 2 else _escaped(part) for place, part in enumerate(parts))


def _code(text: str) -> str:
    """
    Return a span of code that contains `text`.
    """
    text = " ".join(text.split())
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{ticks} {text} {ticks}" if "`" in text else f"`{text}`"


def _block(text: str) -> list[str]:
    """
    Return a fenced block that contains `text`.
    """
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", *text.splitlines(), fence]
