"""
The page of a rank: shared memory that outlives the rank's process.

The training thread writes its position and its rank-local state there: a few stores, no lock, no
system call. The agent has created the page and reads it at any time, also after the writer was
killed between two stores. The next incarnation of the rank inherits the page.

A word of eight bytes is stored atomically, so a reader sees either the old or the new value. A
capture is longer than a word. It is valid only if the digest in its header matches, and the header
is written last.
"""

import mmap
import os
from collections.abc import Collection

import xxhash

from tft.errors import UsageError
from tft.protocol.messages import Position

SLOT_BYTES = 256 * 1024
"""Bytes for one capture with its header. The RNG of a CPU and a data position take 5 KB, each GPU a
few bytes."""

_SLOTS = 4
"""Two captures for each of the last two steps: one when the window closed, one before that."""
_KEPT_SLOTS = 4
"""One capture for each step of which a copy of the state is kept (`tft_backup`). An adaptor keeps
two copies. Two slots more, because another rank may keep copies of other steps than this rank."""
_ALL_SLOTS = _SLOTS + _KEPT_SLOTS
_HEAD_BYTES = 4096
_SIZE = _HEAD_BYTES + _ALL_SLOTS * SLOT_BYTES

# the head of the page, in words of eight bytes
_POSITION, _MOVED, _TRAINING, _TAILED = 0, 1, 2, 3
# the header of a slot, in words of eight bytes
_TAG, _LENGTH, _DIGEST, _HEADER_WORDS = 0, 1, 2, 3

CAPTURE_LIMIT = SLOT_BYTES - 8 * _HEADER_WORDS
"""Largest size of a rank-local state, in bytes."""


