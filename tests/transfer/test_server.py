"""
The server of shards: which requests it answers, which faults it survives, and how it ends.
"""

import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import pytest
from structlog.testing import capture_logs

from tests.exhausted import no_more_threads
from tests.transfer.peers import JOB, META, STEP, Opened, Room, content, fetch_into, serve
from tft.errors import InternalError, TransferFailed, UsageError
from tft.protocol.messages import VERSION
from tft.spi.types import Buffer, ShardPayload
from tft.transfer import ShardServer
from tft.transfer.wire import (
    CHUNK,
    FROM_SERVER,
    Hello,
    Refusal,
    Request,
    ShardOffer,
    frame,
    read_frame,
)

SHARD = {"weights": content(3 * CHUNK)}
HELLO = Hello(job=JOB, rank=1, shard="model", step=STEP)


def connect(server: ShardServer) -> socket.socket:
    """
    Return a client socket.
    """
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def answer(client: socket.socket) -> object:
    """
    Return the next answer of the server.
    """
    return read_frame(lambda views: client.recvmsg_into(views)[0], FROM_SERVER)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        b"\xff" * 100,
        b"\0" * 100,
        frame(HELLO)[:-1] + b"?",
        frame(Refusal(why="I am no client")),
        frame(HELLO) + frame(HELLO),
        frame(HELLO) + frame(Request(offset=3 * CHUNK - 1, length=2)),
        frame(HELLO) + frame(Request(offset=2**63, length=CHUNK)),
        frame(HELLO) + frame(Request(offset=0, length=CHUNK + 1)),
    ],
    ids=[
        "another protocol",
        "ones",
        "noughts",
        "damaged",
        "no hello",
        "no request",
        "past the end",
        "far past the end",
        "more than a chunk",
    ],
)
def test_client_that_sends_garbage_is_logged_and_dropped(opened: Opened, garbage: bytes) -> None:
    """When a client sends bytes that are not of this protocol, then the server closes the
    connection and logs it. The next client is served."""
    server = opened(serve(SHARD))
    room = Room(SHARD)

    with capture_logs() as logs:
        with connect(server) as client:
            client.sendall(garbage)
            with suppress(ConnectionResetError):  # the server closed before it had read everything
                while client.recv(1 << 16):
                    pass
        fetch_into(room, server.address)

    assert [line["event"] for line in logs] == ["shard_client_dropped", "shard_fetched"]


def test_next_client_is_served_after_a_client_dies_inside_a_chunk(opened: Opened) -> None:
    """When a client resets its connection while a chunk is on its way, then the next client is
    served."""
    server = opened(serve(SHARD))
    room = Room(SHARD)

    with connect(server) as client:
        client.sendall(frame(HELLO) + frame(Request(offset=0, length=CHUNK)) * 3)
        assert isinstance(answer(client), ShardOffer)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    fetch_into(room, server.address)

    assert room.taken == [META]


def test_several_clients_are_served_at_the_same_time(opened: Opened) -> None:
    """When one client keeps its connection open, then another client is served."""
    server = opened(serve(SHARD))

    with connect(server) as client:
        client.sendall(frame(HELLO))
        assert answer(client) == ShardOffer(meta=META, buffers=(("weights", 3 * CHUNK),))
        room = Room(SHARD)
        fetch_into(room, server.address)

    assert room.taken == [META]


def test_client_of_another_version_is_refused(opened: Opened) -> None:
    """When a client uses another protocol version, then the refusal names both versions."""
    server = opened(serve(SHARD))

    with connect(server) as client:
        client.sendall(frame(Hello(version=VERSION + 1, job=JOB, rank=1, shard="model", step=STEP)))
        refusal = answer(client)

    assert isinstance(refusal, Refusal)
    assert f"protocol version is {VERSION} here, but {VERSION + 1} at the client" in refusal.why


def test_unexpected_error_of_give_is_reported(opened: Opened) -> None:
    """When `give` raises an unexpected error, then the log has the traceback and the client gets
    the error."""

    def give(shard: str, step: int) -> ShardPayload:
        raise RuntimeError("the device is gone")

    server = opened(ShardServer("127.0.0.1", JOB, give))
    server.start()

    with (
        capture_logs() as logs,
        pytest.raises(
            TransferFailed, match=r"shard 'model' could not be prepared: RuntimeError\('the dev"
        ),
    ):
        fetch_into(Room({}), server.address)
    assert logs[0]["event"] == "shard_not_given"
    assert logs[0]["exc_info"]


def _until_waiting(server: ShardServer, logs: Sequence[object]) -> None:
    while not logs:
        assert server._accepting is not None
        assert server._accepting.is_alive()


