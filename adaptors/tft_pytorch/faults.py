"""
What an exception out of the training loop stands for, and whether a thread may be waiting for
other ranks.
"""

import re
import threading
from collections.abc import Iterator
from types import FrameType
from typing import get_args

import torch
import torch.distributed as dist

from tft.protocol.messages import FaultKind

DECLARED = "tft_fault_kind"
"""An exception whose class has this attribute is the fault that it names."""

_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)

_TABLE: tuple[tuple[type[BaseException], str, FaultKind | None], ...] = (
    # exception          its message (regular expression)                        what it stands for
    (torch.OutOfMemoryError, r"", None),  # the user's: the model does not fit
    (RuntimeError, r"(?i)uncorrectable (ECC|NVLink) error", "memory"),
    (RuntimeError, r"(?i)CUDA error: .*\bECC\b", "memory"),
    (RuntimeError, r"UCE ERROR|HBM MULTI BIT ECC ERROR", "memory"),  # Ascend NPU
    (dist.DistNetworkError, r"", "network"),
    (dist.DistBackendError, r"", "network"),
    (dist.DistStoreError, r"", "network"),
    (RuntimeError, r"gloo/transport/|tcp/(pair|unbound_buffer)\.cc", "network"),
    (RuntimeError, r"Connection closed by peer \[", "network"),
    (RuntimeError, r"Timed out waiting \d+ms for (recv|send) operation", "network"),
    (RuntimeError, r"wait for other ranks .* was called off", "network"),  # `CalledOff`, out of C++
    (RuntimeError, r"Gloo connectFullMesh failed|Application timeout caused pair closure", "network"),
)  # fmt: skip
"""The first line that fits counts. Messages, because gloo raises nothing but RuntimeError."""

_WAITING = (
    re.compile(r"/torch/distributed/(?!checkpoint/)"),  # which waits for the disk
    re.compile(r"/tft_pytorch/interruptible\.py$"),
    re.compile(r"/torch/nn/parallel/distributed\.py$"),  # DDP's own sums and broadcasts
    re.compile(r"/torch/autograd/graph\.py$"),  # backward: DDP sums inside it
)


def classify(error: BaseException) -> FaultKind | None:
    """
    The kind of fault, by the exception or by what it was raised from; None: the user's own bug.
    """
    for link in _chain(error):
        declared = getattr(type(link), DECLARED, None)
        if declared in _KINDS:
            return declared  # type: ignore[no-any-return]  # it is one of the kinds, just checked
        for kind_of_error, message, kind in _TABLE:
            if isinstance(link, kind_of_error) and re.search(message, str(link)):
                return kind
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def waiting(frame: FrameType) -> bool:
    """
    Whether a thread whose innermost Python frame this is may wait for other ranks. A hook of the
    user's that runs inside backward has a frame of its own, so it does not count.
    """
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename == threading.__file__:
        caller = caller.f_back  # what waits is whoever called it
    return caller is not None and any(place.search(caller.f_code.co_filename) for place in _WAITING)
