"""
The wire format of a transfer: the messages on a connection, and their order.

    client to server   `Hello`       the name of the job, and the wanted shard and step
    server to client   `Preparing`   while the shard is being prepared, once a second
    server to client   `ShardOffer`  the buffers of the shard; or `Refusal`, and the connection ends
    client to server   `Request`     asks for a chunk; any number of requests, answered in order
    server to client   for each request: the bytes of the chunk, then their digest

Both ends treat a shard as one sequence of bytes (`Run`): the buffers of the shard, one after the
other. A chunk is any part of this sequence and may span several buffers. So a shard with many small
buffers takes no more requests than a shard with one large buffer.

A message is sent in a frame: length (4 bytes), digest of the body (16 bytes), body (MessagePack).
All digests are XXH3-128. They detect damage, but not manipulation. The server trusts a client that
knows the job's name. When the job has keys, all bytes go through TLS (`tls.py`), and a client must
have the keys.
"""

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Annotated, Protocol, Self, TypeVar

import msgspec
import xxhash

from tft.errors import MalformedMessage
from tft.protocol.codec import pack, unpack
from tft.protocol.messages import VERSION

CHUNK = 4 << 20
"""The size in bytes of the largest chunk. The size is a compromise: a damaged chunk is fetched
again quickly, and even a link of 10 Gbit/s needs only 300 requests a second."""
SMALLEST_CHUNK = 256 << 10
"""The size in bytes of the smallest chunk, except for the last chunk of a shard. With smaller
chunks, the requests and digests would take too large a share of the time."""
FROM_CLIENT = 64 << 10
"""The longest frame that a server reads, in bytes. The limit is small, because an unknown client
must not be able to make the server allocate much memory."""
FROM_SERVER = 256 << 20
"""The longest frame that a client reads, in bytes. It is large, because an offer contains the
metadata of its shard."""

PIECE = 512 << 10
"""The number of bytes of a chunk that are digested and then sent at a time. When the kernel copies
these bytes, they are still in the CPU cache, because they were just digested. A quarter of this
size is slower by a tenth, because of the additional calls; twice the size is not faster."""
_VIEWS = 512
"""The maximum number of memoryviews that are passed to the kernel in one call. Linux accepts at
most 1024 (`IOV_MAX`)."""
_FRAME = struct.Struct("!I16s")
_RANGE = struct.Struct("!QQ")
_DIGEST = 16

