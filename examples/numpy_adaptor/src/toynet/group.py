"""
The group: the ranks that sum up their gradients, connected by sockets.

Rank 0 is the hub. It receives the array of every other rank, adds the arrays in the order of the
ranks, and sends the sum to all. The order of the sum is always the same, so its bits are too.

An all-reduce in which a rank is missing waits for ever. `abort`, called on another thread, makes it
raise `Broken`. This toy does not check which process connects.
"""

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from toynet import rendezvous

CONNECT = 5.0
"""Seconds until a server must have accepted a connection."""
_RANK = struct.Struct("!I")


class Broken(ConnectionError):
    """
    The group has lost a member, or was aborted.
    """


class Group:
    """
    One group, from its forming to its end. Use it on one thread; `abort` may be called on any.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self.before: Callable[[], None] = lambda: None
        """Called before this rank gives its array to an all-reduce."""
        self._peers: list[socket.socket] = []
        """On rank 0: the connections to ranks 1, 2, and so on. Elsewhere: the one to rank 0."""
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        """Every socket of the group, also while it is being formed: what `abort` shuts down."""
        self._aborted = False

    def form(self, name: str, host: str, port: int) -> None:
        """
        Find the other ranks at the rendezvous, under a name that no group had before. Return when
        all ranks have come. Raises `Broken`.
        """
        try:
            desk = self._keep(socket.create_connection((host, port), timeout=CONNECT))
            if self.rank == 0:
                self._peers = self._welcome(desk, name)
            else:
                address, _, door = str(rendezvous.ask(desk, get=name)).rpartition(":")
                hub = self._keep(socket.create_connection((address, int(door)), timeout=CONNECT))
                hub.sendall(_RANK.pack(self.rank))
                self._peers = [hub]
        except OSError as error:
            raise Broken(f"the group {name!r} was not formed: {error}") from error
        self._sum(np.zeros(1))  # returns when the last rank is here

    def all_reduce(self, array: NDArray[np.float64]) -> None:
        """
        Replace the array by the sum of the arrays of all ranks. Raises `Broken`.
        """
        self.before()
        self._sum(array)

    def abort(self) -> None:
        """
        Make the thread that uses this group raise `Broken`, now or at its next call.
        """
        with self._lock:
            self._aborted = True
            for each in self._open:
                with suppress(OSError):  # its peer has closed it
                    each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """
        Free the sockets.
        """
        self.abort()
        with self._lock:
            for each in self._open:
                each.close()
            self._open.clear()

    def _welcome(self, desk: socket.socket, name: str) -> list[socket.socket]:
        own = desk.getsockname()[0]  # the address at which this rank reaches the rendezvous
        door = self._keep(socket.create_server((own, 0)))
        rendezvous.ask(desk, put=name, value=f"{own}:{door.getsockname()[1]}")
        came: dict[int, socket.socket] = {}
        while len(came) < self.world - 1:
            peer = self._keep(door.accept()[0])
            number = bytearray(_RANK.size)
            _fill(peer, memoryview(number))
            came[_RANK.unpack(number)[0]] = peer
        return [came[rank] for rank in sorted(came)]

    def _keep(self, connection: socket.socket) -> socket.socket:
        with self._lock:
            if self._aborted:
                connection.close()
                raise Broken("the group was aborted")
            connection.settimeout(None)
            self._open.append(connection)
        return connection

    def _sum(self, array: NDArray[np.float64]) -> None:
        own = array.data.cast("B")
        try:
            if self.rank == 0:
                other = np.empty_like(array)
                for peer in self._peers:
                    _fill(peer, other.data.cast("B"))
                    array += other
            for peer in self._peers:
                peer.sendall(own)
            if self.rank != 0:
                _fill(self._peers[0], own)
        except OSError as error:
            raise Broken(f"the group is broken: {error}") from error


def _fill(connection: socket.socket, room: memoryview) -> None:
    while room:
        count = connection.recv_into(room)
        if not count:
            raise Broken("a rank has closed its connection")
        room = room[count:]


# ---------------------------------------------------------------- the group of this process

_group: Group | None = None


def join(name: str, host: str, port: int, rank: int, world: int) -> None:
    """
    Form the group of this process. Leave an earlier group first. Raises `Broken`.
    """
    global _group
    leave()
    _group = Group(rank, world)  # before it is formed, so that it can be aborted meanwhile
    _group.form(name, host, port)


def current() -> Group | None:
    """
    Return the group of this process; None before `join` and after `leave`.
    """
    return _group


def leave() -> None:
    """
    Free the group of this process, if there is one.
    """
    global _group
    if _group is not None:
        _group.close()
        _group = None


def all_reduce(array: NDArray[np.float64]) -> int:
    """
    Sum an array over the group of this process, in place. Return the number of ranks. Raises
    `Broken`.
    """
    if _group is None:
        raise Broken("there is no group")
    _group.all_reduce(array)
    return _group.world
