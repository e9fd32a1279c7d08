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

_PIECE = 4 * 2**20
"""The number of bytes that a thread reads at a time. A large tensor is divided into such pieces,
which several threads read."""
_SHARE = 32 * 2**20
"""One more thread is started for each this many bytes of content. A smaller content is read by the
calling thread alone."""
_MOST = 4
"""The highest number of threads. Four threads already use the whole memory bandwidth."""

_cores: ContextVar[int | None] = ContextVar("cores", default=None)
"""The number of processor cores for digests. None: all cores that this process may use."""

_BATCH = 256 * 2**20
"""Buffers are taken and digested in batches of about this many bytes. The content of a device is
first copied to the host. With batches, the host needs memory for one batch and not for the whole
state."""

Content = tuple[str, str, memoryview]
"""A buffer to be digested: the name of its part, its own name, and its bytes."""


def digest_parts(heads: Mapping[str, bytes], buffers: Iterable[Content]) -> dict[str, str]:
    """
    Return the digest of each part of a shard (XXH3-128, hexadecimal), by the part's name.

    `heads` maps the name of a part to bytes that are digested before the buffers of that part.
    `buffers` gives the part, the name and the content of each buffer, in the same order on every
    rank. Large contents are read by up to four threads, which have ended when this function
    returns.
    """
    found = {part: xxhash.xxh3_128(head) for part, head in heads.items()}
    batch: list[Content] = []
    size = 0
    for buffer in buffers:
        batch.append(buffer)
        size += len(buffer[2])
        if size >= _BATCH:
            _add(found, batch)
            batch, size = [], 0
    _add(found, batch)
    return {part: digest.hexdigest() for part, digest in found.items()}


def _add(found: dict[str, xxhash.xxh3_128], batch: Sequence[Content]) -> None:
    """
    Add the buffers of a batch to the digests of their parts.
    """
    pieces: list[memoryview] = []
    counts: list[int] = []
    for _, _, content in batch:
        first = len(pieces)
        if len(content) <= _PIECE:
            pieces.append(content)
        else:
            pieces += [content[at : at + _PIECE] for at in range(0, len(content), _PIECE)]
        counts.append(len(pieces) - first)
    digests = iter(_digests(pieces))
    for (part, name, _), count in zip(batch, counts, strict=True):
        digest = found.setdefault(part, xxhash.xxh3_128())
        digest.update(name.encode())
        for _ in range(count):
            digest.update(next(digests))


def _digests(pieces: list[memoryview]) -> list[bytes]:
    size = sum(len(piece) for piece in pieces)
    cores = _cores.get() or len(os.sched_getaffinity(0))
    readers = min(cores, _MOST, 1 + size // _SHARE)
    left = deque(enumerate(pieces))
    digests: dict[int, bytes] = {}

    def read() -> None:
        while left:
            try:
                index, piece = left.popleft()
            except IndexError:  # another thread has taken the last piece
                return
            digests[index] = xxhash.xxh3_128_digest(piece)

    # new threads and no thread pool: idle threads of a pool would make it unsafe to fork this
    # process later
    threads: list[threading.Thread] = []
    try:
        # if the system cannot start more threads, the threads that run read everything
        with suppress(RuntimeError):
            for _ in range(readers - 1):
                thread = threading.Thread(target=read, name="digest")
                thread.start()
                threads.append(thread)
        read()
    finally:
        left.clear()  # if this rank is interrupted, the threads must stop reading
        for thread in threads:
            thread.join()
    # read again the pieces that a thread failed to read, so that the caller gets the exception
    return [
        digests[index] if index in digests else xxhash.xxh3_128_digest(piece)
        for index, piece in enumerate(pieces)
    ]


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
