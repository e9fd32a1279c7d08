"""
The records of a run: what the files of a run directory say without asking a process.
"""

import json
import os
from pathlib import Path

import pytest

from tft.config import JobSettings
from tft.errors import UsageError
from tft.launcher.records import living_parts, read_records, run_dirs_below
from tft.launcher.run_directory import make_run_dir, run_dir_of, write_job

DAY = 86400.0


def run_dir_in(folder: Path, name: str = "run") -> Path:
    """
    Return a run directory in which a run has just begun.
    """
    run_dir = folder / name
    make_run_dir(run_dir)
    write_job(JobSettings(job="j", run_dir=run_dir, broker="127.0.0.1:1"), ["train.py", "--fast"])
    return run_dir


def report(run_dir: Path, result: str) -> Path:
    """
    Write the report of a run that is over.
    """
    path = run_dir / "report.json"
    path.write_text(
        json.dumps({"result": result, "why": "", "exit_code": 0, "incidents": [], "steps": 7})
    )
    return path


def test_process_that_began_before_its_pid_file_lives(tmp_path: Path) -> None:
    """When a pid file was written by a process that still lives, then the process is found, and
    the run is running."""
    run_dir = run_dir_in(tmp_path)
    (run_dir / "pids" / "run.pid").write_text(f"{os.getpid()}\n")

    records = read_records(run_dir)

    assert (records.living, records.launchers) == ({"run": os.getpid()}, {"run": os.getpid()})
    assert records.result == "running"
    assert records.command == ("train.py", "--fast")


def test_reused_pid_is_not_taken_for_the_process(tmp_path: Path) -> None:
    """When the process with the pid began after the pid file was written, then the kernel has given
    the pid to another process, and the run is not running."""
    run_dir = run_dir_in(tmp_path)
    path = run_dir / "pids" / "run.pid"
    path.write_text(f"{os.getpid()}\n")
    os.utime(path, (DAY, DAY))

    assert read_records(run_dir).result == "ended without a report"


def test_locked_pid_file_shows_a_launcher_that_cannot_be_seen(tmp_path: Path) -> None:
    """When a launcher holds the lock of its pid file, but no process has its pid here, then the run
    is running elsewhere."""
    run_dir = run_dir_in(tmp_path)
    settings = JobSettings(job="j", run_dir=run_dir, broker="127.0.0.1:1")
    with run_dir_of(settings, 1):
        (run_dir / "pids" / "run-1.pid").write_text("4194305\n")
        records = read_records(run_dir)
        assert (records.result, records.living, records.elsewhere) == ("running", {}, True)
    assert read_records(run_dir).result == "ended without a report"


@pytest.mark.parametrize("text", ["", "no number", "4194305"])
def test_pid_file_without_a_process_is_passed_over(tmp_path: Path, text: str) -> None:
    """When a pid file is empty, damaged, or names no process, then it counts for nothing."""
    run_dir = run_dir_in(tmp_path)
    (run_dir / "pids" / "agent-0.pid").write_text(text)

    assert living_parts(run_dir) == {}


def test_report_of_an_earlier_run_does_not_count(tmp_path: Path) -> None:
    """When the report is older than `job.json`, then it is that of an earlier run."""
    run_dir = run_dir_in(tmp_path)
    path = report(run_dir, "dumped")
    assert read_records(run_dir).result == "dumped"

    os.utime(path, (DAY, DAY))

    assert read_records(run_dir).report is None


def test_completed_job_needs_nothing_and_a_lost_one_a_new_start(tmp_path: Path) -> None:
    """When a job is over, then the advice says what to do next."""
    run_dir = run_dir_in(tmp_path)
    assert "no checkpoint to go on from" in read_records(run_dir).advice()
    report(run_dir, "completed")
    assert read_records(run_dir).advice().startswith("nothing to do")


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("job.json", "{", "cannot be read as the description of a job"),
        ("job.json", '{"command": [], "settings": {}}', "of a job: KeyError: 'job'"),
        ("report.json", "[]", "cannot be read as the report of a job"),
    ],
)
def test_damaged_records_are_refused(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    """When a file of the run directory is damaged, then a sentence names the file."""
    run_dir = run_dir_in(tmp_path)
    (run_dir / name).write_text(text)

    with pytest.raises(UsageError, match=sentence) as refused:
        read_records(run_dir)
    assert str(run_dir / name) in str(refused.value)


def test_directory_without_a_job_is_refused(tmp_path: Path) -> None:
    """When a directory does not exist, or no job has run in it, then the sentence says which."""
    with pytest.raises(UsageError, match="there is no such directory"):
        read_records(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"has no file job\.json"):
        read_records(tmp_path)


def test_run_directories_are_found_at_any_depth(tmp_path: Path) -> None:
    """When run directories lie in folders, then all are found, and nothing inside of them."""
    outer = run_dir_in(tmp_path, "a/b")
    run_dir_in(outer, "inner")
    other = run_dir_in(tmp_path, "c")

    assert list(run_dirs_below(tmp_path)) == [outer, other]
    assert list(run_dirs_below(other)) == [other]
