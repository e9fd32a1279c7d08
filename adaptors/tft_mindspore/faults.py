"""
Finds out which fault caused an exception in the training loop, and whether a thread may be waiting
for other ranks.
"""

from types import FrameType

from tft.spi import FaultKind
from tft_mindspore import groups
from tft_mindspore.groups import GroupBroken


def classify(error: BaseException) -> FaultKind | None:
    """
    Return the kind of fault `network` if `error` says that a connection to another rank is broken.
    Return None for any other exception.

    Device errors are not classified here: MindSpore raises a `RuntimeError` for all of them, and
    tft recognises their messages by its own table of device faults.
    """
    return "network" if isinstance(error, GroupBroken) else None


def waiting(frame: FrameType) -> bool:
    """
    Return whether a thread with this innermost Python frame may be waiting for other ranks.
    """
    return frame.f_code.co_filename == groups.__file__
