"""
Loops that wait for connections of groups which are never freed.
"""

import ctypes
import fcntl
import os
import select
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

from tft_pytorch.idle_loops import _Event, calm
from tft_pytorch.sockets import census

HANDLER = 0x55F7B9000210
"""What gloo gives as the data of an event: the address of the object that handles it."""
_ADD = 1


@contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """
    Yield both ends of a TCP connection. As gloo does, do not set close-on-exec.
    """
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        with closing(one), closing(other):
            for end in (one, other):
                fcntl.fcntl(end, fcntl.F_SETFD, 0)
            yield one, other


def watch(loop: select.epoll, end: socket.socket) -> None:
    """
    Let an `epoll` wait for an end of a connection, with the data that gloo would give.
    """
    event = _Event(select.EPOLLIN, HANDLER)
    assert not ctypes.CDLL(None).epoll_ctl(loop.fileno(), _ADD, end.fileno(), ctypes.byref(event))


def reported(loop: select.epoll) -> list[int]:
    """
    Return the data of the events that an `epoll` reports now.
    """
    events = (_Event * 4)()
    count = ctypes.CDLL(None).epoll_wait(loop.fileno(), events, 4, 0)
    return [events[index].data for index in range(count)]


def test_loop_sleeps_after_its_connections_were_cut() -> None:
    """When a cut connection has content that nobody reads, then its loop is woken once more, with
    the data that it has given itself, and sleeps from then on."""
    spared = census()
    with connection() as (one, other), closing(select.epoll()) as loop:
        watch(loop, one)
        other.sendall(b"a part of a message")
        one.shutdown(socket.SHUT_RDWR)
        assert [reported(loop) for _ in range(3)] == [[HANDLER]] * 3
        assert calm(spared) == 1
        assert [reported(loop) for _ in range(3)] == [[HANDLER], [], []]


def test_working_and_spared_connections_are_left_alone() -> None:
    """When a connection works, or was open before the groups were formed, or closes on exec, then
    its loop is woken as before."""
    with connection() as (old, _), closing(select.epoll()) as loop:
        spared = census()
        with connection() as (working, other), connection() as (ours, _):
            ours.set_inheritable(False)
            for end in (old, working, ours):
                watch(loop, end)
            for end in (old, ours):
                end.shutdown(socket.SHUT_RDWR)
            other.sendall(b"a message")
            assert calm(spared) == 0
            assert [len(reported(loop)) for _ in range(2)] == [3, 3]


def test_no_descriptor_is_kept() -> None:
    """When a loop also waits for descriptors that are not connections, as each loop of gloo does,
    then the search leaves no descriptor open."""
    with connection() as (one, _), closing(select.epoll()) as loop, socket.socket() as fresh:
        reading, writing = os.pipe()
        watch(loop, one)
        loop.register(reading)
        loop.register(fresh)
        os.set_inheritable(reading, True)
        fresh.set_inheritable(True)
        before = os.listdir("/proc/self/fd")
        calm(frozenset())
        assert os.listdir("/proc/self/fd") == before
        os.close(reading)
        os.close(writing)
