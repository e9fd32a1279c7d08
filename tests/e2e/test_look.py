"""
The commands that look at jobs, on a real job: `tft status`, `tft top`, `tft jobs` and `tft doctor`.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import FAKE
from tests.e2e.jobs import ROOT, Job, job, reached, strike, until
from tests.e2e.terminals import shown, terminal

LONG = ("100000", "--seconds", "0.02")
"""The arguments of a job that does not end by itself."""


def tft(*words: str, cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    """
    Run a `tft` command without a terminal.
    """
    command = [sys.executable, "-m", "tft", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def facts(run_dir: Path) -> dict[str, Any]:  # Any: JSON
    """
    Return what `tft status --json` says of a job that answers.
    """
    done = tft("status", "--run-dir", str(run_dir), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """
    Return a job with three ranks that trains until the end of this file.
    """
    run_dir = tmp_path_factory.mktemp("looks") / "run"
    with job(run_dir, "--adaptor", "fake", script=FAKE, arguments=LONG, nproc=3) as started:
        until(reached(started, 5), "step 5")
        yield started


def test_status_says_where_the_ranks_of_a_job_are(running: Job) -> None:
    """When a job trains, then its status has the step, the step time, the parts and the processes
    of its ranks."""
    told = facts(running.run_dir)

    assert (told["state"], told["incidents"], told["open_incident"]) == ("healthy", 0, None)
    assert told["slowest"]["step"] >= 5
    assert told["step_seconds"] >= 0.02
    assert told["parts"]["broker"]["answers"]
    assert told["parts"]["controller"] == {"answers": True, "epoch": 1}
    [node] = told["parts"]["nodes"]
    assert (node["answers"], node["ranks"], node["pid"]) == (
        True,
        [0, 1, 2],
        running.pid("agent-0"),
    )
    pids = [running.pid(f"rank-{rank}") for rank in range(3)]
    assert [each["pid"] for each in told["ranks"]] == pids
    assert told["missing_ranks"] == []


def test_stopped_rank_is_named_at_once(running: Job) -> None:
    """When the process of a rank is stopped, then the next line of `tft top` says so, before the
    job has noticed."""
    pid = running.pid("rank-1")
    command = [sys.executable, "-m", "tft", "top", "--run-dir", str(running.run_dir), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as top:
        try:
            assert top.stdout is not None
            assert [each["stopped"] for each in json.loads(top.stdout.readline())["ranks"]] == [
                *3 * [False]
            ]
            os.kill(pid, signal.SIGSTOP)
            for line in top.stdout:
                told = json.loads(line)
                if any(each["stopped"] for each in told["ranks"]):
                    break
        finally:
            os.kill(pid, signal.SIGCONT)
            top.kill()

    assert [each["pid"] for each in told["ranks"] if each["stopped"]] == [pid]
    assert told["state"] == "healthy"


def test_jobs_lists_the_run_with_its_state_and_step(running: Job) -> None:
    """When a run is running, then the list of runs has what its job does, and its step."""
    done = tft("jobs", str(running.run_dir.parent), "--json")

    [run] = json.loads(done.stdout)
    assert (run["state"], run["doing"]) == ("running", "healthy")
    assert run["steps"] >= 5
    assert isinstance(run["incidents"], int)
    assert run["processes"]["run"] == running.process.pid


def test_doctor_asks_the_broker_of_the_job(running: Job) -> None:
    """When a run directory of a running job is given, then messages go through the job's broker,
    and the job's adaptor is imported."""
    done = tft("doctor", "--run-dir", str(running.run_dir), "--json")

    told = json.loads(done.stdout)
    assert (done.returncode, told["failed"]) == (0, 0), done.stdout
    found = {each["check"]: each["text"] for each in told["checks"]}
    settings = json.loads((running.run_dir / "job.json").read_text())["settings"]
    assert found["broker"].startswith(f"{settings['broker']} returns a message")
    assert found["adaptor"].startswith("fake has all required hooks")


def test_top_is_left_with_control_c(running: Job) -> None:
    """When Ctrl-C is pressed, then `tft top` exits with 0. Until then it shows the job in 80
    columns."""
    with terminal("top", "--run-dir", str(running.run_dir)) as (process, ours):
        text = shown(ours, "Ctrl-C leaves")
        process.send_signal(signal.SIGINT)
        shown(ours)
        assert process.wait(20) == 0

    drawn = text.splitlines()
    assert max(map(len, drawn)) <= 80
    assert any(line.startswith("healthy") for line in drawn)
    assert any(line.split()[:2] == ["2", "0"] for line in drawn)


def test_top_gives_the_terminal_back_on_sigterm(running: Job) -> None:
    """When `tft top` gets SIGTERM, then it leaves the other screen, shows the cursor, and exits with
    143."""
    with terminal("top", "--run-dir", str(running.run_dir)) as (process, ours):
        shown(ours, "Ctrl-C leaves")
        process.send_signal(signal.SIGTERM)
        rest = shown(ours, raw=True)
        assert process.wait(20) == 143

    assert "\x1b[?1049l" in rest
    assert "\x1b[?25h" in rest


def test_top_without_a_terminal_is_refused(running: Job) -> None:
    """When the output is no terminal, then `tft top` is refused, and names the command for one
    look."""
    done = tft("top", "--run-dir", str(running.run_dir))

    assert (done.returncode, done.stdout) == (2, "")
    assert "draws in a terminal" in done.stderr
    assert f"use `tft status --run-dir {running.run_dir}`" in done.stderr


def test_incident_is_described_when_it_is_over(running: Job) -> None:
    """When a rank was killed and replaced, then `tft top` describes the incident, and shows the new
    process of the rank."""
    command = [sys.executable, "-m", "tft", "top", "--run-dir", str(running.run_dir), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as top:
        try:
            assert top.stdout is not None
            before = json.loads(top.stdout.readline())["incidents"]
            strike(running, "rank-2")
            for line in top.stdout:
                told = json.loads(line)
                if told["incidents"] > before and told["open_incident"] is None:
                    break
        finally:
            top.kill()

    incident = told["last_incident"]
    assert (told["incidents"], incident["strategy"]) == (before + 1, "recover")
    assert [(fault["kind"], fault["rank"]) for fault in incident["faults"]] == [("process", 2)]
    assert told["ranks"][2]["pid"] == running.pid("rank-2")
    assert told["ranks"][2]["incarnation"] == 1


@pytest.mark.soak
def test_looks_end_with_the_job(running: Job) -> None:
    """When the job ends, then `tft top` prints its result and exits with 0. `tft status` then says
    how the job ended, and how to go on. This is the last test of the job."""
    run_dir = running.run_dir
    command = [sys.executable, "-m", "tft", "top", "--run-dir", str(run_dir), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as top:
        assert top.stdout is not None
        assert json.loads(top.stdout.readline())["state"] == "healthy"
        running.process.send_signal(signal.SIGTERM)
        *_, last = top.stdout.read().splitlines()
    assert running.end().code == 143

    assert top.returncode == 0
    assert (json.loads(last)["state"], json.loads(last)["result"]) == ("over", "cancelled")
    told = facts(run_dir)
    assert told["exit_code"] == 143
    assert told["last_incident"]["strategy"] == "dump"
    assert f"--run-dir {run_dir} --resume continues from {run_dir}" in told["advice"]
