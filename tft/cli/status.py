"""
`tft status`: shows the present state of a job once, as text or as JSON.
"""

import asyncio
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click

from tft.cli.parts import run_dir_option
from tft.clock import SystemClock
from tft.launcher.exit_codes import COMPLETED, FAILED
from tft.launcher.look import look, watching
from tft.launcher.records import Records, read_records
from tft.launcher.run import say
from tft.launcher.run_directory import STORY
from tft.launcher.situation import (
    Facts,
    Situation,
    headline,
    over,
    running,
    silence,
    standing_out,
)
from tft.replay.following import StoryFollower
from tft.sentences import incident_line, open_incident, ranks_of

LEAST, MOST = 1.0, 3.0
"""For how many seconds the command receives messages of the job, at least and at most. A node or
controller of which no message came in `MOST` seconds counts as silent. Agents send ten heartbeats
in a second, and a controller one `Lead` each second."""
MANY = 16
"""If a job has more ranks, only ranks that stand out get a line, unless the user asks for all
ranks."""
REMARKS = 3
"""How many of the last remarks are shown."""
_INDENT = 13
"""The column at which values begin."""


def status_command() -> click.Command:
    """
    Return the command `tft status`.
    """

    def status(run_dir: Path, everything: bool, as_json: bool) -> int:
        return asyncio.run(_status(run_dir, everything=everything, as_json=as_json))

    return click.Command(
        "status",
        callback=status,
        params=[
            run_dir_option(),
            click.Option(
                ["--all", "everything"], is_flag=True, help="Show every node and every rank."
            ),
            click.Option(["--json", "as_json"], is_flag=True, help="Print the facts as JSON."),
        ],
        help="Look at a job: where its ranks are, which parts answer, and what happened to it.",
    )


async def _status(run_dir: Path, *, everything: bool, as_json: bool) -> int:
    records = read_records(run_dir)
    facts = None
    if records.report is None:
        facts = await _looked(records)
        # read the records again, because the job may have ended meanwhile
        records = read_records(run_dir)
    if records.report is not None:
        facts = over(records)
    assert facts is not None
    if as_json:
        click.echo(json.dumps(facts, indent=1))
    elif facts["state"] == "over" or facts["parts"]["broker"]["answers"]:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        click.echo("\n".join(lines(facts, everything=everything, width=width)))
    if facts["state"] == "over":
        return COMPLETED
    if why := silence(records, facts):
        say(why)
        return FAILED
    return COMPLETED


async def _looked(records: Records) -> Facts:
    story = StoryFollower(records.run_dir / STORY)
    async with watching(records.there) as watch:
        await asyncio.to_thread(story.read)
        situation = Situation(records=records, watch=watch, story=story, now=0.0)
        # if the run is over or no process of it lives here, probably nobody answers: wait briefly
        most = MOST if records.result == "running" else LEAST
        await look(watch, situation.expected_nodes(), LEAST, most)
        await asyncio.to_thread(story.read)
        now = SystemClock().now()
        facts = running(Situation(records=records, watch=watch, story=story, now=now))
        facts["odd"] = watch.odd
        return facts


# ---------------------------------------------------------------- lines of text


def lines(facts: Facts, *, everything: bool = False, width: int = 0) -> list[str]:
    """
    Return the facts as lines of text. Lines longer than `width` are wrapped; 0: no line is wrapped.
    """
    told = _over(facts) if facts["state"] == "over" else _running(facts, everything=everything)
    rows = [row for name, value in told for row in _row(name, value, width)]
    return [f"{facts['run_dir']}: {headline(facts)}", *rows, *_table(facts, everything=everything)]


