"""
Count the steps in which ranks were not protected against the loss of their node. In such a step no
other node had the rank-local state (generators, data position) of the rank.
"""

from tft.protocol.messages import Beat


class Protection:
    """
    Adds up the counts that heartbeats (`Beat`) carry. A rank counts each update window that it
    opens before another node has the rank-local state of the step.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int], int] = {}

    def heard(self, beat: Beat) -> None:
        """
        Record the counts in a heartbeat. The count of a rank only grows. The exception is a new
        agent on the node: it creates new shared memory, so the rank counts again from 0 and the old
        count is lost.
        """
        for pulse in beat.pulses:
            self._counts[beat.node, pulse.rank] = pulse.unprotected

    def steps(self) -> int:
        """
        Return the highest number of unprotected steps that any rank has. For a rank that has moved
        to another node, the counts of all its nodes are added.
        """
        by_rank: dict[int, int] = {}
        for (_, rank), count in self._counts.items():
            by_rank[rank] = by_rank.get(rank, 0) + count
        return max(by_rank.values(), default=0)
