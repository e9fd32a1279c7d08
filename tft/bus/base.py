"""
The contract of the bus, and the code that both buses share: it turns frames and subscription
notices into arrivals.

A bus promises as little as publish/subscribe does. A message reaches the participants that are
subscribed when the message passes the broker, and perhaps nobody. A message that must arrive is
repeated by its sender (`tft.core.link.delivery`). A bus promises three things: it never blocks a sender,
the messages of one sender arrive in order, and it reports at once which participant connects or
leaves.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tft.errors import MalformedMessage
from tft.protocol import codec, topics
from tft.protocol.messages import Envelope, Message

_PRESENCE = topics.presence("")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """
    A message of this job.
    """

    topic: bytes
    envelope: Envelope


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """
    Another participant is connected. It may not be subscribed to a topic yet: `Bus.listened` waits
    for that. When several jobs share a broker, the participant may belong to another job.
    """

    sender: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """
    A participant that was present has left, has died, or cannot be reached any more. When the
    broker is lost, every participant is reported as gone.
    """

    sender: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """
    Bytes came that are no message of this version of tft.
    """

    why: str
    """A sentence that says what came, from which sender, and what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotLetIn:
    """
    The broker has refused this participant, or another program listens at the broker's address. The
    connection is tried again and again. Each reason is reported once until a connection succeeds.
    """

    why: str
    """A sentence that says what refused the participant, and what may be wrong."""


Arrival = Heard | Present | Gone | Malformed | NotLetIn


class Bus(Protocol):
    """
    The connection of one participant. It must be used only on the thread of its event loop.
    """

    def publish(self, topic: bytes, message: Message, *, number: int = 0) -> None:
        """
        Send a message to the participants that are subscribed to `topic` now. Never blocks. Without
        a broker or a subscriber the message is dropped. `number` is the number of a report; 0 is
        for all other messages.
        """

    async def receive(self) -> Arrival:
        """
        Return the next arrival. Only one task may receive. A cancelled call loses no arrival.
        """
        raise NotImplementedError

    async def listened(self, topic: bytes) -> None:
        """
        Wait until a participant is subscribed to `topic`. A message that is published from then on
        reaches that participant. With `topics.presence(sender)`, wait until `sender` is connected;
        this participant itself may be that sender.
        """


class Participant:
    """
    A bus without its transport. `send` puts a frame on the transport. The transport feeds incoming
    frames and notices to the participant.

    The queue of arrivals has no bound. A bound would have to block the reader, and the broker takes
    a subscriber that does not read for dead. So a slow consumer costs memory only in its own
    process.
    """

    def __init__(self, *, job: str, sender: str, send: Callable[[bytes, bytes], None]) -> None:
        self._job = job
        self._sender = sender
        self._send = send
        self._open = True
        self._arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
        self._listened: defaultdict[bytes, asyncio.Event] = defaultdict(asyncio.Event)

    # ------------------------------------------------------------ the contract, see `Bus`

    def publish(self, topic: bytes, message: Message, *, number: int = 0) -> None:
        """
        Send a message (see `Bus.publish`).
        """
        envelope = Envelope(job=self._job, sender=self._sender, number=number, message=message)
        if self._open:
            self._send(topic, codec.encode(envelope))

    async def receive(self) -> Arrival:
        """
        Return the next arrival (see `Bus.receive`).
        """
        return await self._arrivals.get()

    async def listened(self, topic: bytes) -> None:
        """
        Wait until a participant is subscribed to `topic` (see `Bus.listened`).
        """
        await self._listened[topic].wait()

    def close(self) -> None:
        """
        Mark the transport as gone. A message that is still published is dropped.
        """
        self._open = False

    # ------------------------------------------------------------ fed by the wire

    def frame(self, topic: bytes, frame: bytes) -> None:
        """
        Take in a frame that came on a topic. A message of another job is ignored.
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
        Add a `Malformed` arrival, for bytes that are no valid frame.
        """
        self._arrivals.put_nowait(Malformed(why=why))

    def not_let_in(self, why: str) -> None:
        """
        Add a `NotLetIn` arrival: the broker has refused this participant.
        """
        self._arrivals.put_nowait(NotLetIn(why=why))

    def subscribed(self, topic: bytes) -> None:
        """
        Take in that the first subscription to a topic has been made.
        """
        event = self._listened[topic]
        if not event.is_set():
            event.set()
            if other := self._other(topic):
                self._arrivals.put_nowait(Present(sender=other))

    def unsubscribed(self, topic: bytes) -> None:
        """
        Take in that the last subscription to a topic has ended.
        """
        event = self._listened[topic]
        if event.is_set():
            event.clear()
            if other := self._other(topic):
                self._arrivals.put_nowait(Gone(sender=other))

    def _other(self, topic: bytes) -> str | None:
        """
        Return the sender whose presence a topic stands for. Return None for another topic, and for
        this participant's own presence.
        """
        if not topic.startswith(_PRESENCE):
            return None
        sender = topic.removeprefix(_PRESENCE).decode(errors="replace")
        return None if sender == self._sender else sender
