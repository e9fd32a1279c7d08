"""
The bus over ZeroMQ.

Each participant (a process that is connected to the bus) has two sockets that are connected to the
broker: an XPUB socket for sending and a SUB socket for receiving. Only this file,
`sockets.py`, `broker.py`, `zap_auth.py` and `tft.keys` import `zmq`.

The event loop calls a reader function whenever the file descriptor of a socket is readable. The
function reads until the socket is empty, in batches. No asyncio task awaits a receive on a socket,
so a cancelled task cannot lose a message.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from tft.bus.base import Bus, Participant
from tft.bus.sockets import MISMATCH, Socket, tuned
from tft.errors import UsageError
from tft.keys import Keys, read_keys
from tft.protocol.topics import presence

REFUSED_RETRY = 1.0
"""The time in seconds after which a process tries again to connect, when a broker has refused the
process. By then, the broker of this job may have been started at the same address. ZeroMQ itself
does not try again after a refusal."""

CUT_OFF = 3
"""The number of connections in a row that must end during the handshake before the bus reports a
refusal. One or two such connections may also be due to a restart of the broker."""

_HANDSHAKES = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)

MANY, PERIOD, SAMPLE = 500, 0.5, 0.2
"""If more than `MANY` messages arrive on a sampled topic in `PERIOD` seconds, the participant
subscribes to it for only `SAMPLE` seconds in each further period. Each agent sends a heartbeat
every 0.1 s, so each agent is still heard in each period. To decode all heartbeats of 1,000 nodes
would keep one processor busy, and messages would pile up in memory without limit."""

_LOOK = 0.01  # seconds between two checks for the first message of a period

BATCH = 256
"""The number of messages that are read from a socket before the event loop does other work. To read
so many messages takes one or two milliseconds."""


@asynccontextmanager
async def open_bus(
    address: str,
    *,
    job: str,
    sender: str,
    topics: Sequence[bytes],
    curve: Path | None = None,
    sampled: bytes | None = None,
) -> AsyncIterator[Bus]:
    """
    Connect a participant named `sender` to the broker at `address` (HOST:PORT), and subscribe to
    `topics`.

    `curve` is a directory with keys. If it is given, all bytes are encrypted with these keys.
    `sampled` is one of the topics: if very many messages arrive on it, the participant gets only
    some of them (see `MANY`).

    Does not wait for the broker. The sockets keep trying to connect until the broker accepts them.
    After a lost connection they try again. When the bus is closed, messages that this process has
    not sent yet are dropped.

    Raises `UsageError` when `address` is not valid, and when the keys cannot be used.
    """
    host, port = host_and_port(address)
    keys = None if curve is None else read_keys(curve)
    with _connected(host, port, (*topics, presence(job, sender)), keys) as (voice, ear):
        link = _Link(address, voice, ear, job=job, sender=sender, encrypts=keys is not None)
        link.open()
        sampling = None if sampled is None else _Sampling(ear.socket, sampled, link)
        try:
            yield link.participant
        finally:
            if sampling is not None:
                sampling.close()
            link.close()


def host_and_port(address: str) -> tuple[str, int]:
    """
    Split a broker's address into host and port. Raises `UsageError` when the address is not valid.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65535:
        raise UsageError(f"the broker's address is HOST:PORT (PORT 1 to 65534), not {address!r}")
    return host, int(port)


class _Line:
    """
    A socket that is connected to the broker, and a second socket, `handshakes`. From that second
    socket one can read whether the handshakes of the first socket succeeded.
    """

    def __init__(self, socket: Socket, handshakes: Socket, host: str, port: int) -> None:
        self.socket = socket
        self.handshakes = handshakes
        self._endpoint = f"tcp://{host}:{port}"

    def connect(self) -> None:
        """
        Connect to the broker, for the first time or again after ZeroMQ has stopped trying.
        """
        # before the first connection there is nothing to disconnect, so `disconnect` raises an
        # error then
        with suppress(zmq.ZMQError):
            self.socket.disconnect(self._endpoint)
        self.socket.connect(self._endpoint)


@contextmanager
def _connected(
    host: str, port: int, topics: Sequence[bytes], keys: Keys | None
) -> Iterator[tuple[_Line, _Line]]:
    """
    Open a publishing and a subscribing socket, and start to connect both to the broker.

    Raises `UsageError` when ZeroMQ cannot use the address.
    """
    with (
        zmq.Context() as context,
        _line(context, zmq.XPUB, host, port, keys) as voice,
        _line(context, zmq.SUB, host, port + 1, keys) as ear,
    ):
        # With the option IMMEDIATE, ZeroMQ queues messages only while the broker is connected, so a
        # restarted broker gets no old messages. When the broker is lost, all subscriptions end, and
        # all other participants are reported as gone.
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
        # 0 means no limit of queued handshake results: a full queue would block ZeroMQ's own thread
        handshakes.set_hwm(0)
        handshakes.connect(f"inproc://handshakes-{port}")
        yield _Line(socket, handshakes, host, port)


