"""
Starts, ends and monitors the processes of msrun, through the functions that msrun has registered.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any


class Processes:
    """
    Implements `tft.spi.launcher.Starter` with the functions of msrun.
    """

    def __init__(
        self,
        *,
        start: Callable[[list[int]], int],
        kill: Callable[[list[int]], int],
        look: Callable[[list[int]], dict[int, dict[str, Any]]],  # Any: numbers or None
    ) -> None:
        self._start = start
        self._kill = kill
        self._look = look
        self._logs: dict[int, Path] = {}
        """The file to which the newest process of each local rank writes its output."""
        self._starts: dict[int, int] = {}
        """How many processes were started for each local rank."""

    def start(self, local_rank: int) -> int:
        """
        Start a process for the rank with the number `local_rank` on this node. Return its pid.

        msrun overwrites the log file of a rank when it starts another process for the rank. So the
        log of the earlier process is renamed first. Raises `ChildProcessError` if the new process
        has ended already.
        """
        earlier = self._logs.pop(local_rank, None)
        number = self._starts.get(local_rank, 0)
        if earlier is not None and earlier.is_file():
            earlier.rename(earlier.with_suffix(f".{number - 1}{earlier.suffix}"))
        self._starts[local_rank] = number + 1
        self._start([local_rank])
        # A status means that the process has ended, and that msrun, its parent, has reaped it. Its
        # pid must then not be used, because another process may get it.
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
        Let msrun kill a process with its whole process group. This also ends the process that
        prints the log of the killed one.
        """
        self._kill([pid])

    def reap(self, local_rank: int, pid: int) -> None:
        """
        Let msrun, the parent of the process, collect the exit status of a process that has ended.
        """
        self._look([local_rank])


def _written_by(pid: int) -> Path | None:
    """
    Return the file to which a process writes its standard output. Return None if it is not written
    to a file.
    """
    try:
        path = Path(f"/proc/{pid}/fd/1").readlink()
    except OSError:
        return None
    return path if path.is_file() else None
