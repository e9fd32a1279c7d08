"""
Runs the jobs of `tft verify`, and ends a job that takes too long.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tft.clock import SystemClock
from tft.launcher.run_directory import REPORT

_END = 20.0
"""The time in seconds that a job gets to end after SIGTERM, before it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """
    A job that has ended.
    """

    run_dir: Path
    code: int | None
    """The exit code of `tft run`. None: the job was ended because its time was over."""
    seconds: float

    @property
    def words(self) -> tuple[str, ...]:
        """
        Return the lines that the job has printed.
        """
        return tuple((self.run_dir / OUTPUT).read_text(errors="replace").splitlines())

    @property
    def incidents(self) -> list[dict[str, Any]]:  # Any: parsed JSON
        """
        Return the incidents in the job's report, or an empty list if there is no report.
        """
        path = self.run_dir / REPORT
        found: list[dict[str, Any]] = (
            json.loads(path.read_text())["incidents"] if path.exists() else []
        )
        return found

    def fired(self) -> dict[str, float]:
        """
        Return the values of the option `--chaos` (kills at a given rank, step and phase) whose kill
        was carried out. Each is mapped to the time of the kill (CLOCK_MONOTONIC, seconds). The
        earliest kill comes first.
        """
        firings = [
            json.loads(path.read_text()) for path in (self.run_dir / "chaos").glob("*-*.json")
        ]
        return {each["spec"]: each["at"] for each in sorted(firings, key=lambda each: each["at"])}

    def missed(self) -> dict[str, str]:
        """
        Return the values of the option `--chaos` that do not fit the job, each with the reason.
        """
        found = [
            json.loads(path.read_text()) for path in (self.run_dir / "chaos/missed").glob("*.json")
        ]
        return {each["spec"]: each["why"] for each in found}


OUTPUT = "output.txt"
"""The name of the file in the run directory that contains what the job has printed."""


def run_job(
    run_dir: Path, options: Sequence[str], command: Sequence[str], *, until: float
) -> Ended:
    """
    Run the command `tft run` with `options` and the training `command` until it ends. End the job
    at the time `until` (CLOCK_MONOTONIC, seconds) if it still runs.
    """
    clock = SystemClock()
    began = clock.now()
    run_dir.mkdir(parents=True)
    started = [sys.executable, "-m", "tft", "run", "--run-dir", str(run_dir), *options, *command]
    with (run_dir / OUTPUT).open("wb") as output:
        process = subprocess.Popen(
            started, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        code: int | None = process.wait(max(0.0, until - began))
    except subprocess.TimeoutExpired:
        code = None
    finally:
        if process.poll() is None:
            _end(process)
    return Ended(run_dir=run_dir, code=code, seconds=clock.now() - began)


def _end(process: subprocess.Popen[bytes]) -> None:
    """
    End a job with SIGTERM. If it still runs `_END` seconds later, kill it.
    """
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_END)
    except subprocess.TimeoutExpired:
        # kill the process group of `tft run`: all other processes of the job die with that process
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
