"""
The interface of a bus, and the code that the two buses share (the ZeroMQ bus and the memory bus).

A participant is a process that is connected to the bus. The shared class `Participant` turns the
frames and subscription notices that it receives into arrivals. An arrival is an object of one of
the classes `Heard`, `Present`, `Gone`, `Malformed` and `NotLetIn`.

A bus does not guarantee delivery. The broker forwards a message only to the participants that are
subscribed at that moment. If no participant is subscribed, the message is lost. So the sender of a
message that must arrive repeats the message (`tft.core.link.delivery`).

A bus promises three things. A sender is never blocked. The messages of one sender arrive in order.
When a participant connects or leaves, the other participants are told at once.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tft.errors import MalformedMessage
from tft.protocol import codec, topics
from tft.protocol.messages import Envelope, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """
    An arrival: a message that a participant of this job has sent.
    """

    topic: bytes
    envelope: Envelope


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """
    An arrival: another participant of this job is connected.

    Perhaps the participant is not subscribed to its topics yet: `Bus.listened` waits for a
    subscription.
    """

    sender: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """
    An arrival: a participant that was present has left, has died, or cannot be reached any more.

    When the broker is lost, every participant is reported as gone.
    """

    sender: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """
    An arrival: bytes came that are not a valid message of this version of tft.
    """

    why: str
    """A sentence that says what came, from which sender, and what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotLetIn:
    """
    An arrival: the broker has refused this participant, or another program listens at the broker's
    address.

    This process keeps trying to connect. The same reason is reported only once, until a connection
    succeeds.
    """

    why: str
    """A sentence that says what refused the participant, and what may be wrong."""


Arrival = Heard | Present | Gone | Malformed | NotLetIn


class Bus(Protocol):
    """
    The connection of one participant (a process of a job) to the bus.

    The object must be used only on the thread of its event loop.
    """

    def publish(self, topic: bytes, message: Message, *, number: int = 0) -> None:
        """
        Send a message to the participants that are subscribed to `topic` now.

        Never blocks. If no broker or no subscriber is connected, the message is dropped. If the
        message is a report, `number` is the number that the sender has given to the report. For
        other messages `number` is 0.
        """

    async def receive(self) -> Arrival:
        """
        Wait for the next arrival (a received message, or news about a participant), and return it.

        Only one task may call this method. If the call is cancelled, no arrival is lost.
        """
        raise NotImplementedError

    async def listened(self, topic: bytes) -> None:
        """
        Wait until some participant is subscribed to `topic`.

        A message that is published on `topic` after this call returns reaches that participant.
        Every participant subscribes to a presence topic of its own, `topics.presence(job, sender)`.
        With this topic, the call waits until the participant `sender` is connected. `sender` may be
        this participant itself.
        """


class Participant:
    """
    The common part of the ZeroMQ bus and the memory bus: everything except the transport.

    `send` is the transport's function that sends a frame on a topic. The transport calls the
    methods below with incoming frames and notices.

    The queue of arrivals has no size limit. With a limit, a participant that handles arrivals
    slowly would have to stop reading, and the broker would treat it as dead. Without a limit, such
    a participant only uses more memory in its own process.
    """

    def __init__(self, *, job: str, sender: str, send: Callable[[bytes, bytes], None]) -> None:
        self._job = job
        self._sender = sender
        self._send = send
        self._presence = topics.presence(job, "")
        self._open = True
        self._arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
        self._listened: defaultdict[bytes, asyncio.Event] = defaultdict(asyncio.Event)

    # ------------------------------------------------------------ methods of `Bus`

    def publish(self, topic: bytes, message: Message, *, number: int = 0) -> None:
        """
        Send a message to the participants that are subscribed to `topic` (see `Bus.publish`).
        """
        envelope = Envelope(job=self._job, sender=self._sender, number=number, message=message)
        if self._open:
            self._send(topic, codec.encode(envelope))

    async def receive(self) -> Arrival:
        """
        Return the next arrival: a received message, or news about a participant (see
        `Bus.receive`).
        """
        return await self._arrivals.get()

    async def listened(self, topic: bytes) -> None:
        """
        Wait until a participant is subscribed to `topic` (see `Bus.listened`).
        """
        await self._listened[topic].wait()

    def close(self) -> None:
        """
        Record that the transport is closed. Messages that are published after this call are
        dropped.
        """
        self._open = False

    # ------------------------------------------------------------ methods that the transport calls

    def frame(self, topic: bytes, frame: bytes) -> None:
        """
        Decode a frame that was received on `topic`, and add an arrival to the queue.

        A frame that cannot be decoded becomes a `Malformed` arrival. A message of another job is
        ignored.
        """
        try:
            envelope = codec.decode(frame)
        except MalformedMessage as error:
            self.malformed(f"on topic {topic!r}: {error}")
            return
        if envelope.job == self._job:
            self._arrivals.put_nowait(Heard(topic=topic, envelope=envelope))

    def malformed(self, why: str) -> None:
        """
        Add a `Malformed` arrival, because bytes came that are no valid frame. `why` says what came.
        """
        self._arrivals.put_nowait(Malformed(why=why))

    def not_let_in(self, why: str) -> None:
        """
        Add a `NotLetIn` arrival. `why` says what refused this participant.
        """
        self._arrivals.put_nowait(NotLetIn(why=why))

    def subscribed(self, topic: bytes) -> None:
        """
        Record that `topic` now has a subscriber. The transport calls this method for the first
        subscription to a topic.

        Wakes the callers of `listened`. If `topic` is the presence topic of another participant,
        that participant has connected: adds a `Present` arrival.
        """
        event = self._listened[topic]
        if not event.is_set():
            event.set()
            if other := self._other(topic):
                self._arrivals.put_nowait(Present(sender=other))

    def unsubscribed(self, topic: bytes) -> None:
        """
        Record that `topic` has no subscriber any more.

        If `topic` is the presence topic of another participant, that participant has left: adds a
        `Gone` arrival.
        """
        event = self._listened.get(topic)
        if event is not None and event.is_set():
            # remove the topic: every process that connects has a presence topic of its own, so the
            # dict `_listened` would otherwise grow without limit
            del self._listened[topic]
            if other := self._other(topic):
                self._arrivals.put_nowait(Gone(sender=other))

    def _other(self, topic: bytes) -> str | None:
        """
        Return the name of the participant of this job whose presence topic is `topic`.

        Returns None if `topic` is no presence topic, if it is this participant's own presence
        topic, or if it belongs to another job on the same broker.
        """
        if not topic.startswith(self._presence):
            return None
        sender = topic.removeprefix(self._presence).decode(errors="replace")
        return None if sender == self._sender else sender
