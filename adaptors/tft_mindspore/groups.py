"""
The process group of a MindSpore job. It carries out all-reduces, broadcasts, gathers and barriers
over host memory, with its own TCP connections instead of MindSpore's collectives.

MindSpore's own collectives on CPU cannot be repaired within a process. After a collective has
failed, its group cannot be used again, and a new group in the same process returns wrong results.
So gradients are reduced over the connections of this module. An all-reduce adds up the arrays in
the order of the ranks, not in the order of arrival. So every rank gets the same bits, and gets the
same bits again when the step is repeated after an incident. A call of `Group.shut` on any thread
interrupts the training thread wherever that thread waits in this group.

This module starts no thread. It computes with numpy arrays. If the caller passes Tensors, this
module imports MindSpore, to return Tensors.
"""

import errno
import hmac
import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy
from numpy.typing import NDArray

from tft.errors import OrderRefused, PeerError, UsageError
from tft_mindspore.step_numbers import watch

Array = NDArray[Any]  # Any: the elements may have any type

_HEADER = struct.Struct("<4sIQ")
"""The header of each message: the name of the operation, the number of the message among those from
the sender to the receiver, and the size of the content in bytes. By the header a receiver notices
that another rank has called another collective."""
_HELLO = struct.Struct("<16sI")
"""The first message of a member that connects to another member: the token, which proves that the
sender belongs to the group, and the rank of the sender."""

_AT_ONCE = 256 * 1024
"""The size in bytes up to which an all-reduce has one round of messages, in which every rank sends
its whole array to every other rank. Larger arrays take two rounds, in which ranks send pieces. The
limit comes from a measurement with four ranks on two cores (the shortest of 30 times): 64 KiB take
0.2 ms in one round and 0.5 ms in two, 256 KiB take 0.8 and 2.3 ms, 1 MiB takes 11 and 8 ms."""

STORE_TIMEOUT = 60.0
"""Seconds within which a connection to the rendezvous store must succeed. The store is a process on
this or another machine. If the store dies, it is started again within a second."""

_AGAIN = 0.05
"""Seconds between two attempts to reach the store."""

_FOREVER = -1
"""The time limit that makes `poll` wait for ever. No limit is needed: if a rank hangs, the
controller notices this, and tft calls `Group.shut` on the ranks that wait."""


class GroupBroken(ConnectionError):
    """
    Raised when a connection of the group has ended, or `shut` was called. The group cannot carry
    out any further collective.
    """


