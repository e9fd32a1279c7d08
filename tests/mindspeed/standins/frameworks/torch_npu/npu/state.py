"""
The devices: which one a thread is on, which are stopped, what has become of their memory.
"""

import threading
from collections.abc import Callable

DEVICES = 8
FORCE_STOP = "FORCE STOP. the device was stopped [ERROR] ERR00100 PTA call acl api failed"

LOW, HIGH = 2, 3
"""What `check_uce_in_memory` says: nothing that is kept was lost, or some was."""

_here = threading.local()
_lock = threading.Lock()
_stopped: set[int] = set()
_stops: list[Callable[[int], None]] = []
"""What else is to be stopped with a device."""
_lost: dict[int, int] = {}


def device_count() -> int:
    """
    How many this node has.
    """
    return DEVICES


def current_device() -> int:
    """
    Of the calling thread.
    """
    return getattr(_here, "device", 0)


def set_device(device: int | str) -> None:
    """
    The calling thread is on this device from here on; other threads stay where they are.
    """
    _here.device = int(str(device).rpartition(":")[2])


def refuse_if_stopped() -> None:
    """
    Raise if the calling thread's device was stopped.
    """
    if current_device() in _stopped:
        raise RuntimeError(FORCE_STOP)


def on_stop(stop: Callable[[int], None]) -> None:
    """
    Have `stop` called with each device that is stopped.
    """
    _stops.append(stop)


def stop_device(device: int) -> int:
    """
    Whoever waits for this device raises FORCE STOP, and so does who gives it work, until it is
    restarted. Another device goes on as before. From any thread; 0: done.
    """
    with _lock:
        _stopped.add(device)
    for stop in _stops:
        stop(device)
    return 0


def restart_device(device: int, *_: bool) -> None:
    """
    It takes work again.
    """
    with _lock:
        _stopped.discard(device)


def lose(device: int, level: int) -> None:
    """
    For tests: memory of this device has an uncorrectable error.
    """
    _lost[device] = level


def check_uce_in_memory(device: int) -> int:
    """
    What was lost: 0 none, 2 nothing that is kept, 3 something that is.
    """
    return _lost.pop(device, 0)
