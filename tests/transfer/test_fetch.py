"""
The fetch of a shard: the received bytes, and the handling of failing sources.
"""

import socket
import threading
import time
from collections.abc import Mapping, Sequence

import pytest
from structlog.testing import capture_logs

from tests.exhausted import no_more_threads
from tests.transfer.peers import (
    JOB,
    META,
    STEP,
    Opened,
    Process,
    Room,
    Tap,
    content,
    fetch_into,
    flip,
    serve,
)
from tft.errors import TransferFailed
from tft.transfer.wire import CHUNK

MANY = {f"layer.{i}": content(7 * i, seed=i) for i in range(500)}
"""About 0.9 MB, in buffers of 0 to 3.5 kB."""

LARGE = {"weights": content(9 * CHUNK + 12345)}


def given(logs: Sequence[Mapping[str, object]]) -> object:
    """
    Return the number of good bytes by rank, from the log of a successful fetch.
    """
    return next(line["given"] for line in logs if line["event"] == "shard_fetched")


def lost(logs: Sequence[Mapping[str, object]]) -> dict[object, object]:
    """
    Return the reason why each source was lost, from the log.
    """
    return {line["source"]: line["why"] for line in logs if line["event"] == "source_lost"}


# ---------------------------------------------------------------- received bytes


@pytest.mark.parametrize(
    "shard",
    [
        {},
        {"nothing": b""},
        {"one": b"1"},
        {"empty first": b"", "a": b"abc", "empty": b"", "b": b"d", "empty last": b""},
        {"up to the edge": content(CHUNK), "over it": content(CHUNK + 1, seed=1)},
        MANY,
        LARGE,
    ],
    ids=["no buffer", "no byte", "one byte", "empty among others", "edges", "many", "large"],
)
@pytest.mark.parametrize("sources", [1, 3])
def test_fetched_shard_is_complete_and_in_place(
    opened: Opened, shard: Mapping[str, bytes], sources: int
) -> None:
    """When a shard of any shape is fetched, then its bytes are in the prepared buffers, and the
    receiver is told its metadata once."""
    servers = [opened(serve(shard)) for _ in range(sources)]
    room = Room(shard)

    fetch_into(room, *(server.address for server in servers))

    assert room.whole()
    assert room.taken == [META]


def test_all_sources_deliver_at_the_same_time(opened: Opened) -> None:
    """When two sources have a shard, then each source delivers a part. The test stops each source
    after its first bytes until the other source has sent as many bytes."""
    met = threading.Barrier(2, timeout=60)

    def meet(position: int, piece: bytearray) -> None:
        if position <= 1 << 17 < position + len(piece):
            met.wait()

    taps = [opened(Tap(opened(serve(LARGE)).address, down=meet)) for _ in range(2)]
    room = Room(LARGE)

    with capture_logs() as logs:
        fetch_into(room, *(tap.address for tap in taps))

    parts = given(logs)
    assert isinstance(parts, dict)
    assert sum(parts.values()) == len(LARGE["weights"])
    assert min(parts.values()) > 0


# ---------------------------------------------------------------- sources that die, hang, refuse


def test_fetch_survives_a_source_killed_before_its_first_chunk(opened: Opened) -> None:
    """When the process of one source is killed after its offer, then the other source delivers all
    bytes."""
    size = len(LARGE["weights"])
    dying, living = (opened(Process(size)) for _ in range(2))
    room = Room(LARGE, at_take=dying.kill)

    with capture_logs() as logs:
        fetch_into(room, dying.address, living.address)

    assert room.taken == [META]
    assert given(logs) == {0: 0, 1: size}
    assert list(lost(logs)) == [0]


def test_fetch_survives_a_source_killed_inside_a_chunk(opened: Opened) -> None:
    """When the process of one source is killed in the middle of a chunk, then the other source
    delivers the whole chunk, over the bytes that have arrived."""
    size = len(LARGE["weights"])
    dying, living = (opened(Process(size)) for _ in range(2))

    def kill(position: int, piece: bytearray) -> None:
        if position <= CHUNK // 3 < position + len(piece):
            dying.kill()
            raise OSError("what was still on the way is lost with the process")

    tap = opened(Tap(dying.address, down=kill))
    room = Room(LARGE)

    with capture_logs() as logs:
        fetch_into(room, tap.address, living.address)

    assert room.taken == [META]
    assert given(logs) == {0: 0, 1: size}
    assert lost(logs) == {0: "the source closed the connection before the transfer was complete"}


