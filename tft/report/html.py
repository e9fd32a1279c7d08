"""
The report of `tft report` as one HTML file. It needs no other file, no network and no script. All
texts are escaped, because the evidence for a fault may contain text from the user's script.
"""

from collections.abc import Iterable, Sequence
from html import escape

from tft.core.job.incident_report import SECONDS
from tft.report import curve, picture
from tft.report.facts import RUNNING, UNFINISHED, Entry, Facts, RunFacts
from tft.report.goodput import (
    AGAIN,
    END,
    INCIDENT,
    LAST,
    PAUSE,
    STANDING,
    START,
    TRAINING,
    Goodput,
    Part,
    step_times,
)
from tft.report.progress import Sample, least_ranks
from tft.report.sentences import ending, incident_title, moment, next_steps, part_name, part_times
from tft.sentences import incident_sentence, remark_text, seconds

PICTURES = 200
"""The maximum number of incidents with a picture, because a picture has about 15 kB. If there are
more incidents, the longest ones get a picture."""
COLORS = {
    TRAINING: "#009e73",
    AGAIN: "#e69f00",
    INCIDENT: "#d55e00",
    START: "#56b4e9",
    PAUSE: "#999999",
    STANDING: "#882255",
    END: "#0072b2",
}
"""The colour of each part of the time. Colour-blind readers can tell the colours apart, and a table
says the same in words."""
SIGNS = {"completed": "✓", RUNNING: "…", UNFINISHED: "?", "dumped": "!", "cancelled": "!"}
"""The sign that is shown beside each result, so that not only a colour tells the result. A result
that is not listed gets ✗."""
STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --soft: #595959; --back: #ffffff; --line: #cccccc;
  --card: #f5f5f5; --link: #005a9c }
