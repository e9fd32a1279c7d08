"""
Own the time of the last event, and the deadline of the present state of a job.
"""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Timing:
    """
    The present time, the leader and the begin of its leadership, and the deadline of the present
    state. Times are in seconds, by the clock of the controller.
    """

    now: float
    led: float
    """The time at which the present leader began. Time limits count from then on, since without a
    leader no answer could arrive."""
    epoch: int = 0
    """The epoch of the leader."""
    deadline: float | None = None
    """The time at which the present state is left in any case: a pause, a consultation, the exit
    of the ranks. None: no such limit."""
    allowed: float = 0.0
    """The limit behind `deadline` in seconds, as `stay` set it."""

    def stay(self, seconds: float) -> None:
        """
        Set the deadline of the present state, in seconds from now.
        """
        self.deadline, self.allowed = self.now + seconds, seconds

    @property
    def expired(self) -> bool:
        """
        True if the deadline of the present state has passed.
        """
        return self.deadline is not None and self.deadline <= self.now

    def lead(self, epoch: int, at: float) -> None:
        """
        Begin the time limit of the state again under a new leader.
        """
        if self.deadline is not None:
            self.deadline = at + self.allowed
        self.epoch, self.led = epoch, at
