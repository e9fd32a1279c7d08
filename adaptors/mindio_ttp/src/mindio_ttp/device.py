"""
Functions for the accelerator (device) of this process, in a program that has imported MindSpore or
`torch_npu`, PyTorch's extension for Ascend NPUs.

This module imports no framework. If the program has imported neither torch_npu nor MindSpore, the
functions act as if there were no device. torch_npu has a separate current device for each thread,
and a new thread begins with device 0.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def current(*, mindspore: bool) -> int | None:
    """
    Return the number of the device that this thread uses. Return None if there is no device. Pass
    `mindspore=True` if the program uses MindSpore, and not torch_npu.
    """
    if mindspore:
        framework = sys.modules.get("mindspore")
        return None if framework is None else int(framework.context.get_context("device_id"))
    npu = _npu()
    return None if npu is None else int(npu.current_device())


def use(device: int | None) -> None:
    """
    Make `device` the current device of the calling thread. Do nothing for MindSpore.

    Source: `set_device` in MindIO's `ttp_decorator.py` (line 123 at commit 22bb3d98 of the
    repository mind-cluster).
    """
    npu = _npu()
    if npu is not None and device is not None:
        npu.set_device(device)


@contextmanager
def own_stream() -> Iterator[None]:
    """
    Run the device operations in the body of the `with` statement on a new stream of the device. The
    stream of the training loop may hold interrupted operations, and so is not used.

    Source: `execute_save` in MindIO's `ttp_decorator.py` (line 417 at commit 22bb3d98 of the
    repository mind-cluster).
    """
    npu = _npu()
    if npu is None or not hasattr(npu, "stream"):
        yield
        return
    with npu.stream(new_stream()):
        yield


def new_stream() -> Any:  # Any: torch_npu has no type annotations
    """
    Return a new stream of the current device. Return None if the program does not use torch_npu.

    Return a stream that runs each operation at once (`SyncLaunchStream`) if this version of
    torch_npu has such streams.
    """
    npu = _npu()
    if npu is None:
        return None
    return npu.SyncLaunchStream() if hasattr(npu, "SyncLaunchStream") else npu.Stream()


def version() -> str:
    """
    Return the version of torch_npu. Return an empty text if the program has not imported torch_npu.
    """
    return str(getattr(sys.modules.get("torch_npu"), "__version__", ""))


def release_memory() -> None:
    """
    Free the device memory of tensors that are no longer used, such as the tensors of the
    interrupted training loop. This makes room for state that this rank receives from other ranks.
    """
    gc.collect()
    npu = _npu()
    if npu is not None and hasattr(npu, "empty_cache"):
        npu.empty_cache()


def time_now() -> int:
    """
    Return the present time by the clock of the device, in microseconds. Return 0 if the device has
    no clock that can be read.

    This function records an event on the device, and returns the time of that event. Source:
    `get_event_time` in MindIO's `uce_utils.py` (line 66 at commit 22bb3d98 of the repository
    mind-cluster).
    """
    npu = _npu()
    if npu is None or not hasattr(npu, "Event"):
        return 0
    event = npu.Event(enable_timing=True)
    event.record()
    return int(event.recorded_time()) if hasattr(event, "recorded_time") else 0


def _npu() -> Any:  # Any: torch_npu has no type annotations
    return getattr(sys.modules.get("torch"), "npu", None)
