"""
`torch.npu`. The current device is one of each thread, as CUDA's is: a new thread is on device 0.
"""

from collections.abc import Callable
from time import monotonic_ns
from typing import Any

import torch

from torch_npu.npu import state
from torch_npu.npu.state import (
    check_uce_in_memory,
    current_device,
    device_count,
    restart_device,
    set_device,
    stop_device,
)

__all__ = [
    "Event", "Stream", "SyncLaunchStream", "check_uce_in_memory", "current_device", "current_stream",
    "default_stream", "device_count", "empty_cache", "is_available", "restart_device", "set_device",
    "stop_device", "stream", "synchronize",
]  # fmt: skip


class Stream:
    """
    Work on a CPU is done when it has been asked for.
    """

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: Any) -> None: ...

    def __getattr__(self, _: str) -> Callable[..., "Stream"]:
        return lambda *_: Stream()


SyncLaunchStream = current_stream = default_stream = Stream


class Event(Stream):
    """
    A point in the work of a stream.
    """

    def record(self, *_: Any) -> None:
        """
        It is reached at once.
        """
        self.at = monotonic_ns() // 1000

    def recorded_time(self) -> int:
        """
        When, in microseconds of the device.
        """
        return self.at


def stream(_: Any) -> Stream:
    """
    A context in which work goes to a stream.
    """
    return Stream()


def is_available() -> bool:
    """
    There are devices.
    """
    return True


def synchronize(*_: Any) -> None:
    """
    Wait for the device. Raises FORCE STOP on one that is stopped.
    """
    state.refuse_if_stopped()


def empty_cache() -> None:
    """
    Nothing is kept.
    """


def memory_allocated(*_: Any) -> int:
    """
    As all that are asked for memory: none is counted.
    """
    return 0


max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated


def get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    """
    The CPU has one generator.
    """
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    """
    As `get_rng_state` has given it.
    """
    torch.set_rng_state(state)
