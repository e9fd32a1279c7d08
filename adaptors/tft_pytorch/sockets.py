"""
Finds the connections of this process's process groups among all its file descriptors, and cuts
these connections.

gloo has no other way to end a collective whose peer does not answer. After any thread has called
`shutdown(2)` on the socket, gloo's waiting call raises an exception within milliseconds. Only the
sockets of gloo and of the clients of the rendezvous store may be cut. gloo's sockets use TCP, and
were opened after the process group began to form. Python, ZeroMQ and most libraries set
close-on-exec on their sockets, but gloo does not. A client of the rendezvous store sets
close-on-exec too, so the client's socket is found by the port to which the socket is connected.

NCCL does not set close-on-exec either. While a communicator is made, NCCL waits for connections of
other ranks at listening sockets. No call of torch ends this wait. A listening socket of NCCL is
known by the option SO_REUSEADDR, which NCCL does not set and gloo does. After `shutdown(2)`,
NCCL's `accept` has an error, and NCCL gives the communicator up.

Of each pair of ranks in a gloo group, one rank connects and the other one accepts. The accepting
rank waits until its listening socket has a connection that begins with the number of the pair
(gloo/transport/tcp/listener.cc). If the connecting rank dies before it connects, nothing ends this
wait. So this process connects to its own listening sockets in the place of the other ranks, and
disconnects at once.
"""

import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress

_ESTABLISHED = 1
"""The state of a TCP connection that works, as the first byte of `TCP_INFO` gives it."""

_PAIR = struct.Struct("=q")
"""The first bytes that gloo sends on a new connection: the number of the pair of ranks."""

_CONNECTED = 1.0
"""The time limit in seconds for a connection of this process to a listening socket of its own."""


def census() -> frozenset[int]:
    """
    Return the inode numbers of all sockets that this process has open.

    Sockets are identified by inode number, because the system reuses the numbers of file
    descriptors.
    """
    return frozenset(inode for _, inode in _sockets())


def cut(spared: frozenset[int], store_port: int, *, listening: bool = False) -> int:
    """
    Shut down the connections of process groups, and of clients of the rendezvous store at the port
    `store_port`. With `listening`, shut down the listening sockets of NCCL too. Leave out the sockets
    whose inode numbers are in `spared`. Return the number of sockets that were shut down.

    Can be called on any thread, and repeatedly.
    """
    return sum(
        _cut_one(connection, store_port, close_on_exec=close_on_exec, listening=listening)
        for connection, close_on_exec in _opened(spared)
    )


def stand_in(spared: frozenset[int], ranks: int) -> None:
    """
    End the waits of gloo for connections of other ranks: connect to each listening socket of gloo
    in the place of up to `ranks` ranks, and disconnect. A waiting call of gloo then raises an
    exception, as if the other rank had ended. Leave out the sockets whose inode numbers are in
    `spared`.

    Can be called on any thread, and repeatedly.
    """
    for listener, close_on_exec in _opened(spared):
        with suppress(OSError):
            if not close_on_exec and _listens(listener) and _reuses(listener):
                for pair in range(ranks):
                    _come_and_go(listener, pair)


def _come_and_go(listener: socket.socket, pair: int) -> None:
    with socket.socket(listener.family) as connection:
        connection.settimeout(_CONNECTED)
        connection.connect(listener.getsockname())
        connection.sendall(_PAIR.pack(pair))


def is_cut(fd: int, spared: frozenset[int]) -> bool:
    """
    Return whether a file descriptor is a connection of a process group of gloo that was shut down.
    Return False for a socket whose inode number is in `spared`.
    """
    found = _tcp_connection(fd)
    if found is None:
        return False
    connection, close_on_exec = found
    with connection:
        if close_on_exec or os.fstat(connection.fileno()).st_ino in spared:
            return False
        return not _listens(connection) and _is_shut(connection)


def _is_shut(connection: socket.socket) -> bool:
    """
    Return whether a TCP connection is not established any more.
    """
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED


def _sockets() -> Iterator[tuple[int, int]]:
    for entry in os.listdir("/proc/self/fd"):
        try:
            found = os.stat(f"/proc/self/fd/{entry}")
        except OSError:  # the file descriptor `entry` was closed after the directory was listed
            continue
        if stat.S_ISSOCK(found.st_mode):
            yield int(entry), found.st_ino


def _reuses(listener: socket.socket) -> bool:
    return bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR))


def _listens(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _opened(spared: frozenset[int]) -> Iterator[tuple[socket.socket, bool]]:
    """
    Yield a copy of each TCP socket of this process, and whether the socket is closed on exec. The
    copy is closed when the next socket is asked for. Leave out sockets whose inode numbers are in
    `spared`.
    """
    for fd, inode in _sockets():
        found = None if inode in spared else _tcp_connection(fd)
        if found is None:
            continue
        connection, close_on_exec = found
        with connection:
            # if the inode number differs, the descriptor was closed meanwhile, and its number was
            # given to another socket: leave that socket out
            if os.fstat(connection.fileno()).st_ino == inode:
                yield connection, close_on_exec


def _cut_one(
    connection: socket.socket, store_port: int, *, close_on_exec: bool, listening: bool
) -> bool:
    try:
        if _listens(connection):
            if close_on_exec or _reuses(connection) or not listening:
                return False
        elif close_on_exec and connection.getpeername()[1] != store_port:
            return False
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # the socket is not connected
        return False
    return True


def _tcp_connection(fd: int) -> tuple[socket.socket, bool] | None:
    """
    Return a copy of the file descriptor `fd` as a socket, and whether `fd` itself is closed on
    exec. Return None if `fd` is closed or is not a TCP socket. Another thread may close `fd`,
    but not the copy, which the caller must close.
    """
    try:
        close_on_exec = bool(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC)
        duplicate = os.dup(fd)
    except OSError:  # the descriptor `fd` was closed meanwhile
        return None
    if not stat.S_ISSOCK(os.fstat(duplicate).st_mode):
        os.close(duplicate)
        return None
    try:
        connection = socket.socket(fileno=duplicate)
    except OSError:  # a kind of socket that Python does not know
        os.close(duplicate)
        return None
    if (
        connection.family in (socket.AF_INET, socket.AF_INET6)
        and connection.type == socket.SOCK_STREAM
    ):
        return connection, close_on_exec
    connection.close()
    return None
