"""
The shared memory of a simulated rank, which stays on the node when the process of the rank ends.
"""

from collections import deque

from tft.protocol.messages import Position, SliceDigest

REPEATED = 16
"""The number of digests that each beat repeats, the newest ones. A real page has more of them."""


class Page:
    """
    The position, the data positions and the newest digests of a rank, which stay on its node when
    the process ends.
    """

    __slots__ = ("_closed", "_kept", "_open", "digests", "kept", "moved", "position", "training")

    def __init__(self) -> None:
        self.position = Position(step=0, window=False)
        self.training = False
        self.moved = 0.0
        self._closed: list[tuple[int, int]] = []
        self._open: list[tuple[int, int]] = []
        self._kept: list[tuple[int, int]] = []
        self.digests: deque[SliceDigest] = deque(maxlen=REPEATED)
        self.kept = 0
        """The step of the newest copy that the rank keeps. 0: none."""

    def move(self, position: Position, now: float) -> None:
        """
        Record the position of the training thread and the moment, by the node's clock.
        """
        self.position = position
        self.moved = now

    def capture(self, step: int, data: int, *, closed: bool) -> None:
        """
        Record the data position `data` of a step. `closed` is True if the update window of the step
        has closed. The page keeps two steps of each kind.
        """
        slots = self._closed if closed else self._open
        slots[:] = [(s, d) for s, d in slots if s % 2 != step % 2] + [(step, data)]

    def keep(self, step: int, data: int, steps: int) -> None:
        """
        Record that copies of the state are kept of `step` and the `steps` steps before it. Keep the
        data position `data` as long as the copy.
        """
        self.kept = step
        self._kept[:] = [(s, d) for s, d in self._kept if step - steps <= s < step] + [(step, data)]

    def forget_after(self, step: int) -> None:
        """
        Drop the captures of steps later than `step`. The job goes back to `step`, so they must not
        be used.
        """
        self.kept = min(self.kept, step)
        for slots in (self._closed, self._open, self._kept):
            slots[:] = [(s, d) for s, d in slots if s <= step]

    def local_states(self) -> dict[int, int]:
        """
        Return the captured data positions, by step. If a step was captured before and after its
        update window, return the later capture.
        """
        return dict([*self._kept, *self._open, *self._closed])
