"""
Decides which fault an exception from the training loop means. Also tells whether a thread may be
waiting for other ranks.
"""

from types import FrameType

from tft.spi import FaultKind
from tft_mindspore import groups
from tft_mindspore.groups import GroupBroken


def classify(error: BaseException) -> FaultKind | None:
    """
    Return the kind of fault that an exception means; None if it means no fault.

    MindSpore raises a RuntimeError for an error of a device. The table of device faults has the
    messages of these errors.
    """
    return "network" if isinstance(error, GroupBroken) else None


def waiting(frame: FrameType) -> bool:
    """
    Return whether a thread with this innermost Python frame may be waiting for other ranks.
    """
    return frame.f_code.co_filename == groups.__file__
