"""
The console of `tft run`: shows the line about the progress of the job.

On a terminal the line stands at the bottom and is drawn in place. It must not be mixed into the
output of the ranks, which the agent writes to its stdout. So everything that this process and its
children write to the terminal goes through a pipe. A thread copies from the pipe to the terminal.
The thread clears the line before it copies something, and draws the line again afterwards. If
the terminal is paused or gone, only this thread stops: when the pipe is full, the agent leaves out
lines and goes on.
"""

import os
import queue
import select
import stat
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import click

from tft.config import inherited_environment
from tft.launcher.progress import Losses, Part, fitted

_PIECE = 64 * 1024
_FAREWELL = 1.0
"""Seconds for which the end of `tft run` waits at most until the terminal has taken all output."""
_LOSS = 5
"""How important the training loss is among the parts of the line (`Part.rank`). If the line is too
long, parts with higher numbers are left out first."""
_STDOUT, _STDERR = 1, 2
_CLEAR = b"\r\x1b[K"


def has_terminal() -> bool:
    """
    Return whether stderr is a terminal in which a line can be drawn again. Return False also if
    stdout is a pipe, for example to `tee`: the program at its other end may write the output of the
    ranks to the same terminal, in the middle of the line.
    """
    if not os.isatty(_STDERR) or inherited_environment().get("TERM", "") in ("", "dumb"):
        return False
    try:
        return _same_terminal() or stat.S_ISREG(os.fstat(_STDOUT).st_mode) or _is_null(_STDOUT)
    except OSError:  # stdout is closed
        return True


