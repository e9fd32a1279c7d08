"""
A histogram in the form in which Prometheus reads it: for each bound in a list, the number of values
up to this bound.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """
    Counts values by their size. `bounds` are the upper bounds of the buckets, in ascending order.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """
        Count a value. `times` says how often it was measured.
        """
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def read(self) -> "Counted":
        """
        Return the counts up to now.
        """
        bounds = [*map(str, self._bounds), "+Inf"]
        return tuple(zip(bounds, accumulate(self._counts), strict=True)), self._sum


Counted = tuple[tuple[tuple[str, int], ...], float]
"""The content of a histogram: for each bucket its upper bound, as text, and the number of values up
to this bound. The second part is the sum of all values."""