class _Link:
    """
    The connection of a participant to the broker: a socket for sending (`voice`) and a socket for
    receiving (`ear`). The event loop reads both sockets.
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
        self.counts: Counter[bytes] = Counter()
        """By topic: how many messages have arrived."""
        self._loop = asyncio.get_running_loop()
        self.participant = Participant(job=job, sender=sender, send=self._send)

    def open(self) -> None:
        self._loop.add_reader(self._voice, self._read_notices)
        self._loop.add_reader(self._ear, self._read_frames)
        for line in self._lines:
            self._loop.add_reader(line.handshakes, self._read_handshakes, line)
            self._read_handshakes(line)
        # read the notices and frames that arrived before the event loop watched the sockets: the
        # file descriptor of a ZeroMQ socket becomes readable only when something new arrives
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
        # read the waiting subscription notices now: the send has reset the socket's file
        # descriptor, so the event loop would not be woken for notices that arrived before
        self._read_notices()

    def _read_notices(self) -> None:
        """
        Read the subscription notices of the broker, and pass them to the participant.

        A notice is a byte, 1 for a new subscription or 0 for an ended one, followed by the topic.
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
                    self.counts[topic] += 1
                    self.participant.frame(topic, frame)
                case _:
                    self.participant.malformed(
                        f"a message with {len(frames)} frames came; a message of tft has two, "
                        "topic and body"
                    )

    def _read_handshakes(self, line: _Line) -> None:
        """
        Read the results of the handshakes of the socket `line` with the broker. Report each refusal
        to the participant.

        `REFUSED_RETRY` seconds after a refusal, the socket tries again to connect.
        """
        for event in self._waiting(line.handshakes, partial(self._read_handshakes, line)):
            seen = parse_monitor_message(event)
            match seen["event"]:
                case zmq.Event.HANDSHAKE_SUCCEEDED:
                    self._cut_off = 0
                    self._told.clear()
                case zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
                    # count the failed handshakes of both sockets of the participant together,
                    # because both sockets connect to the same broker
                    self._cut_off += 1
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
            "was it started with the same --curve?"
            if self._encrypts
            else "was it started with --curve, and this process without?"
        )
        return (
            f"the process that listens at {self._broker} closes every connection without a "
            f"message: {keys}"
        )

    def _why_refused(self, failed: int, value: int) -> str:
        if failed == zmq.Event.HANDSHAKE_FAILED_AUTH:
            return (
                f"the broker at {self._broker} refuses this process, because its key is not one "
                "of the job's keys: was the broker started with the same --curve?"
            )
        if value != MISMATCH:
            return f"the process that listens at {self._broker} is not the broker of this job"
        if self._encrypts:
            return (
                f"the broker at {self._broker} does not use encryption: was it started without "
                "--curve?"
            )
        return f"the broker at {self._broker} uses encryption, but this process has no --curve"

    def _waiting(self, socket: Socket, again: Callable[[], None]) -> Iterator[list[bytes]]:
        """
        Yield the messages that are ready in `socket`, at most `BATCH` of them.

        If more messages may be ready after a full batch, the event loop calls `again` in its next
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


class _Sampling:
    """
    Ends the subscription to a topic for a part of the time, while very many messages arrive on it.
    """

    def __init__(self, ear: Socket, topic: bytes, link: _Link) -> None:
        self._ear = ear
        self._topic = topic
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._paused = False
        self._begun, self._heard = self._loop.time(), 0
        self._timer = self._loop.call_later(PERIOD, self._begin)

    def _begin(self) -> None:
        """
        Begin a period: subscribe to the topic. If very many messages arrived in the period before,
        end the subscription `SAMPLE` seconds after the first message of this period.
        """
        now, arrived = self._loop.time(), self._link.counts[self._topic]
        listened = SAMPLE if self._paused else now - self._begun
        many = (arrived - self._heard) * PERIOD > MANY * listened
        self._begun, self._heard = now, arrived
        if self._paused:
            self._ear.subscribe(self._topic)
            self._paused = False
        if many:
            self._await_first()
        else:
            self._timer = self._loop.call_later(PERIOD, self._begin)

    def _await_first(self) -> None:
        """
        Wait for the first message of this period, and end the subscription `SAMPLE` seconds later.
        The time does not count from the subscription itself, because on a busy machine the senders
        learn late of the subscription.
        """
        arrived = self._link.counts[self._topic] > self._heard
        if arrived or self._loop.time() - self._begun > PERIOD:
            self._timer = self._loop.call_later(SAMPLE, self._pause)
        else:
            self._timer = self._loop.call_later(_LOOK, self._await_first)

    def _pause(self) -> None:
        self._ear.unsubscribe(self._topic)
        self._paused = True
        # vary the pause, so that it does not hide the messages of the same sender each time
        pause = random.uniform(0.6, 1.4) * (PERIOD - SAMPLE)
        self._timer = self._loop.call_later(pause, self._begin)

    def close(self) -> None:
        self._timer.cancel()
