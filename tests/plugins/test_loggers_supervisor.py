"""
The process of the loggers, as the controller keeps it.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tft_loggers.final import Final
from tft_loggers.places import STATE
from tft_loggers.supervisor import Supervisor

from tests.e2e.jobs import until


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
