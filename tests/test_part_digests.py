"""
Digests of the parts of a shard, which ranks compare.
"""

import random
import threading

import pytest
import xxhash

from tft import state_hooks
from tft.hooks import Buffer, ShardPayload
from tft.state_hooks import buffer_digests, part_digests

LARGE = 300_000


def payload(*sizes: int, flip: int | None = None) -> ShardPayload:
    """
    Buffers of these sizes with content of their own, in two parts by turns; one bit of one of them flipped.
    """
    contents = [bytearray(random.Random(i).randbytes(size)) for i, size in enumerate(sizes)]
    if flip is not None:
        contents[flip][-1] ^= 1
    buffers = [
        Buffer(name=f"{('model', 'optim')[i % 2]}.{i}", view=memoryview(content))
        for i, content in enumerate(contents)
    ]
    return ShardPayload(meta=b"described", buffers=tuple(buffers))


@pytest.mark.parametrize("readers", [1, 2, 4])
def test_digests_come_in_the_order_of_the_buffers(
    monkeypatch: pytest.MonkeyPatch, readers: int
) -> None:
    """
    When buffers of very different sizes are read on several threads, then each digest is that of its buffer.
    """
    monkeypatch.setattr(state_hooks, "_READERS", readers)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    given = payload(3, LARGE, 0, 2 * LARGE, 17, 5 * LARGE, LARGE)
    assert buffer_digests(given.buffers) == [
        xxhash.xxh3_128_digest(each.view) for each in given.buffers
    ]


@pytest.mark.parametrize("size", [10, LARGE])
@pytest.mark.parametrize("flip", range(6))
def test_a_flipped_bit_is_in_the_digest_of_its_part_alone(size: int, flip: int) -> None:
    """
    When one bit of one buffer is another, then the digest of its part is, and no other.
    """
    sizes = (size,) * 6
    before, after = part_digests(payload(*sizes)), part_digests(payload(*sizes, flip=flip))
    changed = {part for part in before if before[part] != after[part]}
    assert changed == {("model", "optim")[flip % 2]}
    assert before.keys() == {"description", "model", "optim"}


def test_where_no_thread_can_be_started_one_reads_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """
    When the process may have no further thread, then the digests are the same.
    """
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    given = payload(LARGE, 2 * LARGE, 5 * LARGE)
    before = buffer_digests(given.buffers)

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert buffer_digests(given.buffers) == before
