"""
Decides which fault an exception out of the training loop means, and whether a thread may be waiting
for other ranks.
"""

from types import FrameType

from tft.spi import FaultKind
from tft_mindspore import groups
from tft_mindspore.groups import GroupBroken


def classify(error: BaseException) -> FaultKind | None:
    """
    Return the kind of fault that an exception of this adaptor means, None if it means no fault.

    MindSpore's errors of devices are RuntimeErrors; their messages are in the table of device
    faults.
    """
    return "network" if isinstance(error, GroupBroken) else None


def waiting(frame: FrameType) -> bool:
    """
    Return whether a thread with this innermost Python frame may be waiting for other ranks.
    """
    return frame.f_code.co_filename == groups.__file__
