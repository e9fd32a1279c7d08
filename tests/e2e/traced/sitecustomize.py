"""
Write down which functions of tft and its adaptors a process calls, and when.

Python imports this module first in every process of a job, because its directory is on PYTHONPATH.
The environment variable `TRACED` names the output directory. Without it the module does nothing.

Each process writes one file of lines: the time (CLOCK_MONOTONIC), the file, and the function. A
function that is called again within 1 ms is not written again.
"""

import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[3]
OURS = tuple(f"{ROOT / room}/" for room in ("tft", "adaptors", "plugins"))
TRACED = os.environ.get("TRACED", "")
AGAIN = 0.001
"""Seconds. A function that is called again sooner is not written again."""

_lines = -1
"""The file descriptor of this process's trace file."""
_written: dict[object, float] = {}
"""The time at which each function was last written, by its code object."""


def _open() -> None:
    """
    Open the trace file of this process. Called at the start of a process and after a fork.
    """
    global _lines
    _lines = os.open(
        os.path.join(TRACED, f"{os.getpid()}.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND
    )
    _written.clear()


def _called(frame: FrameType, event: str, _: object) -> None:
    """
    Write down a call. This is the profile function of the process.
    """
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(OURS):
        return
    now = time.monotonic()
    if now - _written.get(code, 0.0) > AGAIN:
        _written[code] = now
        name = os.path.relpath(code.co_filename, ROOT)
        os.write(_lines, f"{now:.6f} {name} {code.co_qualname}\n".encode())


if TRACED:
    _open()
    os.register_at_fork(after_in_child=_open)
    threading.setprofile(_called)
    sys.setprofile(_called)
