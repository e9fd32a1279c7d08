"""
The launcher with real processes and a fake framework, for behaviour that no other test of a job
covers.
"""

import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.e2e.conftest import FAKE
from tests.e2e.jobs import Job, job, left_behind, reached
from tft.bus.ports import free_address

LIMIT = 30.0

ADDS = """
import array, sys
import tft
from tft.testing.adaptor import group

class Numbers:
    values = array.array("d", [0.0])

def train(session):
    for step in session.steps(20):
        group().add(1.0)
        with session.update():
            Numbers.values[0] += 1.0

print("given", *sys.argv[1:])
session = tft.init()
session.adopt(model=Numbers())
session.run(train)
"""

WAITS = """
import signal
import tft

tft.init()
print("waiting", flush=True)
signal.pause()
"""


def until(fact: Callable[[], bool], what: str) -> None:
    """
    Wait for a fact that no event reports, such as the content of a file or a process of the
    kernel's table.
    """
    end = time.monotonic() + LIMIT
    while not fact():
        assert time.monotonic() < end, f"{what} did not come true in {LIMIT} s"
        time.sleep(0.01)


def started(
    folder: Path, script: str, *options: str, arguments: tuple[str, ...] = (), before: str = ""
) -> AbstractContextManager[Job]:
    """
    Start a job with the fake adaptor and one rank per node. `before` is as for `job`.
    """
    path = folder / "script.py"
    path.write_text(script)
    return job(
        folder / "run", "--adaptor", "fake", *options, script=path, arguments=arguments, nproc=1,
        before=before,
    )  # fmt: skip


def test_completed_run_writes_the_report_to_the_given_path(tmp_path: Path) -> None:
    """When a job completes, then a copy of the report is at `--report`, and the run directory has
    the command. The arguments after the script are passed to the script."""
    report = tmp_path / "report.json"
    arguments = ("--report", "mine", "--help")
    with started(tmp_path, ADDS, "--report", str(report), arguments=arguments) as running:
        outcome = running.end(LIMIT)

    assert outcome.code == 0, outcome.output
    assert left_behind(running.run_dir) == []
    assert json.loads(report.read_text()) == outcome.report
    assert "given --report mine --help" in outcome.output
    kept = json.loads((running.run_dir / "job.json").read_text())
    assert kept["command"] == [str(tmp_path / "script.py"), *arguments]


def test_two_launchers_on_one_machine_form_a_job_of_two_nodes(tmp_path: Path) -> None:
    """When `tft run` is started as node 0 and as node 1 on one machine, then both ranks train
    together. Both launchers exit with the result of the job."""
    shared = ("--nnodes", "2", "--job", "both", "--broker", free_address("127.0.0.1"))
    with (
        started(tmp_path, ADDS, *shared, "--node-rank", "0") as first,
        started(tmp_path, ADDS, *shared, "--node-rank", "1") as second,
    ):
        outcomes = [first.end(LIMIT), second.end(LIMIT)]

    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    assert left_behind(first.run_dir) == []
    assert outcomes[0].report["steps"] == 20


@pytest.mark.soak
def test_node_that_waits_for_the_controller_ends_on_sigterm(
    tmp_path: Path,
) -> None:
    """When node 0 does not start, then node 1 says that it waits for the controller. On SIGTERM
    node 1 exits with 143 and leaves no process."""
    alone = (
        "--nnodes",
        "2",
        "--node-rank",
        "1",
        "--job",
        "j",
        "--broker",
        free_address("127.0.0.1"),
    )
    with started(tmp_path, ADDS, *alone) as running:
        until(lambda: "or `tft lead`) running?" in running.output(), "a word about what is awaited")
        running.process.send_signal(signal.SIGTERM)
        outcome = running.end(10.0)
        left = left_behind(running.run_dir)

    assert outcome.code == 143, outcome.output
    assert "no controller has been heard yet" in outcome.output
    assert left == []


def test_second_signal_ends_all_processes_at_once(tmp_path: Path) -> None:
    """When a rank does not leave after the first signal, then the second signal kills it, and the
    exit code is that of the first signal."""
    with started(tmp_path, WAITS) as running:
        until(lambda: "waiting" in running.output(), "a rank that waits")
        running.process.send_signal(signal.SIGTERM)
        until(lambda: "SIGTERM" in running.output(), "an answer to the first signal")
        running.process.send_signal(signal.SIGINT)
        outcome = running.end(5.0)
        left = left_behind(running.run_dir)

    assert outcome.code == 143, outcome.output
    assert left == []


@pytest.fixture
def default_hangup() -> Iterator[None]:
    """
    Give SIGHUP its default action in the processes that are started, also if the tests run under
    `nohup`.
    """
    earlier = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, earlier)


