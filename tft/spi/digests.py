"""
Computes digests of the parts of a shard, which ranks compare to find differing copies.
"""

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar

import xxhash

from tft.spi.types import Buffer, DeviceBuffer

_PIECE = 16 * 2**20
"""The number of bytes that a thread reads at a time. A large tensor is divided into such pieces,
which several threads read."""
_SHARE = 32 * 2**20
"""The number of bytes for each additional thread. The calling thread alone reads buffers that are
smaller than this in total."""
_MOST = 4
"""The highest number of threads that compute digests. Four threads already use the whole memory
bandwidth."""

_cores: ContextVar[int | None] = ContextVar("cores", default=None)
"""The number of processor cores for digests. None: all cores that this process may use."""

_BATCH = 256 * 2**20
"""Buffers are taken from the adaptor and digested in batches of about this many bytes. Some buffers
are copies that are made for the digest. With batches, these copies never need memory for the whole
state at once."""

Content = tuple[str, Buffer | DeviceBuffer]
"""The name of a part of a shard, and a buffer of this part that is to be digested."""
_Piece = tuple[Buffer | DeviceBuffer, int, int]
"""A piece of a buffer that one thread reads at a time: the buffer, the offset of the piece in the
buffer, and its size in bytes."""


def digest_parts(heads: Mapping[str, bytes], contents: Iterable[Content]) -> dict[str, str]:
    """
    Return the digest of each part of a shard (XXH3-128, hexadecimal), by the part's name.

    `heads` maps the name of a part to bytes that are digested before the buffers of that part.
    `contents` lists the buffers, each with the name of its part, in the same order on every rank.
    Large contents are read by up to four threads, which have ended when this function returns. Each
    thread copies content that is on a device to the host, in pieces of 16 MiB.
    """
    found = {part: xxhash.xxh3_128(head) for part, head in heads.items()}
    batch: list[Content] = []
    size = 0
    for content in contents:
        batch.append(content)
        size += content[1].size
        if size >= _BATCH:
            _add(found, batch)
            batch, size = [], 0
    _add(found, batch)
    return {part: digest.hexdigest() for part, digest in found.items()}


def _add(found: dict[str, xxhash.xxh3_128], batch: Sequence[Content]) -> None:
    """
    Add the buffers of a batch to the digests of the parts of a shard to which they belong.
    """
    pieces: list[_Piece] = []
    counts: list[int] = []
    for _, buffer in batch:
        first, size = len(pieces), buffer.size
        pieces += [(buffer, at, min(_PIECE, size - at)) for at in range(0, size, _PIECE)] or [
            (buffer, 0, 0)
        ]
        counts.append(len(pieces) - first)
    digests = iter(_digests(pieces))
    for (part, buffer), count in zip(batch, counts, strict=True):
        digest = found.setdefault(part, xxhash.xxh3_128())
        digest.update(buffer.name.encode())
        for _ in range(count):
            digest.update(next(digests))


def _digests(pieces: list[_Piece]) -> list[bytes]:
    size = sum(count for _, _, count in pieces)
    cores = _cores.get() or len(os.sched_getaffinity(0))
    readers = min(cores, _MOST, 1 + size // _SHARE)
    left = deque(enumerate(pieces))
    digests: dict[int, bytes] = {}

    def read() -> None:
        reader = _Reader()
        while left:
            try:
                index, piece = left.popleft()
            except IndexError:  # another thread has taken the last piece
                return
            digests[index] = reader.digest(piece)

    # start new threads instead of using a thread pool: the idle threads of a pool would make it
    # unsafe to fork this process later
    threads: list[threading.Thread] = []
    try:
        # if the system cannot start more threads, the threads that already run read all pieces
        with suppress(RuntimeError):
            for _ in range(readers - 1):
                thread = threading.Thread(target=read, name="digest")
                thread.start()
                threads.append(thread)
        read()
    finally:
        # empty the queue `left`: if an exception has interrupted this thread, the other threads
        # must stop reading
        left.clear()
        for thread in threads:
            thread.join()
    # read again the pieces that a thread failed to read, so that the caller gets the exception
    again = _Reader()
    return [
        digests[index] if index in digests else again.digest(piece)
        for index, piece in enumerate(pieces)
    ]


class _Reader:
    """
    Digests pieces of buffers on one thread.
    """

    def __init__(self) -> None:
        self._room = memoryview(b"")
        """Host memory into which a device copies the piece to be digested. It is empty until the
        first piece that is on a device."""

    def digest(self, piece: _Piece) -> bytes:
        """
        Return the digest (XXH3-128) of a piece of a buffer.
        """
        buffer, offset, count = piece
        if not isinstance(buffer, DeviceBuffer):
            return xxhash.xxh3_128_digest(buffer.view[offset : offset + count])
        if not self._room:
            self._room = buffer.host_memory(_PIECE)
        room = self._room[:count]
        buffer.copy(offset, room)()
        return xxhash.xxh3_128_digest(room)


@contextmanager
def with_cores(count: int) -> Iterator[None]:
    """
    Compute the digests in the `with` block with at most `count` processor cores (1 or more).
    """
    token = _cores.set(count)
    try:
        yield
    finally:
        _cores.reset(token)
