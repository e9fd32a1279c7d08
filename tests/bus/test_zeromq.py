"""
Tests of the ZeroMQ bus beyond the contract: it outlives the processes that it connects.
"""

import asyncio
import signal
from itertools import pairwise
from time import monotonic

import pytest
import zmq

from tests.bus.conftest import Broker, Participants
from tft.bus.base import Bus, Gone, Heard, Malformed, Present
from tft.bus.zeromq import open_bus
from tft.errors import UsageError
from tft.protocol.frames import FRAME_LIMIT
from tft.protocol.messages import Beat, Envelope, Lead
from tft.protocol.topics import BEATS, ORDERS, REPORTS, presence


async def heard(bus: Bus) -> Lead:
    """
    Return the next message, and skip notices.
    """
    while not isinstance(arrival := await bus.receive(), Heard):
        assert isinstance(arrival, Present | Gone)
    assert isinstance(arrival.envelope.message, Lead)
    return arrival.envelope.message


# ---------------------------------------------------------------- participants


async def test_killed_participant_is_reported_as_gone_at_once(
    broker: Broker, participants: Participants
) -> None:
    """When a participant is killed with SIGKILL, then the broker reports it as gone to the others
    before a missed heartbeat could do so."""
    async with open_bus(broker.address, job="job", sender="controller/1", topics=[]) as bus:
        process = participants.start("rank.0/0")
        assert await bus.receive() == Present(sender="rank.0/0")

        process.send_signal(signal.SIGKILL)
        killed = monotonic()

        assert await bus.receive() == Gone(sender="rank.0/0")
        # a missed heartbeat would be noticed after at least 1.5 s
        assert monotonic() - killed < 1.4


async def test_stopped_process_is_gone_and_busy_process_stays_present(
    broker: Broker, participants: Participants
) -> None:
    """When a process is stopped, then it is reported as gone within seconds, and as present when it
    continues. A process that reads no messages stays present."""
    async with open_bus(broker.address, job="job", sender="controller/1", topics=[]) as bus:
        participants.start("rank.0/0", deaf=True)
        assert await bus.receive() == Present(sender="rank.0/0")
        stopped = participants.start("rank.1/0")
        assert await bus.receive() == Present(sender="rank.1/0")
        stopped.send_signal(signal.SIGSTOP)
        for _ in range(2000):  # 20 MB: more than any buffer of the kernel
            bus.publish(ORDERS, Lead(epoch=1, heard={"x" * 10_000: 1}))
        assert await bus.receive() == Gone(sender="rank.1/0")

        stopped.send_signal(signal.SIGCONT)
        assert await bus.receive() == Present(sender="rank.1/0")


# ---------------------------------------------------------------- the broker


async def test_bus_reconnects_after_its_broker_was_killed(broker: Broker) -> None:
    """When the broker is killed, then all participants are gone. When it starts again at the same
    port, then they are present again and receive messages without any action."""
    address = broker.address
    async with (
        open_bus(address, job="job", sender="controller/1", topics=[REPORTS]) as controller,
        open_bus(address, job="job", sender="rank.0/0", topics=[ORDERS]) as rank,
    ):
        assert await controller.receive() == Present(sender="rank.0/0")
        assert await rank.receive() == Present(sender="controller/1")

        broker.kill()
        assert await controller.receive() == Gone(sender="rank.0/0")
        assert await rank.receive() == Gone(sender="controller/1")
        # no broker is connected: nobody ever receives this
        controller.publish(ORDERS, Lead(epoch=1, heard={}))

        broker.start()
        started = monotonic()
        assert await controller.receive() == Present(sender="rank.0/0")
        assert await rank.receive() == Present(sender="controller/1")
        # ZeroMQ tries to connect every 220 ms or sooner; the rest is allowance for a busy machine
        assert monotonic() - started < 1.4

        await controller.listened(ORDERS)
        await rank.listened(REPORTS)
        controller.publish(ORDERS, Lead(epoch=2, heard={}))
        rank.publish(REPORTS, Lead(epoch=3, heard={}))
        assert (await heard(rank)).epoch == 2
        assert (await heard(controller)).epoch == 3


async def test_bus_can_be_opened_before_its_broker_starts(broker: Broker) -> None:
    """When there is no broker yet, then a publish causes no error. The bus connects when the broker
    starts."""
    broker.kill()
    async with open_bus(broker.address, job="job", sender="rank.0/0", topics=[ORDERS]) as bus:
        bus.publish(ORDERS, Lead(epoch=1, heard={}))

        broker.start()
        await bus.listened(presence("job", "rank.0/0"))
        await bus.listened(ORDERS)

        bus.publish(ORDERS, Lead(epoch=2, heard={}))
        assert (await heard(bus)).epoch == 2


