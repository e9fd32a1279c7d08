"""
Starts, ends and monitors the processes of msrun, the launcher of MindSpore. To do so, this module
calls functions that msrun has registered.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any


class Processes:
    """
    Starts, kills and reaps the rank processes of a node for tft (see `tft.spi.launcher.Starter`).
    The work is done by functions of msrun, the launcher of MindSpore.
    """

    def __init__(
        self,
        *,
        start: Callable[[list[int]], int],
        kill: Callable[[list[int]], int],
        # Any: the values are numbers or None
        look: Callable[[list[int]], dict[int, dict[str, Any]]],
    ) -> None:
        self._start = start
        self._kill = kill
        self._look = look
        self._logs: dict[int, Path] = {}
        """Maps a local rank to the log file to which its newest process writes its output."""
        self._starts: dict[int, int] = {}
        """Maps a local rank to the number of processes that were started for it. The number is used
        in the new name of the log file of an earlier process."""

    def start(self, local_rank: int) -> int:
        """
        Start a process for the rank with the number `local_rank` on this node. Return the pid of
        the process.

        When msrun starts another process for a rank, it overwrites the log file of the rank. So the
        log file of the earlier process is renamed first. Raises `ChildProcessError` if the new
        process has ended already.
        """
        earlier = self._logs.pop(local_rank, None)
        number = self._starts.get(local_rank, 0)
        if earlier is not None and earlier.is_file():
            earlier.rename(earlier.with_suffix(f".{number - 1}{earlier.suffix}"))
        self._starts[local_rank] = number + 1
        self._start([local_rank])
        # A status means that the new process has ended, and that its parent msrun has reaped it.
        # The pid must then not be used, because the system may give it to another process.
        seen = self._look([local_rank])[local_rank]
        if seen["status"] is not None:
            raise ChildProcessError(
                f"the training process ended during its start (msrun: {seen['status']})"
            )
        pid = int(seen["pid"])
        if log := _written_by(pid):
            self._logs[local_rank] = log
        return pid

    def kill(self, local_rank: int, pid: int) -> None:
        """
        Let msrun kill the process with the pid `pid` and its whole process group. The kill also
        ends the process of msrun that prints the log of the killed process.
        """
        self._kill([pid])

    def reap(self, local_rank: int, pid: int) -> None:
        """
        Let msrun collect the exit status of the process of `local_rank`, which has ended. Only
        msrun can do that, because it is the parent of the process.
        """
        self._look([local_rank])


def _written_by(pid: int) -> Path | None:
    """
    Return the path of the file to which the process with the pid `pid` writes its standard output.
    Return None if the process does not write its standard output to a file.
    """
    try:
        path = Path(f"/proc/{pid}/fd/1").readlink()
    except OSError:
        return None
    return path if path.is_file() else None