Views = list[memoryview]
Read = Callable[[Views], int]
"""A function that waits for bytes, fills the views from the first one on, and returns the number of
bytes. The result 0 means that the peer has closed the connection."""
Natural = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """
    The first message of a client: asks the server for a shard as it was at the end of a step.
    """

    version: int = VERSION
    job: str = field(repr=False)
    """The name of the job. A server sends nothing to a client that gives another name. The name is
    left out of the `repr`, because without `--curve` a client needs nothing but the name to read
    state."""
    rank: int
    """The rank that asks for the shard. The server uses it only in its log."""
    shard: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOffer:
    """
    The server's answer when it can send the shard: describes the buffers of the shard.
    """

    meta: bytes
    buffers: tuple[tuple[str, Natural], ...]
    """The name and the size in bytes of each buffer, in order."""

    @property
    def size(self) -> int:
        """
        The total number of bytes in all buffers.
        """
        return sum(size for _, size in self.buffers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparing:
    """
    The server's sign of life while it prepares the shard. A client that gets this message goes on
    waiting.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """
    The server's answer when it does not send the shard. `why` is a sentence with the reason.
    """

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """
    A client's request for one chunk: `length` bytes of the shard, starting at byte `offset`.

    The offset counts from the start of the first buffer, through all buffers in order.
    """

    offset: Natural
    length: Annotated[int, msgspec.Meta(gt=0, le=CHUNK)]


Said = Hello | Preparing | ShardOffer | Refusal | Request

_WORDS: dict[str, type[Said]] = {
    "hello": Hello,
    "preparing": Preparing,
    "offer": ShardOffer,
    "refusal": Refusal,
    "request": Request,
}
_NAMES = {kind: name for name, kind in _WORDS.items()}


# ---------------------------------------------------------------- frames


def frame(said: Said) -> bytes:
    """
    Return the bytes of the frame that contains a message.
    """
    body = pack([_NAMES[type(said)], {f.name: getattr(said, f.name) for f in fields(said)}])
    return _FRAME.pack(len(body), xxhash.xxh3_128_digest(body)) + body


def read_frame(read: Read, longest: int) -> Said:
    """
    Read the next frame with `read`, and return the message in the frame.

    Raises `MalformedMessage` when the bytes are not a valid frame, are damaged, or announce more
    than `longest` bytes. Raises `EOFError` when the peer has closed the connection.
    """
    head = bytearray(_FRAME.size)
    fill([memoryview(head)], read)
    length, digest = _FRAME.unpack(head)
    if length > longest:
        raise MalformedMessage(
            f"a frame of {length} bytes was received, but at most {longest} are read: the peer "
            "does not speak tft's transfer protocol, or its bytes were damaged on the way"
        )
    body = bytearray(length)
    fill([memoryview(body)], read)
    if xxhash.xxh3_128_digest(body) != digest:
        raise MalformedMessage(
            f"a frame of {length} bytes was received that does not match its digest: its bytes "
            "were damaged on the way, or the peer does not speak tft's transfer protocol"
        )
    return _said(memoryview(body))


def _said(body: memoryview) -> Said:
    match unpack(body):
        case [str(name), dict(words)] if name in _WORDS:
            try:
                return msgspec.convert(words, type=_WORDS[name])
            except msgspec.ValidationError as wrong:
                raise MalformedMessage(
                    f"a `{name}` message with wrong values was received: {wrong}"
                ) from None
        case other:
            raise MalformedMessage(
                f"a frame was received that is no message of a transfer: {other!r:.80}"
            )


# ---------------------------------------------------------------- chunks


class Run:
    """
    The buffers of a shard as one sequence of bytes. The bytes are not copied.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._views = [view for view in buffers if view.nbytes]
        self._ends = list(accumulate(view.nbytes for view in self._views))

    @property
    def size(self) -> int:
        """
        The total number of bytes in the buffers of the shard.
        """
        return self._ends[-1] if self._ends else 0

    def batches(self, chunk: Request) -> Iterator[Views]:
        """
        Yield the memory of a chunk (a part of the shard) in order, in lists of views that are sent
        together.
        """
        return _batches(self.part(chunk))

    def part(self, chunk: Request) -> Iterator[memoryview]:
        """
        Yield the memory of a chunk in order, in pieces of at most `PIECE` bytes.

        The chunk must lie within the buffers.
        """
        return cut(self._views, self._ends, chunk)


class Sendable(Protocol):
    """
    A shard as one sequence of bytes, from which `send_chunk` can send chunks: a `Run` or a
    `StagedRun`.
    """

    def batches(self, chunk: Request) -> Iterator[Views]: ...


class Piece(Protocol):
    """
    Some bytes of a buffer, such as a memoryview.
    """

    @property
    def nbytes(self) -> int: ...

    def __getitem__(self, wanted: slice, /) -> Self: ...


P = TypeVar("P", bound=Piece)


def cut(pieces: Sequence[P], ends: Sequence[int], chunk: Request) -> Iterator[P]:
    """
    Yield the bytes of a chunk in order, in pieces of at most `PIECE` bytes.

    `pieces` form one sequence of bytes, and `ends` has for each piece the offset in that sequence
    at which the piece ends.
    """
    at, end = chunk.offset, chunk.offset + chunk.length
    index = bisect_right(ends, at)
    while at < end:
        piece = pieces[index]
        begin = ends[index] - piece.nbytes
        until = min(end, ends[index], at + PIECE)
        yield piece[at - begin : until - begin]
        at = until
        index += at == ends[index]


def chunks(size: int, sources: int) -> list[Request]:
    """
    Divide `size` bytes of a shard into chunks that `sources` sources can send at the same time.

    A small shard is divided into smaller chunks, so that every source has a few chunks to send.
    Then all sources finish at about the same time.
    """
    length = min(CHUNK, max(SMALLEST_CHUNK, size // (4 * sources)))
    return [Request(offset=at, length=min(length, size - at)) for at in range(0, size, length)]


def fingerprint(offer: ShardOffer) -> bytes:
    """
    Return a digest of an offer (a description of a shard). Two offers are equal exactly if their
    digests are equal.
    """
    return xxhash.xxh3_128_digest(frame(offer))


def send_chunk(run: Sendable, chunk: Request, key: bytes, send: Callable[[Views], int]) -> None:
    """
    Send the bytes of a chunk, and then their digest.

    `key` is the fingerprint of the offer that the server has made. The digest is computed over
    `key`, the range of the chunk and its bytes. `send` sends as many bytes of a list of views as
    the connection accepts, and returns their number.
    """
    digest = _digest(chunk, key)
    for batch in run.batches(chunk):
        for view in batch:
            digest.update(view)
        _drain(batch, send)
    _drain([memoryview(digest.digest())], send)


def receive_chunk(run: Run, chunk: Request, key: bytes, read: Read) -> bool:
    """
    Read a chunk into its place in `run`, the memory of the shard. Return whether the chunk arrived
    undamaged.

    The chunk is undamaged if the digest of the received bytes equals the digest that the source
    sent. `key` is the fingerprint of the source's offer. Raises `EOFError` when the connection ends
    before the whole chunk has arrived.
    """
    digest = _digest(chunk, key)
    for batch in _batches(run.part(chunk)):
        fill(batch, read)
        for view in batch:
            digest.update(view)
    sent = bytearray(_DIGEST)
    fill([memoryview(sent)], read)
    return digest.digest() == bytes(sent)


def fill(views: Views, read: Read) -> None:
    """
    Read bytes with `read` until all views are full.

    Raises `EOFError` when the connection ends before the views are full.
    """
    left = [view for view in views if view.nbytes]
    while left:
        count = read(left)
        if not count:
            raise EOFError
        left = _after(left, count)


def _drain(views: Views, send: Callable[[Views], int]) -> None:
    while views:
        views = _after(views, send(views))


def _after(views: Views, count: int) -> Views:
    for index, view in enumerate(views):
        if count < view.nbytes:
            return [view[count:], *views[index + 1 :]]
        count -= view.nbytes
    return []


def _batches(views: Iterator[memoryview]) -> Iterator[Views]:
    batch: Views = []
    size = 0
    for view in views:
        if batch and (size + view.nbytes > PIECE or len(batch) == _VIEWS):
            yield batch
            batch, size = [], 0
        batch.append(view)
        size += view.nbytes
    if batch:
        yield batch


def _digest(chunk: Request, key: bytes) -> xxhash.xxh3_128:
    # The digest includes the fingerprint of the offer and the range of the chunk. So the bytes of
    # another chunk, or of a shard with another offer, do not match the digest.
    return xxhash.xxh3_128(key + _RANGE.pack(chunk.offset, chunk.length))
