"""
Tests of a program that manages a cluster and decides over a job, in rank 0 or in its own process.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from mindio_ttp.checks import Refused
from mindio_ttp.environment import ORCHESTRATOR
from mindio_ttp.orchestrator import REPORTS, Orchestrator

from tests.mindio.expected import assert_expected
from tests.mindio.jobs import LIMIT, ROOT, Job, Outcome, calls, finish, job, trains_on, until
from tests.mindio.test_jobs import assert_same, run
from tft.bus.ports import free_address


def heard(outcome: Outcome) -> list[tuple[str, Any]]:
    """
    Return the reports that rank 0 received, each with its name and main content.
    """
    return [said(call) for call in outcome.calls(0) if call["what"].startswith("report_")]


def said(call: dict[str, Any]) -> tuple[str, Any]:
    """
    Return the name of a report and its main content.
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


def test_rank_0_can_be_the_orchestrator(tmp_path: Path) -> None:
    """When rank 0 has registered for the controller's reports, then it is told of a lost rank and
    of the possible strategies, and its choice is carried out."""
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
def test_an_orchestrator_may_choose_a_last_checkpoint_for_lost_memory(tmp_path: Path) -> None:
    """When the orchestrator chooses a last checkpoint although a repair is possible, then the job
    saves it and ends."""
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


@pytest.mark.soak
def test_a_job_decides_by_itself_when_its_orchestrator_is_lost(tmp_path: Path) -> None:
    """When the rank of the orchestrator is lost, then the job decides by itself."""
    outcome = run(tmp_path, [0, 4, "loop", "kill"], orchestrated=True, run_options="--orchestrated")
    assert_same(outcome)
    assert outcome.strategies == ["recover"]


RECOVERED = [
    ("stop_complete", 0),
    ("strategies", ["exit", "dump", "recover"]),
    ("result", (0, "recover")),
]
"""The reports that follow the faults of a lost rank, when the manager chooses the last offered
strategy."""
TASK = {"MINDX_TASK_ID": "task-7"}


@pytest.fixture(autouse=True)
def nobody_left(tmp_path: Path) -> Iterator[None]:
    """
    Kill controllers that outlive their manager after a failed test.
    """
    yield
    for path in tmp_path.glob("**/pids/lead.pid"):
        _end_controller(path)


