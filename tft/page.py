"""
The page of a rank: shared memory that outlives the rank's process.

The training thread writes its position and its rank-local state to the page. A write is a few
stores to memory, without a lock or a system call. The agent has created the page and may read it at
any time, also after the training process was killed between two stores. The next process of the
rank inherits the page.

A word of eight bytes is stored atomically, so a reader sees either the old or the new value. A
capture (a copy of the rank-local state) is longer than a word. A capture is valid only if the
digest in its header matches its content. The header is written after the content.
"""

import mmap
import os
import threading
from collections.abc import Collection
from dataclasses import dataclass
from struct import Struct

import xxhash

from tft.errors import UsageError
from tft.protocol.messages import Position, SliceDigest, StepWork
from tft.robust_mutex import RobustMutex

SLOT_BYTES = 256 * 1024
"""The number of bytes for one captured rank-local state with its header. The state of the random
generators of the CPU and the data position take about 5 KB. The generators of each GPU take a few
bytes more."""

_SLOTS = 4
"""The number of slots for captures (copies of the rank-local state) of the last two steps. Each
step has two: one from before its update window closed, and one from when the window closed."""
_KEPT_SLOTS = 5
"""The number of slots for captures that are kept longer. The adaptor keeps two or three copies of
the rest of the state (hook `tft_backup`). For each of these copies, the page keeps the capture of
the same step. Two more slots are needed, because another rank may keep copies of other steps than
this rank."""
_ALL_SLOTS = _SLOTS + _KEPT_SLOTS
HEAD_BYTES = 16384
_SIZE = HEAD_BYTES + _ALL_SLOTS * SLOT_BYTES

# the indexes of the fields at the beginning of the page, in words of eight bytes
_POSITION, _MOVED, _TRAINING, _TAILED, _KEPT, _POSTED = 0, 1, 2, 3, 4, 5
_CAPTURED, _ROLLED_BACK, _ELSEWHERE, _UNPROTECTED, _CHANGES, _STEADINESS = 6, 7, 8, 9, 10, 11
# the index of the word that holds 0, or 1 plus the number of the incarnation whose script has ended
_SCRIPT_ENDED = 16
# the ring buffer of the times of the last steps: the index of the word that counts its entries, the
# index of its first word, the number of its entries, and the number of words in an entry
_WORKED, _WORK_RING, _WORK_ENTRIES, _WORK_WORDS = 17, 32, 64, 6
# the offset in bytes of the mutex that the training thread holds as long as it lives
_ALIVE = 8 * 432
# how often the training thread tries to take this mutex, and the seconds between two attempts
_ATTEMPTS, _BETWEEN = 200, 0.005
_WORK_REPEATED = 32
"""The highest number of entries that one call of `work` returns. The call returns the newest
entries, and fewer than the ring buffer has (`_WORK_ENTRIES`). So the rank hardly ever overwrites an
entry while it is read."""
# the ring buffer of slice digests on the page: the index of its first word, the number of its
# entries, and the number of words in an entry
RING, _ENTRIES, ENTRY_WORDS = 512, 192, 8
_STAMP, _ATTEMPT, _STEP, _SLICE, _SHARD, _CONTENT, _CHECK = 0, 1, 2, 3, 4, 5, 6
_CONTENTS = Struct("@5Q")
"""The words of an entry from `_ATTEMPT` to `_CONTENT`, which are written at once."""
_REPEATED = 64
"""The highest number of slice digests that one call of `digests` returns. The call returns the
newest digests."""
_UNKNOWN, _STEADY, _VARYING = 0, 1, 2
"""The values of the field `_STEADINESS`, which says whether the rank-local state has ever changed
between the first capture of a step and the update window of the step. `_UNKNOWN`: no update window
has opened yet. `_STEADY`: the state has never changed there. `_VARYING`: the state has changed
there in at least one step."""
_LATELY = 20
"""The number of steps for which a call of `changes_late` stays in effect. The number is more than
one, because a script may change the rank-local state in some steps only. For example, some scripts
evaluate the model in every tenth step."""
# the indexes of the fields in the header of a capture, in words of eight bytes
_TAG, _LENGTH, _DIGEST, _HEADER_WORDS = 0, 1, 2, 3

