"""
Digests of the parts of a shard, which ranks compare.
"""

import random
import threading
from collections.abc import Callable

import pytest

from tft.spi import digests
from tft.spi.state import part_digests
from tft.spi.types import Buffer, DeviceBuffer, ShardPayload

LARGE = 300_000


def payload(*sizes: int, flip: int | None = None) -> ShardPayload:
    """
    Return buffers of these sizes with different contents, alternately in two parts. One bit of one
    buffer is flipped if `flip` is given.
    """
    contents = [bytearray(random.Random(i).randbytes(size)) for i, size in enumerate(sizes)]
    if flip is not None:
        contents[flip][-1] ^= 1
    buffers = [
        Buffer(name=f"{('model', 'optim')[i % 2]}.{i}", view=memoryview(content))
        for i, content in enumerate(contents)
    ]
    return ShardPayload(meta=b"described", buffers=tuple(buffers))


@pytest.mark.parametrize("size", [10, LARGE])
@pytest.mark.parametrize("flip", range(6))
def test_flipped_bit_changes_only_the_digest_of_its_part(size: int, flip: int) -> None:
    """When one bit of one buffer changes, then the digest of its part changes, and no other digest
    does."""
    sizes = (size,) * 6
    before, after = part_digests(payload(*sizes)), part_digests(payload(*sizes, flip=flip))
    changed = {part for part in before if before[part] != after[part]}
    assert changed == {("model", "optim")[flip % 2]}
    assert before.keys() == {"description", "model", "optim"}


def test_several_threads_compute_the_same_digests_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """When several threads read a state in pieces, then the digests equal those of one thread, and
    no thread is left."""
    monkeypatch.setattr(digests, "_PIECE", 1000)
    sizes = (LARGE, 0, 999, 1000, 1001, LARGE)
    alone = part_digests(payload(*sizes))
    monkeypatch.setattr(digests, "_SHARE", LARGE // 2)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    before = threading.active_count()
    assert part_digests(payload(*sizes)) == alone
    assert part_digests(payload(*sizes, flip=5)) != alone
    assert threading.active_count() == before


def test_caller_limits_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a caller allows some cores, then no more threads read the state than these."""
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def count(thread: threading.Thread) -> None:
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", count)
    monkeypatch.setattr(digests, "_SHARE", 1000)
    monkeypatch.setattr(digests, "_PIECE", 1000)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    whole = part_digests(payload(LARGE))
    assert len(started) == 3
    with digests.with_cores(2):
        assert part_digests(payload(LARGE)) == whole
    assert len(started) == 4


def test_batches_have_the_same_digests_as_a_whole_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a state is larger than one batch of reads, then the digests are the same, and each
    buffer of a device is copied once."""
    sizes = (LARGE, 0, 999, LARGE, 1001, LARGE)
    held = payload(*sizes)
    copied: list[int] = []

    def on_device(buffer: Buffer) -> DeviceBuffer:
        def copy(offset: int, into: memoryview) -> Callable[[], None]:
            copied.append(into.nbytes)
            into[:] = buffer.view[offset : offset + into.nbytes]
            return lambda: None

        return DeviceBuffer(name=buffer.name, size=buffer.view.nbytes, copy=copy)

    buffers = tuple(on_device(each) for each in held.buffers if isinstance(each, Buffer))
    whole = part_digests(held)
    monkeypatch.setattr(digests, "_BATCH", LARGE + 1)
    assert part_digests(ShardPayload(meta=held.meta, buffers=buffers)) == whole
    assert copied == list(sizes)


def test_no_digest_is_returned_when_a_piece_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a piece of a state cannot be read, then an error is raised, and no digest is returned.
    Digests of the remaining pieces could wrongly agree with those of another unreadable state."""
    broken = ShardPayload(meta=b"", buffers=(Buffer(name="model.0", view=memoryview(b"released")),))
    broken.buffers[0].view.release()
    with pytest.raises(ValueError, match="released"):
        part_digests(broken)


def test_caller_reads_the_state_when_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When no thread can be started, then the caller reads the whole state."""

    def exhausted(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    alone = part_digests(payload(LARGE, LARGE))
    monkeypatch.setattr(digests, "_SHARE", 1000)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(threading.Thread, "start", exhausted)
    assert part_digests(payload(LARGE, LARGE)) == alone
