"""
Commands of `tft` in a terminal.
"""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@contextmanager
def terminal(*words: str) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """
    Start a `tft` command in a terminal of 80 columns and 24 lines, and yield it with the terminal's
    other end.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "tft", *words],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env={**os.environ, "TERM": "xterm"},
        # Ctrl-C is ignored in what a shell script starts in the background, such as these tests
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    os.close(theirs)
    try:
        yield process, ours
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(ours)


def shown(ours: int, word: str = "", *, raw: bool = False) -> str:
    """
    Return what a terminal shows until `word` has come, or until the command has ended. Control
    sequences are left out unless `raw`.
    """
    text = ""
    while not word or word not in text:
        try:
            text += os.read(ours, 65536).decode(errors="replace")
        except OSError:  # the last process has closed the terminal
            break
    return text if raw else CONTROL.sub("", text).replace("\r", "")