def test_chunks_of_a_hanging_source_are_fetched_from_another(opened: Opened) -> None:
    """When the process of one source is stopped, then the other source delivers the chunks of this
    source after `patience` has passed without a byte."""
    size = len(LARGE["weights"])
    hanging, living = (opened(Process(size)) for _ in range(2))
    room = Room(LARGE, at_take=hanging.stop)

    with capture_logs() as logs:
        fetch_into(room, hanging.address, living.address, patience=0.3)

    assert room.taken == [META]
    assert "the source has sent nothing for 0.3 s" in str(lost(logs)[0])


def test_fetch_starts_without_a_source_that_makes_no_offer(opened: Opened) -> None:
    """When one source accepts the connection and sends nothing, then the fetch starts without this
    source, long before the patience ends."""
    mute = opened(socket.create_server(("127.0.0.1", 0)))
    living = opened(serve(LARGE))
    room = Room(LARGE)

    began = time.monotonic()
    fetch_into(room, f"127.0.0.1:{mute.getsockname()[1]}", living.address, patience=60.0)

    assert room.taken == [META]
    assert time.monotonic() - began < 30.0


def test_error_names_every_failed_source_with_its_reason(opened: Opened) -> None:
    """When no source can deliver the shard, then the error names each source with its reason, and
    `take` is never called."""
    server = opened(serve(LARGE))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
    room = Room(LARGE, at_take=lambda: pytest.fail("there is nothing to make room for"))

    with pytest.raises(TransferFailed) as failure:
        fetch_into(room, server.address, nobody, "nowhere", step=STEP + 1)

    assert str(failure.value) == (
        f"shard 'model' at step {STEP + 1} could not be fetched whole: "
        f"rank 0 at {server.address}: the source refused to send the shard: "
        f"rank 5 holds shard 'model' at step {STEP}, "
        f"not at step {STEP + 1}; "
        f"rank 1 at {nobody}: the connection to the source broke: Connection refused; "
        "rank 2 at nowhere: the address of the source, 'nowhere', is not HOST:PORT"
    )


def test_loss_of_the_only_source_fails_the_fetch(opened: Opened) -> None:
    """When the only source dies during the fetch, then the fetch fails and the shard is not used."""
    dying = opened(Process(len(LARGE["weights"])))
    room = Room(LARGE, at_take=dying.kill)

    with pytest.raises(TransferFailed, match="rank 0 at"):
        fetch_into(room, dying.address)

    assert room.taken == []


def test_fetch_without_sources_fails() -> None:
    """When an order names no source, then the fetch fails and the error says so."""
    with pytest.raises(TransferFailed, match="the order names no source"):
        fetch_into(Room({}))


def test_source_is_not_at_fault_if_this_rank_has_no_thread_for_it(opened: Opened) -> None:
    """When a thread can be started for one of two sources alone, then the shard is fetched from this
    one. The other source is no lost source of the fetch, because it is sound."""
    servers = [opened(serve(MANY)) for _ in range(2)]
    room, starting = Room(MANY), threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "tft-fetch-model-from-0":
            raise RuntimeError("can't start new thread")
        starting(thread)

    with capture_logs() as logs, pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        odd = fetch_into(room, *(server.address for server in servers))

    assert odd == {}
    assert room.taken == [META]
    assert lost(logs) == {
        0: "this rank cannot start a thread for this source: can't start new thread"
    }


def test_fetch_without_threads_fails(opened: Opened) -> None:
    """When no thread can be started for a fetch, then the fetch fails at once and says why."""
    server = opened(serve(MANY))
    with (
        no_more_threads(),
        pytest.raises(TransferFailed, match="this rank cannot start a thread for this source"),
    ):
        fetch_into(Room(MANY), server.address)


def test_a_source_refuses_a_client_of_another_job(opened: Opened) -> None:
    """When the client belongs to another job, then the source delivers nothing, not even the meta."""
    server = opened(serve(LARGE))
    room = Room(LARGE, at_take=lambda: pytest.fail("the meta was given"))

    with pytest.raises(TransferFailed, match="this port serves another job"):
        fetch_into(room, server.address, job=JOB + "2")