@media (prefers-color-scheme: dark) { :root { --text: #e8e8e8; --soft: #b0b0b0; --back: #161616;
  --line: #444444; --card: #222222; --link: #8ec7ff } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; color: var(--text); background: var(--back);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.5rem; line-height: 1.2 } h2 { font-size: 1.25rem; margin-top: 2rem }
h3 { font-size: 1.05rem; margin: 0 0 .5rem }
a { color: var(--link) } a:focus-visible, [tabindex]:focus-visible, summary:focus-visible {
  outline: 3px solid var(--link); outline-offset: 2px }
.skip { position: absolute; left: -99rem } .skip:focus { position: static }
.result { font-size: 1.15rem; font-weight: 600; border-left: .5rem solid var(--soft);
  padding: .5rem .75rem; background: var(--card) }
.completed { border-color: #009e73 } .failed { border-color: #d55e00 }
.dumped, .cancelled, .unfinished { border-color: #e69f00 }
.soft { color: var(--soft) }
.share { font-size: 2.5rem; font-weight: 700; margin: 0 }
table { border-collapse: collapse; width: 100%; font-size: .95rem }
th { overflow-wrap: normal }
th, td { text-align: left; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top }
.wide { overflow-x: auto } .wide svg { min-width: 40rem; width: 100%; height: auto; display: block }
svg text { fill: var(--text) }
.key { display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem }
.incident { border: 1px solid var(--line); border-radius: .4rem; padding: .75rem; margin: 1rem 0 }
pre { background: var(--card); padding: .6rem; overflow-x: auto; font-size: .85rem;
  white-space: pre-wrap }
@media print { body { max-width: none; padding: 0; font-size: 10pt; color: #000; background: #fff }
  .skip { display: none } .wide, tr, li { break-inside: avoid } h2, h3, h4 { break-after: avoid }
  .wide svg { min-width: 0 } .key { print-color-adjust: exact }
  pre { white-space: pre-wrap } }
"""


def html(facts: Facts) -> str:
    """
    Return the page about a job.
    """
    name = escape(facts.run_dir.resolve().name)
    body = [
        '<a class="skip" href="#incidents">To the incidents</a>',
        f"<header><h1>Report of {name}</h1></header>",
        "<main>",
        *_ending(facts),
        *(_goodput(facts.goodput, len(facts.runs)) if facts.goodput is not None else ()),
        *_curves(facts),
        *_incidents(facts),
        *_more(facts),
        "</main>",
    ]
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>tft: report of {name}</title>",
            f"<style>{STYLE}</style>\n</head>\n<body>",
            *body,
            "</body>\n</html>\n",
        ]
    )


# ---------------------------------------------------------------- the end of the job


def _ending(facts: Facts) -> list[str]:
    sign = SIGNS.get(facts.result, "✗")
    kind = "unfinished" if not facts.over else escape(facts.result)
    lines = [
        '<section aria-label="How the job ended">',
        f'<p class="result {kind}"><span aria-hidden="true">{sign}</span> {escape(ending(facts))}</p>',
    ]
    if facts.why:
        lines.append(f"<p>Reason: {escape(facts.why)}</p>")
    lines += [
        "<h2>What to do next</h2>",
        "<ul>",
        *(f"<li>{with_code(each)}</li>" for each in next_steps(facts)),
        "</ul>",
        "<h2>The job</h2>",
        _table((), _job(facts)),
        *(f'<p class="soft">Not complete: {escape(note)}.</p>' for note in facts.notes),
        "</section>",
    ]
    return lines


def _job(facts: Facts) -> list[tuple[str, ...]]:
    rows = [("run directory", str(facts.run_dir))]
    if facts.command:
        rows.append(("script", " ".join(facts.command)))
    if facts.exit_code is not None:
        rows.append(("exit code", str(facts.exit_code)))
    rows.append(("last step", str(facts.steps)))
    if facts.checkpoint:
        rows.append(("newest checkpoint", facts.checkpoint))
    for number, run in enumerate(facts.runs, start=1):
        rows.append((f"run {number}" if len(facts.runs) > 1 else "run", _run(run)))
    return [tuple(map(escape, row)) for row in rows]


def _run(run: RunFacts) -> str:
    ranks, least = run.progress.world, least_ranks(run.progress.samples)
    steps = f"steps {run.progress.from_step + 1} to {run.last_step}"
    parts = [
        f"began {moment(run.progress.unix)}",
        f"took {seconds(run.goodput.wall)}",
        f"{ranks} ranks",
        steps if run.last_step > run.progress.from_step else "no steps",
    ]
    if 0 < least < ranks:
        parts.append(f"at times with {least} ranks")
    if len(run.progress.leads) > 1:
        parts.append(f"{len(run.progress.leads)} controllers, one after another")
    return ", ".join(parts)


# ---------------------------------------------------------------- goodput


def _goodput(goodput: Goodput, runs: int) -> list[str]:
    parts = [part for part in goodput.parts if part.seconds > 0]
    of_runs = f", in {runs} runs" if runs > 1 else ""
    lines = [
        '<section aria-labelledby="goodput">',
        '<h2 id="goodput">Goodput</h2>',
        f'<p class="share">{100 * goodput.share:.1f} %</p>',
        f"<p>of {seconds(goodput.wall)}{of_runs} went into steps that were kept.</p>",
        _bar(parts, goodput.wall),
        _table(
            ("part of the time", "time", "share", "how often"),
            [
                (
                    f'<span class="key" style="background:{COLORS[part.kind]}" aria-hidden="true">'
                    f"</span>{escape(part_name(part))}",
                    seconds(part.seconds),
                    f"{100 * part.seconds / goodput.wall:.1f} %",
                    part_times(part),
                )
                for part in parts
            ],
        ),
    ]
    if goodput.step_time is not None:
        lines.append(f"<p>Median time of a step: {seconds(goodput.step_time)}.</p>")
    return [*lines, "</section>"]


def _bar(parts: Sequence[Part], wall: float) -> str:
    """
    Return a bar of 1000 units, in which each part has its share.
    """
    rects, at = [], 0.0
    for part in parts:
        width = 1000 * part.seconds / wall
        share = f"{escape(part_name(part))}: {100 * part.seconds / wall:.1f} %"
        rects.append(
            f'<rect x="{at:.2f}" y="0" width="{width:.2f}" height="30" fill="{COLORS[part.kind]}" '
            f'stroke="#ffffff"><title>{share}</title></rect>'
        )
        at += width
    return (
        '<svg viewBox="0 0 1000 30" width="100%" height="30" preserveAspectRatio="none" '
        'role="img" aria-label="The parts of the time, as in the table below">'
        + "".join(rects)
        + "</svg>"
    )


# ---------------------------------------------------------------- curves


def _curves(facts: Facts) -> list[str]:
    lines = []
    for number, run in enumerate(facts.runs, start=1):
        samples = _shifted(run)
        pieces = [
            [(at, took) for at, took, _ in step_times(samples, [span])]
            for span in run.goodput.spans
        ]
        title = "Time of a step" + (f", run {number}" if len(facts.runs) > 1 else "")
        drawn = curve.drawn(pieces, _marks(run), title=title, x_text=seconds, y_text=seconds)
        if drawn:
            lines += [f"<h2>{title}</h2>", _wide(drawn, title)]
            lines.append(
                '<p class="soft">Across: time since the run began. The line is the median, the band '
                "the range of the values. Marks are incidents, with their numbers.</p>"
            )
    marks = [
        curve.Mark(
            start=i["step"],
            end=i["step"],
            number=i["id"],
            anchor=_anchor(i),
            text=incident_sentence(i),
        )
        for i in facts.incidents
        if i["step"] is not None
    ]
    drawn = curve.drawn(
        [facts.losses],
        marks,
        title="Loss",
        x_text=lambda x: f"{x:.0f}",
        y_text=lambda y: f"{y:.3g}",
    )
    if drawn:
        lines += [
            "<h2>Loss</h2>",
            _wide(drawn, "Loss"),
            '<p class="soft">Across: steps. The values are those that the lowest rank has recorded '
            "as <code>loss</code>.</p>",
        ]
    return lines


def _shifted(run: RunFacts) -> list[Sample]:
    began = run.progress.opened
    return [Sample(at=s.at - began, step=s.step, ranks=s.ranks) for s in run.progress.samples]


def _marks(run: RunFacts) -> list[curve.Mark]:
    spans = {span.incident: span for span in run.goodput.spans if span.incident}
    return [
        curve.Mark(
            start=spans[each["id"]].start,
            end=spans[each["id"]].end,
            number=each["id"],
            anchor=_anchor(each),
            text=incident_sentence(each),
        )
        for each in run.incidents
        if each["id"] in spans
    ]


# ---------------------------------------------------------------- incidents


def _incidents(facts: Facts) -> list[str]:
    lines = ['<section aria-labelledby="incidents">', '<h2 id="incidents">Incidents</h2>']
    if not facts.incidents:
        return [*lines, "<p>None.</p>", "</section>"]
    if len(facts.incidents) > 1:
        lines.append(_table(("incident", "when", "what happened"), map(_line, facts.incidents)))
    longest = sorted(
        range(len(facts.incidents)), key=lambda place: -facts.incidents[place]["seconds"]["total"]
    )
    pictured = set(longest[:PICTURES])
    if len(pictured) < len(facts.incidents):
        lines.append(f"<p>Only the {PICTURES} longest incidents have a picture.</p>")
    for place, incident in enumerate(facts.incidents):
        lines += _incident(facts, incident, pictured=place in pictured)
    return [*lines, "</section>"]


def _line(incident: Entry) -> tuple[str, ...]:
    number, when = incident["id"], moment(incident.get("began_unix"))
    link = f'<a href="#{_anchor(incident)}">{number}</a>'
    return link, when, escape(incident_sentence(incident))


def _anchor(incident: Entry) -> str:
    # name the run too: earlier versions of tft numbered incidents from 1 again after a killed run,
    # so a job may have two incidents with one number
    return f"incident-{incident.get('run', 1)}-{incident['id']}"


def _incident(facts: Facts, incident: Entry, *, pictured: bool) -> list[str]:
    number, anchor = incident["id"], _anchor(incident)
    lines = [
        f'<article class="incident" id="{anchor}" aria-labelledby="title-{anchor}">',
        f'<h3 id="title-{anchor}">{incident_title(facts, incident)}</h3>',
        f"<p>{escape(incident_sentence(incident))}</p>",
        f'<p class="soft">{moment(incident.get("began_unix"))}</p>',
    ]
    if pictured and incident["phases"]:
        lines.append(_wide(picture.drawn(incident), f"The phases of incident {number}, by rank"))
    took = [(name, s) for name in SECONDS if (s := incident["seconds"].get(name))]
    if took:
        rows = [(name, picture.SAID[name], seconds(spent)) for name, spent in took]
        ends = (
            "the end of the job" if incident["strategy"] in LAST else "the first step of all ranks"
        )
        rows.append(("total", f"from the fault to {ends}", seconds(incident["seconds"]["total"])))
        lines.append(_table(("phase", "what happens", "time"), rows))
    tried = [f"{each['strategy']}: {each['why_not']}" for each in incident["tried"]]
    lines += _headed("Why no other strategy", tried)
    lines += _headed("What was tried again, and why", incident.get("repeated", ()))
    lines += _headed("Training may not be bit for bit the same", incident["inexact"])
    lines += _headed("Lost with a node", incident.get("unprotected", ()))
    refused = [
        f"step {each['step']}, {each['times']} times, cause: {each['cause']}; {why}"
        for each in incident.get("refused", ())
        for why in each["why"] or ("",)
    ]
    lines += _headed("Refused updates", refused)
    for fault in incident["faults"]:
        if evidence := str(fault.get("evidence", "")).strip():
            who = "no one rank" if fault["rank"] is None else f"rank {fault['rank']}"
            lines.append(f"<h4>Evidence: {escape(fault['kind'])}, {who}</h4>")
            lines.append(f'<pre tabindex="0">{escape(evidence)}</pre>')
    return [*lines, "</article>"]


def _more(facts: Facts) -> list[str]:
    missed = [
        f"step {m['step']}, {m['times']} times: {m['why']}" for m in facts.report.get("missed", ())
    ]
    remarks = [remark_text(r["event"], r["facts"]) for r in facts.report.get("remarks", ())]
    return [
        *_headed("Checkpoints that could not be written", missed, level=2),
        *_headed("Different copies at the start", facts.report.get("begins_unlike", ()), level=2),
        *_headed("Remarks", remarks, level=2),
    ]


# ---------------------------------------------------------------- elements


def _headed(heading: str, entries: Sequence[str], *, level: int = 4) -> list[str]:
    if not entries:
        return []
    return [f"<h{level}>{escape(heading)}</h{level}>", *_list(entries)]


def _list(entries: Iterable[str]) -> list[str]:
    return ["<ul>", *(f"<li>{escape(entry)}</li>" for entry in entries), "</ul>"]


def with_code(text: str) -> str:
    """
    Return a sentence of tft as HTML. What is between backticks becomes a `code` element.
    """
    parts = map(escape, text.split("`"))
    return "".join(
        f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts)
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """
    Return a table. The first cell of a row is the heading of the row. The cells must be escaped.
    """
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    lines = [
        "<tr>"
        + f'<th scope="row">{row[0]}</th>'
        + "".join(f"<td>{cell}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    ]
    return f"<table>{f'<thead><tr>{head}</tr></thead>' if heads else ''}<tbody>{''.join(lines)}</tbody></table>"


def _wide(drawn: str, label: str) -> str:
    """
    Return a picture that scrolls sideways on a narrow screen, also by the keyboard.
    """
    return f'<div class="wide" tabindex="0" role="group" aria-label="{escape(label)}">{drawn}</div>'
