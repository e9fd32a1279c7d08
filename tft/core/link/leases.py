"""
Decide which of several controllers leads a job. Each leader has a number, its epoch. When the
leader is silent, a standby controller claims the next epoch. Only the simulated cluster
(`tft.simulation`) has standby controllers.

Two controllers may claim the same epoch. But a claim is an entry in the story that all controllers
share. The story accepts each epoch only once, and no older epoch after it. A former leader that was
only disconnected may still send orders. Ranks and agents obey only the newest epoch that they know.
"""


class Lease:
    """
    Tells one standby controller when to claim the leadership. The code is pure: the caller says
    which leaders were heard, and passes in the time.
    """

    def __init__(self, *, patience: float, at: float) -> None:
        """
        Begin to watch for a leader. `patience` is the number of seconds after which a silent leader
        counts as gone. A leader announces itself by `Lead` messages. `at` is the present time.
        """
        self._patience = patience
        self._heard = at
        self._epoch = 0

    def heard(self, epoch: int, at: float) -> None:
        """
        Record that at time `at` a controller led in `epoch` or claimed this epoch. The call is
        ignored if a newer epoch is known already.
        """
        if epoch >= self._epoch:
            self._epoch, self._heard = epoch, max(at, self._heard)

    def next_deadline(self) -> float:
        """
        Return the time at which to call `claim`, if no leader is heard before that time.
        """
        return self._heard + self._patience

    def claim(self, at: float) -> int | None:
        """
        Return the epoch that this controller should claim, or None if a leader was heard less than
        `patience` seconds before the time `at`.
        """
        return self._epoch + 1 if at >= self.next_deadline() else None
