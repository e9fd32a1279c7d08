"""
The console of `tft run` in real terminals and without one.

A process with the console writes its output in a terminal of the test, in steps: the test sends it a
line of text for each step.
"""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

LIMIT = 20.0
PROGRAM = """
import os, sys
from pathlib import Path
from tft.launcher.console import LiveConsole, PlainConsole, has_terminal
from tft.launcher.progress import Part

print("terminal" if has_terminal() else "none", flush=True)
with LiveConsole(Path(sys.argv[1])) as console:
    while word := sys.stdin.readline().strip():
        kind, _, text = word.partition(" ")
        if kind == "show":
            console.show([Part(text=each, rank=i) for i, each in enumerate(text.split("|"))])
        elif kind == "child":
            os.spawnvp(os.P_WAIT, "sh", ["sh", "-c", text])
        else:
            print(text, flush=True, file=sys.stderr if kind == "say" else sys.stdout)
print("after", flush=True)
print("after that", file=sys.stderr, flush=True)
"""


class Screen:
    """
    A program in a terminal of the test.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", ours: int) -> None:
        self.process = process
        self.ours = ours
        self.raw = b""

    def do(self, word: str) -> None:
        """
        Let the program do a step.
        """
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n".encode())
        self.process.stdin.flush()

    def until(self, what: bytes) -> None:
        """
        Read what the program writes until this is there.
        """
        end = time.monotonic() + LIMIT
        while what not in self.raw:
            assert time.monotonic() < end, f"{what!r} did not come: {self.raw!r}"
            self._read(0.1)

    def lines(self) -> list[str]:
        """
        Return the lines that stand in the terminal after all that was written.
        """
        lines = [""]
        for piece in re.split(rb"(\r\n|\r\x1b\[K)", self.raw):
            if piece == b"\r\n":
                lines.append("")
            elif piece == b"\r\x1b[K":
                lines[-1] = ""
            else:
                assert b"\x1b" not in piece
                lines[-1] += piece.decode()
        return lines

    def size(self, columns: int) -> None:
        """
        Set the width of the terminal.
        """
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def end(self) -> None:
        """
        Let the program end, and read the rest of its output.
        """
        assert self.process.stdin is not None
        self.process.stdin.close()
        end = time.monotonic() + LIMIT
        while self._read(0.1) or self.process.poll() is None:
            assert time.monotonic() < end
        assert self.process.returncode == 0

    def _read(self, limit: float) -> bool:
        if not select.select([self.ours], [], [], limit)[0]:
            return False
        try:
            piece = os.read(self.ours, 65536)
        except OSError:  # the other end is closed
            return False
        self.raw += piece
        return bool(piece)


@contextmanager
def screen(run_dir: Path, *, term: str = "xterm", stdout: "int | None" = None) -> Iterator[Screen]:
    """
    Start the program in a terminal of 80 columns. `stdout` replaces the terminal as its stdout.
    """
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(run_dir)],
        stdin=subprocess.PIPE, stdout=theirs if stdout is None else stdout, stderr=theirs,
        start_new_session=True, env={**os.environ, "TERM": term},
    )  # fmt: skip
    os.close(theirs)
    shown = Screen(process, ours)
    shown.size(80)
    try:
        yield shown
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        assert process.stdin is not None
        process.stdin.close()
        os.close(ours)


def test_line_stays_below_all_output_and_is_gone_at_the_end(tmp_path: Path) -> None:
    """When this process and its children write while the line is shown, then all that they write is
    above the line. At the end no line is left, and output goes to the terminal directly."""
    with screen(tmp_path) as shown:
        shown.do("show step 1|2 ranks")
        shown.until(b"tft: step 1, 2 ranks")
        shown.do("child echo one; echo two >&2")
        shown.do("say three")
        shown.do("print four")
        shown.until(b"four\r\n")
        shown.do("show step 2|2 ranks")
        shown.until(b"tft: step 2, 2 ranks")
        expected = ["terminal", "one", "two", "three", "four"]
        assert shown.lines() == [*expected, "tft: step 2, 2 ranks"]
        shown.end()
        assert shown.lines() == [*expected, "after", "after that", ""]


def test_line_waits_until_the_output_has_ended_its_line(tmp_path: Path) -> None:
    """When output does not end with a new line, then the line is not drawn behind it."""
    with screen(tmp_path) as shown:
        shown.do("child printf half")
        shown.until(b"half")
        shown.do("show step 1")
        shown.do("child echo ' done'")
        shown.do("show step 2")
        shown.until(b"tft: step 2")
        assert shown.lines() == ["terminal", "half done", "tft: step 2"]


def test_line_fits_a_terminal_that_gets_narrow(tmp_path: Path) -> None:
    """When the terminal gets narrow, then the line loses the parts that matter less."""
    with screen(tmp_path) as shown:
        shown.do("show step 1|0.05 s/step|64 of 64 ranks|3 incidents")
        shown.until(b"3 incidents")
        shown.size(40)
        shown.do("show step 2|0.05 s/step|64 of 64 ranks|3 incidents")
        shown.until(b"step 2")
        assert shown.lines()[-1] == "tft: step 2, 0.05 s/step"[:39]


def test_recorded_loss_is_in_the_line(tmp_path: Path) -> None:
    """When the script records losses, then the line has the newest one."""
    (tmp_path / "records-rank0.jsonl").write_text('{"step": 1, "loss": 2.71828}\n')
    with screen(tmp_path) as shown:
        shown.do("show step 1")
        shown.until(b"tft: step 1, loss 2.718")


def test_terminal_that_is_closed_does_not_end_the_program(tmp_path: Path) -> None:
    """When the terminal is closed, then the program writes on without an error, and more than fits
    into a pipe."""
    out = tmp_path / "out"
    with screen(tmp_path) as shown:
        shown.do("show step 1")
        shown.until(b"step 1")
        gone = os.dup(shown.ours)
        os.dup2(os.open(os.devnull, os.O_RDWR), shown.ours)
        os.close(gone)
        shown.do(f"child trap '' HUP; head -c 300000 /dev/zero; echo done > {out}")
        end = time.monotonic() + LIMIT
        while not out.exists():
            assert time.monotonic() < end, "the program waits for the terminal"
            time.sleep(0.01)


@pytest.mark.parametrize("term", ["dumb", ""])
def test_no_line_is_drawn_in_a_terminal_that_cannot(tmp_path: Path, term: str) -> None:
    """When TERM says that the terminal is dumb, or nothing, then it counts as none."""
    with screen(tmp_path, term=term) as shown:
        shown.until(b"\r\n")
        assert shown.lines()[0] == "none"


def test_output_through_a_pipe_has_no_line_between(tmp_path: Path) -> None:
    """When stdout is a pipe, as to `tee`, then no line is drawn, because the other end may write to
    the same terminal. When it is a file, the line is drawn."""
    with screen(tmp_path, stdout=subprocess.PIPE) as shown:
        assert shown.process.stdout is not None
        assert shown.process.stdout.readline() == b"none\n"
        shown.process.stdout.close()
    with (tmp_path / "out").open("wb") as file, screen(tmp_path, stdout=file.fileno()) as shown:
        shown.do("print one")
        shown.do("show step 1")
        shown.until(b"step 1")
        shown.end()
    assert (tmp_path / "out").read_text() == "terminal\none\nafter\n"
    assert shown.lines()[-2:] == ["after that", ""]


def test_pipe_that_nobody_reads_does_not_hold_up_the_launcher(tmp_path: Path) -> None:
    """When nobody reads stderr, then more lines than fit into a pipe are said without waiting, and
    the end waits for a second at most."""
    code = """
from tft.launcher.console import Speech
with Speech() as speech:
    for _ in range(3000):
        speech.say("x" * 100)
    print("said", flush=True)
print("ended", flush=True)
import os
os._exit(0)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "said\n"
            assert process.stdout.readline() == "ended\n"
        finally:
            process.kill()
