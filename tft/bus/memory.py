"""
A bus within one process, for tests and simulations.

This bus behaves like the ZeroMQ bus and carries the same bytes, but uses no sockets.
"""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from tft.bus.base import Bus, Participant
from tft.protocol.topics import presence


class MemoryBroker:
    """
    The broker of a bus whose participants are all in this process.
    """

    def __init__(self) -> None:
        self._participants: dict[Participant, tuple[bytes, ...]] = {}
        self._subscriptions: Counter[bytes] = Counter()

    @asynccontextmanager
    async def open_bus(
        self, *, job: str, sender: str, topics: Sequence[bytes]
    ) -> AsyncIterator[Bus]:
        """
        Connect a participant named `sender` that subscribes to `topics`.

        The arguments mean the same as those of `tft.bus.zeromq.open_bus`.
        """
        participant = Participant(job=job, sender=sender, send=self.post)
        for topic in self._subscriptions:
            participant.subscribed(topic)
        mine = tuple(dict.fromkeys((*topics, presence(job, sender))))
        self._participants[participant] = mine
        for topic in mine:
            self._subscribe(topic)
        try:
            yield participant
        finally:
            participant.close()
            del self._participants[participant]
            for topic in mine:
                self._unsubscribe(topic)

    def post(self, topic: bytes, frame: bytes) -> None:
        """
        Deliver a frame (an encoded message) to all participants that are subscribed to `topic`.

        Like the ZeroMQ broker, this broker does not decode the frame.
        """
        for participant, topics in self._participants.items():
            if topic in topics:
                participant.frame(topic, frame)

    def _subscribe(self, topic: bytes) -> None:
        self._subscriptions[topic] += 1
        # like the XPUB socket of the ZeroMQ broker, report only the first subscription to a topic
        if self._subscriptions[topic] == 1:
            for participant in self._participants:
                participant.subscribed(topic)

    def _unsubscribe(self, topic: bytes) -> None:
        self._subscriptions[topic] -= 1
        if self._subscriptions[topic] == 0:
            del self._subscriptions[topic]
            for participant in self._participants:
                participant.unsubscribed(topic)
