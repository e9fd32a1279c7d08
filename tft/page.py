"""
The page of a rank: shared memory that outlives the rank's process.

The training thread writes where it stands and its private state: a few stores, no lock, no system
call. The agent, which made the page, reads it at any moment, also after the writer was killed
between two stores; the next incarnation of the rank inherits it.

Words of eight bytes are stored whole, so a reader sees either the old or the new. A capture is
longer than a word: it counts only if the digest in its header, which is written last, fits.
"""

import mmap
import os

import xxhash

from tft.errors import UsageError
from tft.protocol.messages import Position

SLOT_BYTES = 256 * 1024
"""For one capture with its header. A CPU's RNG and a data position take 5 KB, each GPU a few bytes."""

_SLOTS = 4
"""Two captures (as the window closed, and before that) of the last two steps."""
_HEAD_BYTES = 4096
_SIZE = _HEAD_BYTES + _SLOTS * SLOT_BYTES

# the head of the page, in words of eight bytes
_POSITION, _MOVED, _TRAINING, _TAILED = 0, 1, 2, 3
# the header of a slot, in words of eight bytes
_TAG, _LENGTH, _DIGEST, _HEADER_WORDS = 0, 1, 2, 3

CAPTURE_LIMIT = SLOT_BYTES - 8 * _HEADER_WORDS
"""Bytes of the longest private state."""


class Page:
    """
    One rank's page. One process writes at a time; any number may read.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        """The file descriptor to be inherited by the rank's processes."""
        self._memory = mmap.mmap(fd, _SIZE)
        self._bytes = memoryview(self._memory)
        # native formats: those are stored as one word, the standard ones byte by byte
        self._words = self._bytes.cast("Q")
        self._stamps = self._bytes.cast("d")

    @classmethod
    def create(cls) -> "Page":
        """
        A new page: step 0, window closed, not training, nothing captured.
        """
        fd = os.memfd_create("tft-page")
        os.ftruncate(fd, _SIZE)  # sparse: memory is taken when a slot is first written
        return cls(fd)

    @classmethod
    def open(cls, fd: int) -> "Page":
        """
        The page behind an inherited file descriptor. Raises `UsageError` if it is none.
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
                f"the page of this rank should be file descriptor {fd}, which is something else: "
                f"{size} bytes instead of {_SIZE}"
            )
        return cls(fd)

    def close(self) -> None:
        """
        Give the memory and the descriptor back. What was written stays for the others who have
        the page open.
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
        `step` has ended, and what is called after it is over or (`after`) not; or its window has closed and its
        `tail` has begun; or (`window`) the window of `step` + 1 has opened, at `stamp`.
        """
        self._words[_POSITION] = 8 * step + 4 * after + 2 * tail + window
        self._stamps[_MOVED] = stamp

    def end(self, step: int, *, after: bool) -> None:
        """
        `step` has ended, and what is called after it is over or (`after`) not. When its window closed counts as the
        moment of its last move.
        """
        self._words[_POSITION] = 8 * step + 4 * after

    def train(self, inside: bool, stamp: float) -> None:
        """
        The user's `train` was entered or left, at `stamp`.
        """
        self._stamps[_MOVED] = stamp
        self._words[_TRAINING] = inside

    def has_tails(self) -> None:
        """
        The loop says where its steps end: from now on, and for the processes after this one, a step does not end with its
        window.
        """
        self._words[_TAILED] = 1

    def capture(self, step: int, private: bytes, closed: bool) -> None:
        """
        Keep the private state of `step`, taken as its update window closed, or (not `closed`)
        before that. About 1 us for 5 KB.

        Raises `UsageError` for a state longer than `CAPTURE_LIMIT`.
        """
        length = len(private)
        if length > CAPTURE_LIMIT:
            raise UsageError(
                f"the private state of a rank (RNG, data position) has {length} bytes; at most "
                f"{CAPTURE_LIMIT} can be kept at every step: give `data` a smaller state_dict()"
            )
        tag = 2 * step + closed
        start = _HEAD_BYTES + tag % _SLOTS * SLOT_BYTES
        content = start + 8 * _HEADER_WORDS
        self._bytes[content : content + length] = private
        header, words = start // 8, self._words
        # seeded with the tag: an old digest never fits a new header, whatever the content
        words[header + _DIGEST] = xxhash.xxh3_64_intdigest(private, tag)
        words[header + _LENGTH] = length
        words[header + _TAG] = tag

    def forget_after(self, step: int) -> None:
        """
        What was captured of later steps is of a way that nobody goes on: when they are trained anew,
        without a batch that was left out, it is not what they lead to.
        """
        for slot in range(_SLOTS):
            header = (_HEAD_BYTES + slot * SLOT_BYTES) // 8
            if self._words[header + _TAG] // 2 > step:
                self._words[header + _LENGTH] = CAPTURE_LIMIT + 1  # as no capture is

    # ------------------------------------------------------------ anybody reads

    def position(self) -> Position:
        """
        Where the training thread stands.
        """
        step, edges = divmod(self._words[_POSITION], 8)
        return Position(
            step=step, window=bool(edges & 1), tail=bool(edges & 2), after=bool(edges & 4)
        )

    def tailed(self) -> bool:
        """
        Whether steps end behind their windows, as some process of this rank has said.
        """
        return bool(self._words[_TAILED])

    def training(self) -> bool:
        """
        Whether it is inside the user's `train`.
        """
        return bool(self._words[_TRAINING])

    def moved(self) -> float:
        """
        When it last moved (CLOCK_MONOTONIC); 0.0 if it never did.
        """
        return self._stamps[_MOVED]

    def private(self) -> dict[int, bytes]:
        """
        The captures that are whole, by step. Of one step, the one taken as its window closed
        goes before the earlier one.
        """
        captures: dict[int, bytes] = {}
        for tag, private in sorted(self._whole()):
            captures[tag // 2] = private  # of one step the closed one sorts last, and stays
        return captures

    def _whole(self) -> list[tuple[int, bytes]]:
        whole = []
        for slot in range(_SLOTS):
            start = _HEAD_BYTES + slot * SLOT_BYTES
            tag, length, digest = self._words[start // 8 : start // 8 + _HEADER_WORDS]
            if length > CAPTURE_LIMIT:
                continue
            content = start + 8 * _HEADER_WORDS
            private = bytes(self._bytes[content : content + length])
            if xxhash.xxh3_64_intdigest(private, tag) == digest:
                whole.append((tag, private))
        return whole
