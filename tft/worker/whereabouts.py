"""
Finds out where the training thread stands in the user's code.
"""

import sys
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

_ROOT = Path(__file__).parents[1]
_LIBRARIES = tuple(
    {str(_ROOT), *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))}
)
"""The directories with code that is not the user's: tft itself, Python, and installed packages."""
_EXTENSIONS = "tft_"
"""How the names of adaptors and plugins begin. An editable installation has them elsewhere."""


def stack_of(thread: int) -> tuple[str, str]:
    """
    Return the innermost line (FILE:LINE) of the user's code on the stack of a thread, and the whole
    stack as text. Return empty texts for what there is not.
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "", ""
    return _user_line(frame), "".join(traceback.format_stack(frame))


def _user_line(frame: FrameType) -> str:
    caller: FrameType | None = frame
    while caller is not None:
        file = caller.f_code.co_filename
        package = str(caller.f_globals.get("__name__", "")).partition(".")[0]
        if not file.startswith((*_LIBRARIES, "<")) and not package.startswith(_EXTENSIONS):
            return f"{file}:{caller.f_lineno}"
        caller = caller.f_back
    return ""
