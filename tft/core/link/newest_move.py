"""
Keep the time of the newest progress of any rank. The code is pure.
"""

NEVER = float("-inf")


class NewestMove:
    """
    The newest progress of any rank of a job.

    A time may be in the future, because a rank has announced that it will make no progress until
    then. If the announced phase ends early, the rank reports an earlier time again. So this object
    keeps one time for each node, and not only the latest of all.
    """

    def __init__(self) -> None:
        self._floor = NEVER
        self._nodes: dict[int, float] = {}
        self._newest: tuple[float, int | None] = NEVER, None

    @property
    def at(self) -> float:
        """
        The time of the newest progress. Minus infinity if there was none.
        """
        return max(self._floor, self._newest[0])

    def not_before(self, at: float) -> None:
        """
        Count `at` as a time of progress: from now on, the newest progress is not earlier than `at`.
        """
        self._floor = max(self._floor, at)

    def forget(self) -> None:
        """
        Forget the times of all nodes.
        """
        self._nodes.clear()
        self._newest = NEVER, None

    def leave(self, node: int) -> None:
        """
        Forget the time of a node that is lost.
        """
        if node in self._nodes:
            self.heard(node, NEVER)

    def heard(self, node: int, at: float) -> None:
        """
        Record the time of the newest progress of a node's ranks: minus infinity if none trains.
        """
        self._nodes[node] = at
        newest, of = self._newest
        if at >= newest:
            self._newest = at, node
        elif of == node:  # the node with the newest time now reports an older time
            self._newest = max((moved, each) for each, moved in self._nodes.items())
