"""
Reads the settings and the report of a run from its run directory, and finds out which of its
processes live. No process of the run is asked, and nothing is written.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tft import checkpoint
from tft.clock import unix_time
from tft.errors import UsageError
from tft.launcher.run_directory import (
    JOB,
    REPORT,
    JobThere,
    checkpoint_store_there,
    is_locked,
    known_unfit,
    log_file,
)
from tft.launcher.summary import to_go_on

_TOLERANCE = 2.0
"""A process still counts as the one that a pid file names if it seems to have begun up to this many
seconds after the file was written. The two times come from different clocks: the kernel counts the
start in ticks since boot, and the file has the time of the wall clock, which may be adjusted."""
_LAUNCHERS = ("run", "lead")


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """
    The records of the last run in a run directory.
    """

    run_dir: Path
    settings: Mapping[str, Any]  # Any: JSON
    """The settings of the run, from `job.json`."""
    command: tuple[str, ...]
    """The script and its arguments. Empty if the controller was started by hand."""
    began: float
    """The time when the run began, in seconds since 1970."""
    report: Mapping[str, Any] | None  # Any: JSON
    """The report of the run. None if the run has not written it."""
    living: Mapping[str, int] = field(default_factory=dict)
    """By name of a part of tft (`run`, `agent-0`, `rank-3`): the pid of its process, if this
    process lives on this machine."""
    elsewhere: bool = False
    """True if no process lives here, but a launcher of the run lives where this machine cannot see
    its processes: in another container, or on another machine with the same file system."""

    @property
    def there(self) -> JobThere:
        """
        The name of the job, and how to reach it.
        """
        curve = self.settings.get("curve")
        return JobThere(
            job=str(self.settings["job"]),
            broker=str(self.settings["broker"]),
            log=log_file(self.run_dir, "controller"),
            curve=Path(curve) if curve else None,
        )

    @property
    def world(self) -> int:
        """
        The number of ranks with which the run was started.
        """
        return int(self.settings["nnodes"]) * int(self.settings["nproc_per_node"])

    @property
    def launchers(self) -> Mapping[str, int]:
        """
        The pids of the launchers of the run (`tft run`, `tft lead`) that live on this machine.
        """
        return {
            part: pid for part, pid in self.living.items() if part.partition("-")[0] in _LAUNCHERS
        }

    @property
    def result(self) -> str:
        """
        What became of the run: `running`, the result of the report (`completed`, `dumped`,
        `failed`, `cancelled`), or `ended without a report`.

        A run that has written no report is running if one of its processes lives.
        """
        if self.report is not None:
            return str(self.report["result"])
        return "running" if self.living or self.elsewhere else "ended without a report"

    def advice(self) -> str:
        """
        Return a sentence that says what to do after the end of the run.
        """
        if self.result == "completed":
            return "nothing to do: a new job needs another --run-dir"
        store = checkpoint_store_there(self.run_dir)
        newest = checkpoint.newest(store)
        if newest is None:
            return (
                f"there is no checkpoint to go on from: read {self.run_dir / 'logs'}, and start "
                "the job anew with another --run-dir"
            )
        unfit = known_unfit(store, newest)
        again = f"the same command with --run-dir {self.run_dir} --resume continues from {newest}"
        incidents = () if self.report is None else self.report["incidents"]
        return unfit or to_go_on(incidents, again)


def read_records(run_dir: Path) -> Records:
    """
    Read the records of the last run in a run directory.

    Raises `UsageError` if the directory does not exist, is no run directory, or if its `job.json`
    or `report.json` cannot be read.
    """
    path = run_dir / JOB
    try:
        told = json.loads(path.read_text())
        settings = dict(told["settings"])
        _ = (settings["job"], settings["broker"], settings["nnodes"], settings["nproc_per_node"])
        # `tft lead` runs no script, and writes an empty word
        command = tuple(str(word) for word in told["command"] if told["command"] != [""])
        began = path.stat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        what = (
            f"this directory has no file {JOB}"
            if run_dir.is_dir()
            else "there is no such directory"
        )
        raise UsageError(
            f"no job has run in {run_dir}: {what}; name the run directory of a job (`tft jobs` "
            "lists them)"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        raise UsageError(
            f"{path} cannot be read as the description of a job: {type(wrong).__name__}: {wrong}"
        ) from None
    report, living = _fresh_report(run_dir), living_parts(run_dir)
    return Records(
        run_dir=run_dir,
        settings=settings,
        command=command,
        began=began,
        report=report,
        living=living,
        # look at the lock only if nothing else shows that the run lives: the look takes the lock
        # for a moment, in which a launcher could not start
        elsewhere=report is None and not living and _is_held(run_dir),
    )


def is_over(run_dir: Path) -> bool:
    """
    Return whether the last run in a run directory has written its report.
    """
    try:
        return (run_dir / REPORT).stat().st_mtime_ns >= (run_dir / JOB).stat().st_mtime_ns
    except FileNotFoundError:
        return False


def _fresh_report(run_dir: Path) -> Mapping[str, Any] | None:  # Any: JSON
    """
    Return the report of the last run, or None if the run has not written it. A report that is older
    than `job.json` belongs to an earlier run.
    """
    path = run_dir / REPORT
    if not is_over(run_dir):
        return None
    try:
        report: dict[str, Any] = json.loads(path.read_text())
        _ = (report["result"], report["why"], report["exit_code"], report["incidents"])
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        raise UsageError(
            f"{path} cannot be read as the report of a job: {type(wrong).__name__}: {wrong}"
        ) from None
    return report


def run_dirs_below(directory: Path) -> Iterator[Path]:
    """
    Yield the run directories at and below a directory, but none that is inside another run
    directory.
    """
    for here, folders, files in os.walk(directory):
        if JOB in files:
            folders.clear()
            yield Path(here)
        folders.sort()


def living_parts(run_dir: Path) -> Mapping[str, int]:
    """
    Return the pids of the run's processes that live on this machine, by the name of the part.

    The kernel reuses pids. So a process counts only if it began before its pid file was written. A
    process that began later only has the same pid.
    """
    found = {}
    for path in sorted((run_dir / "pids").glob("*.pid")):
        try:
            pid, written = int(path.read_text()), path.stat().st_mtime
        except (OSError, ValueError):
            continue
        began = _began(pid)
        if began is not None and began <= written + _TOLERANCE:
            found[path.stem] = pid
    return found


def _is_held(run_dir: Path) -> bool:
    """
    Return whether a launcher of any node holds the lock of its pid file.
    """
    return any(
        is_locked(path)
        for path in (run_dir / "pids").glob("*.pid")
        if path.stem.partition("-")[0] in _LAUNCHERS
    )


def _began(pid: int) -> float | None:
    """
    Return when a process began, in seconds since 1970. Return None if no such process lives on this
    machine.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] in "ZX":  # the process has ended, and its parent has not reaped it yet
        return None
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    # in seconds since 1970, because it is compared with the times of files
    return unix_time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot
