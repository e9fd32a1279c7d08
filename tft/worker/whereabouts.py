"""
Finds out where the training thread stands in the user's code.
"""

import sys
import sysconfig
from pathlib import Path
from types import FrameType

_ROOT = Path(__file__).parents[1]
_LIBRARIES = tuple(
    {str(_ROOT), *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))}
)
"""The directories with code that is not the user's: tft itself, Python, and installed packages."""
_FRAMES = 40
"""The number of innermost frames of a stack that are described."""
_EXTENSIONS = "tft_"
"""The beginning of the module names of adaptors and plugins. They are recognized by name, because
in an editable installation their files are not in `_LIBRARIES`."""


def stack_of(thread: int) -> tuple[str, str]:
    """
    Return the innermost line (FILE:LINE) of the user's code on the stack of a thread, and the whole
    stack as text. The line is empty if no user code is on the stack, and both are empty if the
    thread has ended.
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "", ""
    return _user_line(frame), _described(frame)


def _described(frame: FrameType) -> str:
    """
    Return the stack as text, with the innermost line last. Leave out the source lines: if the ranks
    hang because a file system hangs, this thread would hang too when it reads source files.
    """
    lines: list[str] = []
    caller: FrameType | None = frame
    while caller is not None and len(lines) < _FRAMES:
        code = caller.f_code
        lines.append(f'  File "{code.co_filename}", line {caller.f_lineno}, in {code.co_name}\n')
        caller = caller.f_back
    return "".join(reversed(lines))


def _user_line(frame: FrameType) -> str:
    caller: FrameType | None = frame
    while caller is not None:
        file = caller.f_code.co_filename
        package = str(caller.f_globals.get("__name__", "")).partition(".")[0]
        if not file.startswith((*_LIBRARIES, "<")) and not package.startswith(_EXTENSIONS):
            return f"{file}:{caller.f_lineno}"
        caller = caller.f_back
    return ""