class Page:
    """
    The page of one rank. One process writes at a time; any number of processes may read.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        """The file descriptor that the rank's processes inherit."""
        self._memory = mmap.mmap(fd, _SIZE)
        self._bytes = memoryview(self._memory)
        # native formats are stored as one word; standard formats are stored byte by byte
        self._words = self._bytes.cast("Q")
        self._stamps = self._bytes.cast("d")

    @classmethod
    def create(cls) -> "Page":
        """
        Create a page: step 0, window closed, not training, no captures.
        """
        fd = os.memfd_create("tft-page")
        os.ftruncate(fd, _SIZE)  # sparse: a slot takes memory only when it is first written
        return cls(fd)

    @classmethod
    def open(cls, fd: int) -> "Page":
        """
        Open the page behind an inherited file descriptor.

        Raises `UsageError` if the descriptor cannot be used or is not a page.
        """
        try:
            size = os.fstat(fd).st_size
        except OSError as error:
            raise UsageError(
                f"the page of this rank should be file descriptor {fd}, which cannot be used "
                f"({error.strerror}): was the script started through something that closes "
                "inherited files?"
            ) from None
        if size != _SIZE:
            raise UsageError(
                f"file descriptor {fd} should be the shared-memory page of this rank, but it is "
                f"something else: it has {size} bytes instead of {_SIZE}"
            )
        return cls(fd)

    def close(self) -> None:
        """
        Release the memory and the descriptor. The content stays for other processes that have the
        page open.
        """
        for view in (self._words, self._stamps, self._bytes):
            view.release()
        self._memory.close()
        os.close(self.fd)

    # ------------------------------------------------------------ the training thread writes

    def move(
        self, step: int, window: bool, stamp: float, *, tail: bool = False, after: bool = False
    ) -> None:
        """
        Write the position of the training thread, which was reached at `stamp` (seconds).

        Without flags: `step` has ended, and so have the functions that are called after it.
        `after`: the step has ended, but these functions have not. `tail`: the window of `step` has
        closed and its tail has begun. `window`: the window of `step` + 1 has opened.
        """
        self._words[_POSITION] = 8 * step + 4 * after + 2 * tail + window
        self._stamps[_MOVED] = stamp

    def end(self, step: int, *, after: bool) -> None:
        """
        Write that `step` has ended. `after`: the functions that are called after it have not ended.

        The time of the last move stays the time when the window of `step` closed.
        """
        self._words[_POSITION] = 8 * step + 4 * after

    def train(self, inside: bool, stamp: float) -> None:
        """
        Write that the user's `train` was entered (`inside`) or left, at `stamp` (seconds).
        """
        self._stamps[_MOVED] = stamp
        self._words[_TRAINING] = inside

    def has_tails(self) -> None:
        """
        Record that the loop marks the end of its steps.

        From now on, and in later processes of this rank, a step ends later than its window.
        """
        self._words[_TAILED] = 1

    def capture(self, step: int, local_state: bytes, closed: bool) -> None:
        """
        Keep the rank-local state of `step`. Takes about 1 us for 5 KB.

        `closed`: the state was captured when the update window of `step` closed; else before that.
        Raises `UsageError` for a state longer than `CAPTURE_LIMIT`.
        """
        if len(local_state) > CAPTURE_LIMIT:
            raise UsageError(
                f"the rank-local state of a rank (RNG, data position) has {len(local_state)} "
                f"bytes; at most {CAPTURE_LIMIT} can be kept at every step: give `data` a smaller "
                "state_dict()"
            )
        tag = 2 * step + closed
        self._write(tag % _SLOTS, tag, local_state)

    def keep(self, step: int, local_state: bytes, kept: Collection[int]) -> None:
        """
        Keep the rank-local state of the end of `step` beyond the next two steps, because a copy of
        the rest of the state is kept too.

        `kept`: the other steps of which this rank has a copy. Their captures stay.
        """
        tag = 2 * step + 1
        tags = {slot: self._tag(slot) for slot in range(_SLOTS, _ALL_SLOTS)}
        old = {slot: old for slot, old in tags.items() if old // 2 not in kept}
        same = [slot for slot, old in tags.items() if old == tag]
        slot = same[0] if same else min(old or tags, key=tags.__getitem__)
        self._write(slot, tag, local_state)

    def _write(self, slot: int, tag: int, local_state: bytes) -> None:
        length = len(local_state)
        start = _HEAD_BYTES + slot * SLOT_BYTES
        content = start + 8 * _HEADER_WORDS
        self._bytes[content : content + length] = local_state
        header, words = start // 8, self._words
        # seeded with the tag, so that an old digest never matches a new header
        words[header + _DIGEST] = xxhash.xxh3_64_intdigest(local_state, tag)
        words[header + _LENGTH] = length
        words[header + _TAG] = tag

    def forget_after(self, step: int) -> None:
        """
        Invalidate the captures of steps later than `step`.

        The job has given up these steps. When they are trained again, for example without a batch
        that is left out, their rank-local state may differ.
        """
        for slot in range(_ALL_SLOTS):
            if self._tag(slot) // 2 > step:
                header = (_HEAD_BYTES + slot * SLOT_BYTES) // 8
                self._words[header + _LENGTH] = CAPTURE_LIMIT + 1  # no capture has this length

    def _tag(self, slot: int) -> int:
        """
        Return the tag of the capture in a slot; negative if the slot has no valid capture.
        """
        header = (_HEAD_BYTES + slot * SLOT_BYTES) // 8
        tag, length = self._words[header + _TAG], self._words[header + _LENGTH]
        return tag if length <= CAPTURE_LIMIT else -1

    # ------------------------------------------------------------ methods for all readers

    def position(self) -> Position:
        """
        Return the position of the training thread.
        """
        step, edges = divmod(self._words[_POSITION], 8)
        return Position(
            step=step, window=bool(edges & 1), tail=bool(edges & 2), after=bool(edges & 4)
        )

    def tailed(self) -> bool:
        """
        Return whether a process of this rank has called `has_tails`: steps end after their windows.
        """
        return bool(self._words[_TAILED])

    def training(self) -> bool:
        """
        Return whether the training thread is inside the user's `train`.
        """
        return bool(self._words[_TRAINING])

    def moved(self) -> float:
        """
        Return when the training thread last moved (CLOCK_MONOTONIC, seconds); 0.0 if never.
        """
        return self._stamps[_MOVED]

    def local_states(self) -> dict[int, bytes]:
        """
        Return the valid captures, by step. If a step has two captures, return the one that was
        taken when its window closed.
        """
        captures: dict[int, bytes] = {}
        for tag, _, local_state in sorted(self._whole()):
            captures[tag // 2] = (
                local_state  # the capture of the closed window sorts last, so it stays
            )
        return captures

    def _whole(self) -> list[tuple[int, int, bytes]]:
        """
        Return tag, negative slot and content of each valid capture. Of two captures with one tag,
        the one of the last two steps sorts last: it may have been made anew.
        """
        whole = []
        for slot in range(_ALL_SLOTS):
            start = _HEAD_BYTES + slot * SLOT_BYTES
            tag, length, digest = self._words[start // 8 : start // 8 + _HEADER_WORDS]
            if length > CAPTURE_LIMIT:
                continue
            content = start + 8 * _HEADER_WORDS
            local_state = bytes(self._bytes[content : content + length])
            if xxhash.xxh3_64_intdigest(local_state, tag) == digest:
                whole.append((tag, -slot, local_state))
        return whole
