"""
`tft top`: what `tft status` says, live in the terminal, until the job is over.

The facts are those of `tft.launcher.situation`; rich draws them.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tft.cli import status
from tft.cli.parts import run_dir_option, until_left
from tft.clock import SystemClock
from tft.errors import UsageError
from tft.launcher.exit_codes import COMPLETED, FAILED
from tft.launcher.look import look, watching
from tft.launcher.records import Records, is_over, read_records
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
from tft.sentences import open_incident, ranks_of

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

_EVERY = 0.5  # seconds between two pictures; a person cannot read faster
_RECORDS = 5.0  # seconds between two checks whether processes of the job live here
_SILENCE = 10.0
"""Seconds without a controller after which a job counts as gone if none of its processes lives on
this machine. A controller or broker that was killed is back sooner."""
_HEAD = 12
"""The number of lines of the screen that are above and below the tables."""


def top_command() -> click.Command:
    """
    Return the command `tft top`.
    """

    def top(run_dir: Path, as_json: bool) -> int:
        draw = None if as_json else _drawing(run_dir)
        return until_left(_top(read_records(run_dir), draw))

    return click.Command(
        "top",
        callback=top,
        params=[
            run_dir_option(),
            click.Option(
                ["--json", "as_json"],
                is_flag=True,
                help="Print the facts as lines of JSON, without a terminal.",
            ),
        ],
        help="Watch a job in the terminal until it is over. Ctrl-C leaves; the job goes on.",
    )


def _drawing(run_dir: Path) -> "Console":
    """
    Return the terminal to draw in. Raises `UsageError` if there is none, or if rich is missing.
    """
    try:
        from rich.console import Console
    except ImportError:
        raise UsageError(
            "`tft top` draws with the package rich: pip install 'tft-bus[terminal]'; `tft status "
            f"--run-dir {run_dir}` prints the same once without it"
        ) from None
    console = Console()
    if not console.is_terminal or console.is_dumb_terminal:
        raise UsageError(
            "`tft top` draws in a terminal, and the output is none: use `tft status --run-dir "
            f"{run_dir}` for one look, or --json for lines of JSON"
        )
    return console


async def _top(records: Records, console: "Console | None") -> int:
    if records.report is None:
        story = StoryFollower(records.run_dir / STORY)
        async with watching(records.there) as watch:
            await asyncio.to_thread(story.read)
            first = Situation(records=records, watch=watch, story=story, now=0.0)
            await look(watch, first.expected_nodes(), 0.0, status.MOST, steps=False)
            if not watch.leads and not is_over(records.run_dir):
                facts = {**running(first), "odd": watch.odd}
                say(silence(records, facts))
                return FAILED
            code = await _watch(first, console)
        if code != COMPLETED:
            return code
        records = read_records(records.run_dir)
    last = over(records)
    if console is None:
        click.echo(json.dumps(last))
    else:
        click.echo("\n".join(status.lines(last, width=console.width)))
    return COMPLETED


async def _watch(first: Situation, console: "Console | None") -> int:
    """
    Show the job until it is over (returns 0), or until nothing of it answers any more (returns 4).
    """
    records, clock = first.records, SystemClock()
    looked = led = clock.now()
    with _shown(console) as show:
        while not is_over(records.run_dir):
            now = clock.now()
            if first.watch.leads:
                led = now
            if now - looked > _RECORDS:
                records, looked = await asyncio.to_thread(read_records, records.run_dir), now
            await asyncio.to_thread(first.story.read)
            situation = Situation(records=records, watch=first.watch, story=first.story, now=now)
            facts = {**running(situation), "odd": first.watch.odd}
            gone = now - led > _SILENCE and records.result != "running"
            if gone or records.began != first.records.began:
                break
            show(facts)
            await asyncio.sleep(_EVERY)
        else:
            return COMPLETED
    if records.began != first.records.began:
        say(f"another run has begun in {records.run_dir}: start `tft top` again to watch it")
    else:
        say(silence(records, facts))
    return FAILED


@contextmanager
def _shown(console: "Console | None") -> Iterator[Callable[[Facts], None]]:
    """
    Yield a function that shows the facts of a job: as a picture that replaces the last one, or
    without a console as a line of JSON.
    """
    if console is None:
        yield lambda facts: click.echo(json.dumps(facts))
        return
    from rich.live import Live

    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield lambda facts: live.update(picture(facts, console.height), refresh=True)


# ---------------------------------------------------------------- the picture


def picture(facts: Facts, height: int) -> "Group":
    """
    Return what the terminal shows of a running job. The head comes first. The tables below get the
    rest of the `height` lines of the terminal.
    """
    from rich.console import Group
    from rich.text import Text

    reasons = dict(standing_out(facts))
    room = max(2, height - _HEAD)
    tables: list[Table | Text] = [_ranks(facts, reasons, room)]
    nodes = facts["parts"]["nodes"]
    if len(nodes) > 1:
        # nodes get at most half of the lines, because the table of ranks comes below
        tables = [
            _nodes(facts, reasons, room // 2),
            Text(),
            _ranks(facts, reasons, room - room // 2 - 1),
        ]
    return Group(
        _headline(facts), *_head(facts), Text(), *tables, Text("Ctrl-C leaves", style="dim")
    )


def _headline(facts: Facts) -> "Text":
    from rich.text import Text

    colour = "green" if facts["state"] == "healthy" else "yellow"
    if not facts["parts"]["controller"]["answers"]:
        colour = "red"
    line = Text(headline(facts), style=f"bold {colour}", no_wrap=True, overflow="ellipsis")
    # the path comes last, because it may be cut off
    line.append(f"  {facts['run_dir']}", style="not bold default")
    return line


def _head(facts: Facts) -> "Iterator[Text]":
    """
    Yield the lines above the tables. They are always the same lines, even those without news,
    because lines that move cannot be read.
    """
    from rich.text import Text

    seconds = facts["step_seconds"]
    parts, incident = facts["parts"], facts["open_incident"]
    answering = sum(each["answers"] for each in parts["nodes"])
    left_out = facts["ranks_left_out"]
    told = (
        ("step", status.steps(facts)),
        ("step time", "-" if seconds is None else f"{seconds:.3g} s"),
        ("progress", status.progress(facts)),
        ("incident", "none is open" if incident is None else open_incident(incident)),
        ("incidents", status.incidents(facts)),
        ("remark", facts["remarks"][-1] if facts["remarks"] else "none"),
        (
            "answering",
            f"broker {_yes(parts['broker'])}, controller {_yes(parts['controller'])}, "
            f"{answering} of {len(parts['nodes'])} agents",
        ),
        (
            "ranks",
            f"{len(facts['ranks'])} with a heartbeat"
            + (f", without {ranks_of(left_out)}" if left_out else ""),
        ),
    )
    for name, value in told:
        line = Text(f"{name:<11}", style="dim", no_wrap=True, overflow="ellipsis")
        line.append(value, style="not dim")
        yield line


def _yes(part: Facts) -> str:
    return "yes" if part["answers"] else "no"


def _nodes(facts: Facts, reasons: Mapping[int, str], room: int) -> "Table":
    """
    Return a table of nodes. Nodes that are silent, or have ranks that stand out, come first.
    """
    from rich.table import Table

    ranks = {each["rank"]: each for each in facts["ranks"]}
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("node", "host", "agent", "ranks", "step", "progress", ""):
        table.add_column(name, justify="right" if name in ("node", "step", "progress") else "left")

    def odd(node: Facts) -> int:
        return sum(rank in reasons for rank in node["ranks"])

    nodes = sorted(
        facts["parts"]["nodes"], key=lambda each: (each["answers"], -odd(each), each["node"])
    )
    for node in nodes[: max(1, room - 2)]:
        own = [ranks[rank] for rank in node["ranks"]]
        count = odd(node)
        table.add_row(
            str(node["node"]),
            node["host"] or "",
            str(node["pid"] or ""),
            ranks_of(node["ranks"]).partition(" ")[2] if own else "",
            str(min((each["step"] for each in own), default="")),
            f"{min(each['seconds_since_progress'] for each in own):.2f} s" if own else "",
            ("" if node["answers"] else "silent")
            or (f"{count} of them stand out" if count else ""),
            style=None if node["answers"] and not count else "yellow",
        )
    more = len(nodes) - max(1, room - 2)
    if more > 0:
        table.add_row("", f"and {more} more nodes")
    return table


def _ranks(facts: Facts, reasons: Mapping[int, str], room: int) -> "Table":
    """
    Return a table of ranks. Ranks that stand out come first. The other ranks follow only if the job
    is small.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("rank", "node", "pid", "step", "progress"):
        table.add_column(name, justify="right")
    table.add_column("", no_wrap=True, overflow="ellipsis")
    silent = facts["missing_ranks"]
    if silent:
        # list all silent ranks in one row, because a lost node has many ranks
        table.add_row("", "", "", "", "", f"no heartbeat of {ranks_of(silent)}", style="yellow")
    odd = [each for each in facts["ranks"] if each["rank"] in reasons]
    small = len(facts["ranks"]) <= status.MANY
    shown = [*odd, *(each for each in facts["ranks"] if small and each["rank"] not in reasons)]
    rows = max(1, room - 2 - bool(silent))
    for each in shown[:rows]:
        reason = reasons.get(each["rank"], "")
        table.add_row(
            str(each["rank"]),
            str(each["node"]),
            str(each["pid"] or ""),
            str(each["step"]),
            f"{each['seconds_since_progress']:.2f} s",
            reason,
            style="yellow" if reason else None,
        )
    more = len(shown) - rows
    if more > 0:
        table.add_row("", "", "", "", "", f"and {more} more ranks")
    return table
