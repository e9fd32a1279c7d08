"""
The bus over ZeroMQ: one XPUB to speak, one SUB to hear, both connected to the broker.

With `broker.py`, `door.py` and `tft.keys` the only importer of `zmq`. The sockets are read by the event loop whenever their
descriptor says so, until nothing is left in them, for as long as the bus is open: nobody awaits a
receive on a socket, so nobody can cancel one.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from tft.bus.base import Bus, Participant
from tft.errors import UsageError
from tft.keys import Keys, read_keys
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

REFUSED_RETRY = 1.0
"""Seconds until a broker that has refused this process is tried again: somebody may have started the
right one in its place. ZeroMQ itself never would."""

CUT_OFF = 3
"""Connections in a row that end before anybody was let in, after which that is told: one or two do when
a broker is started again."""

MISMATCH = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
"""In the event of a failed handshake: one side encrypts, the other does not."""

_HANDSHAKES = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)

BATCH = 256
"""Frames read before the loop's other work has its turn: a millisecond or two."""


@asynccontextmanager
async def open_bus(
    address: str, *, job: str, sender: str, topics: Sequence[bytes], curve: Path | None = None
) -> AsyncIterator[Bus]:
    """
    Take part as `sender` in the bus of the broker at `address` (HOST:PORT), and listen to `topics`.
    With the directory `curve` all is encrypted with the keys in it.

    Returns at once, whether there is a broker or not; it is looked for until it is there, and
    again when it is lost. Raises `UsageError` for an address that cannot be one, and for keys that
    cannot be used. What has not left this process when the bus is closed is not sent any more.
    """
    host, port = host_and_port(address)
    keys = None if curve is None else read_keys(curve)
    with _connected(host, port, (*topics, presence(sender)), keys) as lines:
        link = _Link(address, *lines, job=job, sender=sender, encrypts=keys is not None)
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


class _Line:
    """
    A socket on its way to the broker, and what becomes of its handshakes.
    """

    def __init__(self, socket: Socket, handshakes: Socket, host: str, port: int) -> None:
        self.socket = socket
        self.handshakes = handshakes
        self._endpoint = f"tcp://{host}:{port}"

    def connect(self) -> None:
        """
        For the first time, or where ZeroMQ has given up.
        """
        with suppress(zmq.ZMQError):  # there is none
            self.socket.disconnect(self._endpoint)
        self.socket.connect(self._endpoint)


@contextmanager
def _connected(
    host: str, port: int, topics: Sequence[bytes], keys: Keys | None
) -> Iterator[tuple[_Line, _Line]]:
    """
    A publishing and a subscribing socket on their way to the broker.
    """
    with (
        zmq.Context() as context,
        _line(context, zmq.XPUB, host, port, keys) as voice,
        _line(context, zmq.SUB, host, port + 1, keys) as ear,
    ):
        # Only with a broker at the other end: with a lost broker its subscriptions end, so that
        # everyone is seen to go, and nothing is kept for it that would be stale when it is back.
        voice.socket.setsockopt(zmq.IMMEDIATE, 1)
        try:
            voice.connect()
            ear.connect()
        except zmq.ZMQError as error:
            raise UsageError(f"{host}:{port} cannot be a broker's address: {error}") from None
        for topic in topics:
            ear.socket.subscribe(topic)
        yield voice, ear


@contextmanager
def _line(
    context: zmq.Context[Socket], kind: zmq.SocketType, host: str, port: int, keys: Keys | None
) -> Iterator[_Line]:
    with tuned(context, kind) as socket, context.socket(zmq.PAIR) as handshakes:
        if keys is not None:
            socket.curve_serverkey = keys.broker
            socket.curve_publickey = keys.public
            socket.curve_secretkey = keys.secret
        socket.monitor(f"inproc://handshakes-{port}", _HANDSHAKES)
        handshakes.linger = 0
        handshakes.set_hwm(0)  # a full one would hold up ZeroMQ's own thread
        handshakes.connect(f"inproc://handshakes-{port}")
        yield _Line(socket, handshakes, host, port)


class _Link:
    """
    Two sockets and the participant they serve.
    """

    def __init__(
        self, broker: str, voice: _Line, ear: _Line, *, job: str, sender: str, encrypts: bool
    ) -> None:
        self._broker = broker
        self._voice = voice.socket
        self._ear = ear.socket
        self._lines = (voice, ear)
        self._encrypts = encrypts
        self._cut_off = 0
        self._told: set[str] = set()
        self._loop = asyncio.get_running_loop()
        self.participant = Participant(job=job, sender=sender, send=self._send)

    def open(self) -> None:
        self._loop.add_reader(self._voice, self._read_notices)
        self._loop.add_reader(self._ear, self._read_frames)
        for line in self._lines:
            self._loop.add_reader(line.handshakes, self._read_handshakes, line)
            self._read_handshakes(line)
        # a descriptor tells what is new; what came before this is not
        self._read_notices()
        self._read_frames()

    def close(self) -> None:
        self.participant.close()
        self._loop.remove_reader(self._voice)
        self._loop.remove_reader(self._ear)
        for line in self._lines:
            self._loop.remove_reader(line.handshakes)

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

    def _read_handshakes(self, line: _Line) -> None:
        """
        Whether the broker has let this process in.
        """
        for event in self._waiting(line.handshakes, partial(self._read_handshakes, line)):
            seen = parse_monitor_message(event)
            match seen["event"]:
                case zmq.Event.HANDSHAKE_SUCCEEDED:
                    self._cut_off = 0
                    self._told.clear()
                case zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
                    self._cut_off += 1  # on both lines: they lead to one broker
                    if self._cut_off >= CUT_OFF:
                        self._tell(self._why_cut_off())
                case failed:
                    self._tell(self._why_refused(failed, seen["value"]))
                    self._loop.call_later(REFUSED_RETRY, self._try_again, line)

    def _tell(self, why: str) -> None:
        if why not in self._told:
            self._told.add(why)
            self.participant.not_let_in(why)

    def _try_again(self, line: _Line) -> None:
        if not line.socket.closed:
            line.connect()

    def _why_cut_off(self) -> str:
        keys = (
            "is its --curve the same?"
            if self._encrypts
            else "does it have a --curve that is missing here?"
        )
        return f"what listens at {self._broker} ends every connection without a word: {keys}"

    def _why_refused(self, failed: int, value: int) -> str:
        if failed == zmq.Event.HANDSHAKE_FAILED_AUTH:
            return (
                f"the broker at {self._broker} does not let this process in, whose key is none of the "
                "job's: is its --curve the same?"
            )
        if value != MISMATCH:
            return f"what listens at {self._broker} is not the broker of this job"
        if self._encrypts:
            return f"the broker at {self._broker} does not encrypt: was it started without --curve?"
        return f"the broker at {self._broker} encrypts, and --curve is missing here"

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
