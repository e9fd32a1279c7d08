"""
Classifies the exceptions that leave a Megatron training loop. Also tells whether a thread may be
waiting for other ranks.
"""

import re
from types import FrameType

import tft_pytorch.faults

from tft.spi import Diagnosis, FaultKind

_PRECISION = "PRECISION ERROR"
"""The text of the `RuntimeError` that a monitor of a Megatron job raises when its numbers are
wrong."""

_SOUND = re.compile(r"load ckpt step\s*=\s*(\d+)")
"""The last step that the monitor knows to be sound."""

_BACKWARD = "/megatron/core/pipeline_parallel/schedules.py"
"""The file in which Megatron itself calls torch's engine for the backward pass. The engine reduces
the gradients."""


def classify(error: BaseException) -> FaultKind | Diagnosis | None:
    """
    Return the fault that an exception of a training loop means; None if it means no fault.
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
    Return whether a thread whose innermost Python frame is `frame` may wait for other ranks.
    """
    return frame.f_code.co_filename.endswith(_BACKWARD) or tft_pytorch.faults.waiting(frame)
