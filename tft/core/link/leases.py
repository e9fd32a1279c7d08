"""
Decide which controller leads. An epoch is the number of a leader: when the leader is silent,
another controller claims the next epoch.

Two controllers may claim the same epoch, but a claim is an entry in the shared log of events, and
the log accepts each epoch only once and no older epoch after it. A leader that was only
disconnected may still send orders, but ranks and agents obey only the newest epoch that they know.
"""


class Lease:
    """
    Tells one standby controller when to claim the leadership. The code is pure: the caller passes
    in messages and the time.
    """

    def __init__(self, *, patience: float, at: float) -> None:
        """
        `patience` is the number of seconds without a `Lead` after which the leader counts as gone.
        """
        self._patience = patience
        self._heard = at
        self._epoch = 0

    def heard(self, epoch: int, at: float) -> None:
        """
        Record that at time `at` a controller led in `epoch` or claimed it. A message of an older
        epoch than the newest known one is ignored.
        """
        if epoch >= self._epoch:
            self._epoch, self._heard = epoch, max(at, self._heard)

    def next_deadline(self) -> float:
        """
        Return the time at which to call `claim`, if no leader is heard before.
        """
        return self._heard + self._patience

    def claim(self, at: float) -> int | None:
        """
        Return the epoch that this controller should claim, or None if a leader was heard less than
        `patience` seconds before the time `at`.
        """
        return self._epoch + 1 if at >= self.next_deadline() else None
