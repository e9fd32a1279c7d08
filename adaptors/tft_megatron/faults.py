"""
What an exception out of a Megatron loop stands for, and whether a thread may be waiting for other ranks.
"""

import re
from types import FrameType

import tft_pytorch.faults

from tft.hooks import Diagnosis
from tft.protocol.messages import FaultKind

_PRECISION = "PRECISION ERROR"
"""What somebody who watches the numbers of a Megatron job raises a `RuntimeError` with."""

_SOUND = re.compile(r"load ckpt step\s*=\s*(\d+)")
"""The last step of which they know that it was sound."""

_BACKWARD = "/megatron/core/pipeline_parallel/schedules.py"
"""Megatron calls torch's engine for backward itself, which reduces gradients inside it."""


def classify(error: BaseException) -> FaultKind | Diagnosis | None:
    """
    What an exception stands for; None: no fault.
    """
    said = str(error)
    if isinstance(error, RuntimeError) and _PRECISION in said:
        sound = _SOUND.search(said)
        return Diagnosis(
            kind="numeric", polluted=True, not_after=None if sound is None else int(sound[1])
        )
    return tft_pytorch.faults.classify(error)


def waiting(frame: FrameType) -> bool:
    """
    Whether a thread whose innermost Python frame this is may wait for other ranks.
    """
    return frame.f_code.co_filename.endswith(_BACKWARD) or tft_pytorch.faults.waiting(frame)
