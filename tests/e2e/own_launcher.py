"""
A launcher like those of other frameworks, which starts the ranks of its node when tft asks for
them.

    own_launcher.py NNODES NODE RANKS PORT SCRIPT [ARGS...]

The launcher also starts one process without a rank. The ranks write to `out-RANK` in the working
directory.
"""

import os
import subprocess
import sys
from pathlib import Path

from tft.errors import UsageError
from tft.spi.launcher import BrokerAddress, Node


class Own:
    """
    The implementation of `tft.spi.launcher.Starter`, which starts the processes of a script.
    """

    def __init__(self, first: int, command: list[str]) -> None:
        self._first = first
        self._command = command
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, local_rank: int) -> int:
        """
        Start the process of a local rank and return its process id.
        """
        with Path(f"out-{self._first + local_rank}").open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, *self._command], stdout=out, stderr=out, start_new_session=True
            )
        self._processes[process.pid] = process
        return process.pid

    def kill(self, local_rank: int, pid: int) -> None:
        """
        Kill a process of a local rank with SIGKILL.
        """
        self._processes[pid].kill()

    def reap(self, local_rank: int, pid: int) -> None:
        """
        Wait for the end of a process and forget it.
        """
        self._processes.pop(pid).wait()


nnodes, number, ranks, port = map(int, sys.argv[1:5])
command = sys.argv[5:]
try:
    node = Node(
        nnodes=nnodes, node=number, ranks=ranks, command=command,
        broker=BrokerAddress(host="127.0.0.1", port=port, named="PORT"), defaults=["--adaptor", "fake"],
    )  # fmt: skip
except UsageError as refused:
    sys.exit(f"own: {refused}")
scheduler = subprocess.Popen(
    [sys.executable, *command], env=os.environ | node.beside(), start_new_session=True
)
Path(f"scheduler-{number}").write_text(str(scheduler.pid))
code = node.run(Own(number * ranks, command))
sys.stdout.write(f"the scheduler ended with {scheduler.wait()}\n")
sys.exit(code)
