"""
The state of the devices: the device of each thread, the stopped devices, and the lost memory.
"""

import threading
from collections.abc import Callable

DEVICES = 8
FORCE_STOP = "FORCE STOP. the device was stopped [ERROR] ERR00100 PTA call acl api failed"

LOW, HIGH = 2, 3
"""Results of `check_uce_in_memory`. LOW: only memory that need not be kept was lost. HIGH: memory
to keep was lost."""

_here = threading.local()
_lock = threading.Lock()
_stopped: set[int] = set()
_stops: list[Callable[[int], None]] = []
"""Functions that are called with each device that is stopped."""
_lost: dict[int, int] = {}


def device_count() -> int:
    """
    Return how many devices this node has.
    """
    return DEVICES


def current_device() -> int:
    """
    Return the device of the calling thread.
    """
    return getattr(_here, "device", 0)


def set_device(device: int | str) -> None:
    """
    Put the calling thread on this device. Other threads keep their device.
    """
    _here.device = int(str(device).rpartition(":")[2])


def refuse_if_stopped() -> None:
    """
    Raise an error with FORCE STOP if the calling thread's device is stopped.
    """
    if current_device() in _stopped:
        raise RuntimeError(FORCE_STOP)


def on_stop(stop: Callable[[int], None]) -> None:
    """
    Register `stop` to be called with each device that is stopped.
    """
    _stops.append(stop)


def stop_device(device: int) -> int:
    """
    Stop a device; return 0.

    Until the device is restarted, every thread that waits for it or gives it work gets a FORCE STOP
    error. Other devices continue. Any thread may call this function.
    """
    with _lock:
        _stopped.add(device)
    for stop in _stops:
        stop(device)
    return 0


def restart_device(device: int, *_: bool) -> None:
    """
    Let a stopped device accept work again.
    """
    with _lock:
        _stopped.discard(device)


def lose(device: int, level: int) -> None:
    """
    Give this device an uncorrectable memory error of this level. Only tests call this function.
    """
    _lost[device] = level


def check_uce_in_memory(device: int) -> int:
    """
    Return the level of lost memory: 0 no loss, 2 only memory that need not be kept, 3 memory to
    keep.
    """
    return _lost.pop(device, 0)