_LOW_HALF = 2**32 - 1

CAPTURE_LIMIT = SLOT_BYTES - 8 * _HEADER_WORDS
"""The largest size in bytes of a rank-local state that fits into a slot for a capture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """
    All valid captures (copies of the rank-local state) on the page of a rank.
    """

    attempt: tuple[int, int]
    """The numbers of the incident and the round of the last rollback, or (0, 0) before the first
    rollback."""
    changes: bool
    """True if, in one of the last steps, the rank-local state still changed after the all-reduces
    of the step (see `changes_late`)."""
    steady: bool
    """True if the rank has opened an update window, and if the rank-local state has never changed
    between the first capture of a step and the update window of that step."""
    position: Position
    """The position of the rank, read just before the captures."""
    local_states: dict[tuple[int, bool], bytes]
    """The captures of the rank-local state. The key is the step, and whether the capture was made
    when the update window of the step closed."""


class Page:
    """
    The page of one rank. Only one process of the rank writes to the page at a time. Any number of
    processes may read the page.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        """The file descriptor that the rank's processes inherit."""
        self._memory = mmap.mmap(fd, _SIZE)
        self._bytes = memoryview(self._memory)
        # use the native format "Q": with it, Python writes a word in one store of 8 bytes, which no
        # reader sees half done. With a standard format such as "<Q" it would write byte by byte
        self._words = self._bytes.cast("Q")
        self._stamps = self._bytes.cast("d")
        self._alive = RobustMutex(self._memory, _ALIVE)

    @classmethod
    def create(cls) -> "Page":
        """
        Create a page for a new rank: step 0, outside an update window and outside the user's
        function `train`, without captures.
        """
        fd = os.memfd_create("tft-page")
        os.ftruncate(fd, _SIZE)  # the file is sparse: memory is used only when a capture is written
        page = cls(fd)
        page._alive.create()
        return page

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
                f"the memory that this rank shares with its agent should be file descriptor {fd}, "
                f"which cannot be used ({error.strerror}): start the script without a program in "
                "between that closes inherited files"
            ) from None
        if size != _SIZE:
            raise UsageError(
                f"file descriptor {fd} should be the memory that this rank shares with its agent, "
                f"but is something else: it has {size} bytes instead of {_SIZE}"
            )
        return cls(fd)

    def close(self) -> None:
        """
        Unmap the memory and close the descriptor. Other processes that have the page open still see
        its content.
        """
        self._alive.close()
        for view in (self._words, self._stamps, self._bytes):
            view.release()
        self._memory.close()
        os.close(self.fd)

    # ------------------------------------------------------------ the life of a training thread

    def live(self) -> bool:
        """
        Take the mutex by which the agent learns at once when the calling thread ends
        (`wait_for_death`). The training thread of a new process calls this. Return False if the
        agent itself held the mutex at each attempt. The agent then learns of the end of the thread
        a little later, in another way.
        """
        pause = threading.Event()
        # to see whether a thread lives, the agent holds the mutex for microseconds, or longer if
        # the machine is busy. So try again if the mutex is held
        for _ in range(_ATTEMPTS):
            if self._alive.hold():
                return True
            pause.wait(_BETWEEN)
        return False

    def is_alive(self) -> bool:
        """
        Return whether the thread that has called `live` still runs.
        """
        return self._alive.is_held()

    def wait_for_death(self) -> bool:
        """
        Wait until the thread that has called `live` has ended. Return False if no running thread
        has called `live`.
        """
        return self._alive.wait()

    # ------------------------------------------------------------ the training thread writes

    def move(
        self, step: int, window: bool, stamp: float, *, tail: bool = False, after: bool = False
    ) -> None:
        """
        Write the position that the training thread reached at the time `stamp` (CLOCK_MONOTONIC,
        seconds).

        If no flag is True, `step` has ended, and the user's functions that are called after the
        step (such as an evaluation) have ended too. `after` means that the step has ended, but
        these functions must still be called. `tail` means that the window of `step` has closed, and
        the tail of `step` has begun. `window` means that the window of `step` + 1 has opened.
        """
        self._words[_POSITION] = 8 * step + 4 * after + 2 * tail + window
        self._stamps[_MOVED] = stamp

    def end(self, step: int, *, after: bool) -> None:
        """
        Write that `step` has ended. `after` is True if functions of the user, such as an
        evaluation, must still be called after the step.

        The time of the last progress is not changed: it stays the time when the update window of
        `step` closed.
        """
        self._words[_POSITION] = 8 * step + 4 * after

    def train(self, inside: bool, stamp: float) -> None:
        """
        Write that the training thread has entered (`inside`) or left the user's function `train`,
        at the time `stamp` (CLOCK_MONOTONIC, seconds). A `stamp` in the future announces that the
        training thread will show no progress before that time.
        """
        self._stamps[_MOVED] = stamp
        self._words[_TRAINING] = inside

    def has_tails(self) -> None:
        """
        Record that the training loop marks the end of each of its steps.

        From now on, also in later processes of this rank, a step does not end when its update
        window closes, but when the loop marks the end of the step.
        """
        self._words[_TAILED] = 1

    def end_script(self, incarnation: int) -> None:
        """
        Write that the script of this incarnation has ended without an error. The functions that it
        had registered with `atexit` have ended too.
        """
        self._words[_SCRIPT_ENDED] = incarnation + 1

    def capture(self, step: int, local_state: bytes, closed: bool) -> None:
        """
        Store the rank-local state of `step` in the page. Takes about 1 us for 5 KB.

        `closed` is True if the state was captured when the update window of `step` closed, and
        False if it was captured earlier in the step. Raises `UsageError` for a state longer than
        `CAPTURE_LIMIT`.
        """
        if len(local_state) > CAPTURE_LIMIT:
            raise UsageError(
                f"the rank-local state of a rank (RNG, data position) has {len(local_state)} "
                f"bytes; at most {CAPTURE_LIMIT} can be kept at every step: let the method "
                "state_dict() of the object `data`, which the script gives to session.adopt, "
                "return less"
            )
        tag = 2 * step + closed
        self._write(tag % _SLOTS, tag, local_state)

    def changes_late(self, step: int) -> None:
        """
        Record that the rank-local state has changed late in `step`: a capture after the all-reduces
        of the step differs from the capture before them.
        """
        self._words[_CHANGES] = step

    def varies(self) -> None:
        """
        Record that the rank-local state has changed within a step, between two captures that were
        both made before the update window. From now on, a capture that was sent to another node
        counts as final only after the update window of its step has opened.
        """
        self._words[_STEADINESS] = _VARYING

    def opens(self) -> bool:
        """
        Record that an update window opens. Count the window as unprotected if no other node has a
        usable capture of the step at this moment.

        Return False if the rank-local state is known not to change between the first capture of a
        step and the update window. The other node can then use the captures that it has. Otherwise
        return True: the other node can use the capture of this step only when it knows that the
        window has opened. The caller must then call `move`, and let the agent send the captures to
        the other node once more.
        """
        words = self._words
        steady = words[_STEADINESS] == _STEADY
        if words[_ELSEWHERE] < words[_CAPTURED] or not steady:
            words[_UNPROTECTED] += 1
        if steady:
            return False
        if words[_STEADINESS] == _UNKNOWN:
            words[_STEADINESS] = _STEADY
        words[_CAPTURED] += 1
        return True

    def keep(self, step: int, local_state: bytes, kept: Collection[int]) -> None:
        """
        Keep the rank-local state of the end of `step` beyond the next two steps, because this rank
        also keeps a copy of the rest of its state at the end of `step`.

        `kept` are the other steps of which this rank keeps such a copy. The captures of these steps
        are not overwritten.
        """
        tag = 2 * step + 1
        tags = {slot: self._tag(slot) for slot in range(_SLOTS, _ALL_SLOTS)}
        old = {slot: old for slot, old in tags.items() if old // 2 not in kept}
        same = [slot for slot, old in tags.items() if old == tag]
        slot = same[0] if same else min(old or tags, key=tags.__getitem__)
        self._write(slot, tag, local_state)

    def _write(self, slot: int, tag: int, local_state: bytes) -> None:
        length = len(local_state)
        start = HEAD_BYTES + slot * SLOT_BYTES
        content = start + 8 * _HEADER_WORDS
        self._bytes[content : content + length] = local_state
        header, words = start // 8, self._words
        # the tag of the capture (2 * step, plus 1 for a closed window) is the seed of the digest:
        # so the header of a capture never matches the content of another step
        words[header + _DIGEST] = xxhash.xxh3_64_intdigest(local_state, tag)
        words[header + _LENGTH] = length
        words[header + _TAG] = tag
        words[_CAPTURED] += 1

    def post(
        self, attempt: tuple[int, int], step: int, number: int, of: int, shard: int, digest: int
    ) -> None:
        """
        Write the digest of a slice (see `SliceDigest`) to the ring buffer on the page, from which
        the agent sends it with its next heartbeats. `attempt` has the numbers of the incident and
        the round. Any thread of the rank's process may call this, but only one thread at a time.
        """
        # take plain values instead of a `SliceDigest`: it would take as long to make one as to write
        # the values, and this method is called in each step
        words, count = self._words, self._words[_POSTED]
        start = RING + count % _ENTRIES * ENTRY_WORDS
        incident, round_ = attempt
        content = _CONTENTS.pack(
            _joined(incident, round_), step, _joined(number + 1, of), shard, digest
        )
        first = 8 * (start + _ATTEMPT)
        words[start + _STAMP] = 0  # the stamp 0 makes readers skip the entry while it is written
        self._bytes[first : first + len(content)] = content
        words[start + _CHECK] = _check(content, count)
        words[start + _STAMP] = count + 1
        words[_POSTED] = count + 1

    def post_work(
        self, step: int, input_: float, compute: float, update: float, waited: float
    ) -> None:
        """
        Write the times of a step (`StepWork`) to the ring buffer on the page, from which the agent
        sends them with its next heartbeat.
        """
        words, number = self._words, self._words[_WORKED]
        start = _WORK_RING + number % _WORK_ENTRIES * _WORK_WORDS
        words[start] = 0  # the stamp 0 makes readers skip the entry while it is written
        words[start + 1] = step
        stamps = self._stamps
        stamps[start + 2] = input_
        stamps[start + 3] = compute
        stamps[start + 4] = update
        stamps[start + 5] = waited
        words[start] = number + 1
        words[_WORKED] = number + 1

    def keeps(self, step: int) -> None:
        """
        Write that `step` is the newest step of which the rank keeps a complete copy of its state.
        """
        self._words[_KEPT] = step

    def forget_after(self, step: int, attempt: tuple[int, int]) -> None:
        """
        Invalidate the captures of steps later than `step`, because all ranks go back to the end of
        `step`. `attempt` has the numbers of the incident and the round of this rollback.

        The job has given up the later steps. When these steps are trained again, their rank-local
        state may differ, for example because a batch is skipped.
        """
        for slot in range(_ALL_SLOTS):
            if self._tag(slot) // 2 > step:
                header = (HEAD_BYTES + slot * SLOT_BYTES) // 8
                # a length over the limit makes the capture invalid: readers skip such a capture
                self._words[header + _LENGTH] = CAPTURE_LIMIT + 1
        if self._words[_KEPT] > step:
            self._words[_KEPT] = 0
        # write the attempt (incident and round) after the captures were invalidated: so a reader
        # that has seen captures of later steps still finds the earlier attempt, and does not take
        # these captures for captures of the new attempt
        self._words[_ROLLED_BACK] = _joined(*attempt)
        self._words[_CAPTURED] += 1

    def is_elsewhere(self, number: int) -> None:
        """
        Record that another node has received all captures that were on this page after `number`
        changes (`captured` counts the changes). The agent calls this.
        """
        self._words[_ELSEWHERE] = number

    def _tag(self, slot: int) -> int:
        """
        Return the tag of the capture in a slot of the page (2 * step, plus 1 for a closed window).
        Return a negative number if the slot has no valid capture.
        """
        header = (HEAD_BYTES + slot * SLOT_BYTES) // 8
        tag, length = self._words[header + _TAG], self._words[header + _LENGTH]
        return tag if length <= CAPTURE_LIMIT else -1

    # ------------------------------------------------------------ methods for all readers

    def position(self) -> Position:
        """
        Return the position of the training thread (see `move`).
        """
        step, edges = divmod(self._words[_POSITION], 8)
        return Position(
            step=step, window=bool(edges & 1), tail=bool(edges & 2), after=bool(edges & 4)
        )

    def tailed(self) -> bool:
        """
        Return whether `has_tails` was called for this rank. If so, a step of this rank ends later
        than its update window.
        """
        return bool(self._words[_TAILED])

    def training(self) -> bool:
        """
        Return whether the training thread is inside the user's function `train`.
        """
        return bool(self._words[_TRAINING])

    def script_ended(self, incarnation: int) -> bool:
        """
        Return whether `end_script` was called for this incarnation.
        """
        return self._words[_SCRIPT_ENDED] == incarnation + 1

    def moved(self) -> float:
        """
        Return the last time that `move` or `train` wrote to this page (CLOCK_MONOTONIC, seconds).
        Return 0.0 if neither was called. The time is in the future if the training thread has
        announced a long phase.
        """
        return self._stamps[_MOVED]

    def kept(self) -> int:
        """
        Return the newest step of which the rank keeps a complete copy of its state, or 0 if the
        rank keeps no copy.
        """
        return self._words[_KEPT]

    def captured(self) -> int:
        """
        Return how often the captures on this page were changed so far.
        """
        return self._words[_CAPTURED]

    def unprotected(self) -> int:
        """
        Return how many update windows have opened while no other node had a usable capture of the
        step.
        """
        return self._words[_UNPROTECTED]

    def posted(self) -> int:
        """
        Return how many slice digests were written to this page so far.
        """
        return self._words[_POSTED]

    def worked(self) -> int:
        """
        Return the times of how many steps were written to this page so far.
        """
        return self._words[_WORKED]

    def work(self, since: int) -> tuple[StepWork, ...]:
        """
        Return the times of the last steps on this page, at most `_WORK_REPEATED`, oldest first.
        Leave out the first `since` steps that were ever written.
        """
        worked = self._words[_WORKED]
        found = (self._work_entry(n) for n in range(max(since, worked - _WORK_REPEATED), worked))
        return tuple(work for work in found if work is not None)

    def _work_entry(self, number: int) -> StepWork | None:
        start = _WORK_RING + number % _WORK_ENTRIES * _WORK_WORDS
        end = start + _WORK_WORDS
        times = self._stamps[start + 2 : end].tolist()
        work = StepWork(
            step=self._words[start + 1],
            input=times[0],
            compute=times[1],
            update=times[2],
            waited=times[3],
        )
        # compare the stamp last: it differs if the rank has begun to overwrite the entry
        return work if self._words[start] == number + 1 else None

    def digests(self, since: int = 0) -> tuple[SliceDigest, ...]:
        """
        Return the newest slice digests on this page, at most `_REPEATED`, in the order in which
        `post` wrote them. Leave out the first `since` digests that were ever written.
        """
        posted = self._words[_POSTED]
        found = (self._entry(n) for n in range(max(since, posted - _REPEATED), posted))
        return tuple(digest for digest in found if digest is not None)

    def _entry(self, number: int) -> SliceDigest | None:
        start = RING + number % _ENTRIES * ENTRY_WORDS
        entry = self._words[start : start + ENTRY_WORDS].tolist()
        check = _check(self._words[start + _ATTEMPT : start + _CHECK], number)
        if entry[_STAMP] != number + 1 or entry[_CHECK] != check:
            # the entry cannot be read: its writer is overwriting it, or has not completed it
            return None
        (incident, round_), (number_, of) = _split(entry[_ATTEMPT]), _split(entry[_SLICE])
        return SliceDigest(
            incident=incident,
            round=round_,
            step=entry[_STEP],
            number=number_ - 1,
            of=of,
            shard=entry[_SHARD],
            digest=entry[_CONTENT],
        )

    def local_states(self) -> dict[int, bytes]:
        """
        Return the valid captures, by step. If a step has two captures, return the capture that was
        made when its update window closed.
        """
        captures: dict[int, bytes] = {}
        for tag, _, local_state in sorted(self._whole()):
            captures[tag // 2] = (
                # the captures are sorted by their tags (2 * step, plus 1 for a closed window): so
                # the capture of the closed window overwrites the earlier capture of the same step
                local_state
            )
        return captures

    def captures(self) -> Captured:
        """
        Return all valid captures (copies of the rank-local state) on the page.
        """
        words = self._words
        while True:
            attempt, steadiness, position = words[_ROLLED_BACK], words[_STEADINESS], self.position()
            found = {
                (tag // 2, bool(tag % 2)): local_state
                for tag, _, local_state in sorted(self._whole())
            }
            if words[_ROLLED_BACK] == attempt:
                return Captured(
                    attempt=_split(attempt),
                    changes=words[_CHANGES] > 0 and position.step < words[_CHANGES] + _LATELY,
                    steady=steadiness == _STEADY,
                    position=position,
                    local_states=found,
                )

    def _whole(self) -> list[tuple[int, int, bytes]]:
        """
        Return a triple for each valid capture on this page: its tag, the negative number of its
        slot, and its content.

        Two slots may have the same tag: one slot for the last two steps (a low slot number), and
        one slot for captures that are kept longer. The capture in the first of these two may be
        newer, because it may have been made again after a rollback. In a sorted list of the
        triples, the capture of the lower slot comes last, because the slot numbers are negative. So
        callers that sort the triples use the newer capture.
        """
        whole = []
        for slot in range(_ALL_SLOTS):
            start = HEAD_BYTES + slot * SLOT_BYTES
            tag, length, digest = self._words[start // 8 : start // 8 + _HEADER_WORDS]
            if length > CAPTURE_LIMIT:
                continue
            content = start + 8 * _HEADER_WORDS
            local_state = bytes(self._bytes[content : content + length])
            if xxhash.xxh3_64_intdigest(local_state, tag) == digest:
                whole.append((tag, -slot, local_state))
        return whole


def _joined(high: int, low: int) -> int:
    """
    Return two numbers of 32 bits as one word of 64 bits.
    """
    return high << 32 | low


def _split(word: int) -> tuple[int, int]:
    """
    Return the two numbers in a word that `_joined` has made.
    """
    return word >> 32, word & _LOW_HALF


def _check(words: memoryview | bytes, number: int) -> int:
    """
    Return the check word of an entry in the ring buffer of slice digests: a digest of the entry's
    content (`words`) and of the entry's number.
    """
    return xxhash.xxh3_64_intdigest(words, number)
