"""
The contract of the bus, and what both buses share: how frames and notices become arrivals.

A bus promises little, as pub/sub does. A message reaches those who are subscribed when it passes
the broker, or nobody; what must arrive is repeated by its sender (`tft.core.delivery`). What a
bus does promise: it never blocks its sender, what arrives from one sender is in order, and who
connects and who leaves is told without anybody waiting for a beat.
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
    Another participant is connected. That it hears a topic already, `Bus.listened` tells. Should
    jobs share a broker, it may be of another job.
    """

    sender: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """
    A participant that was present has left, has died, or cannot be reached any more; or it is the
    broker that is gone, and then everyone is.
    """

    sender: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """
    Something came that is no message of this version of tft.
    """

    why: str
    """A sentence: what came, from whom, what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotLetIn:
    """
    The broker has refused this participant, or what listens there is not the broker of this job. It is
    tried again and again; told is what is new since somebody was let in.
    """

    why: str
    """A sentence: who refused, and what may be wrong."""


Arrival = Heard | Present | Gone | Malformed | NotLetIn


class Bus(Protocol):
    """
    One participant's connection. Used from the thread of its event loop only.
    """

    def publish(self, topic: bytes, message: Message, *, number: int = 0) -> None:
        """
        Send to whoever listens to `topic` now. Never blocks; without a broker, or without a
        listener, the message is dropped. `number` is the report's, 0 for what is no report.
        """

    async def receive(self) -> Arrival:
        """
        The next arrival, for a single consumer. A cancelled call loses nothing.
        """
        raise NotImplementedError

    async def listened(self, topic: bytes) -> None:
        """
        Return once somebody is subscribed to `topic`: what is published from then on reaches
        them. With `topics.presence(sender)`, one's own included: once that sender is connected.
        """


class Participant:
    """
    A bus without its wire: `send` puts a frame on it, and what comes off it is fed in.

    The queue has no bound. A bound would have to block the reader, and a subscriber that does not
    read is taken for dead by the broker; what a slow consumer costs, it costs its own process.
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
        See `Bus.publish`.
        """
        envelope = Envelope(job=self._job, sender=self._sender, number=number, message=message)
        if self._open:
            self._send(topic, codec.encode(envelope))

    async def receive(self) -> Arrival:
        """
        See `Bus.receive`.
        """
        return await self._arrivals.get()

    async def listened(self, topic: bytes) -> None:
        """
        See `Bus.listened`.
        """
        await self._listened[topic].wait()

    def close(self) -> None:
        """
        The wire is gone. A task that still publishes is as well off as without a listener.
        """
        self._open = False

    # ------------------------------------------------------------ fed by the wire

    def frame(self, topic: bytes, frame: bytes) -> None:
        """
        A frame came on a topic. One of another job is not ours to look at.
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
        Something came that cannot be taken for a frame.
        """
        self._arrivals.put_nowait(Malformed(why=why))

    def not_let_in(self, why: str) -> None:
        """
        The broker has refused this participant.
        """
        self._arrivals.put_nowait(NotLetIn(why=why))

    def subscribed(self, topic: bytes) -> None:
        """
        The first subscription to a topic stands.
        """
        event = self._listened[topic]
        if not event.is_set():
            event.set()
            if other := self._other(topic):
                self._arrivals.put_nowait(Present(sender=other))

    def unsubscribed(self, topic: bytes) -> None:
        """
        The last subscription to a topic has ended.
        """
        event = self._listened[topic]
        if event.is_set():
            event.clear()
            if other := self._other(topic):
                self._arrivals.put_nowait(Gone(sender=other))

    def _other(self, topic: bytes) -> str | None:
        """
        Whose presence a topic stands for, unless it is one's own: nobody is news to himself.
        """
        if not topic.startswith(_PRESENCE):
            return None
        sender = topic.removeprefix(_PRESENCE).decode(errors="replace")
        return None if sender == self._sender else sender