def test_client_is_served_once_a_thread_can_be_started(opened: Opened) -> None:
    """When no thread can be started for a client, then the server says so and tries again, and the
    client is served by the first thread that can be started."""
    server = opened(serve(SHARD))

    with capture_logs() as logs, ExitStack() as connections:
        with no_more_threads():
            client = connections.enter_context(connect(server))
            client.sendall(frame(HELLO))
            _until_waiting(server, logs)
        assert isinstance(answer(client), ShardOffer)

    assert [line["event"] for line in logs] == ["shard_client_waits"]
    assert "can't start new thread: check the limits of processes" in logs[0]["why"]


def test_client_without_a_thread_is_dropped_and_the_next_one_is_served(opened: Opened) -> None:
    """When no thread can be started for a client for long, then the server ends the connection, so
    that the client asks another source. The next client is served."""
    server = opened(serve(SHARD))
    room = Room(SHARD)

    with capture_logs() as logs:
        with no_more_threads(), connect(server) as client:
            client.sendall(frame(HELLO))
            with suppress(ConnectionResetError):
                assert client.recv(1) == b""
        fetch_into(room, server.address)

    events = ["shard_client_waits", "shard_client_dropped", "shard_fetched"]
    assert [line["event"] for line in logs] == events
    assert room.taken == [META]


def test_server_that_waits_for_a_thread_can_be_closed() -> None:
    """When the server is closed while it waits for a thread, then its threads end."""
    server = serve(SHARD)
    with capture_logs() as logs, no_more_threads(), connect(server):
        _until_waiting(server, logs)
        server.close()

    assert [t.name for t in threading.enumerate() if t.name.startswith("tft-shards")] == []


def test_server_that_has_no_thread_is_refused() -> None:
    """When the thread of a server cannot be started, then a `UsageError` names the limits."""
    server = ShardServer("127.0.0.1", JOB, _give)
    with no_more_threads(), pytest.raises(UsageError, match="check the limits of processes"):
        server.start()
    server.close()


def test_shard_is_prepared_without_a_thread_of_its_own(opened: Opened) -> None:
    """When the thread of a connection can start no further thread, then it prepares the shard
    itself."""
    starved = no_more_threads()

    class Starving(ShardServer):
        def _serve(self, connection: socket.socket, peer: str) -> None:
            with starved:
                super()._serve(connection, peer)

    server = opened(Starving("127.0.0.1", JOB, _give))
    server.start()
    with capture_logs() as logs, connect(server) as client:
        client.sendall(frame(HELLO))
        assert isinstance(answer(client), ShardOffer)

    assert [line["event"] for line in logs] == ["shard_prepared_without_thread"]


@pytest.mark.parametrize(
    "said",
    [b"", frame(HELLO), frame(HELLO) + frame(Request(offset=0, length=CHUNK)) * 3],
    ids=["silent", "idle", "not reading"],
)
def test_close_ends_every_thread_of_the_server(said: bytes) -> None:
    """When the server is closed while a client is connected and silent, idle or not reading, then
    its threads end, the client's connection ends, and the port is closed."""
    server = serve(SHARD)
    host, _, port = server.address.rpartition(":")
    with connect(server) as client:
        client.sendall(said)
        if said:
            assert isinstance(answer(client), ShardOffer)

        server.close()

        assert [t.name for t in threading.enumerate() if t.name.startswith("tft-shards")] == []
        with suppress(ConnectionResetError):  # the connection may never have been accepted
            while client.recv(1 << 20):
                pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))
    server.close()  # a second close does nothing


def test_address_of_a_server_that_was_not_started_is_an_internal_error() -> None:
    """When the address of a server is read before its start, then an `InternalError` is raised. A
    close before the start is allowed."""
    server = ShardServer("127.0.0.1", JOB, lambda shard, step: ShardPayload(meta=b"", buffers=()))

    server.close()
    with pytest.raises(InternalError):
        _ = server.address


def test_an_address_of_another_machine_is_refused() -> None:
    """When the host is not an address of this machine, then a `UsageError` names the host."""
    server = ShardServer("192.0.2.1", JOB, lambda shard, step: ShardPayload(meta=b"", buffers=()))

    with pytest.raises(
        UsageError, match=r"the shards of this rank cannot be served at 192\.0\.2\.1"
    ):
        server.start()


def test_server_works_with_ipv6(opened: Opened) -> None:
    """When the host is an IPv6 address, then a client can fetch from the address that the server
    announces."""
    server = ShardServer("::1", JOB, _give)
    try:
        server.start()
    except UsageError:
        pytest.skip("this machine has no IPv6")
    room = Room(SHARD)

    fetch_into(room, opened(server).address)

    assert room.taken == [META]


def _give(shard: str, step: int) -> ShardPayload:
    return ShardPayload(
        meta=META,
        buffers=tuple(Buffer(name=name, view=memoryview(held)) for name, held in SHARD.items()),
    )
