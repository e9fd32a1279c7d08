"""
Define the present time (the time of the event that is being handled), and the deadline of the
present state of a job.
"""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Timing:
    """
    The present time, the number of the controller that leads the job, the time at which this
    controller began to lead, and the deadline of the present state of the job. Times are in
    seconds, by the clock of the controller.
    """

    now: float
    led: float
    """The time at which the present leader (the controller that decides) began. No time limit is
    counted from an earlier time, because no answer could arrive without a leader."""
    epoch: int = 0
    """The epoch (the number) of the controller that leads the job."""
    deadline: float | None = None
    """The time until which the present state may last, for example a pause, the wait for advice of
    plugins, the wait before another attempt, or the exit of the ranks. None: there is no limit."""
    allowed: float = 0.0
    """The number of seconds that was passed to `stay` when the present deadline was set."""

    def stay(self, seconds: float) -> None:
        """
        Set the deadline of the present state to `seconds` seconds from now.
        """
        self.deadline, self.allowed = self.now + seconds, seconds

    def shorten(self, seconds: float) -> None:
        """
        Set the deadline of the present state to `seconds` seconds from now, unless it is earlier
        already.
        """
        if self.deadline is None or self.now + seconds < self.deadline:
            self.stay(seconds)

    @property
    def expired(self) -> bool:
        """
        True if the deadline of the present state has passed.
        """
        return self.deadline is not None and self.deadline <= self.now

    def lead(self, epoch: int, at: float) -> None:
        """
        Record that a controller with the number `epoch` leads the job since the time `at`. Restart
        the time limit of the present state of the job.
        """
        if self.deadline is not None:
            self.deadline = at + self.allowed
        self.epoch, self.led = epoch, at
