"""
The part of a fetch that serves one source: the connection to the source, and the thread that
receives chunks from the source.

Every wait ends when the source is silent for too long, or when the fetch is over. The silence is
measured by counting waits of `TICK` seconds, not with a clock. So if this process is stopped
(SIGSTOP) for a while, the pause does not count as silence of the source.
"""

import os
import select
import socket
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import closing
from errno import EINPROGRESS
from typing import TypeVar

import structlog

from tft.errors import MalformedMessage, TransferFailed
from tft.protocol.messages import Source
from tft.transfer.chunk_scheduler import ChunkScheduler
from tft.transfer.tls import Tls, reader
from tft.transfer.wire import (
    FROM_SERVER,
    Hello,
    Preparing,
    Refusal,
    Request,
    ShardOffer,
    frame,
    read_frame,
    receive_chunk,
)

log = structlog.get_logger()

T = TypeVar("T")

TICK = 0.02
"""The time in seconds after which a waiting thread checks whether the fetch is over."""

_ASKED = 2
"""The maximum number of chunks that are requested from one source and have not arrived yet. With
two chunks, the source can send one while the request for the next is on its way to the source."""


def bring(
    source: Source,
    place: int,
    hello: Hello,
    scheduler: ChunkScheduler,
    patience: float,
    tls: Tls | None,
) -> None:
    """
    Receive chunks from one source until the scheduler has no chunk left for the source.

    This function is the body of a thread. `place` is the index of the source in the scheduler's
    list. `patience` is the number of seconds without a byte after which the source is lost. If the
    source fails, this function records it as lost in the scheduler, with the reason.
    """
    why: str | None = (
        "the thread that fetched from the source failed: see its traceback in the output of this "
        "rank"
    )
    try:
        with (
            closing(_connect(source.address, scheduler, patience)) as plain,
            closing(_wrapped(plain, tls)) as connection,
        ):
            line = _Line(connection, scheduler, patience)
            line.shake_hands()
            _converse(line, source, place, hello, scheduler)
        why = None
    except (TransferFailed, MalformedMessage) as error:
        why = str(error)
    except EOFError:
        why = "the source closed the connection before the transfer was complete"
    except ssl.SSLError as error:
        why = (
            f"the TLS handshake with the source failed ({error.reason}): was the source started "
            "with the same --curve?"
        )
    except OSError as error:
        why = f"the connection to the source broke: {error.strerror or error}"
    finally:
        if why is not None:
            scheduler.lose(place, why)


class _Line:
    """
    A TCP or TLS connection to one source of the fetch.
    """

    def __init__(
        self, connection: socket.socket, scheduler: ChunkScheduler, patience: float
    ) -> None:
        self._connection = connection
        self._board = scheduler
        self._patience = patience
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(TICK)
        self._read = reader(connection)

    def shake_hands(self) -> None:
        """
        Do the TLS handshake if the connection uses TLS.
        """
        if isinstance(self._connection, ssl.SSLSocket):
            self._patiently(self._connection.do_handshake)

    def read(self, views: list[memoryview]) -> int:
        """
        Wait for bytes from the source and write them into the buffers `views`. Return the number of
        bytes.

        The result 0 means that the source has closed the connection. Raises `TransferFailed` if the
        source is silent for too long, or when the fetch is over.
        """
        return self._patiently(lambda: self._read(views))

    def _patiently(self, act: Callable[[], T]) -> T:
        silent = 0.0
        while not self._board.closed:
            try:
                return act()
            except TimeoutError:
                silent = _longer(silent, self._patience)
        raise TransferFailed("the fetch of the shard is over, so this source is not needed")

    def send(self, said: Hello | Request) -> None:
        """
        Send a message to the source.

        The call does not wait, because every message to a source is short enough to fit into the
        socket's buffer.
        """
        self._connection.sendall(frame(said))


def _converse(
    line: _Line, source: Source, place: int, hello: Hello, scheduler: ChunkScheduler
) -> None:
    line.send(hello)
    while isinstance(answer := read_frame(line.read, FROM_SERVER), Preparing):
        pass
    match answer:
        case ShardOffer() as offer:
            settled = scheduler.offer(place, offer)
        case Refusal(why=why):
            raise TransferFailed(f"the source refused to send the shard: {why}")
        case other:
            raise MalformedMessage(
                f"the source answered a hello with {other!r:.80}, not with an offer or a refusal"
            )
    if settled is None:
        return
    key, room = settled
    asked: deque[Request] = deque()
    while True:
        while len(asked) < _ASKED and (chunk := scheduler.pick(place, wait=not asked)) is not None:
            line.send(chunk)
            asked.append(chunk)
        if not asked:
            return
        chunk = asked.popleft()
        if receive_chunk(room, chunk, key, line.read):
            scheduler.came(place, chunk)
            continue
        log.warning("chunk_damaged", shard=hello.shard, source=source.rank, offset=chunk.offset)
        if not scheduler.spoilt(place, chunk):
            raise TransferFailed("the source repeatedly sent bytes that do not match their digest")


def _wrapped(connection: socket.socket, tls: Tls | None) -> socket.socket:
    if tls is None:
        return connection
    return tls.fetching.wrap_socket(connection, do_handshake_on_connect=False)


def _connect(address: str, scheduler: ChunkScheduler, patience: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        raise TransferFailed(f"the address of the source, {address!r}, is not HOST:PORT")
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind, protocol)
    try:
        # do not block: a blocking call of `connect` would go on after the fetch is over
        connection.setblocking(False)
        _refused(connection.connect_ex(target), EINPROGRESS)
        poll = select.poll()
        poll.register(connection, select.POLLOUT)
        silent = 0.0
        while not poll.poll(TICK * 1000):
            silent = _longer(silent, patience)
            if scheduler.closed:
                raise TransferFailed("the fetch of the shard is over, so this source is not needed")
        _refused(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
    except BaseException:
        connection.close()
        raise
    return connection


def _refused(error: int, *welcome: int) -> None:
    if error not in (0, *welcome):
        raise OSError(error, os.strerror(error))


def _longer(silent: float, patience: float) -> float:
    silent += TICK
    if silent >= patience:
        raise TransferFailed(
            f"the source has sent nothing for {patience} s: its process hangs, or the connection "
            "to it is broken"
        )
    return silent
