"""
Collects what a run directory says about its job: how the job ended, its incidents, its steps over
time, and how its time was spent. The job may be over, may still run, or may have been killed.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tft import checkpoint
from tft.clock import unix_time
from tft.controller.progress import PROGRESS
from tft.core.job.incident import Fault
from tft.core.job.incident_report import incident_report
from tft.errors import CheckpointCorrupt, StoryCorrupt, UsageError
from tft.launcher.run_directory import JOB, REPORT, STORY, checkpoint_store_there, in_use
from tft.replay.judging import replay
from tft.replay.recording import Run, runs_of
from tft.report import goodput, progress
from tft.report.goodput import Goodput, Known
from tft.report.progress import RunProgress

RUNNING, UNFINISHED = "running", "unfinished"
"""The results of a job without a report: it still runs, or it has ended without saying how."""

Entry = dict[str, Any]  # Any: parsed JSON, described in `docs/reference/report.md`


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """
    One run of the job. Each `tft run --resume` begins another run in the same run directory.
    """

    progress: RunProgress
    last_step: int
    goodput: Goodput
    incidents: tuple[Entry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """
    What is known of a job.
    """

    run_dir: Path
    command: tuple[str, ...]
    """The script and its arguments; empty if it is not known."""
    result: str
    why: str
    steps: int
    exit_code: int | None
    runs: tuple[RunFacts, ...]
    incidents: tuple[Entry, ...]
    checkpoint: str
    """The newest complete checkpoint; empty if there is none."""
    report: Entry
    """The content of `report.json`; empty if the job has no report."""
    losses: tuple[tuple[int, float], ...] = ()
    """Steps and their losses, if the script has recorded or logged them."""
    notes: tuple[str, ...] = ()
    """Sentences about what could not be read."""

    @property
    def goodput(self) -> Goodput | None:
        """
        How the time of all runs was spent. None: nothing is known about it.
        """
        return goodput.together([run.goodput for run in self.runs]) if self.runs else None

    @property
    def over(self) -> bool:
        """
        True if the job has ended and has said how.
        """
        return self.result not in (RUNNING, UNFINISHED)


@dataclass(slots=True, kw_only=True)
class _Read:
    """
    The files of a run directory, as they are read.
    """

    run_dir: Path
    report: Entry = field(default_factory=dict)
    """The report of the last run; empty if this run has written none."""
    reported: list[Entry] = field(default_factory=list)
    """The incidents in `report.json`, even if that file is the report of an earlier run."""
    job: Entry = field(default_factory=dict)
    runs: list[RunProgress] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stories: dict[tuple[str, float], Run] | None = None


def gather(run_dir: Path) -> Facts:
    """
    Return what the run directory says about its job. Raises `UsageError` if no job has run there.
    """
    read = _Read(run_dir=run_dir)
    read.job = _json(read, JOB)
    read.report = _report(read)
    read.runs = _progress(read)
    if not (read.report or read.runs or (run_dir / STORY).exists()):
        raise UsageError(
            f"no job has run in {run_dir}: it has no {REPORT}, {PROGRESS} or {STORY}; name the run "
            "directory of a job"
        )
    over = bool(read.report)
    running = not over and any(in_use(run_dir, node) for node in (0, -1))
    steps = int(read.report.get("steps", read.runs[-1].step if read.runs else 0))
    runs = tuple(
        _run(read, place, incidents, steps=steps, running=running)
        for place, incidents in enumerate(_incidents(read))
    )
    incidents = [each for run in runs for each in run.incidents]
    if not runs:
        incidents = read.report.get("incidents") or _story_incidents(read, None)
    result = str(read.report.get("result") or (RUNNING if running else UNFINISHED))
    return Facts(
        run_dir=run_dir,
        command=tuple(map(str, read.job.get("command", ()))),
        result=result,
        why=str(read.report.get("why", "")),
        steps=steps,
        exit_code=read.report.get("exit_code"),
        runs=runs,
        incidents=tuple(incidents),
        checkpoint=_checkpoint(read),
        report=read.report,
        losses=tuple(_losses(read)),
        notes=tuple(dict.fromkeys(read.notes)),
    )


def _run(
    read: _Read, place: int, incidents: Sequence[Entry], *, steps: int, running: bool
) -> RunFacts:
    """
    Return the facts of the run at index `place` of `read.runs`. `steps` is the last step of the
    job. Each incident of the run gets the keys `run`, the number of the run from 1, and
    `began_unix`, the time of the fault in seconds since 1970.
    """
    run = read.runs[place]
    result = goodput.goodput(
        run,
        {each["id"]: known_of(each) for each in incidents},
        _until(read, place, running=running),
        continued_from=_continued_from(read.runs, place),
    )
    starts = {span.incident: run.unix + span.start for span in reversed(result.spans)}
    return RunFacts(
        progress=run,
        last_step=steps if place == len(read.runs) - 1 else run.step,
        goodput=result,
        incidents=tuple(
            {**each, "run": place + 1, "began_unix": starts.get(each["id"])} for each in incidents
        ),
    )


# ---------------------------------------------------------------- files


def _json(read: _Read, name: str) -> Entry:
    path = read.run_dir / name
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as wrong:
        read.notes.append(f"{path} cannot be read ({wrong})")
        return {}
    return content if isinstance(content, dict) else {}


def _report(read: _Read) -> Entry:
    """
    Return the report of the last run. A report of an earlier run, which is older than `job.json`,
    does not count.
    """
    report, job = read.run_dir / REPORT, read.run_dir / JOB
    found = _json(read, REPORT)
    read.reported = list(found.get("incidents", ()))
    if found and job.exists() and report.stat().st_mtime_ns < job.stat().st_mtime_ns:
        return {}
    return found


def _progress(read: _Read) -> list[RunProgress]:
    path = read.run_dir / PROGRESS
    try:
        runs, unread = progress.runs_of(path.read_text(errors="replace"))
    except FileNotFoundError:
        read.notes.append(f"there is no {PROGRESS}, so how the time was spent is not known")
        return []
    except OSError as wrong:
        read.notes.append(f"{path} cannot be read ({wrong.strerror})")
        return []
    if unread:
        rows, were = ("row", "was") if unread == 1 else ("rows", "were")
        read.notes.append(f"{unread} {rows} of {PROGRESS} cannot be read and {were} left out")
    return runs


def _checkpoint(read: _Read) -> str:
    try:
        newest = checkpoint.newest(checkpoint_store_there(read.run_dir))
    except (OSError, CheckpointCorrupt) as wrong:
        read.notes.append(f"the checkpoints cannot be listed ({wrong})")
        return ""
    return "" if newest is None else str(newest)


def _losses(read: _Read) -> list[tuple[int, float]]:
    """
    Return the losses that the lowest rank has recorded under the name `loss` with `session.record`.
    If no rank has recorded losses, return those that the lowest rank has logged with `session.log`.
    A file that cannot be read is left out.
    """
    found: dict[int, float] = {}
    recorded, logged = (
        sorted(read.run_dir.glob(f"{what}-rank*.jsonl"), key=lambda path: (len(path.name), path))
        for what in ("records", "values")
    )
    for path in (*recorded, *logged):
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError as wrong:
            read.notes.append(f"{path} cannot be read ({wrong.strerror})")
            continue
        for line in lines:
            try:
                row = json.loads(line)
                loss = float((row["values"] if path in logged else row)["loss"])
                if math.isfinite(loss):
                    found[int(row["step"])] = loss
            except (ValueError, KeyError, TypeError):
                continue  # a row about something else, or an incomplete row
        if found:
            break
    return sorted(found.items())


# ---------------------------------------------------------------- incidents of each run


def _incidents(read: _Read) -> list[list[Entry]]:
    """
    Return the incidents of each run. If a run has ended with a report, its incidents are in the
    report, after those of earlier runs. For all other runs, compute the incidents from the story.
    """
    reported = list(read.reported)
    found: list[list[Entry]] = []
    for run in reversed(read.runs):
        own: list[Entry] = []
        while run.ended and reported and int(reported[-1]["id"]) >= run.first_incident:
            own.insert(0, reported.pop())
        seen = {change.incident for change in run.changes} - {0}
        if not seen <= {each["id"] for each in own}:
            own = _story_incidents(read, run) or own
        found.insert(0, own)
    return found


def _story_incidents(read: _Read, run: RunProgress | None) -> list[Entry]:
    """
    Return the incidents of `run`, computed from the story. If `run` is None, use the last run in
    the story. The times in these incidents count from the first evidence of the fault, because only
    a report can tell when the fault itself happened.
    """
    stories = _stories(read)
    story = (
        next(reversed(stories.values()), None)
        if run is None
        else stories.get((run.run, run.opened))
    )
    if story is None:
        return []
    judged = replay(story)
    if judged.failure:
        read.notes.append(f"{STORY} cannot be judged to its end: {judged.failure}")
    every = {each.number: each for each in judged.machine.incidents}
    last = judged.machine.incident
    if last.is_open:
        every[last.number] = last
    return [
        {**incident_report(each, _nobody_knows), "open": each.closed is None}
        for each in every.values()
    ]


def _nobody_knows(fault: Fault) -> float | None:
    return None


def _stories(read: _Read) -> dict[tuple[str, float], Run]:
    if read.stories is None:
        read.stories = {}
        path = read.run_dir / STORY
        try:
            found = runs_of(path.read_bytes(), str(path))
            read.stories = {(run.opened.run, run.opened.at): run for run in found.values()}
        except (OSError, StoryCorrupt, UsageError) as wrong:
            read.notes.append(f"some incidents are not known, because of the story: {wrong}")
    return read.stories


def known_of(incident: Mapping[str, Any]) -> Known:  # Any: parsed JSON
    """
    Return what the computation of the goodput needs to know about an incident. `incident` has the
    form of an incident in a report.
    """
    total = None if incident.get("open") else float(incident["seconds"]["total"])
    return Known(
        strategy=str(incident["strategy"]), total=total, steps_lost=int(incident["steps_lost"])
    )


# ---------------------------------------------------------------- the time of each run


def _until(read: _Read, place: int, *, running: bool) -> float:
    """
    Return the time at which the run at index `place` ends for the computation of the goodput. A run
    that has ended ends with its last row in the progress file, and a run that still runs ends now.
    A run that was killed ends with its last row or the last event of its story, whichever is later.
    """
    run = read.runs[place]
    if run.ended:
        return run.last
    if running and place == len(read.runs) - 1:
        return run.last + max(0.0, unix_time() - run.last_unix)
    story = _stories(read).get((run.run, run.opened))
    events = () if story is None else story.events
    last = events[-1].event.at + run.shift if events else run.last
    # ignore the story if its last time is far from the last row: then the two come from controllers
    # on different machines, whose clocks cannot be compared
    return max(run.last, last) if abs(last - run.last) < 1e6 else run.last


def _continued_from(runs: Sequence[RunProgress], place: int) -> int | None:
    """
    Return the earliest step from which a run after the run at index `place` has continued, or None
    if there is no later run. The run after the next may have gone back further, for example because
    it found the checkpoints of the next run damaged.
    """
    return min((run.began_after for run in runs[place + 1 :]), default=None)
