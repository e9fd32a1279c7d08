"""
Who leads: a controller that stands by claims the next epoch when the leader has fallen silent.

Two may claim at once, and a leader that was only cut off may still talk. Neither does harm: a claim
is an entry in the shared story, which takes each epoch once and nothing from an older one, and
ranks and agents obey the newest epoch they have heard of.
"""


class Lease:
    """
    One controller that stands by. Pure: it is told what is heard and when time has passed.
    """

    def __init__(self, *, patience: float, at: float) -> None:
        """
        `patience` is how many seconds without a `Lead` are taken for the leader's end.
        """
        self._patience = patience
        self._heard = at
        self._epoch = 0

    def heard(self, epoch: int, at: float) -> None:
        """
        Somebody says that it leads in this epoch, or is found to have claimed it. One that leads in
        an older epoch than another has claimed is no leader.
        """
        if epoch >= self._epoch:
            self._epoch, self._heard = epoch, max(at, self._heard)

    def next_deadline(self) -> float:
        """
        When `claim` is to be asked.
        """
        return self._heard + self._patience

    def claim(self, at: float) -> int | None:
        """
        The epoch to claim, when nobody leads any more.
        """
        return self._epoch + 1 if at >= self.next_deadline() else None
