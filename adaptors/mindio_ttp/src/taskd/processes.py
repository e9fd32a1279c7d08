"""
msrun's processes, through the functions that it offers.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any


class Processes:
    """
    What `tft.starter.Starter` asks for.
    """

    def __init__(
        self,
        *,
        start: Callable[[list[int]], int],
        kill: Callable[[list[int]], int],
        look: Callable[[list[int]], dict[int, dict[str, Any]]],  # Any: numbers, or None
    ) -> None:
        self._start = start
        self._kill = kill
        self._look = look
        self._logs: dict[int, Path] = {}
        """Of each local rank: where its newest process writes to."""
        self._starts: dict[int, int] = {}

    def start(self, local_rank: int) -> int:
        """
        msrun begins the log of a rank anew each time: what the process before has written is kept under
        another name.
        """
        earlier = self._logs.pop(local_rank, None)
        number = self._starts.get(local_rank, 0)
        if earlier is not None and earlier.is_file():
            earlier.rename(earlier.with_suffix(f".{number - 1}{earlier.suffix}"))
        self._starts[local_rank] = number + 1
        self._start([local_rank])
        # it is a child of msrun, which has looked at it once: what it saw end then is gone
        seen = self._look([local_rank])[local_rank]
        if seen["status"] is not None:
            raise ChildProcessError(f"it ended as soon as it had begun (msrun: {seen['status']})")
        pid = int(seen["pid"])
        if log := _written_by(pid):
            self._logs[local_rank] = log
        return pid

    def kill(self, local_rank: int, pid: int) -> None:
        """
        With its group, and what shows its log.
        """
        self._kill([pid])

    def reap(self, local_rank: int, pid: int) -> None:
        """
        msrun takes the status of a process when it looks at it.
        """
        self._look([local_rank])


def _written_by(pid: int) -> Path | None:
    """
    The file that a process has for its standard output, where that is one.
    """
    try:
        path = Path(f"/proc/{pid}/fd/1").readlink()
    except OSError:
        return None
    return path if path.is_file() else None