class Manager:
    """
    A running process of `manager.py`.
    """

    def __init__(self, process: "subprocess.Popen[str]", directory: Path) -> None:
        self.process = process
        self._directory = directory

    def ask(self, *words: Any) -> Any:  # Any: JSON
        """
        Let the manager call a function and return the result.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def heard(self) -> list[tuple[str, Any]]:
        """
        Return the reports that the manager has received so far.
        """
        path = self._directory / "heard.jsonl"
        if not path.exists():
            return []
        return [said(json.loads(line)) for line in path.read_text().splitlines()]

    def end(self) -> None:
        """
        Close the manager's input and wait until the manager exits.
        """
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(LIMIT) == 0


@contextmanager
def manager(
    directory: Path, port: int, *, leads: bool = True, task: str = "task-7", **options: Any
) -> Iterator[Manager]:
    """
    Start a manager of the job in the directory `job` beside `directory`, and yield it.

    When the context ends, the manager is stopped if it still runs.
    """
    directory.mkdir(parents=True)
    words = ["4", str(port), str(directory), json.dumps(options)]
    variables = {
        **os.environ,
        "MINDX_TASK_ID": task,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TFT_RUN_OPTIONS": f"--run-dir {directory.parent / 'job' / 'run'}",
    }
    with (directory / "errors").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "manager.py"), *words],
            env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            start_new_session=True,
        )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == ("leads\n" if leads else ""), (
            directory / "errors"
        ).read_text()
        yield Manager(process, directory)
        if process.poll() is None:
            Manager(process, directory).end()
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


def lead_file(directory: Path) -> Path:
    """
    Return the file that holds the pid and the lock of a job's `tft lead` process.
    """
    return directory / "run" / "pids" / "lead.pid"


def _end_controller(pid_file: Path) -> None:
    """
    Kill a `tft lead` process and all processes that it has started.
    """
    with suppress(FileNotFoundError, ProcessLookupError, ValueError):
        os.killpg(int(pid_file.read_text()), signal.SIGKILL)


def lives(pid_file: Path) -> bool:
    """
    Return whether the process in `pid_file` exists and is not a zombie.
    """
    try:
        state = Path(f"/proc/{int(pid_file.read_text())}/stat").read_text()
    except FileNotFoundError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def free_port() -> int:
    """
    Return a port that a controller can listen at.
    """
    return int(free_address("127.0.0.1").rpartition(":")[2])


@contextmanager
def led(tmp_path: Path, port: int, **options: Any) -> Iterator[Job]:  # Any: options of the program
    """
    Start a job of four ranks that the manager at `port` leads, and yield it once it trains.

    Rank 2 is killed when a file `strike` exists.
    """
    with job(
        tmp_path / "job", launched=True, port=port, environment=TASK, done="done",
        faults=[[2, 0, "loop", "kill"]], **options,
    ) as running:  # fmt: skip
        trains_on(running)
        yield running


def lose_a_rank(running: Job, managing: Manager) -> None:
    """
    Kill rank 2 and wait until the manager has received all reports of the recovery.
    """
    assert managing.heard() == []
    (running.directory / "strike").touch()
    until("the rank is replaced", lambda: len(managing.heard()) == 1 + len(RECOVERED))
    assert managing.heard() == [("fault_ranks", [(2, 1)]), *RECOVERED]
    trains_on(running)


def assert_one_story(outcome: Outcome, steps: int, *strategies: str) -> None:
    """
    Check that the job trained like a job without faults, without a restart of the job.

    One process of rank 2 was replaced for each strategy; no other process was replaced.
    """
    assert_expected(outcome, steps)
    assert outcome.strategies == list(strategies)
    assert outcome.ranks_called("started") == sorted([0, 1, 2, 3] + [2] * len(strategies))
    story = (outcome.directory / "run" / "story.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in story].count("Opened") == 1


@pytest.mark.soak
def test_a_manager_that_is_no_rank_decides(tmp_path: Path) -> None:
    """When the controller was started with rank -1, then the ranks find the controller, and the
    manager decides about a lost rank, even rank 0."""
    port = free_port()
    with manager(tmp_path / "manager", port) as managing:
        assert managing.ask("query_high_availability_switch") is True
        with job(
            tmp_path / "job", launched=True, faults=[[0, 4, "loop", "kill"]], port=port,
            environment=TASK,
        ) as running:  # fmt: skip
            outcome = running.end()
        assert_same(outcome)
        assert managing.heard() == [("fault_ranks", [(0, 1)]), *RECOVERED]


@pytest.mark.soak
def test_a_manager_that_restarts_its_controller_does_not_end_the_job(tmp_path: Path) -> None:
    """When a manager destroys its controller and starts it again while a job trains, then the job
    trains on, and the manager decides about a rank that is lost afterwards. No process is left at
    the end."""
    port = free_port()
    with manager(tmp_path / "manager", port) as managing, led(tmp_path, port) as running:
        managing.ask("restart")
        trains_on(running)
        lose_a_rank(running, managing)
        managing.ask("restart")
        outcome, steps = finish(running)
        assert_one_story(outcome, steps, "recover")
        assert managing.ask("destroy_controller") is None
        assert not lives(lead_file(running.directory))


@pytest.mark.soak
@pytest.mark.parametrize("with_controller", [False, True])
def test_a_new_manager_takes_the_job_over(tmp_path: Path, with_controller: bool) -> None:
    """When the process of a manager is killed, alone or with its controller, then the job trains
    on, and a new manager at the same address decides about the next lost rank."""
    port = free_port()
    with manager(tmp_path / "first", port) as first, led(tmp_path, port) as running:
        lead = lead_file(running.directory)
        before = lead.read_text()
        first.process.kill()
        first.process.wait()
        if with_controller:
            _end_controller(lead)
            until("the controller is gone", lambda: not lives(lead))
        trains_on(running)
        with manager(tmp_path / "second", port) as second:
            assert (lead.read_text() == before) is not with_controller
            trains_on(running)
            lose_a_rank(running, second)
            outcome, steps = finish(running)
            assert_one_story(outcome, steps, "recover")
            assert first.heard() == []
        assert not lives(lead)


@pytest.mark.soak
def test_a_new_manager_decides_about_the_open_incident(tmp_path: Path) -> None:
    """When a manager is killed before its choice, and another one starts, then the new manager gets
    the whole incident, and decides."""
    port = free_port()
    never = {"exit,dump,recover": f"after {tmp_path / 'never'}"}
    with manager(tmp_path / "first", port, choices=never) as first, led(tmp_path, port) as running:
        (running.directory / "strike").touch()
        until("it is offered", lambda: len(first.heard()) == len(RECOVERED))
        with manager(tmp_path / "second", port) as second:
            first.process.kill()
            until("the rank is replaced", lambda: len(second.heard()) == 1 + len(RECOVERED))
            assert second.heard() == [("fault_ranks", [(2, 1)]), *RECOVERED]
            outcome, steps = finish(running)
        assert_one_story(outcome, steps, "recover")


@pytest.mark.soak
@pytest.mark.parametrize("leaves", ["destroys", "ends"])
def test_a_job_without_manager_decides_by_itself(tmp_path: Path, leaves: str) -> None:
    """When a manager destroys its controller while a job trains, or the manager ends, and no other
    manager comes, then a lost rank is replaced without asking a manager, and the controller ends
    with the job."""
    port = free_port()
    with manager(tmp_path / "manager", port) as managing, led(tmp_path, port) as running:
        if leaves == "ends":
            managing.end()
        else:
            managing.ask("destroy_controller")
        (running.directory / "strike").touch()
        until("it is replaced", lambda: len(calls(running, 2, "started")) == 2)
        trains_on(running)
        outcome, steps = finish(running)
        assert_one_story(outcome, steps, "recover")
        assert managing.heard() == []
        until("the controller is gone", lambda: not lives(lead_file(running.directory)))


@pytest.mark.soak
@pytest.mark.parametrize("kills", [False, True])
def test_a_controller_without_ranks_ends_when_its_manager_destroys_it(
    tmp_path: Path, kills: bool
) -> None:
    """When a manager destroys its controller before any rank has joined, then the controller ends.
    This also holds if the manager took the controller over from a manager that was killed."""
    port = free_port()
    with manager(tmp_path / "first", port) as first:
        if not kills:
            first.ask("destroy_controller")
        else:
            first.process.kill()
            first.process.wait()
            assert lives(lead_file(tmp_path / "job"))
            with manager(tmp_path / "second", port) as second:
                second.ask("destroy_controller")
        assert not lives(lead_file(tmp_path / "job"))


@pytest.mark.soak
def test_the_second_of_two_managers_decides(tmp_path: Path) -> None:
    """When a second manager starts at the address of a living one, then there is still one
    controller, and it reports faults to the second manager. Orders of the first manager are ignored
    until the second one has left."""
    port = free_port()
    with manager(tmp_path / "first", port) as first, led(tmp_path, port) as running:
        before = lead_file(running.directory).read_text()
        with manager(tmp_path / "second", port) as second:
            assert lead_file(running.directory).read_text() == before
            assert first.ask("notify_controller_dump") == 1
            lose_a_rank(running, second)
            assert first.heard() == []
        assert first.ask("query_high_availability_switch") is True
        until("the first one decides", lambda: first.ask("notify_controller_stop_train", {}) == 0)
        outcome, steps = finish(running)
        assert_one_story(outcome, steps, "recover")


@pytest.mark.soak
def test_a_manager_of_another_job_is_refused_at_a_used_port(tmp_path: Path) -> None:
    """When a manager of another job starts at a port in use, then it is refused, and the first job
    keeps its manager."""
    port = free_port()
    with manager(tmp_path / "first", port) as first:
        with manager(tmp_path / "other" / "second", port, leads=False, task="another") as second:
            assert second.process.wait(LIMIT) == 1
            said = (tmp_path / "other" / "second" / "errors").read_text()
            assert "another process listens there" in said
            assert "tft_start_controller: no controller leads" in said
        assert first.ask("query_high_availability_switch") is True


@pytest.mark.parametrize("is_link", [False, True])
def test_a_socket_directory_open_to_other_users_is_refused(tmp_path: Path, is_link: bool) -> None:
    """When other users can open the directory of the sockets, or the directory is a link, then the
    manager is refused with a message, and no process is started."""
    room = tmp_path / f"tft-mindio-{os.getuid()}"
    if is_link:
        (tmp_path / "target").mkdir(mode=0o700)
        room.symlink_to(tmp_path / "target")
    else:
        room.mkdir(mode=0o755)
    calls = "c.tft_init_controller(-1, 4, False); c.tft_start_controller('127.0.0.1', 29400, False)"
    done = subprocess.run(
        [sys.executable, "-c", f"from mindio_ttp import controller_ttp as c; {calls}"],
        env={**os.environ, "TMPDIR": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True,
        timeout=LIMIT, check=False,
    )  # fmt: skip
    assert f"{room} must be a directory that only user {os.getuid()} can open" in done.stderr
    assert not (tmp_path / "tft-runs").exists()


@pytest.mark.parametrize("rank", [-1, 0])
def test_a_refused_start_is_refused_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """When the start of the controller was refused and its cause is still there, then the second
    call is refused too. It does not return as if there were a controller."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"tft-mindio-{os.getuid()}").mkdir(mode=0o755)
    monkeypatch.setenv("TFT_JOB", "j")
    monkeypatch.delenv(ORCHESTRATOR, raising=False)
    made = Orchestrator()
    for name in REPORTS:
        made.register(name, lambda *facts: None)
    made.init(rank, 4)
    for _ in range(2):
        with pytest.raises(Refused, match="that only user" if rank < 0 else "add --orchestrated"):
            made.start("127.0.0.1", 29400, (), "")


@pytest.mark.soak
def test_a_restarted_job_gets_a_controller_of_its_own(tmp_path: Path) -> None:
    """When a manager ends a job with a last checkpoint, restarts its controller before the old one
    has ended, and the ranks are started again, then the job resumes with its own controller, and
    the manager decides."""
    port = free_port()
    with manager(tmp_path / "manager", port) as managing:
        with led(tmp_path, port) as running:
            before = lead_file(running.directory).read_text()
            assert managing.ask("notify_controller_dump") == 0
            managing.ask("restart")
            assert set(running.end().codes) == {3}
        until("another one leads", lambda: lead_file(running.directory).read_text() != before)
        heard = len(managing.heard())
        with job(
            running.directory, launched=True, port=port, environment=TASK,
            faults=[[1, 4, "loop", "kill"]],
        ) as running:  # fmt: skip
            assert set(running.end().codes) == {0}
        assert managing.heard()[heard:] == [("fault_ranks", [(1, 1)]), *RECOVERED]
