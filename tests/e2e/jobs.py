"""
Real jobs: `tft run` in a separate process, with checks that no process is left behind.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "examples" / "gpt" / "train.py"
LIMIT = 100.0
"""The time limit of a job in seconds. A job that hangs is a failure."""
MARK = "TFT_TEST_RUN"
"""The environment variable that every process of a test's job inherits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """
    The result of a job that has ended: its exit code, output and run directory.
    """

    code: int
    output: str
    run_dir: Path

    @property
    def report(self) -> dict[str, Any]:  # Any: JSON
        """
        The content of `report.json` in the run directory.
        """
        report: dict[str, Any] = json.loads((self.run_dir / "report.json").read_text())
        return report

    @property
    def incidents(self) -> list[dict[str, Any]]:  # Any: JSON
        """
        The incidents of the report, in order.
        """
        incidents: list[dict[str, Any]] = self.report["incidents"]
        return incidents

    def rows(self) -> dict[tuple[int, int], str]:
        """
        Return the loss of every rank and step. Fail the test if a step appears twice.
        """
        rows: dict[tuple[int, int], str] = {}
        for path in sorted(self.run_dir.glob("steps-rank*.jsonl")):
            rank = int(path.stem.removeprefix("steps-rank"))
            for line in path.read_text().splitlines():
                row = json.loads(line)
                assert (rank, row["step"]) not in rows, f"{path} holds step {row['step']} twice"
                rows[rank, row["step"]] = row["loss"]
        return rows

    def finals(self) -> dict[int, dict[str, str]]:
        """
        Return the digests of every rank at the end of the job.
        """
        return {
            int(path.stem.removeprefix("final-rank")): json.loads(path.read_text())
            for path in self.run_dir.glob("final-rank*.json")
        }

    def chaos(self) -> list[dict[str, Any]]:  # Any: JSON
        """
        Return the records of the faults that chaos injected, in order of time.
        """
        records = [json.loads(p.read_text()) for p in (self.run_dir / "chaos").glob("*-*.json")]
        return sorted(records, key=lambda record: float(record["at"]))


class Job:
    """
    A running job.
    """

    def __init__(self, process: subprocess.Popen[str], run_dir: Path, log: Path) -> None:
        self.process = process
        self.run_dir = run_dir
        self._log = log

    def end(self, limit: float = LIMIT) -> Outcome:
        """
        Wait until the job has ended, at most `limit` seconds, and return its outcome.
        """
        try:
            code = self.process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job has not ended:\n{self.output()[-6000:]}") from None
        return Outcome(code=code, output=self.output(), run_dir=self.run_dir)

    def output(self) -> str:
        """
        Return what the job has printed so far.
        """
        return self._log.read_text(errors="replace")

    def asked(self, *words: str) -> tuple[int, str]:
        """
        Run a `tft` command on this job. Return the exit code and the error output of the command.
        """
        command = [sys.executable, "-m", "tft", words[0], "--run-dir", str(self.run_dir)]
        done = subprocess.run(
            [*command, *words[1:]],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=LIMIT, check=False,
        )  # fmt: skip
        return done.returncode, done.stderr

    def pid(self, name: str) -> int:
        """
        Return the process id of a part of the job, such as a rank or an agent, by its name.
        """
        return int((self.run_dir / "pids" / f"{name}.pid").read_text())


@contextmanager
def job(
    run_dir: Path,
    *options: str,
    script: Path = TRAIN,
    arguments: Sequence[str] = ("--steps", "20"),
    nproc: int = 4,
    environment: Mapping[str, str] | None = None,
    before: str = "",
) -> Iterator[Job]:
    """
    Start `tft run` with some additional environment variables. `before` is what a shell does before
    that, such as `ulimit`.

    At the end of the `with` block, kill all remaining processes of the job by their process ids.
    """
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    log = run_dir.with_name(f"{run_dir.name}-{len(list(run_dir.parent.glob('*.out')))}.out")
    command = [
        sys.executable, "-m", "tft", "run", "--nproc-per-node", str(nproc),
        "--run-dir", str(run_dir), *options, str(script), *arguments,
    ]  # fmt: skip
    if before:
        command = ["sh", "-c", f'{before} && exec "$@"', "sh", *command]
    with started(command, run_dir, log, environment=environment) as running:
        yield running


@contextmanager
def started(
    command: Sequence[str],
    run_dir: Path,
    log: Path,
    *,
    where: Path = ROOT,
    environment: Mapping[str, str] | None = None,
    alone: bool = False,
) -> Iterator[Job]:
    """
    Start a process of the job in `run_dir`, with its output in the file `log`.

    At the end of the `with` block, kill all remaining processes of the job by their process ids.
    With `alone`, kill only this process and those that end with it.
    """
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=where, stdout=out, stderr=subprocess.STDOUT, text=True,
            start_new_session=True, env={**os.environ, **(environment or {}), MARK: str(run_dir)},
        )  # fmt: skip
    try:
        yield Job(process, run_dir, log)
    finally:
        process.kill()
        process.wait()
        for pid in [] if alone else left_behind(run_dir):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def run(run_dir: Path, *options: str, limit: float = LIMIT, **how: Any) -> Outcome:  # Any: job's
    """
    Run a job from start to end. Fail the test if the job leaves a process behind.
    """
    with job(run_dir, *options, **how) as running:
        outcome = running.end(limit)
        assert left_behind(run_dir) == [], "processes were left behind"
    return outcome


def run_once(
    factory: pytest.TempPathFactory, name: str, run_in: Callable[[Path], Outcome]
) -> Outcome:
    """
    Return the outcome of a job with which several tests compare theirs.

    The job runs once per test run, in the first process of pytest that asks for it. The other
    processes of pytest wait for the outcome.
    """
    base = factory.getbasetemp()
    where = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"once-{name}"
    where.mkdir(exist_ok=True)
    output = where / "output"
    with (where / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held until the file is closed
        if not output.exists():
            outcome = run_in(where / "run")
            assert outcome.code == 0, outcome.output
            output.write_text(outcome.output)
    return Outcome(code=0, output=output.read_text(), run_dir=where / "run")


def left_behind(run_dir: Path) -> list[int]:
    """
    Return the ids of all processes of the job.

    A process belongs to the job if its environment names the run directory.
    """
    needle = os.fsencode(f"{MARK}={run_dir}\0")
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z" and needle in words:
            found.append(int(entry.name))
    return found


def identical(outcome: Outcome, undisturbed: Outcome) -> None:
    """
    Check that the job has the same losses at all ranks and steps, and the same final digests, as
    the undisturbed job.
    """
    assert undisturbed.finals()
    found = differences(outcome, undisturbed)
    assert not found, "; ".join(found)


def differences(outcome: Outcome, undisturbed: Outcome) -> list[str]:
    """
    Return a sentence for each rank on which losses or final digests of two jobs differ.
    """
    sentences = []
    losses, others = outcome.rows(), undisturbed.rows()
    found, expected = outcome.finals(), undisturbed.finals()
    ranks = {rank for rank, _ in losses | others} | found.keys() | expected.keys()
    for rank in sorted(ranks):
        steps = {step for r, step in losses | others if r == rank}
        wrong = [n for n in sorted(steps) if losses.get((rank, n)) != others.get((rank, n))]
        if wrong:
            sentences.append(f"the losses of steps {wrong} differ on rank {rank}")
        left, right = found.get(rank, {}), expected.get(rank, {})
        parts = [n for n in sorted(left | right) if left.get(n) != right.get(n)]
        if parts:
            sentences.append(f"the digests of {', '.join(parts)} differ on rank {rank}")
    return sentences


def until(fact: Callable[[], bool], what: str, limit: float = 20.0) -> None:
    """
    Wait until `fact` is true, at most `limit` seconds. `what` names the fact in the error message.

    This is for facts that no event reports, such as the content of a file or the end of a process.
    """
    end = time.monotonic() + limit
    while not fact():
        assert time.monotonic() < end, f"{what} did not come true in {limit} s"
        time.sleep(0.01)


def reached(running: Job, step: int) -> Callable[[], bool]:
    """
    Return a function that tells whether rank 0 has begun `step`.
    """
    path = running.run_dir / "steps-rank0.jsonl"
    return lambda: path.exists() and path.read_text().count("\n") >= step


def strike(running: Job, name: str) -> None:
    """
    Kill the part `name` of the job with SIGKILL, by its process id.
    """
    os.kill(running.pid(name), signal.SIGKILL)


def logged_events(run_dir: Path) -> list[str]:
    """
    Return the events in the controller's log that it tells its plugins: those of level `info`
    without a logger of a plugin, in order.
    """
    lines = (run_dir / "logs" / "controller.log").read_text().splitlines()
    return [
        word.removeprefix("event=")
        for line in lines
        if " level=info " in line
        for word in line.split()
        if word.startswith("event=")
    ]