class Speech:
    """
    Prints lines on stderr on a separate thread, inside a `with` block. So a terminal that is
    paused, or a pipe that nobody reads, does not block `tft run`, which must supervise its
    processes.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._print, name="speech", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._waiting.put(None)
        self._thread.join(_FAREWELL)

    def say(self, sentence: str) -> None:
        """
        Print a line for the operator.
        """
        self.echo(f"tft: {sentence}")

    def echo(self, line: str) -> None:
        """
        Print a line as it is.
        """
        self._waiting.put(line)

    def _print(self) -> None:
        while (line := self._waiting.get()) is not None:
            with suppress(OSError):
                click.echo(line, err=True)


class LiveConsole:
    """
    Draws the line about the progress in the terminal, inside a `with` block. At the end of the
    block, stdout and stderr are again as they were before.
    """

    live = True

    def __init__(self, run_dir: Path) -> None:
        self._losses = Losses(run_dir)
        self._parts: Sequence[Part] = ()
        self._drawn = b""
        """The progress line that the terminal shows now. Empty: it shows none."""
        self._whole = True
        """True if the last output of the job ended with a line end. Otherwise the progress line is
        not drawn, because it would stand in the middle of a line."""
        self._lost = False
        """True if writing to the terminal has failed, because it is gone."""
        self._saved: dict[int, int] = {}
        self._terminal = self._reading = -1
        self._waking = (-1, -1)
        self._thread = threading.Thread(target=self._copy, name="console", daemon=True)

    def __enter__(self) -> Self:
        _flush()
        self._terminal = os.dup(_STDERR)
        taken = [_STDERR, *([_STDOUT] if _same_terminal() else [])]
        self._saved = {fd: os.dup(fd) for fd in taken}
        self._reading, writing = os.pipe()
        self._waking = os.pipe()
        for fd in (self._reading, *self._waking):
            os.set_blocking(fd, False)
        # The thread is a daemon, because its write to a paused terminal may block for ever and
        # `tft run` must be able to end. Start it before the output is redirected, so that an error
        # of the start is printed in the terminal.
        self._thread.start()
        for fd in taken:
            os.dup2(writing, fd)
        os.close(writing)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        _flush()
        for fd, before in self._saved.items():
            os.dup2(before, fd)
            os.close(before)
        os.close(self._waking[1])
        self._thread.join(_FAREWELL)
        if not self._thread.is_alive():
            for fd in (self._reading, self._waking[0], self._terminal):
                os.close(fd)

    def show(self, parts: Sequence[Part]) -> None:
        """
        Let the thread draw another line. If `parts` is empty, the thread removes the line.
        """
        self._parts = parts
        # the pipe is full if the terminal is paused: then nothing needs to be drawn
        with suppress(BlockingIOError):
            os.write(self._waking[1], b".")

    # ---------------------------------------------------------------- on the thread

    def _copy(self) -> None:
        poll = select.poll()
        for fd in (self._reading, self._waking[0]):
            poll.register(fd, select.POLLIN)
        while True:
            found = dict(poll.poll())
            if self._reading in found:
                if piece := _read(self._reading):
                    self._pass_on(piece)
                elif piece is not None:
                    poll.unregister(self._reading)
            if self._waking[0] in found:
                if not _drained(self._waking[0]):
                    break
                try:
                    self._draw()
                except Exception as error:  # noqa: BLE001 # the output must still be read
                    self._parts = ()
                    self._pass_on(f"tft: the progress is not shown any more: {error!r}\n".encode())
        # copy what this process and its children have written before the end
        while piece := _read(self._reading):
            self._pass_on(piece)
        self._write(_CLEAR if self._drawn else b"")

    def _pass_on(self, piece: bytes) -> None:
        """
        Copy a piece of output to the terminal.
        """
        before, self._drawn = self._drawn, b""
        self._whole = piece.endswith(b"\n")
        line = before if self._whole else b""
        # write all parts in one call, so that the line does not flicker
        self._write((_CLEAR if before else b"") + piece + line)
        self._drawn = line

    def _draw(self) -> None:
        if not self._whole:
            return
        line = b""
        if self._parts and self._in_foreground():
            loss = self._losses.newest()
            told = [] if loss is None else [Part(text=f"loss {loss:.4g}", rank=_LOSS)]
            # leave one column free: a line as wide as the terminal would move the cursor down
            line = fitted([*self._parts, *told], self._columns() - 1).encode()
        if line != self._drawn:
            self._write(_CLEAR + line)
            self._drawn = line

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._terminal).columns or 80
        except OSError:
            return 80

    def _in_foreground(self) -> bool:
        """
        Return whether the shell waits for this process. The line of a process in the background
        would disturb what the user types.
        """
        try:
            return os.tcgetpgrp(self._terminal) == os.getpgrp()
        except OSError:  # this terminal does not control the session, so no shell waits at it
            return True

    def _write(self, output: bytes) -> None:
        rest = memoryview(output)
        while rest and not self._lost:
            try:
                rest = rest[os.write(self._terminal, rest) :]
            except BlockingIOError:  # another program has set the terminal to non-blocking mode
                select.select([], [self._terminal], [])
            except OSError:
                # the terminal is gone: drop its output, but continue to read the pipe, so that no
                # writer is blocked
                self._lost = True


class PlainConsole:
    """
    Prints lines about the progress on stderr, one below the other.
    """

    live = False

    def __init__(self, run_dir: Path) -> None:
        self._losses = Losses(run_dir)
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._thread.join(_FAREWELL)

    def show(self, parts: Sequence[Part]) -> None:
        """
        Print a line on a separate thread, because a pipe that nobody reads would block the caller.
        While the thread still waits with the line before, print nothing.
        """
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(
                target=self._print, args=(parts,), name="console", daemon=True
            )
            with suppress(RuntimeError):  # if the system cannot start a thread, leave out this line
                thread.start()
                self._thread = thread

    def _print(self, parts: Sequence[Part]) -> None:
        loss = self._losses.newest()
        told = [] if loss is None else [Part(text=f"loss {loss:.4g}", rank=_LOSS)]
        with suppress(OSError):
            click.echo(fitted([*parts, *told]), err=True)


def _same_terminal() -> bool:
    """
    Return whether stdout is the same terminal as stderr, so that the line must also be cleared
    before output of stdout.
    """
    if not os.isatty(_STDOUT):
        return False
    return os.fstat(_STDOUT).st_rdev == os.fstat(_STDERR).st_rdev


def _is_null(fd: int) -> bool:
    return os.fstat(fd).st_rdev == os.stat(os.devnull).st_rdev


def _read(fd: int) -> bytes | None:
    """
    Read from a pipe without waiting, and return the bytes. Return None if the pipe is empty now,
    and b"" if no process has the pipe open for writing.
    """
    try:
        return os.read(fd, _PIECE)
    except BlockingIOError:
        return None


def _drained(fd: int) -> bool:
    """
    Read all that is in a pipe. Return False if nobody can write to it any more.
    """
    while piece := _read(fd):
        pass
    return piece is None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # a stream may be closed
            stream.flush()
