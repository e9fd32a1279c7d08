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
    Return the kind of fault that caused `error`. Return None if no known fault did.

    MindSpore raises a RuntimeError for every error of a device, so the messages are compared with
    the table of device faults.
    """
    return "network" if isinstance(error, GroupBroken) else None


def waiting(frame: FrameType) -> bool:
    """
    Return whether a thread with this innermost Python frame may be waiting for other ranks.
    """
    return frame.f_code.co_filename == groups.__file__
