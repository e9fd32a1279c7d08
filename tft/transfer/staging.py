"""
A view of a shard as one sequence of bytes, for a shard that has buffers on a device.

Bytes on a device are copied to the host when they are sent. This takes two pieces of host memory
for each connection, whatever the size of the shard: while one piece is being sent, the device
copies into the other piece.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tft.spi.types import Buffer, DeviceBuffer
from tft.transfer.wire import PIECE, Request, Run, Views, cut


@dataclass(frozen=True, slots=True)
class _Part:
    """
    The bytes of a buffer from offset `begin` up to `end`. `copy(offset, into)` begins to copy bytes
    of the buffer to the host, and returns a function that waits for the copy (as
    `DeviceBuffer.copy`).
    """

    copy: Callable[[int, memoryview], Callable[[], None]]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def __getitem__(self, wanted: slice) -> "_Part":
        return _Part(self.copy, self.begin + wanted.start, self.begin + wanted.stop)


def run_of(buffers: Sequence[Buffer | DeviceBuffer]) -> "Run | StagedRun":
    """
    Return an object that reads the buffers of a shard as one sequence of bytes. If a buffer is on a
    device, its bytes are copied to host memory when they are read.
    """
    on_device = next((each for each in buffers if isinstance(each, DeviceBuffer)), None)
    if on_device is None:
        return Run([each.view for each in buffers])
    return StagedRun(buffers, on_device.host_memory)


class StagedRun:
    """
    The buffers of a shard as one sequence of bytes, which is copied to host memory in parts.

    Only one thread (that of one connection) may use this object.
    """

    def __init__(
        self, buffers: Sequence[Buffer | DeviceBuffer], host_memory: Callable[[int], memoryview]
    ) -> None:
        parts = [_part(buffer) for buffer in buffers]
        self._parts = [part for part in parts if part.nbytes]
        self._ends = list(accumulate(part.nbytes for part in self._parts))
        self._staging = (host_memory(PIECE), host_memory(PIECE))

    @property
    def size(self) -> int:
        """
        The total number of bytes in the buffers of the shard.
        """
        return self._ends[-1] if self._ends else 0

    def batches(self, chunk: Request) -> Iterator[Views]:
        """
        Yield the bytes of a chunk in order. Each item is a list with one view of host memory. The
        view is valid until the caller takes the next item, because its memory is used again.
        """
        staged: Callable[[], memoryview] | None = None
        for number, group in enumerate(self._groups(chunk)):
            following = _stage(group, self._staging[number % 2])
            if staged is not None:
                yield [staged()]
            staged = following
        if staged is not None:
            yield [staged()]

    def _groups(self, chunk: Request) -> Iterator[list[_Part]]:
        """
        Yield the parts of buffers that form a chunk, in order and in groups. A group has at most
        `PIECE` bytes, so that it fits into one piece of host memory.
        """
        group: list[_Part] = []
        size = 0
        for part in cut(self._parts, self._ends, chunk):
            if size + part.nbytes > PIECE:
                yield group
                group, size = [], 0
            group.append(part)
            size += part.nbytes
        if group:
            yield group


def _part(buffer: Buffer | DeviceBuffer) -> _Part:
    if isinstance(buffer, DeviceBuffer):
        return _Part(buffer.copy, 0, buffer.size)
    view = buffer.view

    def copy(offset: int, into: memoryview) -> Callable[[], None]:
        into[:] = view[offset : offset + into.nbytes]
        return lambda: None

    return _Part(copy, 0, view.nbytes)


def _stage(group: Sequence[_Part], memory: memoryview) -> Callable[[], memoryview]:
    """
    Begin to copy a group of parts of buffers into the host memory `memory`. Return a function that
    waits for the copy and returns the bytes.
    """
    waits = []
    at = 0
    for part in group:
        waits.append(part.copy(part.begin, memory[at : at + part.nbytes]))
        at += part.nbytes

    def staged() -> memoryview:
        for wait in waits:
            wait()
        return memory[:at]

    return staged
