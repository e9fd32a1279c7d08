"""
Fixtures: a broker as a real process, and participants as real processes that tests kill and stop.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pytest

from tft.keys import make_keys

ROOT = Path(__file__).parents[2]

BROKER = """
import sys
from pathlib import Path
from tft.bus.broker import main
from tft.logs import configure_logs
configure_logs()
host, port, curve = sys.argv[1:]
opened = lambda port: print(port, flush=True)
main(host, int(port), curve=Path(curve) if curve else None, opened=opened)
"""

PARTICIPANT = """
import asyncio, signal, sys
from tft.bus.zeromq import open_bus
from tft.protocol.topics import ORDERS, presence

async def main(address, sender, deaf=""):
    async with open_bus(address, job="job", sender=sender, topics=[ORDERS]) as bus:
        await bus.listened(presence("job", sender))
        print("open", flush=True)
        if deaf:
            signal.pause()  # the loop does not run any more
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


class Processes:
    """
    Starts Python processes that print one line when they are ready. Ends them after the test.
    """

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def start(
        self, code: str, *arguments: str, errors: Path | None = None
    ) -> tuple[subprocess.Popen[str], str]:
        """
        Start a process. Return the process and its first line. Its standard error goes to `errors`.
        """
        command = [sys.executable, "-c", code, *arguments]
        with ExitStack() as stack:
            to = None if errors is None else stack.enter_context(errors.open("a"))
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=to, text=True
            )
        self._started.append(process)
        return process, output(process).readline().strip()

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()
            output(process).close()


def output(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


class Broker:
    """
    The process of a broker. Its port stays the same when it is started again.
    """

    def __init__(
        self, processes: Processes, curve: Path | None = None, log: Path | None = None
    ) -> None:
        self._processes = processes
        self.curve = curve
        self._log = log
        self.port = 0
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """
        Start the broker. Returns when it accepts connections.
        """
        self.process, port = self._processes.start(
            BROKER, "127.0.0.1", str(self.port), str(self.curve or ""), errors=self._log
        )
        self.port = int(port)

    def kill(self) -> None:
        """
        Kill the broker with SIGKILL. Returns when its ports are free.
        """
        self.process.kill()
        self.process.wait()


@pytest.fixture
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.end()


@pytest.fixture
def broker(processes: Processes) -> Broker:
    return Broker(processes)


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    Return the directory with the keys of the job.
    """
    directory = tmp_path_factory.mktemp("keys") / "job"
    make_keys(directory)
    return directory


@pytest.fixture
def guarded(processes: Processes, keys: Path, tmp_path: Path) -> Broker:
    """
    Return a broker that accepts only participants with the keys of the job. Its log is
    `broker.log`.
    """
    return Broker(processes, keys, tmp_path / "broker.log")


class Participants:
    """
    Connected participant processes that are subscribed to ORDERS.
    """

    def __init__(self, processes: Processes, broker: Broker) -> None:
        self._processes = processes
        self._broker = broker

    def start(self, sender: str, *, deaf: bool = False) -> subprocess.Popen[str]:
        """
        Start a participant. Returns when it is connected. A `deaf` participant never reads its
        messages.
        """
        process, line = self._processes.start(
            PARTICIPANT, self._broker.address, sender, *(["deaf"] if deaf else [])
        )
        assert line == "open"
        return process


@pytest.fixture
def participants(processes: Processes, broker: Broker) -> Participants:
    return Participants(processes, broker)
