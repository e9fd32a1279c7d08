"""
Shards whose buffers are on a device: they are copied to the host in parts, when they are sent.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tests.transfer.peers import JOB, META, Opened, Room, content, fetch_into
from tft.errors import TransferFailed
from tft.spi.types import Buffer, DeviceBuffer, ShardPayload
from tft.transfer import ShardServer
from tft.transfer.staging import StagedRun
from tft.transfer.wire import CHUNK, PIECE, chunks

SIZES = (1, 700, PIECE - 1, PIECE, PIECE + 1, 0, 3 * CHUNK + 5, 12, *([8] * 600))


@dataclass
class Device:
    """
    Memory of a pretended device, whose copies end only when they are waited for.
    """

    held: bytes
    copied: list[int] = field(default_factory=list)
    """The sizes of the copies."""

    def copy(self, offset: int, into: memoryview) -> Callable[[], None]:
        """
        Begin to copy. The copied bytes are complete only after the returned function was called.
        """
        into[:] = bytes(into.nbytes)
        self.copied.append(into.nbytes)

        def wait() -> None:
            into[:] = self.held[offset : offset + into.nbytes]

        return wait

    def buffer(self, name: str) -> DeviceBuffer:
        """
        Return all memory as a buffer.
        """
        return DeviceBuffer(name=name, size=len(self.held), copy=self.copy)


def mixed() -> tuple[list[bytes], tuple[Buffer | DeviceBuffer, ...]]:
    """
    Return the contents of buffers of many sizes, and the buffers: every third one is on the host.
    """
    held = [content(size, seed) for seed, size in enumerate(SIZES)]
    return held, tuple(
        Buffer(name=str(i), view=memoryview(each)) if i % 3 == 2 else Device(each).buffer(str(i))
        for i, each in enumerate(held)
    )


def test_chunks_of_staged_buffers_have_the_bytes_of_the_buffers() -> None:
    """When buffers of many sizes are on a device and on the host, then the batches of all chunks
    are their bytes in order, and each batch is valid until the next one is taken."""
    held, buffers = mixed()
    run = StagedRun(buffers, lambda size: memoryview(bytearray(size)))
    found = b"".join(
        bytes(view)
        for chunk in chunks(run.size, 3)
        for batch in run.batches(chunk)
        for view in batch
    )
    assert found == b"".join(held)


def test_a_shard_on_a_device_is_fetched_whole(opened: Opened) -> None:
    """When a shard has buffers on a device, then a client gets their content."""
    held, buffers = mixed()
    server = opened(
        ShardServer("127.0.0.1", JOB, lambda *_: ShardPayload(meta=META, buffers=buffers))
    )
    server.start()
    room = Room({str(i): each for i, each in enumerate(held)})
    fetch_into(room, server.address)
    assert room.taken == [META]


def test_a_whole_view_of_a_device_buffer_is_a_copy() -> None:
    """When all bytes of a device buffer are needed at once, then `view` copies them."""
    assert bytes(Device(b"abc").buffer("one").view) == b"abc"


@pytest.mark.parametrize(
    ("seconds", "patience"), [(2.5, 1.5), pytest.param(20.0, 5.0, marks=pytest.mark.soak)]
)
def test_a_source_that_prepares_a_shard_for_long_is_not_given_up(
    opened: Opened, seconds: float, patience: float
) -> None:
    """When a source takes longer to prepare a shard than a client waits for a silent source, then
    the source says that it is at work, and the client gets the shard."""
    quiet = threading.Event()
    held = content(1000)

    def give(shard: str, step: int) -> ShardPayload:
        quiet.wait(seconds)
        return ShardPayload(meta=META, buffers=(Buffer(name="weights", view=memoryview(held)),))

    server = opened(ShardServer("127.0.0.1", JOB, give))
    server.start()
    room = Room({"weights": held})
    fetch_into(room, server.address, patience=patience)
    assert room.taken == [META]


def test_a_source_that_refuses_after_a_long_preparation_is_lost(opened: Opened) -> None:
    """When a source fails after a long preparation, then the client gets the reason."""

    def give(shard: str, step: int) -> ShardPayload:
        threading.Event().wait(1.5)
        raise ValueError("the device is gone")

    server = opened(ShardServer("127.0.0.1", JOB, give))
    server.start()
    with pytest.raises(TransferFailed, match="the device is gone"):
        fetch_into(Room({"weights": bytes(10)}), server.address)
