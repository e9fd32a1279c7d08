"""
Functions that run jobs of programs written for MindIO, watch them, and kill all remaining
processes.

A job is started by `tft run`, or with one process per rank as another launcher starts it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mindio.ring import Ring
from tft.bus.ports import free_address

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "program.py"
LIMIT = 90.0
"""Seconds a job may take; a hang is a failure."""

Call = dict[str, Any]
"""The record of a call: the function and its arguments. Any: JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """
    The results of a job that has ended.
    """

    codes: list[int]
    directory: Path
    world: int
    output: str

    def calls(self, rank: int) -> list[Call]:
        """
        Return the recorded function calls of a rank with their arguments, in order.
        """
        path = self.directory / f"calls-{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def called(self, what: str) -> list[tuple[int, Call]]:
        """
        Return all calls of one function, each with the rank that was called.
        """
        return [
            (rank, call)
            for rank in range(self.world)
            for call in self.calls(rank)
            if call["what"] == what
        ]

    def ranks_called(self, what: str) -> list[int]:
        """
        Return the rank of each call of the function `what`. A rank appears once per call.
        """
        return [rank for rank, _ in self.called(what)]

    def finals(self) -> set[str]:
        """
        Return the distinct final states of the ranks.
        """
        return {path.read_text() for path in self.directory.glob("final-*.hex")}

    def losses(self) -> dict[tuple[int, int], set[str]]:
        """
        Return the computed losses by rank and step. A set has several losses if a repeated step had
        a different loss.
        """
        found: dict[tuple[int, int], set[str]] = {}
        for rank in range(self.world):
            path = self.directory / f"losses-{rank}.jsonl"
            for line in path.read_text().splitlines():
                step, loss = json.loads(line)
                found.setdefault((rank, step), set()).add(loss)
        return found

    @property
    def report(self) -> dict[str, Any]:  # Any: JSON
        """
        The content of the job's `report.json`.
        """
        report: dict[str, Any] = json.loads((self.directory / "run" / "report.json").read_text())
        return report

    @property
    def strategies(self) -> list[str]:
        """
        The strategy of each incident, in order.
        """
        return [str(incident["strategy"]) for incident in self.report["incidents"]]


class Job:
    """
    A job that is running.
    """

    def __init__(
        self,
        processes: list[subprocess.Popen[bytes]],
        directory: Path,
        world: int,
        start: Callable[[list[str], int], subprocess.Popen[bytes]],
        words: list[str],
    ) -> None:
        self.processes = processes
        self.directory = directory
        self.world = world
        self._start = start
        self._words = words

    def another(self, rank: int) -> subprocess.Popen[bytes]:
        """
        Start a further process for `rank`, as another launcher starts a replacement.
        """
        return self._start([sys.executable, *self._words], rank)

    def node(self, number: int, *options: str) -> subprocess.Popen[bytes]:
        """
        Start another node for a job that `tft run` has started.
        """
        there = json.loads((self.directory / "run" / "job.json").read_text())["settings"]
        run = [
            *("-m", "tft", "run", "--adaptor", "mindio", "--nproc-per-node", str(self.world)),
            *("--job", there["job"], "--broker", there["broker"]),
            *("--run-dir", there["run_dir"], "--node-rank", str(number), *options),
        ]
        return self._start([sys.executable, *run, *self._words], 0)

    def end(self) -> Outcome:
        """
        Wait until all processes have ended and return the outcome.
        """
        log = self.directory / "output"
        try:
            codes = [process.wait(LIMIT) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job has not ended:\n{log.read_text()[-6000:]}") from None
        return Outcome(
            codes=codes,
            directory=self.directory,
            world=self.world,
            output=log.read_text(errors="replace"),
        )


@contextmanager
def job(
    directory: Path,
    *,
    world: int = 4,
    steps: int = 8,
    program: Path = PROGRAM,
    launched: bool = False,
    run_options: str = "",
    port: int = 0,
    environment: Mapping[str, str] | None = None,
    **options: Any,  # Any: options of the program, as JSON
) -> Iterator[Job]:
    """
    Start a program, yield the running job, and kill its remaining processes by pid at the end.

    With `launched`, one process per rank is started, as by a launcher other than `tft run`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    ring = Ring(world)
    at = str(port) if port else free_address("127.0.0.1").rpartition(":")[2]
    words = [str(program), at, str(ring.port), str(directory), str(steps), json.dumps(options)]
    places = f"--run-dir {directory / 'run'} {run_options}"
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        **(environment or {}),
    }
    commands = [[sys.executable, *words]] * world
    if launched:
        variables |= {"TFT_RUN_OPTIONS": places, "WORLD_SIZE": str(world)}
    else:
        run = ["-m", "tft", "run", "--adaptor", "mindio", "--nproc-per-node", str(world)]
        commands = [[sys.executable, *run, *places.split(), *words]]
    processes: list[subprocess.Popen[bytes]] = []
    with (directory / "output").open("wb") as output:

        def start(command: list[str], rank: int) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                command, cwd=directory, env={**variables, "RANK": str(rank)}, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            processes.append(process)
            return process

        try:
            for rank, command in enumerate(commands):
                start(command, rank)
            yield Job(processes, directory, world, start, words)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            ring.close()


def until(what: str, holds: Callable[[], bool]) -> None:
    """
    Wait until `holds()` is true. Fails after `LIMIT` seconds with the text `what`.
    """
    limit = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < limit, f"waited in vain until {what}"
        time.sleep(0.02)


def calls(running: Job, rank: int, what: str) -> list[Call]:
    """
    Return the calls of the function `what` that a rank has recorded so far.
    """
    path = running.directory / f"calls-{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    noted = [json.loads(line) for line in lines if line.endswith("}")]
    return [each for each in noted if each["what"] == what]


def finish(running: Job) -> tuple[Outcome, int]:
    """
    Let the job end, and return its outcome and the number of its last step.
    """
    (running.directory / "done").touch()
    outcome = running.end()
    last = running.directory / "last"
    return outcome, int(last.read_text()) if last.exists() else 0


def steps_of(running: Job, rank: int) -> int:
    """
    Return how many steps a rank has begun. Repeated steps count each time.
    """
    path = running.directory / f"losses-{rank}.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def trains_on(running: Job) -> None:
    """
    Wait until rank 0 has begun several more steps.
    """
    before = steps_of(running, 0)
    until("the job trains on", lambda: steps_of(running, 0) > before + 5)
