"""
Takes what a process needs from the system away from it, for a while.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_STACK = 1 << 46
"""The size of a stack in bytes that no process has room for: no thread with it can be started."""


@contextmanager
def no_more_threads() -> Iterator[None]:
    """
    Let every start of a thread of this process fail in the `with` block, as if the system had no
    more threads.
    """
    before = threading.stack_size(_STACK)
    try:
        yield
    finally:
        threading.stack_size(before)
