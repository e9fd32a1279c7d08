"""
What manages a cluster has its say, in rank 0 or in a process of its own.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.mindio.jobs import LIMIT, ROOT, Outcome, job
from tests.mindio.test_jobs import assert_same, run
from tft.bus.ports import free_address


def heard(outcome: Outcome) -> list[tuple[str, Any]]:
    """
    The names of what rank 0 was reported, with what matters of each.
    """
    return [said(call) for call in outcome.calls(0) if call["what"].startswith("report_")]


def said(call: dict[str, Any]) -> tuple[str, Any]:
    """
    A report, in short.
    """
    name = call["what"].removeprefix("report_")
    match name:
        case "fault_ranks":
            return name, [tuple(each) for each in call["ranks"]]
        case "stop_complete":
            return name, call["code"]
        case "strategies":
            return name, call["strategies"]
        case _:
            return name, (call["code"], call["strategy"])


def test_rank_0_may_decide_about_the_others(tmp_path: Path) -> None:
    """
    When rank 0 has registered for what the controller reports, it hears of a lost rank and what can be
    done, and what it chooses is done.
    """
    outcome = run(tmp_path, [2, 4, "loop", "kill"], orchestrated=True, run_options="--orchestrated")
    assert_same(outcome)
    assert outcome.strategies == ["recover"]
    assert heard(outcome) == [
        ("fault_ranks", [(2, 1)]),
        ("stop_complete", 0),
        ("strategies", ["exit", "dump", "recover"]),
        ("result", (0, "recover")),
    ]


@pytest.mark.soak
def test_lost_memory_may_be_answered_with_an_end(tmp_path: Path) -> None:
    """
    When the orchestrator chooses a last checkpoint though more could be done, the job is saved and ends.
    """
    outcome = run(
        tmp_path, [1, 4, "loop", "UCE ERROR, device error type 5a"],
        orchestrated=True, run_options="--orchestrated",
        choices={"exit,dump,retry,recover": "dump"},
    )  # fmt: skip
    assert outcome.codes == [3], outcome.output
    assert outcome.strategies == ["dump"]
    assert outcome.called("rename")
    [faults] = [call for call in outcome.calls(0) if call["what"] == "report_fault_ranks"]
    assert faults["ranks"] == [[1, 0]]
    assert faults["codes"] == [[1, "5a"]]


def test_an_orchestrator_that_is_lost_is_not_waited_for(tmp_path: Path) -> None:
    """
    When the rank that decided is the one that is lost, the job decides by itself.
    """
    outcome = run(tmp_path, [0, 4, "loop", "kill"], orchestrated=True, run_options="--orchestrated")
    assert_same(outcome)
    assert outcome.strategies == ["recover"]


class Manager:
    """
    The process of a manager.
    """

    def __init__(self, process: "subprocess.Popen[str]", directory: Path) -> None:
        self._process = process
        self._directory = directory

    def ask(self, *words: Any) -> Any:  # Any: JSON
        """
        Have it call a function; what that said.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def heard(self) -> list[tuple[str, Any]]:
        """
        What it was reported.
        """
        path = self._directory / "heard.jsonl"
        if not path.exists():
            return []
        return [said(json.loads(line)) for line in path.read_text().splitlines()]


@contextmanager
def manager(directory: Path, port: int, **options: Any) -> Iterator[Manager]:
    """
    A manager that leads, whose controller ends with it.
    """
    directory.mkdir(parents=True)
    words = ["4", str(port), str(directory), json.dumps(options)]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TFT_RUN_OPTIONS": f"--run-dir {directory.parent / 'job' / 'run'}",
        "MINDX_TASK_ID": "task-7",
    }
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "manager.py"), *words],
        env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "leads\n"
        yield Manager(process, directory)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(LIMIT) == 0
    finally:
        process.kill()
        process.wait()
        _end_controller(directory.parent / "job" / "run" / "pids" / "lead.pid")
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def _end_controller(pid_file: Path) -> None:
    """
    One that outlives its manager, which a test that has failed has killed.
    """
    with suppress(FileNotFoundError, ProcessLookupError, ValueError):
        os.killpg(int(pid_file.read_text()), signal.SIGKILL)


def test_a_manager_leads_a_job_that_it_has_no_part_in(tmp_path: Path) -> None:
    """
    When the controller was started with rank -1, the ranks find it, rank 0 is lost as any other may be,
    and the manager decides.
    """
    port = int(free_address("127.0.0.1").rpartition(":")[2])
    with manager(tmp_path / "manager", port) as managing:
        assert managing.ask("query_high_availability_switch") is True
        with job(
            tmp_path / "job", launched=True, faults=[[0, 4, "loop", "kill"]], port=port,
            environment={"MINDX_TASK_ID": "task-7"},
        ) as running:  # fmt: skip
            outcome = running.end()
        assert_same(outcome)
        assert managing.heard() == [
            ("fault_ranks", [(0, 1)]),
            ("stop_complete", 0),
            ("strategies", ["exit", "dump", "recover"]),
            ("result", (0, "recover")),
        ]
