"""
Count the steps in which ranks were not protected against the loss of their node.
"""

from tft.protocol.messages import Beat


class Protection:
    """
    Counts from the beats how many update windows have opened before another node had the
    rank-local state of the step.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int], int] = {}

    def heard(self, beat: Beat) -> None:
        """
        Take the counts in a beat. The count of a rank only grows, unless its node has got another
        agent and with it new pages. Then the rank begins again from 0, and the old count is lost.
        """
        for pulse in beat.pulses:
            self._counts[beat.node, pulse.rank] = pulse.unprotected

    def steps(self) -> int:
        """
        Return the number of such steps of the rank that has the most. A rank that has moved to
        another node has them on both.
        """
        by_rank: dict[int, int] = {}
        for (_, rank), count in self._counts.items():
            by_rank[rank] = by_rank.get(rank, 0) + count
        return max(by_rank.values(), default=0)
