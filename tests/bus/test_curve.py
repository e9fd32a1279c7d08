"""
The bus with the keys of a job: a participant without them is refused, is not heard, and gets a
reason.
"""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest
import zmq

from tests.bus.conftest import BROKER, Broker, Processes
from tests.bus.test_zeromq import heard
from tests.e2e.jobs import until
from tests.transfer.peers import Tap
from tft.bus.base import Arrival, Bus, Gone, Heard, NotLetIn, Present
from tft.bus.zeromq import open_bus
from tft.errors import UsageError
from tft.keys import make_keys, read_keys
from tft.protocol.messages import Lead
from tft.protocol.topics import ORDERS, REPORTS, presence

SECRET = "a name that nobody is to read"


@pytest.fixture(scope="session")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    Return the directory with the keys of another job.
    """
    directory = tmp_path_factory.mktemp("keys") / "others"
    make_keys(directory)
    return directory


@pytest.fixture
async def member(guarded: Broker, keys: Path) -> AsyncIterator[Bus]:
    """
    Return a participant that the broker has accepted.
    """
    async with open_bus(
        guarded.address, job="job", sender="controller/1", topics=[REPORTS, ORDERS], curve=keys
    ) as bus:
        await bus.listened(ORDERS)
        yield bus


@contextmanager
def stranger(
    address: str, kind: zmq.SocketType, keys: tuple[bytes, bytes, bytes] | None = None
) -> Iterator[zmq.Socket[bytes]]:
    """
    Return a plain ZeroMQ socket with any keys: the server's public key, and its own public and
    secret key.
    """
    with zmq.Context() as context, context.socket(kind) as made:
        made.linger = 0
        if keys is not None:
            made.curve_serverkey, made.curve_publickey, made.curve_secretkey = keys
        made.connect(f"tcp://{address}")
        yield made


def told(log: Path, *words: str) -> None:
    """
    Wait until a line of the log contains all these words.
    """
    until(
        lambda: any(all(w in line for w in words) for line in log.read_text().splitlines()),
        f"a line with {words}",
    )


@asynccontextmanager
async def without(
    address: str, curve: Path | None, topics: Sequence[bytes] = (ORDERS,)
) -> AsyncIterator[Bus]:
    """
    Return a participant that should be refused.
    """
    async with open_bus(address, job="job", sender="rank.6/6", topics=topics, curve=curve) as bus:
        yield bus


# ---------------------------------------------------------------- refused participants


async def test_participant_without_keys_is_refused_with_a_reason(
    guarded: Broker, member: Bus, tmp_path: Path
) -> None:
    """When a participant comes without `--curve`, then it is told that `--curve` may be missing,
    and the broker logs the refusal."""
    async with without(guarded.address, None) as outside:
        await is_told(
            outside,
            f"the broker at {guarded.address} uses encryption, but this process has no --curve",
            f"{guarded.address} closes every connection without a message: was it started with "
            "--curve, and this process without?",
        )
        told(tmp_path / "broker.log", "peer_refused")
        await assert_unheard(member, outside)


async def test_participant_with_keys_of_another_job_is_refused_with_a_reason(
    guarded: Broker, member: Bus, others: Path, tmp_path: Path
) -> None:
    """When a participant has the keys of another job, then the participant is refused, and the
    error asks whether its `--curve` is the same."""
    async with without(guarded.address, others) as outside:
        await is_told(
            outside,
            f"the process that listens at {guarded.address} closes every connection without a "
            "message: was it started with the same --curve?",
        )
        told(tmp_path / "broker.log", "peer_refused", "keys of another job")
        await assert_unheard(member, outside)


async def test_participant_without_a_key_of_the_job_is_refused(
    guarded: Broker, member: Bus, keys: Path, others: Path, tmp_path: Path
) -> None:
    """When a participant knows the public key of the broker but has its own key pair, then the
    broker refuses it. The participant and the log of the broker get the reason."""
    for name in ("broker.pub",):
        (tmp_path / name).write_bytes((keys / name).read_bytes())
    for name in ("job.key", "job.pub"):
        (tmp_path / name).write_bytes((others / name).read_bytes())
    for name in ("broker.pub", "job.key", "job.pub"):
        (tmp_path / name).chmod(0o600)

    async with without(guarded.address, tmp_path) as outside:
        await is_told(
            outside,
            f"the broker at {guarded.address} refuses this process, because its key is not one of "
            "the job's keys: was the broker started with the same --curve?",
        )
        told(tmp_path / "broker.log", "peer_refused", "127.0.0.1", "no key of this job")
        await assert_unheard(member, outside)


async def assert_unheard(member: Bus, outside: Bus) -> None:
    """
    Check that neither participant receives messages of the other, although both publish.
    """
    outside.publish(ORDERS, Lead(epoch=666, heard={}))
    member.publish(ORDERS, Lead(epoch=1, heard={}))
    assert (await heard(member)).epoch == 1
    assert all(isinstance(arrival, NotLetIn) for arrival in await arriving(outside, 0.3))


async def is_told(bus: Bus, *either: str) -> None:
    """
    Wait until one of the sentences arrives as a reason. The reason depends on which side closes the
    connection first.
    """
    arrival = await bus.receive()
    assert isinstance(arrival, NotLetIn)
    assert any(words in arrival.why for words in either), arrival.why


async def arriving(bus: Bus, seconds: float) -> list[Arrival]:
    """
    Return all arrivals within `seconds`. Only a time limit can show that a message does not arrive.
    """
    arrivals: list[Arrival] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                arrivals.append(await bus.receive())
    return arrivals


async def test_subscriber_without_keys_of_the_job_receives_nothing(
    guarded: Broker, member: Bus, others: Path
) -> None:
    """When ZeroMQ sockets subscribe to everything without keys, with keys of another job or with
    their own pair, then no message of the job reaches them."""
    known = read_keys(guarded.curve or others).broker
    public, secret = zmq.curve_keypair()
    theirs = read_keys(others)
    ear = f"127.0.0.1:{guarded.port + 1}"
    with (
        stranger(ear, zmq.SUB) as plain,
        stranger(ear, zmq.SUB, (known, public, secret)) as own,
        stranger(ear, zmq.SUB, (theirs.broker, theirs.public, theirs.secret)) as other,
    ):
        for each in (plain, own, other):
            each.subscribe(b"")
        for epoch in range(50):
            member.publish(ORDERS, Lead(epoch=epoch, heard={}))
            assert (await heard(member)).epoch == epoch
            await asyncio.sleep(0.005)

        for each in (plain, own, other):
            assert each.poll(0) == 0


async def test_participant_with_keys_refuses_a_broker_without_keys(
    broker: Broker, keys: Path
) -> None:
    """When a participant with keys connects to a broker without keys, then it refuses the broker,
    and the error says what may be wrong."""
    async with without(broker.address, keys) as bus:
        await is_told(
            bus,
            (
                f"the broker at {broker.address} does not use encryption: was it started without "
                "--curve?"
            ),
            f"{broker.address} closes every connection without a message: was it started with "
            "the same --curve?",
        )


async def test_participant_refuses_a_broker_with_other_keys(
    processes: Processes, keys: Path, others: Path
) -> None:
    """When a broker with the keys of another job listens at the address, then a participant with
    the keys of the job refuses it."""
    pretending = Broker(processes, others)

    async with without(pretending.address, keys) as bus:
        arrival = await bus.receive()

    assert isinstance(arrival, NotLetIn)
    assert arrival.why.endswith("started with the same --curve?")


async def test_process_that_is_not_a_broker_is_reported() -> None:
    """When a process that is not a broker listens at the address, then the error names this
    address."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3 and more than a greeting has\r\n")
        await reader.read(1)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with without(f"127.0.0.1:{port}", None) as bus:
            arrival = await bus.receive()

    assert isinstance(arrival, NotLetIn)
    assert f"the process that listens at 127.0.0.1:{port}" in arrival.why


