"""
The contract of the bus, kept by the one in memory and by the one over ZeroMQ.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import msgpack
import pytest
import zmq

from tft.bus.base import Arrival, Bus, Gone, Heard, Malformed, Present
from tft.bus.memory import MemoryBroker
from tft.bus.zeromq import open_bus
from tft.keys import read_keys
from tft.protocol import codec
from tft.protocol.messages import VERSION, Envelope, Lead
from tft.protocol.topics import BEATS, ORDERS, REPORTS, presence


class Exchange(Protocol):
    """
    A broker, whichever.
    """

    def open(
        self, sender: str, *topics: bytes, job: str = "job"
    ) -> AbstractAsyncContextManager[Bus]: ...

    def post(self, topic: bytes, *frames: bytes) -> None:
        """
        Frames from something that is no bus of ours, in order; somebody must listen to `topic`.
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
    The epochs of the next `count` messages; comings and goings are passed over.
    """
    heard: list[int] = []
    while len(heard) < count:
        arrival = await bus.receive()
        if isinstance(arrival, Heard):
            assert isinstance(arrival.envelope.message, Lead)
            heard.append(arrival.envelope.message.epoch)
    return heard


# ---------------------------------------------------------------- messages


async def test_what_is_published_is_heard_by_who_listens(controller: Bus, rank: Bus) -> None:
    """
    When a message is published on a topic somebody listens to, then they hear it, with its
    sender, its number and its job.
    """
    assert await rank.receive() == Present(sender="controller/1")
    await controller.listened(ORDERS)

    controller.publish(ORDERS, lead(1), number=7)

    assert await rank.receive() == Heard(
        topic=ORDERS,
        envelope=Envelope(job="job", sender="controller/1", number=7, message=lead(1)),
    )


async def test_a_topic_that_was_not_asked_for_is_not_heard(controller: Bus, rank: Bus) -> None:
    """
    When something is published on another topic, then one hears only one's own.
    """
    await controller.listened(ORDERS)
    await controller.listened(BEATS)

    controller.publish(BEATS, lead(1))
    controller.publish(ORDERS, lead(2))

    assert await epochs(rank, 1) == [2]


async def test_who_listens_to_his_own_topic_hears_himself(exchange: Exchange) -> None:
    """
    When a sender listens to the topic it publishes on, then it hears what it sends.
    """
    async with exchange.open("controller/1", ORDERS) as bus:
        await bus.listened(ORDERS)

        bus.publish(ORDERS, lead(1))

        assert await epochs(bus, 1) == [1]


async def test_everybody_who_listens_hears(controller: Bus, exchange: Exchange) -> None:
    """
    When several listen to a topic, then each hears every message.
    """
    async with exchange.open("rank.1/0", ORDERS) as one, exchange.open("rank.2/0", ORDERS) as other:
        await controller.listened(presence("rank.1/0"))
        await controller.listened(presence("rank.2/0"))

        controller.publish(ORDERS, lead(1))

        assert [await epochs(one, 1), await epochs(other, 1)] == [[1], [1]]


async def test_a_flood_from_one_sender_arrives_whole_and_in_order(
    controller: Bus, rank: Bus
) -> None:
    """
    When thousands of messages are published at once, then none is dropped and none overtakes.
    """
    await controller.listened(ORDERS)

    for epoch in range(5000):
        controller.publish(ORDERS, lead(epoch))

    assert await epochs(rank, 5000) == list(range(5000))


async def test_what_nobody_listens_to_is_dropped(controller: Bus, exchange: Exchange) -> None:
    """
    When nobody listens, then publishing is no error, and who comes later hears what is later.
    """
    controller.publish(ORDERS, lead(1))

    async with exchange.open("rank.0/0", ORDERS) as rank:
        await controller.listened(ORDERS)
        controller.publish(ORDERS, lead(2))

        assert await epochs(rank, 1) == [2]


async def test_a_cancelled_receive_loses_nothing(controller: Bus, rank: Bus) -> None:
    """
    When receives are cancelled while messages come in, then every message is still received once.
    """
    await controller.listened(ORDERS)

    heard: list[int] = []
    for epoch in range(200):
        controller.publish(ORDERS, lead(epoch))
        receiving = asyncio.create_task(epochs(rank, 1))
        await asyncio.sleep(0)  # it waits now, or has what came
        if not receiving.done():
            receiving.cancel()
        try:
            heard += await receiving
        except asyncio.CancelledError:
            continue

    heard += await epochs(rank, 200 - len(heard))

    assert heard == list(range(200))


async def test_publishing_after_the_bus_was_closed_is_no_error(
    controller: Bus, exchange: Exchange
) -> None:
    """
    When a task still publishes while its bus is closed, then it is as if nobody listened.
    """
    async with exchange.open("rank.0/0") as bus:
        await bus.listened(REPORTS)

    bus.publish(REPORTS, lead(1))

    async with exchange.open("rank.0/1") as bus:
        await bus.listened(REPORTS)
        bus.publish(REPORTS, lead(2))

    assert await epochs(controller, 1) == [2]


# ---------------------------------------------------------------- presence


async def test_who_comes_and_who_leaves_is_told(controller: Bus, exchange: Exchange) -> None:
    """
    When another participant opens its bus, it is present; when it closes it, it is gone.
    """
    async with exchange.open("rank.0/0", ORDERS):
        assert await controller.receive() == Present(sender="rank.0/0")

    assert await controller.receive() == Gone(sender="rank.0/0")


async def test_who_comes_late_is_told_who_is_there(exchange: Exchange) -> None:
    """
    When others are present already, then a newcomer hears of each of them, and not of itself.
    """
    async with exchange.open("rank.0/0") as first, exchange.open("rank.1/0"):
        assert await first.receive() == Present(sender="rank.1/0")

        async with exchange.open("controller/1") as late:
            arrivals = [await late.receive(), await late.receive()]
            await late.listened(presence("controller/1"))
            assert await first.receive() == Present(sender="controller/1")

    assert sorted(str(arrival) for arrival in arrivals) == [
        "Present(sender='rank.0/0')",
        "Present(sender='rank.1/0')",
    ]


async def test_listened_is_a_fact_about_now(controller: Bus, exchange: Exchange) -> None:
    """
    When the only listener of a topic leaves, then waiting for a listener is waiting again.
    """
    async with exchange.open("rank.0/0", ORDERS):
        await controller.listened(ORDERS)
        assert await controller.receive() == Present(sender="rank.0/0")
    assert await controller.receive() == Gone(sender="rank.0/0")

    waiting = asyncio.create_task(controller.listened(presence("rank.0/0")))
    await asyncio.sleep(0)
    assert not waiting.done()

    async with exchange.open("rank.0/0", ORDERS):
        await waiting


# ---------------------------------------------------------------- strangers


def frame(*, job: str = "job", epoch: int = 1, **changes: object) -> bytes:
    """
    A frame with some of its top fields changed.
    """
    envelope = Envelope(job=job, sender="stranger", number=0, message=lead(epoch))
    changed: bytes = msgpack.packb({**msgpack.unpackb(codec.encode(envelope)), **changes})
    return changed


async def next_but_notices(bus: Bus) -> Arrival:
    while isinstance(arrival := await bus.receive(), Present | Gone):
        pass
    return arrival


async def test_another_job_on_the_same_broker_is_not_heard(exchange: Exchange, rank: Bus) -> None:
    """
    When another job publishes on the same topics, then nothing of it arrives.
    """
    frames: Sequence[bytes] = [frame(job="other", epoch=1), frame(job="job", epoch=2)]
    await rank.listened(ORDERS)

    exchange.post(ORDERS, *frames)

    assert await epochs(rank, 1) == [2]


async def test_another_version_arrives_as_a_sentence(exchange: Exchange, rank: Bus) -> None:
    """
    When a peer speaks another version, then one is told so, and goes on hearing others.
    """
    await rank.listened(ORDERS)

    exchange.post(ORDERS, frame(v=VERSION + 1), frame(epoch=5))

    assert await next_but_notices(rank) == Malformed(
        why=f"on topic b'orders': 'stranger' speaks version {VERSION + 1} of the protocol, "
        f"version {VERSION} is spoken here: install the same tft on every node of the job"
    )
    assert await epochs(rank, 1) == [5]


async def test_garbage_arrives_as_a_sentence(exchange: Exchange, rank: Bus) -> None:
    """
    When bytes come that are no message, then one is told, and goes on hearing others.
    """
    await rank.listened(ORDERS)

    exchange.post(ORDERS, b"\xc1", frame(epoch=5))

    assert await next_but_notices(rank) == Malformed(
        why="on topic b'orders': 1 bytes are not MessagePack: FormatError"
    )
    assert await epochs(rank, 1) == [5]
