"""
Reports each collective that this process enters, and counts its messages to and from single ranks.

torch has no hook for collectives or messages. So this module replaces methods of torch's class
`ProcessGroup`, and of the subclasses of this class in Python. The replaced methods work for groups
of every backend.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from tft_pytorch.interruptible import MESSAGES, OPERATIONS


class _Watch:
    """
    Replaces torch's methods by methods that report collectives and count messages, and can restore
    torch's methods.
    """

    def __init__(self) -> None:
        self._native: dict[tuple[type, str], Any] = {}  # Any: methods with different signatures
        self._entered: Callable[[], None] | None = None
        self._counts = False
        self.messages = 0

    def watch(self, entered: Callable[[], None] | None) -> None:
        """
        Call `entered` whenever a collective, or a message to or from a single rank, is about to
        begin. If `entered` is None, report nothing.
        """
        self._entered = entered
        self._replace()

    def count(self) -> None:
        """
        Count the messages to and from single ranks from now on.
        """
        self._counts = True
        self._replace()

    def _replace(self) -> None:
        """
        Restore torch's own methods, and then replace those methods that have to report or count
        now.
        """
        for (owner, name), method in self._native.items():
            setattr(owner, name, method)
        self._native.clear()
        names = () if self._entered is None else OPERATIONS
        for name in {*names, *(MESSAGES if self._counts else ())}:
            groups: list[type] = [dist.ProcessGroup, *dist.ProcessGroup.__subclasses__()]
            for group in groups:
                method = vars(group).get(name)
                if method is not None:
                    self._native[group, name] = method
                    setattr(group, name, self._watched(method, is_message=name in MESSAGES))

    # Any: the methods of torch have different signatures
    def _watched(self, method: Any, *, is_message: bool) -> Callable[..., Any]:
        def operation(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if self._entered is not None:
                self._entered()
            self.messages += is_message
            return method.__get__(group)(*args, **kwargs)

        return operation


_watch = _Watch()


def watch(entered: Callable[[], None] | None) -> None:
    """
    Call `entered` from now on whenever Python code of this process is about to begin a collective,
    or a message to or from a single rank.

    If `entered` is None, stop these calls.
    """
    _watch.watch(entered)


def count_messages() -> None:
    """
    Count the messages to and from single ranks from now on.
    """
    _watch.count()


def messages() -> int:
    """
    Return the number of messages to and from single ranks that this process has begun.

    After `count_messages` was called, every message is counted. Of the messages before that call,
    some may be missing.
    """
    return _watch.messages