async def test_repeated_refusal_is_reported_once(guarded: Broker) -> None:
    """When a participant is refused again and again, then each reason is reported once."""
    async with without(guarded.address, None) as outside:
        arrivals = await arriving(outside, 2.5)  # each connection tries at least twice in this time

    assert arrivals
    assert len(set(arrivals)) == len(arrivals)


# ---------------------------------------------------------------- accepted participants


async def test_refused_participant_connects_when_the_right_broker_starts(
    processes: Processes, broker: Broker, keys: Path
) -> None:
    """When a broker without the keys is replaced by the broker of the job at the same address, then
    the participant connects. ZeroMQ alone does not try again after a refusal."""
    async with without(broker.address, keys) as bus:
        assert isinstance(await bus.receive(), NotLetIn)

        broker.kill()
        broker.curve = keys
        broker.start()

        await bus.listened(presence("job", "rank.6/6"))
        await bus.listened(ORDERS)
        bus.publish(ORDERS, Lead(epoch=2, heard={}))
        while isinstance(arrival := await bus.receive(), NotLetIn | Present):
            pass
        assert isinstance(arrival, Heard)


async def test_bus_with_keys_works_again_after_its_broker_was_killed(
    guarded: Broker, member: Bus, keys: Path
) -> None:
    """When a broker with keys is killed and started again, then its participants connect again and
    receive messages."""
    async with open_bus(
        guarded.address, job="job", sender="rank.0/0", topics=[ORDERS], curve=keys
    ) as rank:
        assert await member.receive() == Present(sender="rank.0/0")
        assert await rank.receive() == Present(sender="controller/1")

        guarded.kill()
        assert await member.receive() == Gone(sender="rank.0/0")
        assert await rank.receive() == Gone(sender="controller/1")
        guarded.start()
        assert await member.receive() == Present(sender="rank.0/0")
        assert await rank.receive() == Present(sender="controller/1")

        await rank.listened(REPORTS)
        rank.publish(REPORTS, Lead(epoch=3, heard={}))
        assert (await heard(member)).epoch == 3


