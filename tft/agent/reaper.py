"""
The reaper: a process that kills the remaining processes of a node when its agent has died.

The agent starts the reaper as `python -m tft.agent.reaper MARKER`. The stdin of the reaper is a
pipe whose other end only the agent holds. When the agent ends, in whatever way, the kernel closes
the agent's end. The reaper then kills every process that was started with TFT_REAPER=MARKER in its
environment. When no such process is left, the reaper ends.

Ranks die with their agent by themselves (`tft.parent_death`). The reaper is for processes that the
ranks have started. Such processes inherit the environment, even through several forks and `setsid`,
while their parent and their session may change. A process that was started with a cleared
environment is not found.

The reaper imports as few modules as possible, so that it is ready before the first rank runs.
"""

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator

VARIABLE = "TFT_REAPER"
"""The environment variable by which the reaper recognises the rendezvous store, the ranks, and all
processes that store and ranks start."""

_QUIET_ROUNDS = 2
"""
The number of searches in a row that must find no process before the reaper ends. One search can
miss a new process: a parent may fork it after the search has listed all pids, and the parent may
end before the search looks at the parent.
"""
_ROUND_MS = 50
"""The time in milliseconds that the reaper waits, at most, until a killed process has ended. Then
the reaper searches for processes again."""


def main() -> None:
    """
    Wait for the end of the agent. Then kill all processes that have the agent's marker in their
    environment (`VARIABLE`).
    """
    # ignore signals that end the whole job: the reaper must still run when the agent has ended
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(sys.stdin.fileno(), 1):
        pass  # nothing is ever written to the pipe: `read` returns when the agent has ended
    mark = f"{VARIABLE}={sys.argv[1]}".encode()
    quiet = 0
    while quiet < _QUIET_ROUNDS:
        quiet = 0 if _end(mark) else quiet + 1


def marked(mark: bytes) -> Iterator[int]:
    """
    Yield the pids of all processes that were started with `mark` (NAME=value) in their environment.
    """
    for name in os.listdir("/proc"):
        if name.isdigit() and _bears(int(name), mark):
            yield int(name)


def _bears(pid: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            return mark in environ.read().split(b"\0")
    except OSError:
        return False  # the process has ended, or belongs to another user


def _end(mark: bytes) -> bool:
    """
    Kill all running processes that have `mark` (NAME=value) in their environment. Return whether
    any such process was found.
    """
    with contextlib.ExitStack() as opened:
        dying = select.poll()
        found = False
        for pid in marked(mark):
            try:
                process = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            opened.callback(os.close, process)
            if not _bears(pid, mark):
                continue  # the pid has been given to another process in the meantime
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            dying.register(process, select.POLLIN)
            found = True
        if found:
            dying.poll(_ROUND_MS)
    return found


if __name__ == "__main__":
    main()
