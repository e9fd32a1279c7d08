"""
The bytes of a transfer: what the two ends of a connection say, and in which order.

    client to server   `Hello`       the key of the job, the shard and the step that are wanted
    server to client   `Offer`       what the shard consists of; or `Refusal`, and the end
    client to server   `Request`     a chunk, as often as it likes; answered in order
    server to client   the bytes of the chunk, then their digest

To both ends a shard is one run of bytes: its buffers, end to end. A chunk is any part of that
run, so many small buffers cost no more than a large one. What is said travels in frames: length
(4 bytes), digest of the body (16), body (MessagePack). All digests are XXH3-128: they tell
damage, not malice. Whoever knows the job's name is trusted; with the keys of a job all of this is
spoken through TLS (`tls.py`), and whoever has them is.
"""

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Annotated

import msgspec
import xxhash

from tft.errors import MalformedMessage
from tft.protocol.codec import pack, unpack
from tft.protocol.messages import VERSION

CHUNK = 4 << 20
"""Bytes of a chunk: little to fetch again, yet 10 Gbit/s need only 300 requests a second."""
SMALLEST_CHUNK = 256 << 10
"""Bytes; a smaller one would be all overhead."""
FROM_CLIENT = 64 << 10
"""The longest frame a server reads, in bytes: a stranger cannot make it hold more."""
FROM_SERVER = 256 << 20
"""The longest frame a client reads, in bytes: an offer carries the meta of its shard."""

_PIECE = 512 << 10
"""Bytes digested and handed to the kernel at a time: still in the cache for the second of the two.
A quarter of it costs a tenth of the speed in calls, and twice as much gains nothing."""
_VIEWS = 512
"""Buffers handed to the kernel at a time; Linux takes 1024 at most."""
_FRAME = struct.Struct("!I16s")
_RANGE = struct.Struct("!QQ")
_DIGEST = 16

Views = list[memoryview]
Read = Callable[[Views], int]
"""Waits for bytes, puts them into the views from the first on, returns how many; 0: the end."""
Natural = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """
    The first words of a client.
    """

    version: int = VERSION
    job: str = field(repr=False)
    """The key, so in no log: a server gives nothing to a client of another job."""
    rank: int
    """Who asks; for the log."""
    shard: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """
    What a server is about to give.
    """

    meta: bytes
    buffers: tuple[tuple[str, Natural], ...]
    """Name and size in bytes of each, in their order."""

    @property
    def size(self) -> int:
        """
        Bytes of all buffers together.
        """
        return sum(size for _, size in self.buffers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """
    Why a server gives nothing: a sentence.
    """

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """
    A chunk: a part of the run of bytes that the buffers of a shard form.
    """

    offset: Natural
    length: Annotated[int, msgspec.Meta(gt=0, le=CHUNK)]


Said = Hello | Offer | Refusal | Request

_WORDS: dict[str, type[Said]] = {
    "hello": Hello,
    "offer": Offer,
    "refusal": Refusal,
    "request": Request,
}
_NAMES = {kind: name for name, kind in _WORDS.items()}


# ---------------------------------------------------------------- frames


def frame(said: Said) -> bytes:
    """
    The frame that carries this.
    """
    body = pack([_NAMES[type(said)], {f.name: getattr(said, f.name) for f in fields(said)}])
    return _FRAME.pack(len(body), xxhash.xxh3_128_digest(body)) + body


def read_frame(read: Read, longest: int) -> Said:
    """
    What the next frame says. Raises `MalformedMessage` where it is none of ours, is damaged, or
    is longer than `longest` bytes, and `EOFError` where the peer has closed.
    """
    head = bytearray(_FRAME.size)
    fill([memoryview(head)], read)
    length, digest = _FRAME.unpack(head)
    if length > longest:
        raise MalformedMessage(
            f"a frame of {length} bytes came where at most {longest} are read: the peer does not "
            "speak tft's transfer protocol, or its bytes were damaged on the way"
        )
    body = bytearray(length)
    fill([memoryview(body)], read)
    if xxhash.xxh3_128_digest(body) != digest:
        raise MalformedMessage(
            f"a frame of {length} bytes came that does not match its digest: its bytes were "
            "damaged on the way, or the peer does not speak tft's transfer protocol"
        )
    return _said(memoryview(body))


def _said(body: memoryview) -> Said:
    match unpack(body):
        case [str(name), dict(words)] if name in _WORDS:
            try:
                return msgspec.convert(words, type=_WORDS[name])
            except msgspec.ValidationError as wrong:
                raise MalformedMessage(f"a {name} came that cannot be one: {wrong}") from None
        case other:
            raise MalformedMessage(f"a frame came that is no word of a transfer: {other!r:.80}")


# ---------------------------------------------------------------- chunks


class Run:
    """
    Buffers seen as one run of bytes, in place.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._views = [view for view in buffers if view.nbytes]
        self._ends = list(accumulate(view.nbytes for view in self._views))

    @property
    def size(self) -> int:
        """
        Bytes in all.
        """
        return self._ends[-1] if self._ends else 0

    def part(self, chunk: Request) -> Iterator[memoryview]:
        """
        The memory of a chunk, which must lie within the run, piece by piece in its order.
        """
        at, end = chunk.offset, chunk.offset + chunk.length
        index = bisect_right(self._ends, at)
        while at < end:
            view = self._views[index]
            begin = self._ends[index] - view.nbytes
            until = min(end, self._ends[index], at + _PIECE)
            yield view[at - begin : until - begin]
            at = until
            index += at == self._ends[index]


def chunks(size: int, sources: int) -> list[Request]:
    """
    A run of `size` bytes, cut for so many sources: a shard smaller than many chunks is cut finer,
    so that every source has a few to give and all end at about the same time.
    """
    length = min(CHUNK, max(SMALLEST_CHUNK, size // (4 * sources)))
    return [Request(offset=at, length=min(length, size - at)) for at in range(0, size, length)]


def fingerprint(offer: Offer) -> bytes:
    """
    Equal for equal offers only.
    """
    return xxhash.xxh3_128_digest(frame(offer))


def send_chunk(run: Run, chunk: Request, key: bytes, send: Callable[[Views], int]) -> None:
    """
    Send a chunk and its digest. `key` is the fingerprint of the offer; `send` sends from the
    views what it can and returns how many bytes that was.
    """
    digest = _digest(chunk, key)
    for batch in _batches(run.part(chunk)):
        for view in batch:
            digest.update(view)
        _drain(batch, send)
    _drain([memoryview(digest.digest())], send)


def receive_chunk(run: Run, chunk: Request, key: bytes, read: Read) -> bool:
    """
    Read a chunk into its place; whether it is what the source digested. Raises `EOFError`.
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
    Fill the views from the stream. Raises `EOFError` where it ends before they are full.
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
        if batch and (size + view.nbytes > _PIECE or len(batch) == _VIEWS):
            yield batch
            batch, size = [], 0
        batch.append(view)
        size += view.nbytes
    if batch:
        yield batch


def _digest(chunk: Request, key: bytes) -> xxhash.xxh3_128:
    # The offer and the place are digested with the bytes: right bytes of another chunk are wrong.
    return xxhash.xxh3_128(key + _RANGE.pack(chunk.offset, chunk.length))
