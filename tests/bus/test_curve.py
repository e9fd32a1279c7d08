"""
The bus with the keys of a job: who has none of them is neither let in nor heard, and is told so.
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
    The keys of another job.
    """
    directory = tmp_path_factory.mktemp("keys") / "others"
    make_keys(directory)
    return directory


@pytest.fixture
async def member(guarded: Broker, keys: Path) -> AsyncIterator[Bus]:
    """
    One who has been let in.
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
    A socket that is none of ours, with any keys: of the server, its own public and its own secret one.
    """
    with zmq.Context() as context, context.socket(kind) as made:
        made.linger = 0
        if keys is not None:
            made.curve_serverkey, made.curve_publickey, made.curve_secretkey = keys
        made.connect(f"tcp://{address}")
        yield made


def told(log: Path, *words: str) -> None:
    """
    Returns once a line of the log has all these words.
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
    Somebody who should not be let in.
    """
    async with open_bus(address, job="job", sender="rank.6/6", topics=topics, curve=curve) as bus:
        yield bus


# ---------------------------------------------------------------- who is not let in


async def test_who_has_no_keys_is_not_let_in_and_knows_why(
    guarded: Broker, member: Bus, tmp_path: Path
) -> None:
    """
    When a participant comes without --curve, then it hears what is missing, and the broker writes
    down that it was there.
    """
    async with without(guarded.address, None) as outside:
        await is_told(
            outside,
            f"the broker at {guarded.address} uses encryption, and --curve is missing here",
            f"{guarded.address} closes every connection without a message: does it have a --curve",
        )
        told(tmp_path / "broker.log", "peer_refused")
        await assert_unheard(member, outside)


async def test_who_has_keys_of_another_job_is_not_let_in_and_knows_why(
    guarded: Broker, member: Bus, others: Path, tmp_path: Path
) -> None:
    """
    When a participant has the keys of another job, then it is asked whether they are the same.
    """
    async with without(guarded.address, others) as outside:
        await is_told(
            outside,
            f"the process that listens at {guarded.address} closes every connection without a "
            "message: is its --curve the same?",
        )
        told(tmp_path / "broker.log", "peer_refused", "keys of another job")
        await assert_unheard(member, outside)


async def test_who_knows_the_broker_but_has_no_key_of_the_job_is_not_let_in(
    guarded: Broker, member: Bus, keys: Path, others: Path, tmp_path: Path
) -> None:
    """
    When somebody knows the public key of the broker, which is no secret, and has a pair of their own,
    then the broker has not let them in, and says so to both sides.
    """
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
            "the job's: is its --curve the same?",
        )
        told(tmp_path / "broker.log", "peer_refused", "127.0.0.1", "no key of this job")
        await assert_unheard(member, outside)


async def assert_unheard(member: Bus, outside: Bus) -> None:
    """
    Neither hears the other, though both say something: what is heard next is one's own.
    """
    outside.publish(ORDERS, Lead(epoch=666, heard={}))
    member.publish(ORDERS, Lead(epoch=1, heard={}))
    assert (await heard(member)).epoch == 1
    assert all(isinstance(arrival, NotLetIn) for arrival in await arriving(outside, 0.3))


async def is_told(bus: Bus, *either: str) -> None:
    """
    Returns once one of the sentences has come. Which one is a matter of who ends the connection first,
    where both sides find that they do not suit each other.
    """
    arrival = await bus.receive()
    assert isinstance(arrival, NotLetIn)
    assert any(words in arrival.why for words in either), arrival.why


async def arriving(bus: Bus, seconds: float) -> list[Arrival]:
    """
    All that arrives within a time: that something does not come is no fact to wait for.
    """
    arrivals: list[Arrival] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                arrivals.append(await bus.receive())
    return arrivals


async def test_a_subscriber_without_keys_gets_nothing_however_it_asks(
    guarded: Broker, member: Bus, others: Path
) -> None:
    """
    When sockets of ZeroMQ itself subscribe to everything, plain, with the keys of another job, or with
    a pair of their own, then what others are sent does not reach them.
    """
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


async def test_a_broker_without_keys_is_not_the_jobs(broker: Broker, keys: Path) -> None:
    """
    When a participant with keys finds a broker without, then it does not speak to it, and says what may
    be wrong.
    """
    async with without(broker.address, keys) as bus:
        await is_told(
            bus,
            (
                f"the broker at {broker.address} does not use encryption: was it started without "
                "--curve?"
            ),
            f"{broker.address} closes every connection without a message: is its --curve the same?",
        )


