"""
What an exception out of the training loop stands for, and whether a thread may be waiting for other
ranks.
"""

from types import FrameType

from tft.protocol.messages import FaultKind
from tft_mindspore import groups
from tft_mindspore.groups import GroupBroken


def classify(error: BaseException) -> FaultKind | None:
    """
    The kind of fault that an exception of this adaptor stands for; None: of none. What MindSpore says of
    devices comes as words in a RuntimeError, and stands in the table of device faults.
    """
    return "network" if isinstance(error, GroupBroken) else None


def waiting(frame: FrameType) -> bool:
    """
    Whether a thread whose innermost Python frame this is may wait for other ranks.
    """
    return frame.f_code.co_filename == groups.__file__
