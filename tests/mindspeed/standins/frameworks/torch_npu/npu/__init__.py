"""
`torch.npu`. As in CUDA, each thread has its own current device; a new thread is on device 0.
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
    A stand-in for a stream. Work on a CPU is complete as soon as a program requests it.
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
        Record the current time, because a CPU reaches the event at once.
        """
        self.at = monotonic_ns() // 1000

    def recorded_time(self) -> int:
        """
        Return the recorded time in microseconds.
        """
        return self.at


def stream(_: Any) -> Stream:
    """
    Return a context in which work goes to a stream.
    """
    return Stream()


def is_available() -> bool:
    """
    Return True: the stand-in has devices.
    """
    return True


def synchronize(*_: Any) -> None:
    """
    Wait for the device. Raises an error with FORCE STOP if the device is stopped.
    """
    state.refuse_if_stopped()


def empty_cache() -> None:
    """
    Do nothing: the stand-in has no cache.
    """


def memory_allocated(*_: Any) -> int:
    """
    Return 0: the stand-in counts no memory.
    """
    return 0


max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated


def get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    """
    Return the state of the CPU's generator, which all devices share.
    """
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    """
    Set the state that `get_rng_state` has returned.
    """
    torch.set_rng_state(state)