async def test_a_broker_that_pretends_is_not_believed(
    processes: Processes, keys: Path, others: Path
) -> None:
    """
    When another broker sits at the address, then nobody with the keys of the job speaks to it.
    """
    pretending = Broker(processes, others)

    async with without(pretending.address, keys) as bus:
        arrival = await bus.receive()

    assert isinstance(arrival, NotLetIn)
    assert arrival.why.endswith("is its --curve the same?")


async def test_what_is_no_broker_at_all_is_named() -> None:
    """
    When the address is that of something else, then that is said, with keys and without.
    """

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


async def test_it_says_once_what_it_is_not_let_in_for(guarded: Broker) -> None:
    """
    When a participant is refused again and again, then it is told once.
    """
    async with without(guarded.address, None) as outside:
        arrivals = await arriving(outside, 2.5)  # two tries on each line, or more

    assert arrivals
    assert len(set(arrivals)) == len(arrivals)


# ---------------------------------------------------------------- who is


async def test_who_was_refused_comes_in_when_the_right_broker_is_there(
    processes: Processes, broker: Broker, keys: Path
) -> None:
    """
    When a broker of somebody else leaves the address to the job's, then it is found, though ZeroMQ does
    not try again where it was refused.
    """
    async with without(broker.address, keys) as bus:
        assert isinstance(await bus.receive(), NotLetIn)

        broker.kill()
        broker.curve = keys
        broker.start()

        await bus.listened(presence("rank.6/6"))
        await bus.listened(ORDERS)
        bus.publish(ORDERS, Lead(epoch=2, heard={}))
        while isinstance(arrival := await bus.receive(), NotLetIn | Present):
            pass
        assert isinstance(arrival, Heard)


async def test_the_bus_works_again_after_its_broker_was_killed(
    guarded: Broker, member: Bus, keys: Path
) -> None:
    """
    When a broker with keys is killed and started again, then those it had let in come in again.
    """
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


def test_a_port_that_is_only_knocked_at_stays_open(guarded: Broker, tmp_path: Path) -> None:
    """
    When something connects and leaves, or speaks another language, then the broker goes on and writes
    down who that was.
    """
    for word in (b"", b"GET / HTTP/1.0\r\n\r\n" * 10):
        with socket.create_connection(("127.0.0.1", guarded.port)) as knocking:
            knocking.sendall(word)

    told(tmp_path / "broker.log", "peer_refused", "left before it had shown a key")
    assert guarded.process.poll() is None


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_a_broker_with_keys_cleanly(
    guarded: Broker, member: Bus, ending: signal.Signals
) -> None:
    """
    When it is told to end while messages pass and somebody knocks, then it ends with 0.
    """
    async with without(guarded.address, None):
        for epoch in range(1000):
            member.publish(ORDERS, Lead(epoch=epoch, heard={}))

        guarded.process.send_signal(ending)

        assert guarded.process.wait(20) == 0


@pytest.mark.parametrize("first", [0, -1], ids=["its port is taken", "the next is taken"])
def test_a_taken_address_is_refused_with_keys_as_well(
    processes: Processes, guarded: Broker, keys: Path, tmp_path: Path, first: int
) -> None:
    """
    When a broker with keys cannot listen, then it says so and ends.
    """
    second, line = processes.start(
        BROKER, "127.0.0.1", str(guarded.port + first), str(keys), errors=tmp_path / "second.log"
    )

    assert second.wait(20) == 1
    assert line == ""
    assert "AddressTaken" in (tmp_path / "second.log").read_text()


# ---------------------------------------------------------------- on the wire


@pytest.mark.parametrize("encrypted", [True, False])
async def test_nobody_on_the_way_reads_along(
    request: pytest.FixtureRequest, keys: Path, encrypted: bool
) -> None:
    """
    When somebody sees every byte between a participant and the broker, then neither the name of the job
    nor what is said is among them; without keys both are.
    """
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
    A publisher whose connection runs through the tap.
    """
    keys = None if curve is None else read_keys(curve)
    pair = None if keys is None else (keys.broker, keys.public, keys.secret)
    with stranger(tap.address, zmq.XPUB, pair) as voice:
        yield voice


# ---------------------------------------------------------------- the files


async def test_keys_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    """
    When the keys are not there, then a bus is not opened.
    """
    with pytest.raises(UsageError, match="there is no such directory"):
        async with without("127.0.0.1:5000", tmp_path / "none"):
            pass
