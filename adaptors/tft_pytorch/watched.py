"""
Watches the collectives that this process enters.

torch has no hook for this. So this module replaces the methods of torch's process groups while
collectives are watched. It does so whatever the backend of the groups is.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from tft_pytorch.interruptible import OPERATIONS

_native: dict[str, Any] = {}  # Any: methods of a class in C++
"""The methods that were replaced, by name."""


def watch(entered: Callable[[], None] | None) -> None:
    """
    Call `entered` from now on whenever a collective is about to be entered from Python.

    If `entered` is None, stop these calls, and restore torch's own methods.
    """
    for name, method in _native.items():
        setattr(dist.ProcessGroup, name, method)
    _native.clear()
    if entered is None:
        return
    for name in OPERATIONS:
        method = vars(dist.ProcessGroup).get(name)
        if method is not None:
            _native[name] = method
            setattr(dist.ProcessGroup, name, _watched(method, entered))


def _watched(method: Any, entered: Callable[[], None]) -> Callable[..., Any]:  # Any: as above
    def operation(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        entered()
        return method.__get__(self)(*args, **kwargs)

    return operation
