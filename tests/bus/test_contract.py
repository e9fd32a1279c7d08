"""
The contract of the bus, tested with the memory bus and with the ZeroMQ bus.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import msgpack
import pytest
import zmq

from tft.bus.base import Arrival, Bus, Gone, Heard, Malformed, Participant, Present
from tft.bus.memory import MemoryBroker
from tft.bus.zeromq import open_bus
from tft.keys import read_keys
from tft.protocol import codec
from tft.protocol.messages import VERSION, Envelope, Lead
from tft.protocol.topics import BEATS, ORDERS, REPORTS, presence


class Exchange(Protocol):
    """
    A broker of either bus.
    """

    def open(
        self, sender: str, *topics: bytes, job: str = "job"
    ) -> AbstractAsyncContextManager[Bus]: ...

    def post(self, topic: bytes, *frames: bytes) -> None:
        """
        Send raw frames on a topic, in order. A participant must be subscribed to `topic`.
        """


class InMemory:
    def __init__(self) -> None:
        self._broker = MemoryBroker()

    def open(
        self, sender: str, *topics: bytes, job: str = "job"
    ) -> AbstractAsyncContextManager[Bus]:
        return self._broker.open_bus(job=job, sender=sender, topics=topics)

    def post(self, topic: bytes, *frames: bytes) -> None:
        for frame in frames:
            self._broker.post(topic, frame)


class OverZeromq:
    def __init__(self, port: int, curve: Path | None = None) -> None:
        self._port = port
        self._curve = curve

    def open(
        self, sender: str, *topics: bytes, job: str = "job"
    ) -> AbstractAsyncContextManager[Bus]:
        address = f"127.0.0.1:{self._port}"
        return open_bus(address, job=job, sender=sender, topics=topics, curve=self._curve)

    def post(self, topic: bytes, *frames: bytes) -> None:
        with zmq.Context() as context, context.socket(zmq.XPUB) as stranger:
            if self._curve is not None:
                keys = read_keys(self._curve)
                stranger.curve_serverkey = keys.broker
                stranger.curve_publickey, stranger.curve_secretkey = keys.public, keys.secret
            stranger.connect(f"tcp://127.0.0.1:{self._port}")
            while stranger.recv() != b"\x01" + topic:
                pass
            for frame in frames:
                stranger.send_multipart((topic, frame))


@pytest.fixture(params=["memory", "zeromq", "zeromq with keys"])
def exchange(request: pytest.FixtureRequest) -> Exchange:
    if request.param == "memory":
        return InMemory()
    broker = request.getfixturevalue("broker" if request.param == "zeromq" else "guarded")
    return OverZeromq(broker.port, broker.curve)


@pytest.fixture
async def controller(exchange: Exchange) -> AsyncIterator[Bus]:
    async with exchange.open("controller/1", REPORTS, BEATS) as bus:
        yield bus


@pytest.fixture
async def rank(exchange: Exchange) -> AsyncIterator[Bus]:
    async with exchange.open("rank.0/0", ORDERS) as bus:
        yield bus


def lead(epoch: int) -> Lead:
    return Lead(epoch=epoch, heard={"rank.0/0": 3})


async def epochs(bus: Bus, count: int) -> list[int]:
    """
    Return the epochs of the next `count` messages. Notices about participants are skipped.
    """
    heard: list[int] = []
    while len(heard) < count:
        arrival = await bus.receive()
        if isinstance(arrival, Heard):
            assert isinstance(arrival.envelope.message, Lead)
            heard.append(arrival.envelope.message.epoch)
    return heard


# ---------------------------------------------------------------- messages


async def test_published_message_reaches_a_listener_of_its_topic(
    controller: Bus, rank: Bus
) -> None:
    """When a message is published on a topic with a listener, then the listener receives the
    message with its sender, number and job."""
    assert await rank.receive() == Present(sender="controller/1")
    await controller.listened(ORDERS)

    controller.publish(ORDERS, lead(1), number=7)

    assert await rank.receive() == Heard(
        topic=ORDERS,
        envelope=Envelope(job="job", sender="controller/1", number=7, message=lead(1)),
    )


async def test_listener_receives_only_its_own_topics(controller: Bus, rank: Bus) -> None:
    """When a message is published on another topic, then the listener does not receive it."""
    await controller.listened(ORDERS)
    await controller.listened(BEATS)

    controller.publish(BEATS, lead(1))
    controller.publish(ORDERS, lead(2))

    assert await epochs(rank, 1) == [2]


async def test_sender_that_listens_to_its_topic_receives_its_own_messages(
    exchange: Exchange,
) -> None:
    """When a sender listens to the topic on which it publishes, then it receives its own messages."""
    async with exchange.open("controller/1", ORDERS) as bus:
        await bus.listened(ORDERS)

        bus.publish(ORDERS, lead(1))

        assert await epochs(bus, 1) == [1]


async def test_every_listener_of_a_topic_receives_each_message(
    controller: Bus, exchange: Exchange
) -> None:
    """When several participants listen to a topic, then each participant receives every message."""
    async with exchange.open("rank.1/0", ORDERS) as one, exchange.open("rank.2/0", ORDERS) as other:
        await controller.listened(presence("job", "rank.1/0"))
        await controller.listened(presence("job", "rank.2/0"))

        controller.publish(ORDERS, lead(1))

        assert [await epochs(one, 1), await epochs(other, 1)] == [[1], [1]]


async def test_many_messages_of_one_sender_arrive_complete_and_in_order(
    controller: Bus, rank: Bus
) -> None:
    """When 5000 messages are published at once, then all arrive in order."""
    await controller.listened(ORDERS)

    for epoch in range(5000):
        controller.publish(ORDERS, lead(epoch))

    assert await epochs(rank, 5000) == list(range(5000))


async def test_message_without_a_listener_is_dropped(controller: Bus, exchange: Exchange) -> None:
    """When a topic has no listener, then a publish causes no error. A participant that listens
    later receives only later messages."""
    controller.publish(ORDERS, lead(1))

    async with exchange.open("rank.0/0", ORDERS) as rank:
        await controller.listened(ORDERS)
        controller.publish(ORDERS, lead(2))

        assert await epochs(rank, 1) == [2]


async def test_cancelled_receive_loses_no_message(controller: Bus, rank: Bus) -> None:
    """When receives are cancelled while messages arrive, then every message is still received once."""
    await controller.listened(ORDERS)

    heard: list[int] = []
    for epoch in range(200):
        controller.publish(ORDERS, lead(epoch))
        receiving = asyncio.create_task(epochs(rank, 1))
        await asyncio.sleep(0)  # `receive` is waiting now, or has received
        if not receiving.done():
            receiving.cancel()
        try:
            heard += await receiving
        except asyncio.CancelledError:
            continue

    heard += await epochs(rank, 200 - len(heard))

    assert heard == list(range(200))


async def test_publish_after_the_bus_is_closed_causes_no_error(
    controller: Bus, exchange: Exchange
) -> None:
    """When a task publishes after its bus was closed, then no error is raised and no listener
    receives the message."""
    async with exchange.open("rank.0/0") as bus:
        await bus.listened(REPORTS)

    bus.publish(REPORTS, lead(1))

    async with exchange.open("rank.0/1") as bus:
        await bus.listened(REPORTS)
        bus.publish(REPORTS, lead(2))

    assert await epochs(controller, 1) == [2]


# --------------------------------------------------------- notices that participants join and leave


async def test_participants_are_told_who_joins_and_leaves(
    controller: Bus, exchange: Exchange
) -> None:
    """When another participant opens its bus, then it is reported as present. When it closes its
    bus, then it is reported as gone."""
    async with exchange.open("rank.0/0", ORDERS):
        assert await controller.receive() == Present(sender="rank.0/0")

    assert await controller.receive() == Gone(sender="rank.0/0")


async def test_new_participant_is_told_who_is_present(exchange: Exchange) -> None:
    """When others are present already, then a new participant is told of each of them, and not of
    itself."""
    async with exchange.open("rank.0/0") as first, exchange.open("rank.1/0"):
        assert await first.receive() == Present(sender="rank.1/0")

        async with exchange.open("controller/1") as late:
            arrivals = [await late.receive(), await late.receive()]
            await late.listened(presence("job", "controller/1"))
            assert await first.receive() == Present(sender="controller/1")

    assert sorted(str(arrival) for arrival in arrivals) == [
        "Present(sender='rank.0/0')",
        "Present(sender='rank.1/0')",
    ]


async def test_wait_for_a_listener_uses_the_current_listeners(
    controller: Bus, exchange: Exchange
) -> None:
    """When the only listener of a topic has left, then a wait for a listener of this topic blocks
    until a new listener joins."""
    async with exchange.open("rank.0/0", ORDERS):
        await controller.listened(ORDERS)
        assert await controller.receive() == Present(sender="rank.0/0")
    assert await controller.receive() == Gone(sender="rank.0/0")

    waiting = asyncio.create_task(controller.listened(presence("job", "rank.0/0")))
    await asyncio.sleep(0)
    assert not waiting.done()

    async with exchange.open("rank.0/0", ORDERS):
        await waiting


async def test_participants_that_have_left_are_forgotten() -> None:
    """When processes come and go, then a participant keeps nothing about those that have left. A wait
    for one that left ends when it comes back."""
    bus = Participant(job="job", sender="controller/1", send=lambda topic, frame: None)
    for incarnation in range(50):
        bus.subscribed(presence("job", f"rank.0/{incarnation}"))
        bus.unsubscribed(presence("job", f"rank.0/{incarnation}"))
    assert not bus._listened
    waiting = asyncio.create_task(bus.listened(presence("job", "rank.0/7")))
    await asyncio.sleep(0)
    assert not waiting.done()
    bus.subscribed(presence("job", "rank.0/7"))
    await waiting


# ---------------------------------------------------- messages of other jobs, versions and programs


def frame(*, job: str = "job", epoch: int = 1, **changes: object) -> bytes:
    """
    Return a frame with some of its top-level fields changed.
    """
    envelope = Envelope(job=job, sender="stranger", number=0, message=lead(epoch))
    changed: bytes = msgpack.packb({**msgpack.unpackb(codec.encode(envelope)), **changes})
    return changed


async def next_but_notices(bus: Bus) -> Arrival:
    while isinstance(arrival := await bus.receive(), Present | Gone):
        pass
    return arrival


async def test_messages_of_another_job_are_ignored(exchange: Exchange, rank: Bus) -> None:
    """When another job publishes on the same topics, then none of its messages arrives."""
    frames: Sequence[bytes] = [frame(job="other", epoch=1), frame(job="job", epoch=2)]
    await rank.listened(ORDERS)

    exchange.post(ORDERS, *frames)

    assert await epochs(rank, 1) == [2]


async def test_presence_in_another_job_is_not_reported(exchange: Exchange) -> None:
    """When two jobs share a broker and both have a participant of the same name, then each job hears
    only of its own, also when one of the two leaves."""
    async with (
        exchange.open("controller/1", job="job") as first,
        exchange.open("controller/1", job="job/2") as second,
    ):
        async with exchange.open("rank.0/0", job="job/2"):
            assert await second.receive() == Present(sender="rank.0/0")
            async with exchange.open("rank.0/0", job="job"):
                assert await first.receive() == Present(sender="rank.0/0")
            assert await first.receive() == Gone(sender="rank.0/0")
            await second.listened(presence("job/2", "rank.0/0"))
        assert await second.receive() == Gone(sender="rank.0/0")


async def test_message_of_another_version_is_reported_in_a_sentence(
    exchange: Exchange, rank: Bus
) -> None:
    """When a peer uses another protocol version, then the receiver gets a sentence about it, and
    still receives the messages of other peers."""
    await rank.listened(ORDERS)

    exchange.post(ORDERS, frame(v=VERSION + 1), frame(epoch=5))

    assert await next_but_notices(rank) == Malformed(
        why=f"on topic b'orders': 'stranger' uses version {VERSION + 1} of the protocol between "
        f"tft's processes, but this process uses version {VERSION}: "
        "install the same tft on every node of the job"
    )
    assert await epochs(rank, 1) == [5]


async def test_bytes_that_are_no_message_are_reported_in_a_sentence(
    exchange: Exchange, rank: Bus
) -> None:
    """When bytes arrive that are not a message, then the receiver gets a sentence about them, and
    still receives valid messages."""
    await rank.listened(ORDERS)

    exchange.post(ORDERS, b"\xc1", frame(epoch=5))

    assert await next_but_notices(rank) == Malformed(
        why="on topic b'orders': 1 bytes are not MessagePack: FormatError"
    )
    assert await epochs(rank, 1) == [5]
