"""
The requests of an agent to a program that starts ranks, and the program's answers.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tft.agent.reaper import VARIABLE
from tft.config import aside_variables, change_environment, descriptor_paths, stands_aside
from tft.errors import UsageError
from tft.spi.launcher import Answer, Ask, BrokerAddress, Node, Service, hear_answer, say, written

WAITS = "import signal; signal.pause()"
"""The code of a process that lives until it is killed."""


class Starts:
    """
    A starter that starts Python with some code, and records the requests.
    """

    def __init__(self, code: str) -> None:
        self.code = code
        self.reaped: list[int] = []
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, local_rank: int) -> int:
        """
        Implement `tft.spi.launcher.Starter`.
        """
        if not self.code:
            raise FileNotFoundError("there is no such script")
        process = subprocess.Popen([sys.executable, "-c", self.code], start_new_session=True)
        self._processes[process.pid] = process
        return process.pid

    def kill(self, local_rank: int, pid: int) -> None:
        """
        Implement `tft.spi.launcher.Starter`.
        """
        os.killpg(pid, signal.SIGKILL)

    def reap(self, local_rank: int, pid: int) -> None:
        """
        Implement `tft.spi.launcher.Starter`.
        """
        self.reaped.append(self._processes.pop(pid).wait())


class Asking:
    """
    The test in the role of the agent: it sends requests to a service on a thread, which also waits
    for the end of a process.
    """

    def __init__(self, code: str) -> None:
        self.starts = Starts(code)
        self._channel, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._run = subprocess.Popen([sys.executable, "-c", WAITS])
        self.environment = dict(os.environ)
        service = Service(self._theirs, self.starts, self.environment)
        self._thread = threading.Thread(
            target=lambda: service.serve(until_ended=self._run.pid), name="service"
        )
        self._thread.start()

    def ask(self, ask: Ask, *descriptors: int) -> None:
        """
        Send a request.
        """
        say(self._channel, ask, *descriptors)

    def start(self, number: int, **variables: str) -> Answer:
        """
        Request a process with these additional variables.
        """
        text = written(self.environment | variables)
        self.ask(Ask(kind="start", number=number, local_rank=0), text)
        os.close(text)
        return self.answer()

    def answer(self) -> Answer:
        """
        Return the next answer.
        """
        answer = hear_answer(self._channel)
        assert answer is not None
        return answer

    def end(self) -> None:
        """
        End the process that stands for the node's `tft run`.
        """
        self._run.kill()
        self._thread.join()
        self._run.wait()
        self._channel.close()
        self._theirs.close()


@pytest.fixture
def waiting() -> Iterator[Asking]:
    """
    Return a program whose ranks wait until they are killed.
    """
    asking = Asking(WAITS)
    yield asking
    asking.end()


def test_killed_process_is_reaped_only_when_the_agent_asks(
    waiting: Asking,
) -> None:
    """When a process is killed, then its end is reported with the signal. The process is reaped
    when the agent asks, so its pid is not used again before."""
    started = waiting.start(1)
    waiting.ask(Ask(kind="kill", number=1, local_rank=0))
    ended = waiting.answer()

    assert (started.kind, ended) == (
        "started",
        Answer(kind="ended", number=1, pid=started.pid, code=-signal.SIGKILL),
    )
    assert waiting.starts.reaped == []
    assert Path(f"/proc/{started.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    waiting.ask(Ask(kind="reap", number=1, local_rank=0))
    waiting.start(2)  # requests are carried out in order, so the reap is done by now
    assert waiting.starts.reaped == [-signal.SIGKILL]


def test_requests_for_a_missing_process_are_ignored(waiting: Asking) -> None:
    """When the agent asks to kill or reap a process that does not exist, then the service ignores
    this and starts the next process."""
    waiting.ask(Ask(kind="kill", number=9, local_rank=0))
    waiting.ask(Ask(kind="reap", number=9, local_rank=0))

    assert waiting.start(1).kind == "started"


def test_ranks_are_killed_and_reaped_when_tft_run_ends() -> None:
    """When `tft run` ends before its ranks, then the ranks are killed and reaped."""
    asking = Asking(WAITS)
    try:
        pids = [asking.start(number).pid for number in (1, 2)]
    finally:
        asking.end()

    assert asking.starts.reaped == [-signal.SIGKILL] * 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_failed_start_of_a_process_is_reported_to_the_agent() -> None:
    """When the program cannot start a process, then the agent gets the reason."""
    asking = Asking("")
    try:
        assert asking.start(1) == Answer(kind="refused", number=1, why="there is no such script")
    finally:
        asking.end()


def test_rank_has_the_environment_of_its_program_and_of_the_agent(tmp_path: Path) -> None:
    """When the program that starts the ranks has changed its own environment, then the ranks
    have these changes and the variables of the agent. The program's own environment does not get
    the agent's variables."""
    found = tmp_path / "found"
    asking = Asking(
        "import os; from pathlib import Path\n"
        f"names = ['THEIRS', 'OURS', 'TFT_PARENT', 'TFT_ASIDE']\n"
        f"Path({str(found)!r}).write_text(repr([os.environ.get(name) for name in names]))"
    )
    try:
        with change_environment({"THEIRS": "later", "TFT_ASIDE": "1"}):
            pid = asking.start(1, OURS="chosen").pid
            assert asking.answer() == Answer(kind="ended", number=1, pid=pid, code=0)
            assert os.environ["TFT_ASIDE"] == "1"
        assert "OURS" not in os.environ
    finally:
        asking.end()

    assert found.read_text() == repr(["later", "chosen", str(os.getpid()), None])


def test_process_without_a_rank_has_the_mark_of_the_reaper() -> None:
    """When a process holds no rank, then it has the mark that the reaper looks for."""
    assert aside_variables("m")[VARIABLE] == "m"
    assert stands_aside(aside_variables("m"))
    assert not stands_aside({VARIABLE: "m"})


def test_page_is_opened_only_when_its_value_is_a_path() -> None:
    """When a rank has inherited the descriptors of its page, then no path is opened. When the
    variables have paths, then both paths are opened."""
    assert descriptor_paths({"TFT_PAGE": "5", "TFT_WORDS": "6"}) is None
    assert descriptor_paths({}) is None
    assert descriptor_paths({"TFT_PAGE": "/a", "TFT_WORDS": "/b"}) == ("/a", "/b", "")
    bell = {"TFT_PAGE": "/a", "TFT_WORDS": "/b", "TFT_BELL": "/c"}
    assert descriptor_paths(bell) == ("/a", "/b", "/c")


def test_node_with_a_remote_broker_needs_a_trusted_network() -> None:
    """When node 0 of several nodes is on another machine, and the network is not declared as
    trusted, then the node is refused before any process starts."""
    with pytest.raises(UsageError, match="TFT_RUN_OPTIONS=--insecure if the network is trusted"):
        Node(
            nnodes=2, node=1, ranks=1, command=["train.py"],
            broker=BrokerAddress(host="192.0.2.1", port=1, named="--master_addr"),
        )  # fmt: skip


def test_process_that_cannot_be_watched_is_killed(
    waiting: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When no descriptor is left to watch a started process, then the start is refused, and the
    process is killed and reaped."""

    def exhausted(pid: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", exhausted)
    assert waiting.start(1).kind == "refused"
    assert waiting.starts.reaped == [-signal.SIGKILL]