def test_port_stays_open_after_connections_without_a_key(guarded: Broker, tmp_path: Path) -> None:
    """When a connection closes at once or sends another protocol, then the broker continues and
    logs its address."""
    for word in (b"", b"GET / HTTP/1.0\r\n\r\n" * 10):
        with socket.create_connection(("127.0.0.1", guarded.port)) as knocking:
            knocking.sendall(word)

    told(tmp_path / "broker.log", "peer_refused", "left before it had shown a key")
    assert guarded.process.poll() is None


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
async def test_signal_ends_the_broker_with_keys_cleanly(
    guarded: Broker, member: Bus, ending: signal.Signals
) -> None:
    """When SIGTERM or SIGINT comes while messages pass and a process without keys connects, then
    the broker exits with 0."""
    async with without(guarded.address, None):
        for epoch in range(1000):
            member.publish(ORDERS, Lead(epoch=epoch, heard={}))

        guarded.process.send_signal(ending)

        assert guarded.process.wait(20) == 0


@pytest.mark.parametrize("first", [0, -1], ids=["its port is taken", "the next is taken"])
def test_broker_with_keys_refuses_a_taken_address(
    processes: Processes, guarded: Broker, keys: Path, tmp_path: Path, first: int
) -> None:
    """When a broker with keys cannot listen because one of its ports is taken, then it reports this
    and exits with 1."""
    second, line = processes.start(
        BROKER, "127.0.0.1", str(guarded.port + first), str(keys), errors=tmp_path / "second.log"
    )

    assert second.wait(20) == 1
    assert line == ""
    assert "AddressTaken" in (tmp_path / "second.log").read_text()


# ---------------------------------------------------------------- messages on the network


@pytest.mark.parametrize("encrypted", [True, False])
async def test_traffic_with_keys_cannot_be_read_on_the_network(
    request: pytest.FixtureRequest, keys: Path, encrypted: bool
) -> None:
    """When all bytes between a participant and the broker are recorded, then they contain neither
    the job name nor the topic. Without keys they contain both."""
    target: Broker = request.getfixturevalue("guarded" if encrypted else "broker")
    curve = keys if encrypted else None
    passed = bytearray()
    tap = Tap(target.address, up=lambda _, piece: passed.extend(piece))
    try:
        async with (
            open_bus(target.address, job=SECRET, sender="a", topics=[ORDERS], curve=curve) as ear,
            relayed(tap, curve) as voice,
        ):
            while voice.recv() != b"\x01" + ORDERS:
                pass
            voice.send_multipart((ORDERS, SECRET.encode()))
            await ear.receive()
    finally:
        tap.close()

    assert len(passed) > 100
    assert (SECRET.encode() in passed) is not encrypted
    assert (ORDERS in passed) is not encrypted


@asynccontextmanager
async def relayed(tap: Tap, curve: Path | None) -> AsyncIterator[zmq.Socket[bytes]]:
    """
    Return a publisher whose connection goes through the tap.
    """
    keys = None if curve is None else read_keys(curve)
    pair = None if keys is None else (keys.broker, keys.public, keys.secret)
    with stranger(tap.address, zmq.XPUB, pair) as voice:
        yield voice


# ---------------------------------------------------------------- key files


async def test_keys_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    """When the directory of the keys does not exist, then the bus is not opened."""
    with pytest.raises(UsageError, match="there is no such directory"):
        async with without("127.0.0.1:5000", tmp_path / "none"):
            pass
