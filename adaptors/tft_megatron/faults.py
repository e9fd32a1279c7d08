"""
Finds out which fault caused an exception in a Megatron training loop, and whether a thread may be
waiting for other ranks.
"""

import re
from types import FrameType

import tft_pytorch.faults

from tft.spi import Diagnosis, FaultKind

_PRECISION = "PRECISION ERROR"
"""A text in the message of the `RuntimeError` that a precision monitor raises. A precision monitor
is a tool that checks losses and gradients, and raises when they are wrong. MindSpeed-LLM searches
for the same text."""

_SOUND = re.compile(r"load ckpt step\s*=\s*(\d+)")
"""The part of the precision monitor's message that names the last step whose numbers were right."""

_BACKWARD = "/megatron/core/pipeline_parallel/schedules.py"
"""The end of the path of the Megatron file that calls torch's autograd engine for the backward
pass. Gradients are reduced inside that call, so a thread in this file may wait for other ranks."""


def classify(error: BaseException) -> FaultKind | Diagnosis | None:
    """
    Return the kind of fault that caused `error`, an exception in a training loop, or a `Diagnosis`
    with more facts. Return None if the exception is not known as a sign of a fault.
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
