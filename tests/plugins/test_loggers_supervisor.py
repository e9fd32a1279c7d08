"""
The process of the loggers, as the controller keeps it.
"""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tft_loggers import supervisor as keeping
from tft_loggers.final import Final
from tft_loggers.places import FAILED, STATE
from tft_loggers.supervisor import Supervisor

from tests.e2e.jobs import until
from tft.last_words import forget_words, last_words
from tft.spi import Remark


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """
    Return a run directory in which rank 0 has logged three steps.
    """
    (tmp_path / "logs").mkdir()
    rows = [{"step": step, "unix": 1.5, "values": {"a": step / 7}} for step in (1, 2, 3)]
    (tmp_path / "values-rank0.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path


@pytest.fixture
def supervisor(run_dir: Path) -> Iterator[Supervisor]:
    """
    Yield a supervisor that has started its process. At the end the process has ended.
    """
    made = Supervisor(run_dir, "j", ["jsonl"])
    made.start()
    try:
        yield made
    finally:
        made.ends("completed")
        made.close()
        assert made.process is not None
        assert made.process.poll() is not None


def steps(run_dir: Path) -> list[int]:
    """
    Return the steps that have reached the loggers.
    """
    path = run_dir / "values.jsonl"
    return (
        [json.loads(row)["step"] for row in path.read_text().splitlines()] if path.exists() else []
    )


def kill(supervisor: Supervisor) -> None:
    """
    Kill the process of the loggers.
    """
    assert supervisor.process is not None
    os.kill(supervisor.process.pid, signal.SIGKILL)
    supervisor.process.wait()


def test_process_that_was_killed_is_run_once_more_at_the_end(
    run_dir: Path, supervisor: Supervisor
) -> None:
    """When the process of the loggers has been killed and the job ends before it is started again,
    then the rest is sent nevertheless."""
    supervisor.final(0)
    supervisor.final(2)
    until(lambda: steps(run_dir) == [1, 2], "the first steps are sent")
    kill(supervisor)
    supervisor.final(3)
    supervisor.ends("completed")
    supervisor.close()
    assert steps(run_dir) == [1, 2, 3]
    assert Final.of(run_dir / STATE) == Final(step=3, result="completed")


def test_return_of_the_job_is_in_the_file_at_once(run_dir: Path, supervisor: Supervisor) -> None:
    """When the job goes back before a final step, then the file says so when the call returns. The
    next controller does not forget it."""
    supervisor.final(3)
    supervisor.final(1)
    assert Final.of(run_dir / STATE) == Final(step=1, backs=[1])
    supervisor.ends("dumped")
    supervisor.close()
    again = Supervisor(run_dir, "j", ["jsonl"])
    again.start()
    assert Final.of(run_dir / STATE) == Final(step=1, backs=[1])
    again.ends("completed")
    again.close()


def test_directory_that_cannot_be_written_is_remarked_and_said_at_the_end(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When `values/` cannot be written, then a remark says so once, and another when it can be again. If
    it cannot at the end, then the last words of the job say why values are missing."""
    monkeypatch.setattr(keeping, "LIMIT", 1.0)
    (run_dir / STATE).write_text("")
    made = Supervisor(run_dir, "j", ["jsonl"])
    made.start()
    made.final(2)
    made.final(1)
    [remark] = made.remarks()
    assert remark.event == "values_not_sent"
    assert "values cannot be written (File exists)" in str(remark.facts["why"])

    (run_dir / STATE).unlink()
    made.final(0)
    assert [remark.event for remark in made.remarks()] == ["values_not_sent_over"]
    assert Final.of(run_dir / STATE).step == 0

    made.ends("completed")
    blocked = run_dir / STATE / "final.json"
    while not blocked.is_dir():  # the process of the loggers may write the file in between
        blocked.unlink(missing_ok=True)
        with suppress(FileExistsError):
            blocked.mkdir()
    made.close()
    [word] = last_words(run_dir)
    assert f"were sent ({run_dir / STATE} cannot be written (Is a directory)); `" in word


def test_pause_before_the_process_is_started_again_doubles(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the process of the loggers cannot be started, then the first pause is the shortest one,
    and each further pause is twice as long, up to the longest one."""
    monkeypatch.setattr(keeping, "FIRST", 0.01)
    monkeypatch.setattr(keeping, "LONGEST", 0.05)
    (run_dir / "logs").rmdir()
    made = Supervisor(run_dir, "j", ["jsonl"])
    with capture_logs() as logs:
        made.start()
        until(lambda: len(logs) >= 5, "five attempts")
        made.ends("completed")
        made.close()
    pauses = [entry["again_s"] for entry in logs if entry["event"] == "loggers_ended"]
    assert pauses[:5] == [0.01, 0.02, 0.04, 0.05, 0.05]


BROKEN = """
import os

def open_logger(job):
    if not (job.run_dir / "works").exists():
        raise OSError("no room")
    from tft_loggers.jsonl import open_logger
    return open_logger(job)
"""


@pytest.fixture
def broken(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    """
    Return a supervisor with the logger `broken`, which fails until there is a file `works`. It gets
    one second at the end of the job.
    """
    packages = run_dir / "packages"
    info = packages / "broken_logger-1.0.dist-info"
    info.mkdir(parents=True)
    (packages / "broken_logger.py").write_text(BROKEN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-logger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tft.loggers]\nbroken = broken_logger:open_logger\n")
    monkeypatch.setenv("PYTHONPATH", f"{packages}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(keeping, "LIMIT", 1.0)
    return Supervisor(run_dir, "j", ["broken"])


def remarked(supervisor: Supervisor, remarks: list[Remark]) -> int:
    """
    Add the new remarks of a supervisor to `remarks`. Return how many there are.
    """
    remarks += supervisor.remarks()
    return len(remarks)


def test_logger_that_always_fails_is_remarked_and_said_at_the_end(
    run_dir: Path, broken: Supervisor
) -> None:
    """When a logger always fails, then one remark says so with the reason. At the end of the job, a
    sentence for the operator names the command that sends the rest. The next run begins without it."""
    broken.start()
    broken.final(3)
    remarks: list[Remark] = []
    until(lambda: remarked(broken, remarks) == 1, "the failure is remarked")
    broken.ends("completed")
    broken.close()
    assert [(each.event, dict(each.facts)) for each in [*remarks, *broken.remarks()]] == [
        ("logger_failed", {"logger": "broken", "why": "OSError: no room"})
    ]
    (sentence,) = last_words(run_dir)
    assert sentence.startswith("not all values of session.log were sent (broken: OSError: no room)")
    assert sentence.endswith(f"-m tft_loggers {run_dir} broken` sends the rest")
    forget_words(run_dir)
    assert last_words(run_dir) == []


def test_logger_that_works_again_is_remarked(run_dir: Path, broken: Supervisor) -> None:
    """When a logger that has failed takes values again, then a remark says so, and nothing is said
    at the end."""
    broken.start()
    broken.final(3)
    failure = run_dir / STATE / "broken" / FAILED
    until(lambda: failure.exists() and json.loads(failure.read_text())["times"] > 1, "it fails")
    remarks: list[Remark] = []
    until(lambda: remarked(broken, remarks) == 1, "the failure is remarked")
    (run_dir / "works").touch()
    until(lambda: remarked(broken, remarks) == 2, "it works again")
    broken.ends("completed")
    broken.close()
    assert [each.event for each in remarks] == ["logger_failed", "logger_failed_over"]
    assert (last_words(run_dir), steps(run_dir)) == ([], [1, 2, 3])
