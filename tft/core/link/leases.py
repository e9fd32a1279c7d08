"""
Decide which controller leads: another controller claims the next epoch when the leader is silent.

Two controllers may claim the same epoch, and a leader that was only disconnected may still send
orders. Both are harmless: a claim is an entry in the shared log of events, which accepts each epoch
once and then no older epoch, and ranks and agents obey only the newest epoch that they know.
"""


class Lease:
    """
    The lease of one standby controller. The code is pure: the caller passes in messages and the
    time.
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
        Record that a controller leads in this epoch, or has claimed it. A `Lead` of an older epoch
        than the newest known one is ignored.
        """
        if epoch >= self._epoch:
            self._epoch, self._heard = epoch, max(at, self._heard)

    def next_deadline(self) -> float:
        """
        Return the time at which to call `claim`.
        """
        return self._heard + self._patience

    def claim(self, at: float) -> int | None:
        """
        Return the epoch that this controller should claim. None: a leader is still there.
        """
        return self._epoch + 1 if at >= self.next_deadline() else None
