"""
Finds out which fault caused an exception in the training loop, and whether a thread may be waiting
for other ranks.
"""

import re
import threading
from types import FrameType

import torch.distributed as dist

from tft.spi import FaultKind

_NETWORK: tuple[tuple[type[BaseException], str], ...] = (
    # the class of the exception, and a regular expression for the message of the exception
    (dist.DistNetworkError, r""),
    (dist.DistBackendError, r""),
    (dist.DistStoreError, r""),
    (RuntimeError, r"gloo/transport/|tcp/(pair|unbound_buffer)\.cc"),
    (RuntimeError, r"Connection closed by peer \["),
    (RuntimeError, r"Timed out waiting \d+ms for (recv|send) operation"),
    # the text of tft's exception `CalledOff`, which torch's C++ code raises again as RuntimeError
    (RuntimeError, r"wait for other ranks .* was cancelled"),
    (RuntimeError, r"Gloo connectFullMesh failed|Application timeout caused pair closure"),
)  # fmt: skip
"""Exceptions that mean a broken connection. Their messages must be compared, because gloo raises
RuntimeError for every error."""

_WAITING = (
    # code of torch.distributed, except that in checkpoint/, which waits for the disk
    re.compile(r"/torch/distributed/(?!checkpoint/)"),
    re.compile(r"/tft_pytorch/interruptible\.py$"),
    re.compile(r"/torch/nn/parallel/distributed\.py$"),  # DDP's own all-reduces and broadcasts
    re.compile(r"/torch/autograd/graph\.py$"),  # backward passes, in which DDP reduces gradients
)


def classify(error: BaseException) -> FaultKind | None:
    """
    Return the kind of fault that `error` means: `network` if torch raised it because a connection
    is broken, else None.
    """
    said = str(error)
    broken = any(isinstance(error, kind) and re.search(words, said) for kind, words in _NETWORK)
    return "network" if broken else None


def waiting(frame: FrameType) -> bool:
    """
    Return whether a thread with this innermost Python frame may be waiting for other ranks.

    A user's hook that runs inside the backward has a frame of its own, so such a hook does not
    count as waiting.
    """
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename == threading.__file__:
        # skip the frames of the module threading, which every kind of wait uses
        caller = caller.f_back
    return caller is not None and any(place.search(caller.f_code.co_filename) for place in _WAITING)
