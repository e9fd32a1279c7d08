"""
The bus over ZeroMQ: one XPUB to speak, one SUB to hear, both connected to the broker.

With `broker.py` the only importer of `zmq`. The sockets are read by the event loop whenever their
descriptor says so, until nothing is left in them, for as long as the bus is open: nobody awaits a
receive on a socket, so nobody can cancel one.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import zmq

from tft.bus.base import Bus, Participant
from tft.errors import UsageError
from tft.protocol.codec import FRAME_LIMIT
from tft.protocol.topics import presence

Socket = zmq.Socket[bytes]

HEARTBEAT_INTERVAL_MS = 500
HEARTBEAT_TIMEOUT_MS = 1500
"""
A peer that is silent for so long is given up; it is noticed within two seconds. Heartbeats are
answered by ZeroMQ's own thread, so a busy or blocked Python is no silence; a stopped process, a
dead machine and a broken link are.
"""

RECONNECT_MS = 20
RECONNECT_MAX_MS = 200
"""A broker that was started again is found within 220 ms, and a lost one costs five tries a second."""

CONNECT_TIMEOUT_MS = 1000
"""The kernel waits longer and longer between its tries to connect to a machine that is silent."""

BATCH = 256
"""Frames read before the loop's other work has its turn: a millisecond or two."""


@asynccontextmanager
async def open_bus(
    address: str, *, job: str, sender: str, topics: Sequence[bytes]
) -> AsyncIterator[Bus]:
    """
    Take part as `sender` in the bus of the broker at `address` (HOST:PORT), and listen to `topics`.

    Returns at once, whether there is a broker or not; it is looked for until it is there, and
    again when it is lost. Raises `UsageError` for an address that cannot be one. What has not left
    this process when the bus is closed is not sent any more.
    """
    host, port = host_and_port(address)
    with _connected(host, port, (*topics, presence(sender))) as (voice, ear):
        link = _Link(voice, ear, job=job, sender=sender)
        link.open()
        try:
            yield link.participant
        finally:
            link.close()


def tuned(context: zmq.Context[Socket], kind: zmq.SocketType) -> Socket:
    """
    A socket as every socket of the bus is, at either end.
    """
    socket = context.socket(kind)
    socket.linger = 0
    # No high-water mark. With one, a publisher drops silently what a slow subscriber has not
    # taken, or (XPUB_NODROP) everybody waits for the slowest. A subscriber's own reading must not
    # be stopped either: it would miss heartbeats and be cut off. So what waits, waits in memory:
    # in the slow process while it lives, in the broker until heartbeats have given it up.
    socket.set_hwm(0)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_LIMIT)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
    return socket


def host_and_port(address: str) -> tuple[str, int]:
    """
    The two halves of a broker's address. Raises `UsageError` for what cannot be one.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65535:
        raise UsageError(f"the broker's address is HOST:PORT (PORT 1 to 65534), not {address!r}")
    return host, int(port)


@contextmanager
def _connected(host: str, port: int, topics: Sequence[bytes]) -> Iterator[tuple[Socket, Socket]]:
    """
    A publishing and a subscribing socket on their way to the broker.
    """
    with (
        zmq.Context() as context,
        tuned(context, zmq.XPUB) as voice,
        tuned(context, zmq.SUB) as ear,
    ):
        # Only with a broker at the other end: with a lost broker its subscriptions end, so that
        # everyone is seen to go, and nothing is kept for it that would be stale when it is back.
        voice.setsockopt(zmq.IMMEDIATE, 1)
        try:
            voice.connect(f"tcp://{host}:{port}")
            ear.connect(f"tcp://{host}:{port + 1}")
        except zmq.ZMQError as error:
            raise UsageError(f"{host}:{port} cannot be a broker's address: {error}") from None
        for topic in topics:
            ear.subscribe(topic)
        yield voice, ear


class _Link:
    """
    Two sockets and the participant they serve.
    """

    def __init__(self, voice: Socket, ear: Socket, *, job: str, sender: str) -> None:
        self._voice = voice
        self._ear = ear
        self._loop = asyncio.get_running_loop()
        self.participant = Participant(job=job, sender=sender, send=self._send)

    def open(self) -> None:
        self._loop.add_reader(self._voice, self._read_notices)
        self._loop.add_reader(self._ear, self._read_frames)
        # a descriptor tells what is new; what came before this is not
        self._read_notices()
        self._read_frames()

    def close(self) -> None:
        self.participant.close()
        self._loop.remove_reader(self._voice)
        self._loop.remove_reader(self._ear)

    def _send(self, topic: bytes, frame: bytes) -> None:
        self._voice.send_multipart((topic, frame), zmq.NOBLOCK)
        # sending takes in what happened to the socket, and the descriptor will not tell it again
        self._read_notices()

    def _read_notices(self) -> None:
        """
        Who subscribes, and who no longer does: a byte, 1 or 0, before the topic.
        """
        for notice, *_ in self._waiting(self._voice, self._read_notices):
            if notice.startswith(b"\x01"):
                self.participant.subscribed(notice[1:])
            elif notice.startswith(b"\x00"):
                self.participant.unsubscribed(notice[1:])

    def _read_frames(self) -> None:
        for frames in self._waiting(self._ear, self._read_frames):
            match frames:
                case [topic, frame]:
                    self.participant.frame(topic, frame)
                case _:
                    self.participant.malformed(
                        f"a message of {len(frames)} frames came; one of tft has a topic and a body"
                    )

    def _waiting(self, socket: Socket, again: Callable[[], None]) -> Iterator[list[bytes]]:
        """
        What has come to a socket, up to a batch; what is left is read `again` in the loop's next
        turn.
        """
        for _ in range(BATCH):
            if socket.closed:
                return
            try:
                yield socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
        self._loop.call_soon(again)