class Group:
    """
    The process group of all ranks. `Groups.form` makes a new group after each incident.

    The methods are called on the training thread. `shut` may be called on any thread.
    """

    def __init__(self, name: str, rank: int, world: int, contributing: Callable[[], None]) -> None:
        self.name = name
        self.rank = rank
        """The rank of this process in the group."""
        self.world = world
        """The number of members of the group."""
        self._contributing = contributing
        self._peers: dict[int, socket.socket] = {}
        self._sent = dict.fromkeys(range(world), 0)
        self._received = dict.fromkeys(range(world), 0)
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._broken = False

    @property
    def broken(self) -> bool:
        """
        True if `shut` was called.
        """
        return self._broken

    # ------------------------------------------------------------ collectives

    def sum(self, arrays: Sequence[Any], ranks: Sequence[int] | None = None) -> list[Any]:
        """
        All-reduce `arrays` by sum over all ranks, or over the ranks in `ranks`. Return the results.

        All these ranks must pass the same number of arrays, with the same sizes and types. The
        arrays are numpy arrays or Tensors of MindSpore, and the results are of the same kind. Raises
        `GroupBroken` if a rank is lost. Raises `UsageError` if this rank is not among `ranks`.
        """
        members = self._members(ranks)
        self._contributing()
        plain = [_plain(array) for array in arrays]
        kinds = list(dict.fromkeys(array.dtype for array in plain))
        found: dict[int, Array] = {}
        for kind in kinds:
            places = [place for place, array in enumerate(plain) if array.dtype == kind]
            flat = numpy.concatenate([plain[place].reshape(-1) for place in places])
            summed = self._sum(flat, members)
            at = 0
            for place in places:
                size = plain[place].size
                found[place] = summed[at : at + size].reshape(plain[place].shape)
                at += size
        return [_like(array, found[place]) for place, array in enumerate(arrays)]

    def mean(self, arrays: Sequence[Any], ranks: Sequence[int] | None = None) -> list[Any]:
        """
        All-reduce `arrays` by average over all ranks, or over the ranks in `ranks`. Return the
        averages. Data-parallel training averages its gradients with this method. Arguments and
        exceptions are the same as those of `sum`. Also raises `UsageError` for integers and
        booleans, whose averages have another type.
        """
        members = self._members(ranks)
        plain = [_plain(array) for array in arrays]
        _check_averages(plain)
        totals = self.sum(plain, members)
        for each in totals:
            each /= each.dtype.type(len(members))
        watch.averaged(plain, totals)
        return [_like(array, each) for array, each in zip(arrays, totals, strict=True)]

    def broadcast(
        self, arrays: Sequence[Any], root: int, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """
        Send the `arrays` of the rank `root` to all ranks, or to the ranks in `ranks`. Return the
        arrays of `root`. All other ranks must pass arrays of the same sizes and types, whose
        content is ignored. Raises `GroupBroken` if a rank is lost, and `UsageError` if this rank or
        `root` is not among `ranks`.
        """
        members = self._members(ranks)
        if root not in members:
            raise UsageError(
                f"rank {root} was named as the sender of a broadcast, but is not among the ranks "
                f"that take part, {members}"
            )
        self._contributing()
        plain = [_plain(array) for array in arrays]
        others = [rank for rank in members if rank != self.rank]
        if self.rank == root:
            whole = b"".join(_bytes(array) for array in plain)
            self._exchange(b"cast", {rank: memoryview(whole) for rank in others}, {})
            return list(arrays)
        room = [numpy.empty_like(array) for array in plain]
        size = sum(array.nbytes for array in room)
        whole_room = bytearray(size)
        self._exchange(b"cast", {}, {root: memoryview(whole_room)})
        at = 0
        for array in room:
            _bytes(array)[:] = whole_room[at : at + array.nbytes]
            at += array.nbytes
        return [_like(array, each) for array, each in zip(arrays, room, strict=True)]

    def gather(self, words: bytes, ranks: Sequence[int] | None = None) -> list[bytes]:
        """
        Collect the bytes `words` from all ranks, or from the ranks in `ranks`. Return the bytes of
        each rank, in the order of the ranks. The ranks may pass different numbers of bytes.
        """
        members = self._members(ranks)
        self._contributing()
        others = [rank for rank in members if rank != self.rank]
        size = len(words).to_bytes(8, "little")
        sizes = {rank: bytearray(8) for rank in others}
        self._exchange(
            b"size", {rank: memoryview(size) for rank in others},
            {rank: memoryview(room) for rank, room in sizes.items()},
        )  # fmt: skip
        said = {rank: bytearray(int.from_bytes(room, "little")) for rank, room in sizes.items()}
        self._exchange(
            b"said", {rank: memoryview(words) for rank in others},
            {rank: memoryview(room) for rank, room in said.items()},
        )  # fmt: skip
        return [words if rank == self.rank else bytes(said[rank]) for rank in members]

    def barrier(self, ranks: Sequence[int] | None = None) -> None:
        """
        Wait until all ranks, or all of `ranks`, have called this method.
        """
        others = [rank for rank in self._members(ranks) if rank != self.rank]
        self._exchange(
            b"meet", dict.fromkeys(others, memoryview(b"")),
            {rank: memoryview(bytearray()) for rank in others},
        )  # fmt: skip

    def agree(self, refuses: bool) -> bool:
        """
        Wait until all ranks have called this method. Return True if at least one rank has passed
        `refuses=True`, which means that it refuses the update of the step.
        """
        members = self._members(None)
        return bool(self._sum(numpy.array([refuses], numpy.float32), members)[0] > 0)

    # ------------------------------------------------------------ all-reduce

    def _members(self, ranks: Sequence[int] | None) -> list[int]:
        members = list(range(self.world)) if ranks is None else sorted(set(ranks))
        if self.rank not in members or not 0 <= members[0] <= members[-1] < self.world:
            raise UsageError(
                f"rank {self.rank} of {self.world} has called a collective of the ranks {members}: "
                f"`ranks` must contain {self.rank}, and only numbers from 0 to {self.world - 1}"
            )
        return members

    def _sum(self, flat: Array, members: list[int]) -> Array:
        if len(members) == 1:
            return flat
        if flat.nbytes <= _AT_ONCE:
            parts = self._swap(b"sum1", members, dict.fromkeys(members, flat), flat.size)
            return _added(parts, members)
        # A large array is cut into one piece for each rank. Each rank adds up one piece, and sends
        # the sum of this piece to all other ranks.
        ends = [flat.size * (place + 1) // len(members) for place in range(len(members))]
        begins = [0, *ends[:-1]]
        pieces = {
            rank: flat[begin:end] for rank, begin, end in zip(members, begins, ends, strict=True)
        }
        own = _added(self._swap(b"sum2", members, pieces, pieces[self.rank].size), members)
        whole = numpy.empty_like(flat)
        rooms = {
            rank: whole[begin:end] for rank, begin, end in zip(members, begins, ends, strict=True)
        }
        rooms[self.rank][:] = own
        others = [rank for rank in members if rank != self.rank]
        self._exchange(
            b"sum3", {rank: _bytes(own) for rank in others},
            {rank: _bytes(rooms[rank]) for rank in others},
        )  # fmt: skip
        return whole

    def _swap(
        self, what: bytes, members: list[int], pieces: Mapping[int, Array], size: int
    ) -> dict[int, Array]:
        """
        Send `pieces[r]` to each other member `r`, and receive from each other member the piece for
        this rank. Return the pieces for this rank by sender, including the piece that this rank
        itself has. Each piece for this rank has `size` elements. `what` is the name of the
        operation.
        """
        others = [rank for rank in members if rank != self.rank]
        mine = pieces[self.rank]
        rooms = {rank: numpy.empty(size, mine.dtype) for rank in others}
        self._exchange(
            what, {rank: _bytes(pieces[rank]) for rank in others},
            {rank: _bytes(room) for rank, room in rooms.items()},
        )  # fmt: skip
        return {**rooms, self.rank: mine}

    # ------------------------------------------------------------ messages

    def _exchange(
        self,
        what: bytes,
        giving: Mapping[int, memoryview],
        taking: Mapping[int, memoryview],
    ) -> None:
        """
        Send one message to each rank of `giving`, and receive one message from each rank of
        `taking`. `what` is the name of the operation. Sending and receiving overlap. Otherwise two
        ranks that both send a whole message before they receive would wait for each other for ever.
        """
        if self._broken:
            raise self._cut_off()
        outgoing: dict[int, list[memoryview]] = {}
        for rank, view in giving.items():
            self._sent[rank] += 1
            header = _HEADER.pack(what, self._sent[rank] & 0xFFFFFFFF, view.nbytes)
            outgoing[rank] = [memoryview(header), view]
        incoming: dict[int, _Incoming] = {}
        for rank, room in taking.items():
            self._received[rank] += 1
            incoming[rank] = _Incoming(what, self._received[rank] & 0xFFFFFFFF, room)
        waiting = select.poll()
        waiting.register(self._wake, select.POLLIN)
        ranks: dict[int, int] = {}
        for rank in outgoing.keys() | incoming.keys():
            ranks[self._peers[rank].fileno()] = rank
        for descriptor, rank in ranks.items():
            waiting.register(descriptor, _interest(outgoing.get(rank), incoming.get(rank)))
        while ranks:
            for descriptor, events in waiting.poll(_FOREVER):
                if descriptor == self._wake:
                    raise self._cut_off()
                rank = ranks[descriptor]
                if events & select.POLLOUT:
                    self._send(rank, outgoing[rank])
                # data has come, or the other rank has closed the connection
                if events & ~select.POLLOUT:
                    self._receive(rank, incoming.get(rank))
                left = _interest(outgoing.get(rank), incoming.get(rank))
                if left:
                    waiting.modify(descriptor, left)
                else:
                    waiting.unregister(descriptor)
                    del ranks[descriptor]

    def _cut_off(self) -> GroupBroken:
        return GroupBroken(f"the group {self.name!r} was interrupted: an incident is being handled")

    def _send(self, rank: int, views: list[memoryview]) -> None:
        """
        Send as many bytes of `views` to a rank as its connection accepts now. Remove these bytes
        from `views`.
        """
        try:
            sent = self._peers[rank].sendmsg(views)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._lost(rank, error) from error
        while views and sent >= views[0].nbytes:
            sent -= views.pop(0).nbytes
        if views and sent:
            views[0] = views[0][sent:]

    def _receive(self, rank: int, incoming: "_Incoming | None") -> None:
        if incoming is None or not incoming.room_left:
            # This rank expects no message now. So peek at the next byte without removing it. If
            # there is a byte, the other rank has sent its next message early. Otherwise the other
            # rank has closed the connection.
            incoming = None
        try:
            if incoming is None:
                got = len(self._peers[rank].recv(1, socket.MSG_PEEK))
            else:
                got = self._peers[rank].recv_into(incoming.room_left)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._lost(rank, error) from error
        if not got:
            raise self._lost(rank, None)
        if incoming is not None:
            incoming.came(got, rank)

    def _lost(self, rank: int, error: OSError | None) -> GroupBroken:
        why = "that rank has closed it" if error is None else str(error.strerror)
        return GroupBroken(f"the connection to rank {rank} of group {self.name!r} is broken: {why}")

    # ------------------------------------------------------------ forming and ending

    def join(self, host: str, port: int) -> None:
        """
        Find the other members of the group through the rendezvous store, and connect to all of
        them. Return when every member is connected to all other members. `host` and `port` are the
        address of the store.
        """
        store = self._reach_store(host, port)
        with self._kept(socket.socket(store.family)) as listener:
            listener.bind((store.getsockname()[0], 0))
            listener.listen(self.world)
            listener.setblocking(False)
            told = self._ask(store, listener.getsockname()[1])
            token = bytes.fromhex(told["token"])
            for rank in range(self.rank):
                at, port = told["members"][rank]
                self._peers[rank] = self._connect(rank, at, port, token)
            self._accept_members(listener, token)
            self._forget(store)
            self._forget(listener)
        self.barrier()

    def shut(self) -> None:
        """
        Make every call that waits in this group, and every later call, raise `GroupBroken`.

        Can be called on any thread, and more than once.
        """
        with self._lock:
            if self._broken:
                return
            self._broken = True
            os.eventfd_write(self._wake, 1)
            for connection in self._open:
                with suppress(OSError):  # a socket that is not connected yet cannot be shut down
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """
        Call `shut`, and close the connections.
        """
        self.shut()
        with self._lock:
            for connection in self._open:
                connection.close()
            self._open.clear()
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1

    def _kept(self, connection: socket.socket) -> socket.socket:
        """
        Add the socket `connection` to the sockets that `shut` interrupts, and return this socket.
        Raises `GroupBroken` if `shut` was called already.
        """
        with self._lock:
            if self._broken:
                connection.close()
                raise self._cancelled()
            self._open.append(connection)
        return connection

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.remove(connection)
        connection.close()

    def _reach_store(self, host: str, port: int) -> socket.socket:
        """
        Connect to the rendezvous store, and return the connection. Try again for up to
        `STORE_TIMEOUT` seconds, because a store that has died is started again.
        """
        until = time.monotonic() + STORE_TIMEOUT
        while True:
            try:
                return self._dial(host, port)
            except OSError as error:
                if isinstance(error, GroupBroken) or time.monotonic() > until:
                    raise
            self._wait(None, 0, _AGAIN)

    def _dial(self, host: str, port: int) -> socket.socket:
        """
        Connect to `host` and `port`, and return the connection. Raises `OSError` if nobody listens
        there.
        """
        (family, kind, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        connection = self._kept(socket.socket(family, kind))
        connection.setblocking(False)
        error = connection.connect_ex(address)
        if error == errno.EINPROGRESS:
            self._wait(connection, select.POLLOUT)
            error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            self._forget(connection)
            raise OSError(error, os.strerror(error))
        return connection

    # Any: the store's answer was parsed from JSON
    def _ask(self, store: socket.socket, port: int) -> dict[str, Any]:
        asked = {"name": self.name, "rank": self.rank, "world": self.world, "port": port}
        store.sendall(json.dumps(asked).encode() + b"\n")
        said = b""
        while not said.endswith(b"\n"):
            self._wait(store, select.POLLIN)
            got = store.recv(1 << 16)
            if not got:
                raise GroupBroken(
                    "the rendezvous store, through which the ranks form their group, has ended "
                    "before the group was formed"
                )
            said += got
        told: dict[str, Any] = json.loads(said)
        if "refused" in told:
            raise PeerError(
                "the rendezvous store, through which the ranks form their group, refuses the "
                f"request of this rank: {told['refused']}"
            )
        return told

    def _connect(self, rank: int, host: str, port: int, token: bytes) -> socket.socket:
        try:
            connection = self._dial(host, port)
        except GroupBroken:
            raise
        except OSError as error:
            raise GroupBroken(
                f"rank {rank} of group {self.name!r} cannot be reached at {host}:{port}: "
                f"{error.strerror}"
            ) from error
        connection.sendall(_HELLO.pack(token, self.rank))
        return _ready(connection)

    def _accept_members(self, listener: socket.socket, token: bytes) -> None:
        """
        Accept connections until all members with a higher rank than this one are connected.

        Other programs may connect too. They delay no member, whatever they do: the connections are
        read side by side, and those without the token of the group are closed.
        """
        greeting: dict[int, tuple[socket.socket, bytearray]] = {}
        waiting = select.poll()
        waiting.register(self._wake, select.POLLIN)
        waiting.register(listener, select.POLLIN)
        while len(self._peers) < self.world - 1:
            for descriptor, _ in waiting.poll(_FOREVER):
                if descriptor == self._wake:
                    raise self._cancelled()
                if descriptor == listener.fileno():
                    # the other end may have closed the connection before it was accepted
                    with suppress(BlockingIOError, ConnectionAbortedError):
                        connection = self._kept(listener.accept()[0])
                        connection.setblocking(False)
                        greeting[connection.fileno()] = (connection, bytearray())
                        waiting.register(connection, select.POLLIN)
                    continue
                connection, said = greeting[descriptor]
                if _is_hello_over(connection, said):
                    waiting.unregister(descriptor)
                    del greeting[descriptor]
                    self._admit(connection, bytes(said), token)
        for connection, _ in greeting.values():
            self._forget(connection)

    def _admit(self, connection: socket.socket, said: bytes, token: bytes) -> None:
        """
        Keep a connection as that of a member if `said`, the first message, has the token of the
        group. Otherwise close the connection, because then the other end is no member.
        """
        theirs, rank = _HELLO.unpack(said) if len(said) == _HELLO.size else (b"", -1)
        if not hmac.compare_digest(theirs, token) or not self.rank < rank < self.world:
            self._forget(connection)
            return
        self._peers[rank] = _ready(connection)

    def _wait(self, on: socket.socket | None, events: int, seconds: float | None = None) -> None:
        waiting = select.poll()
        waiting.register(self._wake, select.POLLIN)
        if on is not None:
            waiting.register(on, events)
        came = waiting.poll(None if seconds is None else seconds * 1000)
        if any(descriptor == self._wake for descriptor, _ in came):
            raise self._cancelled()

    def _cancelled(self) -> GroupBroken:
        return GroupBroken(
            f"forming the group {self.name!r} was cancelled, because an incident is being handled"
        )


class _Incoming:
    """
    A message that is being received. The header comes first, then the content.
    """

    def __init__(self, what: bytes, turn: int, room: memoryview) -> None:
        self._expected = (what, turn, room.nbytes)
        self._header = bytearray(_HEADER.size)
        self._room = room
        self.room_left = memoryview(self._header)
        """The memory for the next bytes. The view is empty when all bytes have arrived."""
        self._in_header = True

    def came(self, count: int, rank: int) -> None:
        """
        Record that `count` further bytes have arrived from `rank`.

        Raises `UsageError` if the header is not that of the message that this rank expects.
        """
        self.room_left = self.room_left[count:]
        if self._in_header and not self.room_left:
            found = _HEADER.unpack(self._header)
            if found != self._expected:
                raise UsageError(
                    f"rank {rank} is at another place of the script than this rank: on rank "
                    f"{rank}, message {found[1]} between the two ranks is "
                    f"{found[0].decode(errors='replace')!r} of {found[2]} bytes; on this rank, "
                    f"message {self._expected[1]} is {self._expected[0].decode()!r} of "
                    f"{self._expected[2]} bytes. All ranks must call the same all-reduces in the "
                    "same order"
                )
            self._in_header = False
            self.room_left = self._room


class Groups:
    """
    Forms and closes the group of this process. `form` and `clear` are called on the training
    thread, `quiesce` on any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._group: Group | None = None
        self._formed = False
        self.contributing: Callable[[], None] = _nothing
        """The function to call before this rank sends data of the present step to the other
        ranks."""

    @property
    def present(self) -> Group:
        """
        The group that was formed last. Raises `GroupBroken` if there is no group at present.
        """
        group = self._group
        if group is None or not self._formed:
            raise GroupBroken(
                "there is no group of the ranks now: tft forms the group when session.run begins, "
                "and again after each incident"
            )
        return group

    def form(self, name: str, host: str, port: int, rank: int, world: int) -> None:
        """
        Form the group `name` with the other ranks, through the store at `host` and `port`. Raises
        `OrderRefused` if `quiesce` is called before the group is formed.
        """
        self.clear()
        group = Group(name, rank, world, lambda: self.contributing())
        with self._lock:
            self._group = group
        try:
            group.join(host, port)
        except OSError as error:
            if group.broken:  # the method `quiesce` has cancelled the forming of the group
                raise OrderRefused(
                    f"forming the group {name!r} was cancelled, because an incident is "
                    "being handled"
                ) from error
            raise
        self._formed = True

    def quiesce(self) -> None:
        """
        Interrupt every thread that waits in the group, or waits for the group to be formed. The
        waiting call raises an exception.
        """
        with self._lock:
            if self._group is not None:
                self._group.shut()

    def clear(self) -> None:
        """
        Close the group and drop the reference to it.
        """
        self._formed = False
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            group.close()


def _nothing() -> None:
    """
    Do nothing. This function is the initial value of the attribute `contributing`.
    """


def _interest(views: list[memoryview] | None, incoming: _Incoming | None) -> int:
    """
    Return the events for which to poll a connection: POLLOUT if `views` are left to send, and
    POLLIN if bytes of the message `incoming` are left to receive. Return 0 if nothing is left.
    """
    wanted = select.POLLOUT if views else 0
    if incoming is not None and incoming.room_left:
        wanted |= select.POLLIN
    return wanted


def _is_hello_over(connection: socket.socket, said: bytearray) -> bool:
    """
    Append what has come of the first message of a connection to `said`. Return True if the message
    is complete, or if nothing more will come.
    """
    try:
        got = connection.recv(_HELLO.size - len(said))
    except BlockingIOError:
        return False
    except OSError:  # the other end has reset the connection
        return True
    said += got
    return not got or len(said) == _HELLO.size


def _ready(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _added(parts: Mapping[int, Array], members: Sequence[int]) -> Array:
    """
    Return the sum of `parts`, added up in the order of `members`. So the result does not depend on
    the order of arrival.
    """
    total: Array = parts[members[0]].copy()
    for rank in members[1:]:
        total += parts[rank]
    return total


def _check_averages(arrays: Sequence[Array]) -> None:
    for place, array in enumerate(arrays):
        if numpy.issubdtype(array.dtype, numpy.integer) or array.dtype == numpy.bool_:
            raise UsageError(
                f"the array at place {place} has the type {array.dtype}, which cannot hold an "
                "average: pass it to the method sum, or convert it to a floating-point type"
            )


def _plain(array: Any) -> Array:  # Any: a numpy array or a MindSpore Tensor
    plain = array if isinstance(array, numpy.ndarray) else array.asnumpy()
    # use `asarray`, because `numpy.ascontiguousarray` would turn a scalar into an array of one
    # dimension
    return numpy.asarray(plain, order="C")


def _like(given: Any, found: Array) -> Any:  # Any: a numpy array or a MindSpore Tensor
    if isinstance(given, numpy.ndarray):
        return found
    # this import costs nothing, because the caller passes Tensors and so has imported MindSpore
    from mindspore import Tensor

    return Tensor(found)


def _bytes(array: Array) -> memoryview:
    return array.reshape(-1).view(numpy.uint8).data
