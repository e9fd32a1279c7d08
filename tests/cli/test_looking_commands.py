"""
The commands that look, without a job: what they refuse, and that they cost `tft run` nothing.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tft.bus.ports import free_address
from tft.config import JobSettings
from tft.core.job import shutdown
from tft.launcher import run
from tft.launcher.run_directory import make_run_dir, write_job


def tft(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """
    Run a `tft` command in a folder.
    """
    return subprocess.run(
        [sys.executable, "-m", "tft", *words],
        cwd=folder, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("status", "--run-dir", "nowhere"), "there is no such directory"),
        (("status", "--run-dir", "."), "this directory has no file job.json"),
        (("top", "--run-dir", ".", "--json"), "this directory has no file job.json"),
        (("jobs",), "there is no directory tft-runs"),
    ],
)
def test_wrong_directory_is_refused_in_one_sentence(
    tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    """When a command is given a directory in which no job has run, then one sentence says so, and
    the exit code is 2."""
    done = tft(tmp_path, *words)

    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert sentence in done.stderr


def test_status_of_a_killed_job_says_what_is_left(tmp_path: Path) -> None:
    """When nothing of a job lives, and there is no report, then the exit code of the status is 4, and
    one sentence says what was found. The list of runs says it too."""
    make_run_dir(tmp_path / "run")
    address = free_address("127.0.0.1")
    write_job(JobSettings(job="j", run_dir=tmp_path / "run", broker=address), ["train.py"])
    (tmp_path / "run" / "pids" / "run.pid").write_text("4194305\n")
    done = tft(tmp_path, "status", "--run-dir", "run")

    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (4, "", 1)
    assert "the job in run has ended without a report" in done.stderr
    assert f"its broker at {address} does not answer" in done.stderr
    listed = tft(tmp_path, "jobs", ".").stdout.splitlines()
    assert listed[1].split()[:6] == ["run", "ended", "without", "a", "report", "-"]


def test_jobs_has_the_newest_step_that_is_written(tmp_path: Path) -> None:
    """When a run was killed, or its parts do not answer, then the list has the step of the newest row
    about its progress, and says that it may have been further."""
    make_run_dir(tmp_path / "run")
    address = free_address("127.0.0.1")
    write_job(JobSettings(job="j", run_dir=tmp_path / "run", broker=address), ["train.py"])
    rows = tmp_path / "run" / "progress.jsonl"
    lead = '{"at":1,"unix":1,"run":"r","opened":1.0,"epoch":1,"from_step":40}\n'
    rows.write_text('{"at":1,"unix":1,"step":53,"ranks":2}\n' + lead)
    assert tft(tmp_path, "jobs", ".").stdout.splitlines()[1].split()[5] == "40+"

    end = '{"at":3,"unix":3,"state":"freezing","incident":1}\n{"at":4,"un'
    rows.write_text(lead + '{"at":2,"unix":2,"step":62,"ranks":2}\n' + end)
    assert tft(tmp_path, "jobs", ".").stdout.splitlines()[1].split()[5] == "62+"
    (tmp_path / "run" / "pids" / "run.pid").write_text(f"{os.getpid()}\n")
    row = tft(tmp_path, "jobs", ".").stdout.splitlines()[1].split()
    assert row[:5] == ["run", "running:", "no", "answer", "62+"]


def test_run_that_cannot_be_read_is_listed_with_the_reason(tmp_path: Path) -> None:
    """When `job.json` of a run is damaged, then the list has the run, and its last line says why."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.json").write_text("{")
    done = tft(tmp_path, "jobs", ".")

    assert done.returncode == 0
    _, row, why = done.stdout.splitlines()
    assert row.split()[:2] == ["run", "unreadable"]
    assert "run/job.json cannot be read as the description of a job" in why


@pytest.mark.parametrize("buffered", [True, False])
def test_output_that_cannot_be_written_is_one_sentence(tmp_path: Path, buffered: bool) -> None:
    """When the output of a command goes to a full disk, then one sentence says so, and the exit code
    is 2. When its reader has gone, then nothing is said."""
    command = [sys.executable, *(() if buffered else ("-u",)), "-m", "tft", "jobs", ".", "--json"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.json").write_text("{")
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    on_full, on_closed = (
        subprocess.run(
            command, cwd=tmp_path, stdout=where, stderr=subprocess.PIPE, text=True, timeout=60,
            check=False, env={k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"},
        )
        for where in (full, writer)
    )  # fmt: skip
    os.close(full)
    os.close(writer)

    sentence = "tft: the output cannot be written: No space left on device\n"
    assert (on_full.returncode, on_full.stderr) == (2, sentence)
    assert (on_closed.returncode, on_closed.stderr) == (1, "")


def test_run_imports_nothing_of_these_commands(tmp_path: Path) -> None:
    """When `tft run` is made, then no module of a command that looks is imported."""
    code = (
        "import sys, click; from tft.cli.main import tft\n"
        "tft.get_command(click.Context(tft), 'run')\n"
        "rooms = ('tft.cli', 'tft.replay', 'tft.launcher.records', 'rich.live')\n"
        "print(*(m for m in sys.modules if m.startswith(rooms)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert set(done.stdout.split()) == {"tft.cli", "tft.cli.main", "tft.cli.commands"}


def test_processes_of_a_job_import_only_what_they_need(tmp_path: Path) -> None:
    """When the launcher and the broker are imported by the command line, then the launcher has no job
    machine, the broker has no messages, and none has rich."""
    code = (
        "import sys, click; from tft.cli import main\n"
        "main._import_structlog(); import tft.cli.commands, tft.bus.broker\n"
        "words = ('tft.protocol.messages', 'msgspec', 'rich', 'tft.core.job.machine')\n"
        "print(*(m for m in words if m in sys.modules)); import tft.launcher.run\n"
        "print(*(m for m in words if m in sys.modules)); import rich, structlog"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines() == ["", "tft.protocol.messages msgspec"]


def test_launcher_knows_the_reason_of_a_completed_job() -> None:
    """When a job completes, then the reason in its report is the one that the launcher leaves out."""
    assert run.FINISHED == shutdown.FINISHED


def test_top_without_rich_says_what_to_install(tmp_path: Path) -> None:
    """When rich is not installed, then `tft top` is refused, and the sentence names the extra."""
    code = (
        "import sys; from tft.cli.main import main\n"
        "sys.modules['rich.console'] = None\n"  # as Python marks a module that cannot be imported
        "sys.argv = ['tft', 'top', '--run-dir', '.']\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert "pip install 'tft-bus[terminal]'" in done.stderr
    assert "`tft status --run-dir .`" in done.stderr
