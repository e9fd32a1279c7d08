"""
`tft jobs`: lists the runs whose run directories are below a directory.

A run counts as running while processes of it live. The command asks a running job itself what it is
doing, because the files contain its step a second late, or not at all.
"""

import asyncio
import json
import shlex
import shutil
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import click

from tft.controller.progress import PROGRESS
from tft.errors import UsageError
from tft.launcher.look import look, watching
from tft.launcher.records import Records, read_records, run_dirs_below
from tft.launcher.run_directory import STORY
from tft.launcher.situation import Facts
from tft.replay.following import StoryFollower
from tft.report.progress import newest_step

_MOST = 1.0  # seconds to wait for the answer of a running job
_AT_ONCE = 32
"""The maximum number of running jobs that are looked at in parallel. Each needs about ten open
files."""
_HEAD = ("RUN", "STATE", "STEPS", "INCIDENTS", "BEGAN", "SCRIPT")


def jobs_command() -> click.Command:
    """
    Return the command `tft jobs`.
    """

    def jobs(directory: Path, as_json: bool) -> int:
        if not directory.is_dir():
            raise UsageError(
                f"there is no directory {directory}: name the directory in which your run "
                "directories are (`tft run` makes them in tft-runs)"
            )
        listed = asyncio.run(_listed(directory))
        if as_json:
            click.echo(json.dumps(listed, indent=1))
        elif not listed:
            click.echo(f"tft: there is no run directory in {directory}", err=True)
        else:
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
            click.echo("\n".join(_table(listed, directory, width)))
        return 0

    return click.Command(
        "jobs",
        callback=jobs,
        params=[
            click.Argument(
                ["directory"],
                type=click.Path(path_type=Path),
                default=Path("tft-runs"),
                metavar="[DIR]",
            ),
            click.Option(["--json", "as_json"], is_flag=True, help="Print the list as JSON."),
        ],
        help="List the runs in DIR (tft-runs) and below, the newest first: what they are doing, or "
        "how they ended.",
    )


async def _listed(directory: Path) -> list[Facts]:
    gate = asyncio.Semaphore(_AT_ONCE)

    async def described(run_dir: Path) -> Facts:
        try:
            records = read_records(run_dir)
        except UsageError as unread:
            return _unread(run_dir, str(unread))
        if records.result != "running":
            # use another thread: a long story takes seconds to read, and meanwhile this thread must
            # receive the messages of running jobs
            return await asyncio.to_thread(_ended, records)
        async with gate:
            return await _running(records)

    found = await asyncio.gather(*(described(each) for each in run_dirs_below(directory)))
    return sorted(found, key=lambda each: (-each["began"], each["run_dir"]))


def _ended(records: Records) -> Facts:
    facts = _common(records)
    if records.report is not None:
        facts["steps"] = records.report.get("steps")
        facts["incidents"] = len(records.report["incidents"])
        return facts
    facts["at_least"] = True
    story = StoryFollower(records.run_dir / STORY)
    story.read()
    if not story.failure:
        facts["steps"] = story.last_step
        facts["incidents"] = story.count
    written = newest_step(records.run_dir / PROGRESS)
    if written is not None:
        facts["steps"] = max(written, facts["steps"] or 0)
    return facts


async def _running(records: Records) -> Facts:
    facts = _common(records)
    # if the keys cannot be read, for example, the job cannot be asked
    with suppress(UsageError):
        async with watching(records.there) as watch:
            nodes = range(int(records.settings["nnodes"]))
            await look(watch, nodes, 0.0, _MOST, steps=False)
            ranks = watch.ranks().values()
            facts["doing"] = watch.state or None
            facts["steps"] = min((seen.pulse.position.step for seen in ranks), default=None)
            facts["incidents"] = None if watch.lead is None else watch.lead.incident
    if facts["steps"] is None:
        facts["steps"] = newest_step(records.run_dir / PROGRESS)
        facts["at_least"] = True
    return facts


def _common(records: Records) -> Facts:
    return {
        "run_dir": str(records.run_dir),
        "state": records.result,
        "doing": None,
        "steps": None,
        "at_least": False,
        "incidents": None,
        "began": records.began,
        "command": list(records.command),
        "processes": dict(records.living),
        "problem": None,
    }


def _unread(run_dir: Path, why: str) -> Facts:
    facts: Facts = {"doing": None, "steps": None, "at_least": False, "incidents": None}
    return {
        "run_dir": str(run_dir),
        "state": "unreadable",
        **facts,
        "began": 0.0,
        "command": [],
        "processes": {},
        "problem": why,
    }


def _table(listed: list[Facts], directory: Path, width: int) -> list[str]:
    rows = [_HEAD, *(_cells(each, directory) for each in listed)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD) - 1)]
    lines = [
        "  ".join([*(c.ljust(w) for c, w in zip(row[:-1], widths, strict=True)), row[-1]]).rstrip()
        for row in rows
    ]
    if width:
        # the script is the last column, because this column is cut off if the line is too long
        lines = [line if len(line) <= width else f"{line[: width - 1]}…" for line in lines]
    return [*lines, *(f"tft: {each['problem']}" for each in listed if each["problem"])]


def _cells(each: Facts, directory: Path) -> tuple[str, ...]:
    name = Path(each["run_dir"])
    with suppress(ValueError):
        name = name.relative_to(directory) if name != directory else name
    doing = f": {each['doing'] or 'no answer'}" if each["state"] == "running" else ""
    began = (
        f"{datetime.fromtimestamp(each['began']).astimezone():%Y-%m-%d %H:%M}"
        if each["began"]
        else "-"
    )
    return (
        str(name),
        f"{each['state']}{doing}",
        _steps(each),
        "-" if each["incidents"] is None else str(each["incidents"]),
        began,
        shlex.join(each["command"]),
    )


def _steps(each: Facts) -> str:
    if each["steps"] is None:
        return "-"
    # a plus sign says that the job may be further than this number: it is from files, which contain
    # a step a second late, or not at all
    return f"{each['steps']}+" if each["at_least"] else str(each["steps"])
