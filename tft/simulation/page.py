"""
The shared memory of a simulated rank, which stays on the node when the process of the rank ends.
"""

from tft.protocol.messages import Position


class Page:
    """
    The position and the data positions of a rank. They stay on its node when the process ends.
    """

    __slots__ = ("_closed", "_open", "moved", "position", "training")

    def __init__(self) -> None:
        self.position = Position(step=0, window=False)
        self.training = False
        self.moved = 0.0
        self._closed: list[tuple[int, int]] = []
        self._open: list[tuple[int, int]] = []

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

    def forget_after(self, step: int) -> None:
        """
        Drop the captures of steps later than `step`. The job goes back to `step`, so they must not
        be used.
        """
        for slots in (self._closed, self._open):
            slots[:] = [(s, d) for s, d in slots if s <= step]

    def local_states(self) -> dict[int, int]:
        """
        Return the captured data positions, by step. If a step was captured before and after its
        update window, return the later capture.
        """
        return dict([*self._open, *self._closed])