# ---------------------------------------------------------------- invalid frames of other programs


async def test_message_with_three_frames_is_reported_in_a_sentence(broker: Broker) -> None:
    """When a message does not have exactly the two frames topic and body, then the receiver gets a
    sentence about it."""
    async with open_bus(broker.address, job="job", sender="rank.0/0", topics=[ORDERS]) as bus:
        await bus.listened(ORDERS)

        post(broker, ORDERS, [ORDERS, b"one", b"two"])

        assert await bus.receive() == Malformed(
            why="a message with 3 frames came; a message of tft has two, topic and body"
        )


async def test_frame_over_the_size_limit_does_not_pass_the_broker(broker: Broker) -> None:
    """When a process publishes a frame above the size limit, then no participant receives it, and
    the bus continues."""
    async with open_bus(broker.address, job="job", sender="rank.0/0", topics=[ORDERS]) as bus:
        await bus.listened(ORDERS)

        post(broker, ORDERS, [ORDERS, bytes(FRAME_LIMIT + 1)])
        bus.publish(ORDERS, Lead(epoch=1, heard={}))

        assert (await heard(bus)).epoch == 1


def post(broker: Broker, topic: bytes, frames: list[bytes]) -> None:
    """
    Publish raw frames when a participant is subscribed to `topic`. Returns when they were accepted
    or refused.
    """
    with zmq.Context() as context, context.socket(zmq.XPUB) as stranger:
        stranger.setsockopt(zmq.IMMEDIATE, 1)
        stranger.connect(f"tcp://{broker.address}")
        while stranger.recv() != b"\x01" + topic:
            pass
        stranger.send_multipart(frames)


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize("address", ["", "host", "host:", ":5000", "host:0", "host:65535", "h:-1"])
async def test_malformed_broker_address_is_refused(address: str) -> None:
    """When an address is not HOST:PORT with a possible second port after it, then the error says
    so."""
    with pytest.raises(UsageError, match="HOST:PORT"):
        async with open_bus(address, job="job", sender="rank.0/0", topics=[]):
            pass


async def test_invalid_host_name_is_refused() -> None:
    """When the host name of the address is invalid, then a `UsageError` names the address."""
    with pytest.raises(UsageError, match="no host:5000 cannot be"):
        async with open_bus("no host:5000", job="job", sender="rank.0/0", topics=[]):
            pass


# ---------------------------------------------------------------- sampled topics


async def test_of_a_busy_sampled_topic_only_some_messages_come(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When very many messages are published on a sampled topic, then a participant gets those of a
    part of each period. When they are few again, it gets all. Messages on other topics all come."""
    monkeypatch.setattr("tft.bus.zeromq.MANY", 50)
    monkeypatch.setattr("tft.bus.zeromq.PERIOD", 0.1)
    monkeypatch.setattr("tft.bus.zeromq.SAMPLE", 0.03)
    async with (
        open_bus(broker.address, job="job", sender="node.0/0", topics=[]) as voice,
        open_bus(
            broker.address, job="job", sender="ask.1", topics=[BEATS, ORDERS], sampled=BEATS
        ) as ear,
    ):
        await voice.listened(ORDERS)
        await voice.listened(BEATS)
        numbers = await published(voice, ear, 1500, every=0.001)
        assert 100 < len(numbers) < 1300
        assert max(b - a for a, b in pairwise(numbers)) < 500
        assert numbers == sorted(numbers)
        while len(await published(voice, ear, 20, every=0.01)) < 20:
            pass  # the topic is paused once more
        assert await published(voice, ear, 30, every=0.01) == [*range(30)]


async def published(voice: Bus, ear: Bus, count: int, *, every: float) -> list[int]:
    """
    Publish a heartbeat every `every` seconds, and then an order. Return the numbers of the
    heartbeats that have come before the order.
    """

    async def publish() -> None:
        for number in range(count):
            voice.publish(BEATS, Beat(node=number, pulses=(), at=0.0))
            await asyncio.sleep(every)
        voice.publish(ORDERS, Lead(epoch=1, heard={}))

    numbers = []
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(publish())
        while True:
            match await ear.receive():
                case Heard(envelope=Envelope(message=Beat(node=node))):
                    numbers.append(node)
                case Heard(envelope=Envelope(message=Lead())):
                    return numbers
                case other:
                    assert isinstance(other, Present | Gone)
