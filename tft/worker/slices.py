"""
Digests the shards of a rank slice by slice, so that copies of a shard on several ranks can be
compared while the job trains. A slice is a part of the bytes of a shard. After each step one slice
of each shard is digested. After as many steps as there are slices, every byte was digested once.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import pluggy
import xxhash

from tft.core.link.slice_comparison import CONTRIBUTION
from tft.page import Page
from tft.plugins import direct
from tft.protocol.messages import ShardCopies
from tft.spi.types import Buffer, DeviceBuffer, SliceContent

AT_ONCE = 128 * 1024
"""Slices of at most this many bytes are digested on the training thread. To hand such a small slice
to another thread would take longer than to digest it."""


@dataclass(slots=True, kw_only=True)
class _Listed:
    """
    The memory of one shard, as the adaptor has listed it.
    """

    head: bytes
    """The values of the shard that are not in tensors, as they were at the last listing."""
    buffers: tuple[Buffer | DeviceBuffer, ...]
    identity: tuple[int, ...]
    """A number for each buffer, from which one can tell whether the buffer has moved in memory."""
    offsets: list[int]
    """The byte at which each buffer begins, counted from the first buffer of the shard. The last
    entry is the byte at which the last buffer ends."""

    def pieces(self, number: int, of: int) -> list[tuple[Buffer | DeviceBuffer, int, int]]:
        """
        Return the parts of buffers that are in slice number `number` of `of` slices. Each part is a
        buffer, and the bytes of the buffer at which the part begins and ends.
        """
        total = self.offsets[-1]
        first, last = total * number // of, total * (number + 1) // of
        found = []
        for index in range(max(0, bisect_right(self.offsets, first) - 1), len(self.offsets) - 1):
            begin, end = self.offsets[index], self.offsets[index + 1]
            if begin >= last:
                break
            if end > first:
                buffer = self.buffers[index]
                found.append((buffer, max(first, begin) - begin, min(last, end) - begin))
        return found

    @property
    def place(self) -> tuple[tuple[int, ...], list[int]]:
        """
        Numbers from which one can tell whether another listing has the same pieces of memory. They
        hold no reference to the memory.
        """
        return self.identity, self.offsets


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slice:
    """
    One slice of every shard.
    """

    parts: list[tuple[int, str, list[tuple[Buffer | DeviceBuffer, int, int]]]]
    """For each shard: its number, its name, and the parts of buffers that belong to this slice."""
    large: bool
    """True if the slice takes too long to be digested on the training thread."""


class Slices:
    """
    Digests the slices of one rank, and posts the digests on its page (shared memory that the agent
    reads).
    """

    def __init__(self, hook: pluggy.HookRelay, page: Page) -> None:
        self._hook = hook
        self._page = page
        self._shards: list[tuple[int, str]] = []
        self._list: Callable[..., SliceContent] | None = None
        self._contribution: Callable[..., int | None] | None = None
        self._attempt = (0, 0)
        self._listed: dict[str, _Listed] = {}
        self._cut: dict[int, _Slice] = {}
        """Maps the number of a slice to the slice. A slice is cut out of the listed memory when it
        is first needed."""
        self._places: dict[str, tuple[tuple[int, ...], list[int]]] = {}
        """For each shard, where its buffers were in memory at the last listing."""
        self._steady = 0
        """The number of listings in a row in which every buffer was at the same place in memory.
        When it reaches the number of slices, the adaptor is asked less often (see
        `_list_again`)."""

    @property
    def listable(self) -> bool:
        """
        True if the adaptor has the hook `tft_slices`, which lists the buffers of a shard. Without
        it no slices are digested.
        """
        return self._list is not None

    def begin(self, shards: Sequence[ShardCopies]) -> None:
        """
        Record the shards of this rank. Only shards that several ranks hold are compared.
        """
        self._shards = [(i, each.shard) for i, each in enumerate(shards) if len(each.ranks) > 1]
        listing, contribution = self._hook.tft_slices, self._hook.tft_contribution
        self._list = direct(listing) if listing.get_hookimpls() else None
        # if only two ranks hold a shard and their copies differ, digests of what each rank has
        # contributed to the gradients show which copy is wrong. Among three or more copies the
        # majority shows it, so these digests are not needed
        needed = any(len(each.ranks) == 2 for each in shards) and contribution.get_hookimpls()
        self._contribution = direct(contribution) if needed else None

    def resume(self, incident: int, round_: int) -> None:
        """
        Record the attempt in which this rank trains from now on: the numbers of the incident and of
        the round after which training resumes.
        """
        self._attempt = (incident, round_)
        self.forget()
        self._places, self._steady = {}, 0

    def forget(self) -> None:
        """
        Drop the references to the memory of the shards, because other code may replace this memory
        from now on.
        """
        self._listed, self._cut = {}, {}

    def digest(self, step: int, number: int, of: int) -> Callable[[], None] | None:
        """
        Digest slice `number` of `of` of every shard, as it is at the end of `step`, and post the
        digests. Called on the training thread.

        If the slice is large, do not digest it, but return a function that digests it and posts the
        digests. The caller may run this function on any thread, but must wait for its end before
        the state changes. Return None if the digests are posted already.
        """
        if not self._shards:
            return None  # no other rank has a copy of a shard of this rank
        self._list_again(number, of)
        contributed = None if self._contribution is None else self._contribution()
        if contributed is not None:
            self._page.post(self._attempt, step, CONTRIBUTION, of, 0, contributed)
        cut = self._cut.get(number)
        if cut is None:
            cut = self._cut[number] = self._cut_out(number, of)
        # the description of a shard belongs to its slice 0
        heads = [self._listed[shard].head if number == 0 else b"" for _, shard, _ in cut.parts]
        work = partial(self._digest, step, number, of, cut, heads, self._attempt)
        if cut.large:
            return work
        work()
        return None

    def _digest(
        self, step: int, number: int, of: int, cut: _Slice, heads: Sequence[bytes],
        attempt: tuple[int, int],
    ) -> None:  # fmt: skip
        for head, (index, _, pieces) in zip(heads, cut.parts, strict=True):
            self._page.post(attempt, step, number, of, index, _digest(head, pieces))

    def _cut_out(self, number: int, of: int) -> _Slice:
        parts = [
            (index, shard, self._listed[shard].pieces(number, of)) for index, shard in self._shards
        ]
        pieces = [piece for _, _, found in parts for piece in found]
        return _Slice(
            parts=parts,
            large=sum(end - begin for _, begin, end in pieces) > AT_ONCE
            or any(isinstance(buffer, DeviceBuffer) for buffer, _, _ in pieces),
        )

    def _list_again(self, number: int, of: int) -> None:
        """
        Ask the adaptor for the memory of the shards, unless the last answer is still valid.

        An optimizer may replace the tensors of its state instead of changing them. So the adaptor
        is asked in every step, until the memory has stayed the same for a whole cycle through the
        slices. After that it is asked once in each cycle, at slice 0, as on all other ranks.
        """
        if self._listed and self._steady >= of and number > 0:
            return
        assert self._list is not None
        # Make the new listing before the last one is dropped: some buffers of the last one may be
        # copies, and a new copy in the memory of a freed one would count as memory that has stayed
        # the same.
        found = {shard: _list(self._list(shard=shard)) for _, shard in self._shards}
        places = {shard: each.place for shard, each in found.items()}
        same, self._places = places == self._places, places
        self._steady = self._steady + 1 if same else 0
        if same and self._listed:
            # keep the slices that are cut out already
            for shard, each in found.items():
                self._listed[shard].head = each.head
        else:
            self.forget()
            self._listed = found


def _list(content: SliceContent) -> _Listed:
    sizes = accumulate(each.size for each in content.buffers)
    return _Listed(
        head=content.head,
        buffers=content.buffers,
        identity=content.identity,
        offsets=[0, *sizes],
    )


def _digest(head: bytes, pieces: Iterable[tuple[Buffer | DeviceBuffer, int, int]]) -> int:
    digest = xxhash.xxh3_64(head)
    for buffer, begin, end in pieces:
        if isinstance(buffer, DeviceBuffer):
            room = buffer.host_memory(end - begin)
            buffer.copy(begin, room)()
            digest.update(room)
        else:
            digest.update(buffer.view[begin:end])
    return digest.intdigest()
