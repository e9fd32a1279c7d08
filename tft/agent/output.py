"""
The output of the ranks. The agent copies the output unchanged to one log per process, and line by
line to the agent's own stdout.

Output must not block the agent. So the agent reads the output in pieces, and does other work
between two pieces. If nobody reads the agent's stdout (as in a paused terminal), the agent leaves
out lines there, and does not wait.
"""

import asyncio
import contextlib
import os
import queue
import threading
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

_PIECE = 64 * 1024
"""The number of bytes that are read from a pipe at a time: as many as a pipe holds. A longer line
is shown on the agent's stdout in parts."""
_BACKLOG = 8 * 1024 * 1024
"""The number of bytes that may wait to be written to the agent's stdout. All output of a test run
fits into it, so tests lose no lines."""
_FAREWELL = 1.0
"""The time in seconds that an ending agent spends at most on writing the waiting lines to its
stdout."""


class Console:
    """
    The agent's stdout. A separate thread writes whole lines to it, so that the agent never waits
    for the reader of its stdout.
    """

    def __init__(self, fd: int = 1) -> None:
        self._fd = fd
        self._waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # the counters of bytes (taken, written) and of lines (left out) need no lock, because each
        # counter is changed by one thread only
        self._taken = 0
        self._written = 0
        self._left_out = 0
        # a daemon thread, because a write to stdout may block forever, and the agent must be able
        # to end nevertheless
        self._thread = threading.Thread(target=self._write, name="console", daemon=True)
        self._thread.start()

    def show(self, lines: bytes) -> None:
        """
        Let the thread write `lines`, which are whole lines. Never blocks. If more than `_BACKLOG`
        bytes wait already, `lines` are dropped. The number of dropped lines is printed when there
        is room again.
        """
        if self._taken - self._written > _BACKLOG:
            self._left_out += lines.count(b"\n")
            return
        self._say_what_was_left_out()
        self._taken += len(lines)
        self._waiting.put(lines)

    def close(self) -> None:
        """
        Write the waiting lines, for `_FAREWELL` seconds at most.
        """
        self._say_what_was_left_out()
        self._waiting.put(None)
        self._thread.join(_FAREWELL)

    def _say_what_was_left_out(self) -> None:
        if self._left_out:
            told = f"[tft] {self._left_out} lines are not shown here, they are in logs/\n"
            self._left_out = 0
            self._taken += len(told)
            self._waiting.put(told.encode())

    def _write(self) -> None:
        readable = True
        while (lines := self._waiting.get()) is not None:
            rest = memoryview(lines)
            while rest and readable:
                try:
                    rest = rest[os.write(self._fd, rest) :]
                # nobody can read the agent's stdout any more: write no more lines to it, only to
                # the logs
                except OSError as error:
                    log.warning("console_lost", why=error.strerror)
                    readable = False
            self._written += len(lines)


class Output:
    """
    The stdout and stderr of one process, in the order in which they were written.
    """

    def __init__(self, fd: int, *, record: Path, prefix: str, console: Console) -> None:
        self._fd = fd
        self._record = record
        self._log_fd = -1
        self._prefix = prefix.encode()
        self._console = console
        self._unfinished = b""

    @classmethod
    def open(cls, *, record: Path, prefix: str, console: Console) -> tuple["Output", int]:
        """
        Open a pipe for the output of a process, and begin to read from it. Return the `Output`
        object, and the descriptor of the pipe's end to which the process writes. The caller closes
        that descriptor. `record` is the path of the log.

        Raises OSError when `record` cannot be opened.
        """
        reading, writing = os.pipe()
        output = cls(reading, record=record, prefix=prefix, console=console)
        try:
            output._log_fd = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError:
            os.close(reading)
            os.close(writing)
            raise
        os.set_blocking(reading, False)
        asyncio.get_running_loop().add_reader(reading, output._read)
        return output, writing

    @property
    def closed(self) -> bool:
        """
        True if no more output is read from the pipe: every process that could write to it has
        ended, or `finish` was called.
        """
        return self._fd < 0

    def finish(self) -> None:
        """
        Read the output that is in the pipe now, then close the output.
        """
        while not self.closed:
            if not self._read():
                self._close()

    def _read(self) -> bool:
        """
        Read at most `_PIECE` bytes from the pipe, and write them to the log and to the console.
        Return False if there was nothing to read.
        """
        try:
            piece = os.read(self._fd, _PIECE)
        except BlockingIOError:
            return False
        if not piece:
            self._close()
            return False
        self._keep(piece)
        lines, newline, self._unfinished = (self._unfinished + piece).rpartition(b"\n")
        if newline:
            self._show(lines)
        elif len(self._unfinished) > _PIECE:
            self._show(self._unfinished)
            self._unfinished = b""
        return True

    def _close(self) -> None:
        if self.closed:
            return
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        self._fd = -1
        if self._log_fd >= 0:
            os.close(self._log_fd)
        if self._unfinished:
            self._show(self._unfinished)

    def _show(self, lines: bytes) -> None:
        prefix = self._prefix
        self._console.show(prefix + lines.replace(b"\n", b"\n" + prefix) + b"\n")

    def _keep(self, piece: bytes) -> None:
        rest = memoryview(piece)
        while rest and self._log_fd >= 0:
            try:
                rest = rest[os.write(self._log_fd, rest) :]
            # the log cannot be written, for example because the disk is full: stop writing it,
            # because the job can go on without this log
            except OSError as error:
                log.warning("log_lost", path=str(self._record), why=error.strerror)
                with contextlib.suppress(OSError):
                    os.close(self._log_fd)
                self._log_fd = -1