@pytest.mark.usefixtures("default_hangup")
@pytest.mark.parametrize("ignored", [False, True])
def test_job_of_a_closed_terminal_ends_after_a_last_checkpoint(
    ignored: bool, tmp_path: Path
) -> None:
    """When `tft run` gets SIGHUP, also twice, as it does when its terminal closes, then the job saves
    a last checkpoint and the exit code is 129. If SIGHUP is ignored, as under nohup, it stays so."""
    before = "trap '' HUP" if ignored else ""
    with job(
        tmp_path / "run", "--adaptor", "fake", script=FAKE,
        arguments=("25", "--seconds", "0.05"), nproc=2, before=before,
    ) as running:  # fmt: skip
        until(reached(running, 5), "step 5")
        for _ in range(2):
            running.process.send_signal(signal.SIGHUP)
        outcome = running.end(LIMIT)

    assert left_behind(running.run_dir) == []
    if ignored:
        assert (outcome.code, outcome.report["result"]) == (0, "completed"), outcome.output
        return
    assert (outcome.code, outcome.report["result"]) == (129, "cancelled"), outcome.output
    assert outcome.report["why"] == "SIGHUP was sent to `tft run` on node 0"
    assert list((running.run_dir / "checkpoints").glob("step-*"))


def test_job_goes_on_when_a_pid_file_or_a_copy_cannot_be_written(tmp_path: Path) -> None:
    """When the controller is killed and the pid file of the next one cannot be written, then this is
    said once, and the job completes. When the copy of the report cannot be written at the end, then
    one sentence says so, the summary follows, and the exit code is that of the job."""
    with job(
        tmp_path / "run", "--adaptor", "fake", "--report", "/dev/full", script=FAKE,
        arguments=("25", "--seconds", "0.05"), nproc=2,
    ) as running:  # fmt: skip
        until(reached(running, 5), "step 5")
        pid, path = running.pid("controller"), running.run_dir / "pids" / "controller.pid"
        path.unlink()
        path.mkdir()
        os.kill(pid, signal.SIGKILL)
        outcome = running.end(LIMIT)

    assert (outcome.code, outcome.report["result"]) == (0, "completed"), outcome.output
    said = f"cannot write {path}: Is a directory; the job goes on without it"
    assert outcome.output.count(said) == 1, outcome.output
    _, unwritten, after = outcome.output.partition(
        "tft: the copy of the report cannot be written to /dev/full (No space left on device): read "
        f"{running.run_dir / 'report.json'}\n"
    )
    assert unwritten, outcome.output
    assert "tft: 25 steps in " in after


def test_job_fails_when_the_broker_dies_more_often_than_the_limit(tmp_path: Path) -> None:
    """When a broker dies more often than the restart limit allows, then the job fails with exit
    code 4, and one sentence gives the reason."""
    with started(tmp_path, WAITS) as running:
        pid = 0
        for _ in range(11):
            pid = next_broker(running, pid)
            os.kill(pid, signal.SIGKILL)
        outcome = running.end(LIMIT)
        left = left_behind(running.run_dir)

    assert outcome.code == 4, outcome.output
    assert "the broker was killed by SIGKILL, after 10 restarts within 60 s" in outcome.output
    assert left == []


def test_job_fails_when_the_beginning_of_its_story_is_damaged(tmp_path: Path) -> None:
    """When the controller dies and its successor cannot read with what the run began, then the job
    fails after one restart. The sentence that names the damaged line is shown."""
    with started(tmp_path, WAITS) as running:
        until(lambda: "waiting" in running.output(), "the rank's start")
        story = running.run_dir / "story.jsonl"
        content = story.read_bytes()
        story.write_bytes(content.replace(b'"kind":"Opened"', b'"kind":Opened"', 1))
        os.kill(running.pid("controller"), signal.SIGKILL)
        outcome = running.end(LIMIT)

    assert outcome.code == 4
    assert "the controller refused to start" in outcome.output
    assert f"tft: {story}, line 1: it cannot be read as JSON" in outcome.output
    assert outcome.output.count("it is started again") == 1
    assert left_behind(running.run_dir) == []


def next_broker(running: Job, before: int) -> int:
    """
    Return the pid of the broker that replaces the one with the pid `before`.
    """
    path = running.run_dir / "pids" / "broker.pid"
    until(lambda: path.exists() and int(path.read_text()) != before, "a new broker")
    return int(path.read_text())


def test_low_limit_of_open_files_is_raised_for_every_part(tmp_path: Path) -> None:
    """When the soft limit of open files is too low for a job, then it is raised to the usual one for
    every process, ranks included, and the job starts."""
    with started(tmp_path, WAITS, before="ulimit -Sn 40 && ulimit -Hn 2000") as running:
        until(lambda: "waiting" in running.output(), "the rank's start")
        for part in ("controller", "agent-0", "rank-0"):
            pid = running.pid(part)
            assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (1024, 2000), part
        assert resource.prlimit(running.pid("broker"), resource.RLIMIT_NOFILE) == (2000, 2000)


def test_too_low_limit_of_open_files_is_refused(tmp_path: Path) -> None:
    """When the hard limit of open files is too low, then `tft run` exits with 2 and names it."""
    with started(tmp_path, WAITS, before="ulimit -n 64") as running:
        outcome = running.end(LIMIT)
    assert outcome.code == 2
    assert outcome.output == (
        "tft: tft run may open only 64 files and needs 256 or more: raise the hard limit (ulimit "
        "-Hn)\n"
    )
    assert not running.run_dir.exists()
