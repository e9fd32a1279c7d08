"""
The systems of the comparison: how a job of each is started, and what its supervisor does meanwhile.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.benchmarks.peers.workload import RANKS

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
LIMIT = 120.0
"""The seconds after which a job counts as one that does not go on."""
BIN = Path(sys.executable).parent


@contextmanager
def process(
    log: Path, *command: str, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """
    Run a process in a process group of its own, and end the whole group at the end of the block.
    """
    with log.open("ab") as output:
        one = subprocess.Popen(
            command, stdout=output, stderr=output, cwd=ROOT, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(environment or {})},
        )  # fmt: skip
    try:
        yield one
    finally:
        with suppress(ProcessLookupError):
            os.killpg(one.pid, signal.SIGKILL)
        one.wait()


def free_ports(count: int) -> int:
    """
    Return a port that is free now, and so are the ones after it, `count` in all.
    """
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
        try:
            for each in range(port, port + count):
                with socket.socket() as one:
                    one.bind(("127.0.0.1", each))
        except OSError:
            continue
        return port


def with_tft(*options: str) -> Callable[[Path, str], None]:
    """
    Return a function that runs a job with tft.
    """

    def run(directory: Path, kill: str) -> None:
        command = [
            sys.executable, "-m", "tft", "run", "--nproc-per-node", str(RANKS),
            "--run-dir", f"{directory}/run", *options, str(HERE / "with_tft.py"),
            str(directory), kill,
        ]  # fmt: skip
        with process(directory / "log", *command) as one:
            one.wait(LIMIT)

    return run


def with_torchrun(directory: Path, kill: str) -> None:
    """
    Run a job with torchrun, which starts all processes again. Without the setting in its
    environment, torch 2.13 gives the new processes the addresses of the old ones, and most jobs end.
    """
    command = [
        str(BIN / "torchrun"), "--nproc-per-node", str(RANKS), "--max-restarts", "3",
        "--standalone", str(HERE / "with_torchrun.py"), str(directory), kill,
    ]  # fmt: skip
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with process(directory / "log", *command, environment=environment) as one:
        one.wait(LIMIT)


def with_nvrx(milliseconds: int) -> Callable[[Path, str], None]:
    """
    Return a function that runs a job with NVIDIA's resiliency extension, whose monitors look every
    `milliseconds`.
    """

    def run(directory: Path, kill: str) -> None:
        port = free_ports(2)
        command = [str(HERE / "with_nvrx.py"), str(directory), kill, str(milliseconds)]

        def start(rank: int) -> list[str]:
            return [sys.executable, *command]

        environment = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS),
        }  # fmt: skip
        _supervise(directory, start, lambda rank: {**environment, "RANK": str(rank)}, again=False)

    return run


def with_torchft(*lighthouse: str) -> Callable[[Path, str], None]:
    """
    Return a function that runs a job with torchft. `lighthouse` has the settings of its
    coordinator. A process that ends is started again at once.
    """

    def run(directory: Path, kill: str) -> None:
        port = free_ports(1)
        command = [
            str(BIN / "torchft_lighthouse"), "--min_replicas", str(RANKS - 1),
            "--bind", f"[::]:{port}", *lighthouse,
        ]  # fmt: skip

        def start(rank: int) -> list[str]:
            return [sys.executable, str(HERE / "with_torchft.py"), str(directory), kill]

        with process(directory / "lighthouse", *command):
            _supervise(
                directory, start,
                lambda rank: {
                    "REPLICA": str(rank), "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}",
                },
                again=True,
            )  # fmt: skip

    return run


def _supervise(
    directory: Path,
    start: Callable[[int], list[str]],
    environment: Callable[[int], Mapping[str, str]],
    *,
    again: bool,
) -> None:
    """
    Run one process for each rank until all have ended. With `again`, a process that was killed is
    started again.
    """
    with ExitStack() as stack:

        def begin(rank: int) -> subprocess.Popen[bytes]:
            one = process(directory / f"log-{rank}", *start(rank), environment=environment(rank))
            return stack.enter_context(one)

        running = {rank: begin(rank) for rank in range(RANKS)}
        until = time.monotonic() + LIMIT
        while running:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(start(0), LIMIT)
            for rank, one in list(running.items()):
                code = one.poll()
                if code is not None:
                    del running[rank]
                    if code == -signal.SIGKILL and again:
                        running[rank] = begin(rank)
            time.sleep(0.002)