# ---------------------------------------------------------------- damaged bytes


def test_damaged_chunk_is_fetched_from_another_source(opened: Opened) -> None:
    """When a bit flips on the way from one source, then that chunk is fetched from the other
    source."""
    other_is_done = threading.Event()

    def hold(position: int, piece: bytearray) -> None:
        # The honest source waits until a chunk was damaged. Otherwise it might send all chunks.
        if position > CHUNK:
            other_is_done.wait(60)

    def damage(position: int, piece: bytearray) -> None:
        flip(300_000)(position, piece)
        if position > CHUNK:
            other_is_done.set()

    lying = opened(Tap(opened(serve(LARGE)).address, down=damage))
    honest = opened(Tap(opened(serve(LARGE)).address, down=hold))
    room = Room(LARGE)

    with capture_logs() as logs:
        fetch_into(room, lying.address, honest.address)

    assert room.taken == [META]
    damaged = [line["source"] for line in logs if line["event"] == "chunk_damaged"]
    assert damaged == [0]
    assert lost(logs) == {}


def test_damaged_chunk_is_fetched_again_from_the_only_source(opened: Opened) -> None:
    """When a bit flips once on the way from the only source, then the chunk is fetched again from
    this source."""
    tap = opened(Tap(opened(serve(MANY)).address, down=flip(100_000)))
    room = Room(MANY)

    with capture_logs() as logs:
        fetch_into(room, tap.address)

    assert room.taken == [META]
    assert [line["event"] for line in logs] == ["chunk_damaged", "shard_fetched"]


def test_repeated_damage_from_the_only_source_fails_the_fetch(opened: Opened) -> None:
    """When every chunk of the only source is damaged, then the fetch fails and the shard is not
    used."""
    tap = opened(Tap(opened(serve(LARGE)).address, down=flip(*range(200_000, 10 * CHUNK, 100_000))))
    room = Room(LARGE)

    with pytest.raises(TransferFailed, match="repeatedly sent bytes that do not match"):
        fetch_into(room, tap.address)

    assert room.taken == []


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("position", [0, 6, 30])
def test_source_with_a_damaged_hello_or_offer_is_lost(
    opened: Opened, way: str, position: int
) -> None:
    """When the length, the digest or the body of a hello or an offer is damaged on the way, then
    that source is lost. The other source delivers the shard."""
    served = opened(serve(MANY)).address
    disturb = flip(position)
    tap = opened(Tap(served, down=disturb) if way == "down" else Tap(served, up=disturb))
    room = Room(MANY)

    with capture_logs() as logs:
        fetch_into(room, tap.address, opened(serve(MANY)).address)

    assert room.taken == [META]
    assert list(lost(logs)) == [0]


def test_damaged_request_ends_the_connection(opened: Opened) -> None:
    """When the first request is damaged on the way, then the source closes the connection and the
    fetch fails."""

    def damage(position: int, piece: bytearray) -> None:
        if position:  # the first piece is the hello, the next one the request
            piece[30] ^= 1

    tap = opened(Tap(opened(serve(MANY)).address, up=damage))

    with pytest.raises(TransferFailed, match="the source closed the connection"):
        fetch_into(Room(MANY), tap.address)


# ---------------------------------------------------------------- sources and buffers that disagree


def test_source_that_disagrees_with_the_majority_is_not_used(opened: Opened) -> None:
    """When two of three sources agree on the meta, then the third source delivers nothing, also
    when it is the first in the list."""
    odd = opened(serve(MANY, meta=b"something else"))
    agreed = [opened(serve(MANY)) for _ in range(2)]
    room = Room(MANY)

    with capture_logs() as logs:
        fetch_into(room, odd.address, *(server.address for server in agreed))

    assert room.taken == [META]
    parts = given(logs)
    assert isinstance(parts, dict)
    assert parts[0] == 0


def test_first_source_is_used_when_two_sources_disagree(opened: Opened) -> None:
    """When there is no majority, then the first source in the order's list is used, and the other
    source delivers nothing."""
    first, second = opened(serve(MANY)), opened(serve({"weights": b"?"}))
    room = Room(MANY)

    with capture_logs() as logs:
        fetch_into(room, first.address, second.address)

    assert room.taken == [META]
    assert given(logs) == {0: sum(map(len, MANY.values())), 1: 0}


