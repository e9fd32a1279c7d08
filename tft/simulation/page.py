"""
The shared memory of a simulated rank, which stays on the node when the process of the rank ends.
"""

from collections import deque
from collections.abc import Callable, Collection

from tft.protocol.messages import Position, SliceDigest

REPEATED = 16
"""The number of slice digests that the page holds. Each heartbeat sends all of them again. A real
page holds more digests."""

_KEPT = 4
"""The least number of steps whose data positions `Page.keep` keeps. A rank that keeps more copies of
its state than this has one position for each copy. A real rank keeps two copies."""


class Page:
    """
    The page of one rank, which stays on the node when the process ends. It holds the position of
    the training thread, the data positions (numbers of batches drawn) that the rank has captured,
    and the newest digests of the rank's state.
    """

    __slots__ = (
        "_closed", "_kept", "_open", "_ring", "attempt", "captured", "digests", "kept", "moved",
        "position", "training",
    )  # fmt: skip

    def __init__(self, ring: Callable[[], None]) -> None:
        """
        Create an empty page: the memory that a simulated rank shares with the agent of its node.
        `ring` is called when the rank has written a new data position to the page. The agent must
        then send this position to another node.
        """
        self._ring = ring
        self.captured = 0
        """How often the captured data positions were changed so far. This number serves as their
        version."""
        self.attempt = (0, 0)
        """Incident and round of the last rollback."""
        self.position = Position(step=0, window=False)
        self.training = False
        self.moved = 0.0
        self._closed: list[tuple[int, int]] = []
        self._open: list[tuple[int, int]] = []
        self._kept: dict[int, int] = {}
        self.digests: deque[SliceDigest] = deque(maxlen=REPEATED)
        self.kept = 0
        """The step of the newest copy of its state that the rank keeps. 0 if the rank keeps no
        copy."""

    def move(self, position: Position, now: float) -> None:
        """
        Record the position of the training thread and the moment, by the node's clock.
        """
        self.position = position
        self.moved = now

    def capture(self, step: int, data: int, *, closed: bool) -> None:
        """
        Record the data position `data` of a step. `closed` is True if the update window of the step
        has closed. The page keeps the data positions of two steps whose window has closed, and
        those of two steps whose window had not closed when they were captured.
        """
        if closed:
            late = data != dict(self._open).get(step)
            self._put(self._closed, step, data)
            if late:
                self._ring()
        # store the position only once: the forward pass may have captured it already
        elif (step, data) not in self._open:
            self._put(self._open, step, data)
            self._ring()

    def _put(self, slots: list[tuple[int, int]], step: int, data: int) -> None:
        self.captured += 1
        slots[:] = [(s, d) for s, d in slots if s % 2 != step % 2] + [(step, data)]

    def keep(self, step: int, data: int, kept: Collection[int]) -> None:
        """
        Keep the data position `data` of a step for longer than `capture` does. When there is no
        room, drop the oldest position whose step is not in `kept` (the steps of which the rank has
        copies).
        """
        self.kept = step
        self.captured += 1
        self._kept[step] = data
        if len(self._kept) > max(_KEPT, len(kept)):
            del self._kept[min(set(self._kept).difference(kept), default=min(self._kept))]

    def forget_after(self, step: int, attempt: tuple[int, int]) -> None:
        """
        Drop the data positions of steps later than `step`, because the job goes back to `step`.
        `attempt` is the incident and the round in which the job goes back.
        """
        self.attempt = attempt
        self.captured += 1
        self.kept = min(self.kept, step)
        for slots in (self._closed, self._open):
            slots[:] = [(s, d) for s, d in slots if s <= step]
        self._kept = {s: d for s, d in self._kept.items() if s <= step}

    def captures(self) -> dict[tuple[int, bool], int]:
        """
        Return all captured data positions. A key is the number of a step, and True if the update
        window of the step had closed when the position was captured.
        """
        return {
            **{(step, False): data for step, data in self._open},
            **{(step, True): data for step, data in (*self._kept.items(), *self._closed)},
        }

    def local_states(self) -> dict[int, int]:
        """
        Return the captured data positions, by step. If a step was captured before and after its
        update window, return the later capture.
        """
        return dict([*self._open, *self._kept.items(), *self._closed])