def _over(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts["exit_code"] is not None:
        yield "exit code", str(facts["exit_code"])
    yield "why", facts["why"]
    yield "steps", str(facts["steps"])
    yield "incidents", incidents(facts)
    yield "next", facts["advice"]


def _running(facts: Facts, *, everything: bool) -> Iterator[tuple[str, str]]:
    yield "step", steps(facts)
    if facts["state"] == "healthy":
        seconds = facts["step_seconds"]
        yield "step time", "no step ended in this look" if seconds is None else f"{seconds:.3g} s"
    yield "progress", progress(facts)
    if (incident := facts["open_incident"]) is not None:
        yield f"incident {incident['id']}", open_incident(incident)
    yield "incidents", incidents(facts)
    for remark in facts["remarks"][-REMARKS:]:
        yield "remark", remark
    parts = facts["parts"]
    yield "broker", f"{parts['broker']['address']} {_answers(parts['broker'])}"
    epoch = f" (epoch {parts['controller']['epoch']})" if parts["controller"]["answers"] else ""
    yield "controller", f"{_answers(parts['controller'])}{epoch}"
    yield from _nodes(parts["nodes"], everything=everything)
    if facts["ranks_left_out"]:
        yield "left out", f"{ranks_of(facts['ranks_left_out'])}: the job goes on without them"
    if facts["story_failure"]:
        yield "story", f"not read: {facts['story_failure']}"


def steps(facts: Facts) -> str:
    """
    Return a text with the steps of the slowest and the fastest rank.
    """
    slow, fast = facts["slowest"], facts["fastest"]
    if slow is None:
        return "unknown: no rank has been heard"
    if slow["step"] == fast["step"]:
        return f"{slow['step']} ({_every(facts)})"
    return f"{slow['step']} (rank {slow['rank']}) to {fast['step']} (rank {fast['rank']})"


def _every(facts: Facts) -> str:
    return "all ranks that are heard" if facts["missing_ranks"] else "all ranks"


def progress(facts: Facts) -> str:
    """
    Return a text that says how long ago any rank made progress.
    """
    seconds = facts["seconds_since_progress"]
    return "unknown" if seconds is None else f"{seconds:.2f} s ago"


def incidents(facts: Facts) -> str:
    """
    Return a text that says how many incidents there were, and what the last one was.
    """
    last = facts["last_incident"]
    return (
        "none"
        if not facts["incidents"]
        else (f"{facts['incidents']}" + (f"; {incident_line(last)}" if last else ""))
    )


def _nodes(nodes: list[Facts], *, everything: bool) -> Iterator[tuple[str, str]]:
    answering = [each for each in nodes if each["answers"]]
    if len(nodes) > MANY and not everything:
        yield "nodes", f"{len(answering)} of {len(nodes)} answer"
        nodes = [each for each in nodes if not each["answers"]][:MANY]
    for each in nodes:
        host = f"{each['host']}, " if each["host"] else ""
        pid = f"agent {each['pid']} " if each["pid"] else ""
        ranks = f": {ranks_of(each['ranks'])}" if each["ranks"] else ""
        yield f"node {each['node']}", f"{host}{pid}{_answers(each)}{ranks}"


def _answers(part: Facts) -> str:
    return "answers" if part["answers"] else "does not answer"


def _row(name: str, value: str, width: int) -> list[str]:
    first = f"  {name}".ljust(_INDENT)
    if not width or len(first) + len(value) <= width:
        return [first + value]
    room = max(width, _INDENT + 20)
    return textwrap.wrap(value, room, initial_indent=first, subsequent_indent=" " * _INDENT)


def _table(facts: Facts, *, everything: bool) -> list[str]:
    """
    Return a table of all ranks or, if the job has many ranks, of the ranks that stand out.
    """
    if facts["state"] == "over":
        return []
    reasons = dict(standing_out(facts))
    shown = facts["ranks"]
    if len(shown) > MANY and not everything:
        shown = [each for each in shown if each["rank"] in reasons][:MANY]
    silent = facts["missing_ranks"]
    rows = [rank_row(each, reasons.get(each["rank"], "")) for each in shown]
    more = len(reasons) - len(silent) - len(shown)
    head = f"  {'rank':>6} {'node':>5} {'pid':>8} {'step':>9} {'progress':>9}"
    return [
        *(["", head, *rows] if rows else []),
        *([f"  and {more} more that stand out"] if more > 0 else []),
        *([f"  no heartbeat of {ranks_of(silent)}"] if silent else []),
    ]


def rank_row(each: Facts, reason: str) -> str:
    """
    Return the line of one rank.
    """
    pid = "" if each["pid"] is None else each["pid"]
    since = f"{each['seconds_since_progress']:.2f} s"
    row = f"  {each['rank']:>6} {each['node']:>5} {pid:>8} {each['step']:>9} {since:>9}"
    return f"{row}  {reason}".rstrip()
