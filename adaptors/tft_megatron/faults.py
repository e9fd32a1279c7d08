"""
What an exception out of a Megatron loop stands for, and whether a thread may be waiting for other ranks.
"""

from types import FrameType

import tft_pytorch.faults

from tft.protocol.messages import FaultKind

_BACKWARD = "/megatron/core/pipeline_parallel/schedules.py"
"""Megatron calls torch's engine for backward itself, which sums inside it."""


def classify(error: BaseException) -> FaultKind | None:
    """
    The kind of fault an exception stands for; None: of none.
    """
    return tft_pytorch.faults.classify(error)


def waiting(frame: FrameType) -> bool:
    """
    Whether a thread whose innermost Python frame this is may wait for other ranks.
    """
    return frame.f_code.co_filename.endswith(_BACKWARD) or tft_pytorch.faults.waiting(frame)
