"""
The accelerator of this process, for a program that has imported `torch_npu` or MindSpore.

This module imports no framework: without one of them the program has no device. torch_npu keeps the
current device for each thread, so a new thread begins at device 0.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def current(*, mindspore: bool) -> int | None:
    """
    Return the number of the device that this thread uses; None where there is no device.
    """
    if mindspore:
        framework = sys.modules.get("mindspore")
        return None if framework is None else int(framework.context.get_context("device_id"))
    npu = _npu()
    return None if npu is None else int(npu.current_device())


def use(device: int | None) -> None:
    """
    Make `device` the current device of the calling thread. Source: `set_device` of `ttp_decorator.py` (line
    123 at mind-cluster 22bb3d98), which does nothing for MindSpore either.
    """
    npu = _npu()
    if npu is not None and device is not None:
        npu.set_device(device)


@contextmanager
def own_stream() -> Iterator[None]:
    """
    Run the body of the `with` statement on a new stream, because the training stream may hold
    interrupted operations.

    Source: `execute_save` of `ttp_decorator.py`, line 417.
    """
    npu = _npu()
    if npu is None or not hasattr(npu, "stream"):
        yield
        return
    with npu.stream(new_stream()):
        yield


def new_stream() -> Any:  # Any: torch_npu has no types
    """
    Return a new stream of the current device; None without torch_npu.

    It is a stream that runs its operations at once, where torch_npu has such streams.
    """
    npu = _npu()
    if npu is None:
        return None
    return npu.SyncLaunchStream() if hasattr(npu, "SyncLaunchStream") else npu.Stream()


def version() -> str:
    """
    Return the version of torch_npu; empty where the program has not imported it.
    """
    return str(getattr(sys.modules.get("torch_npu"), "__version__", ""))


def release_memory() -> None:
    """
    Free the device memory that the frames of a training loop have used, so that received state
    fits.
    """
    gc.collect()
    npu = _npu()
    if npu is not None and hasattr(npu, "empty_cache"):
        npu.empty_cache()


def time_now() -> int:
    """
    Return the time of the device in microseconds, from an event; 0 where the device cannot tell it.

    Source: `get_event_time` of `uce_utils.py`, line 66.
    """
    npu = _npu()
    if npu is None or not hasattr(npu, "Event"):
        return 0
    event = npu.Event(enable_timing=True)
    event.record()
    return int(event.recorded_time()) if hasattr(event, "recorded_time") else 0


def _npu() -> Any:  # Any: torch_npu has no types
    return getattr(sys.modules.get("torch"), "npu", None)
