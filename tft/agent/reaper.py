"""
The reaper: what cleans a node when its agent can no longer do it.

`python -m tft.agent.reaper MARKER`, with a pipe on stdin whose other end only the agent holds. When
the agent ends, in whatever way, the kernel closes that end; the reaper then kills every process
that was started with TFT_REAPER=MARKER in its environment, until none is left, and ends.

The ranks die with their agent by themselves (`tft.parent_death`). This is for what they started: the
environment is handed down through `setsid` and any number of forks, unlike parents and sessions.
A process that was started with a cleared environment is not found.

It imports as little as it can: it has to be there first, and is there once per node.
"""

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator

VARIABLE = "TFT_REAPER"
"""In the environment of the store, the ranks, and of all they start."""

_QUIET_ROUNDS = 2
"""
So many looks in a row must find nothing: one look can miss a process whose parent forked it after
the list was read, and ended before its own turn came.
"""
_ROUND_MS = 50
"""How long a round waits for one of the killed to be gone before it looks again."""


def main() -> None:
    """
    Wait for the agent's end, then leave nothing of it.
    """
    # what ends the agent politely must not end the reaper first
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(sys.stdin.fileno(), 1):
        pass  # nobody writes: this is the wait for the end of the pipe
    mark = f"{VARIABLE}={sys.argv[1]}".encode()
    quiet = 0
    while quiet < _QUIET_ROUNDS:
        quiet = 0 if _end(mark) else quiet + 1


def marked(mark: bytes) -> Iterator[int]:
    """
    The pids of all processes with `mark` (NAME=value) in the environment they were started with.
    """
    for name in os.listdir("/proc"):
        if name.isdigit() and _bears(int(name), mark):
            yield int(name)


def _bears(pid: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            return mark in environ.read().split(b"\0")
    except OSError:
        return False  # it is gone, or another user's


def _end(mark: bytes) -> bool:
    """
    Kill all that are there now; whether there were any.
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
                continue  # the pid went to somebody else before it was pinned
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            dying.register(process, select.POLLIN)
            found = True
        if found:
            dying.poll(_ROUND_MS)
    return found


if __name__ == "__main__":
    main()
