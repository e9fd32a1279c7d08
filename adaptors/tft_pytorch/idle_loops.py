"""
Makes the gloo threads of process groups that cannot be freed sleep.

A thread of gloo (`gloo_tcp_loop`) waits with `epoll` for the connections of a group. If data has
arrived for which no operation was begun, or a connection was shut down, gloo reads nothing. Then
each call of `epoll_wait` returns at once, and the thread uses a whole core. In a group in use this
lasts only a moment, because an operation is begun soon. If a group cannot be freed, because one of
its operations does not end, the thread uses the core until the time limit of the group, half an
hour. With edge-triggered notification (`EPOLLET`), `epoll_wait` reports each connection once more,
and then sleeps.
"""

import ctypes
import os
import platform
import re
import select
from collections.abc import Iterator

from tft_pytorch.sockets import is_cut

_MODIFY = 3
"""The operation `EPOLL_CTL_MOD` of `epoll_ctl`."""
_ENTRY = re.compile(r"^tfd:\s*(\d+)\s+events:\s*([0-9a-f]+)\s+data:\s*([0-9a-f]+)", re.MULTILINE)
"""A line of /proc/self/fdinfo of an `epoll` descriptor: the descriptor that is watched, the events,
and the data that `epoll_wait` returns (man 5 proc)."""


class _Event(ctypes.Structure):
    """
    The C structure `epoll_event`. On x86-64 it has no padding.
    """

    if platform.machine() == "x86_64":
        _pack_ = 1
    _fields_ = [("events", ctypes.c_uint32), ("data", ctypes.c_uint64)]


def calm(spared: frozenset[int]) -> int:
    """
    Set all `epoll` instances of this process to edge-triggered mode for the connections that were
    cut. The threads of gloo then sleep and use no processor time. Leave out the sockets whose inode
    numbers are in `spared`. Return the number of changed connections.

    The user data of each watched connection must stay the same, because gloo finds the connection
    by it. `select.epoll.modify` would replace this data, so `epoll_ctl` is called directly.
    """
    libc = ctypes.CDLL(None)
    changed = 0
    for loop in _loops():
        for watched, events, data in _watched(loop):
            if not is_cut(watched, spared):
                continue
            event = _Event(events | select.EPOLLET, data)
            # epoll_ctl fails if gloo has closed the connection meanwhile; such a connection needs
            # no change
            changed += libc.epoll_ctl(loop, _MODIFY, watched, ctypes.byref(event)) == 0
    return changed


def _loops() -> Iterator[int]:
    """
    Yield the file descriptors of the `epoll` instances of this process.
    """
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:  # the file descriptor `entry` was closed after the directory was listed
            continue
        if target == "anon_inode:[eventpoll]":
            yield int(entry)


def _watched(loop: int) -> list[tuple[int, int, int]]:
    """
    Return what an `epoll` instance watches: descriptors, events and data.
    """
    try:
        with open(f"/proc/self/fdinfo/{loop}") as file:
            found = _ENTRY.findall(file.read())
    except OSError:
        return []
    return [(int(fd), int(events, 16), int(data, 16)) for fd, events, data in found]