@pytest.mark.parametrize(
    ("here", "said"),
    [
        ({"a": b"12"}, "buffer 1 is 'b' of 3 bytes there and missing here"),
        ({"a": b"12", "b": b"345", "c": b""}, "buffer 2 is missing there and 'c' of 0"),
        ({"a": b"12", "b": b"34"}, "'b' of 3 bytes there and 'b' of 2 bytes here"),
        ({"b": b"12", "a": b"345"}, "'a' of 2 bytes there and 'b' of 2 bytes here"),
    ],
    ids=["fewer", "more", "smaller", "another order"],
)
def test_buffers_that_do_not_match_are_refused(
    opened: Opened, here: Mapping[str, bytes], said: str
) -> None:
    """When `take` returns other buffers than the sources have, then the error names the first
    difference, and nothing is written."""
    server = opened(serve({"a": b"12", "b": b"345"}))
    room = Room(here)

    with pytest.raises(TransferFailed, match=said):
        fetch_into(room, server.address)

    assert not any(any(memory) for memory in room.memory.values())


def test_read_only_buffer_is_refused(opened: Opened) -> None:
    """When `take` returns read-only memory, then the error names the buffer."""
    server = opened(serve({"a": b"12"}))
    room = Room({"a": b"12"})
    room.memory["a"] = b"12"  # type: ignore[assignment] # on purpose not a bytearray

    with pytest.raises(TransferFailed, match=r"memory for buffer 'a' .* is read-only"):
        fetch_into(room, server.address)


def test_error_of_take_ends_the_fetch_completely(opened: Opened) -> None:
    """When `take` raises, then the fetch raises this error, and no thread or connection remains
    (the fixture `opened` checks this)."""
    server = opened(serve(MANY))

    def fail() -> None:
        raise RuntimeError("no memory left on the device")

    with pytest.raises(RuntimeError, match="no memory left"):
        fetch_into(Room(MANY, at_take=fail), server.address)


# ---------------------------------------------------------------- fetches that are abandoned


def test_fetch_with_a_hanging_source_can_be_abandoned(opened: Opened) -> None:
    """When a fetch is abandoned while its only source hangs, then the fetch ends long before its
    patience does."""
    hanging = opened(Process(len(LARGE["weights"])))
    abandoned = threading.Event()

    def stop() -> None:
        hanging.stop()
        abandoned.set()

    room = Room(LARGE, at_take=stop)
    with pytest.raises(TransferFailed, match="cancelled"):
        fetch_into(room, hanging.address, abandoned=abandoned, patience=60.0)

    assert room.taken == []


def test_fetch_can_be_abandoned_inside_a_chunk(opened: Opened) -> None:
    """When a fetch is abandoned in the middle of a chunk, then it ends without the remaining bytes."""
    abandoned, over = threading.Event(), threading.Event()

    def abandon(position: int, piece: bytearray) -> None:
        if position > CHUNK // 2:
            abandoned.set()
            over.wait(60)

    tap = opened(Tap(opened(serve(LARGE)).address, down=abandon))
    room = Room(LARGE)

    with pytest.raises(TransferFailed, match="cancelled"):
        fetch_into(room, tap.address, abandoned=abandoned, patience=60.0)

    over.set()
    assert room.taken == []


def test_fetch_that_cannot_connect_can_be_abandoned(opened: Opened) -> None:
    """When the machine of a source does not answer the connection, then an abandoned fetch stops
    the wait and its thread (the fixture `opened` checks this)."""
    full = opened(socket.create_server(("127.0.0.1", 0), backlog=0))
    address = full.getsockname()
    for _ in range(3):  # Linux accepts one client more than the backlog; others wait
        client = opened(socket.socket())
        client.setblocking(False)
        client.connect_ex(address)
    abandoned = threading.Event()
    room = Room(MANY, at_take=abandoned.set)

    with pytest.raises(TransferFailed, match="cancelled"):
        fetch_into(
            room,
            f"127.0.0.1:{address[1]}",
            opened(serve(MANY)).address,
            abandoned=abandoned,
            patience=60.0,
        )
