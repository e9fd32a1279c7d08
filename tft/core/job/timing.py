"""
Own the time of the last event, and the deadline of the present state of a job.
"""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Timing:
    """
    The present time, the leader and the start of its leadership, and the deadline of the present
    state. Times are in seconds, by the clock of the controller.
    """

    now: float
    led: float
    """The time at which the present leader began. Time limits are counted from this time on,
    because no answer could arrive without a leader."""
    epoch: int = 0
    """The epoch of the leader."""
    deadline: float | None = None
    """The time at which the present state ends in any case. It is used for a pause, for the wait
    for advice of plugins, and for the exit of the ranks. None: the state has no such limit."""
    allowed: float = 0.0
    """The number of seconds that `stay` was called with for the present deadline."""

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
        Restart the time limit of the present state under a new leader.
        """
        if self.deadline is not None:
            self.deadline = at + self.allowed
        self.epoch, self.led = epoch, at
