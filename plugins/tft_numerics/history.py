"""
The last values of one number, and the limit above which a further value is a spike.
"""

from collections import deque

WINDOW = 100
"""How many of the last values count."""
WARM = 50
"""No value is a spike before there are so many others: the first steps of a training change
quickly."""
_RENEWED = 20
"""After so many values the median is computed anew, if none of them was far above it."""
_NORMAL = 1.4826
"""The standard deviation of a normal distribution, in median absolute deviations."""
_FLOOR = 0.05
"""The smallest deviation that is assumed, as a part of the median: a number that hardly varies has
spikes of a millionth."""


class History:
    """
    The last values of one number, each with its step.

    Ranks that have seen the same values judge alike, even if one of them has seen a step more and
    was brought back. So twice as many values are kept as count.
    """

    def __init__(self) -> None:
        self._values: deque[tuple[int, float]] = deque(maxlen=2 * WINDOW)
        self._fresh = 0
        """How many more values may be compared with `_ordinary`."""
        self._ordinary = 0.0
        """A value up to this is no spike, judged by the last values some steps ago."""

    def add(self, step: int, value: float) -> None:
        """
        Add a value of an accepted step.
        """
        self._values.append((step, value))

    def back_to(self, step: int) -> None:
        """
        Forget the values of `step` and of later steps, because these are computed again.
        """
        self._fresh = 0
        while self._values and self._values[-1][0] >= step:
            self._values.pop()

    def clear(self) -> None:
        """
        Forget all values.
        """
        self._fresh = 0
        self._values.clear()

    def limit(self, value: float, factor: float) -> float | None:
        """
        Return the limit that `value` exceeds, or None if it is no spike: it is `factor` deviations
        above the median, or there are too few other values to say so.
        """
        if len(self._values) < WARM:
            return None
        if self._fresh and value <= self._ordinary:  # in nearly all steps
            self._fresh -= 1
            return None
        known = sorted([each for _, each in self._values][-WINDOW:])
        median = known[len(known) // 2]
        least = factor * _FLOOR * abs(median)
        self._fresh, self._ordinary = _RENEWED, median + least
        if value <= self._ordinary:
            return None
        away = sorted(abs(each - median) for each in known)
        limit = median + max(least, factor * _NORMAL * away[len(away) // 2])
        return limit if limit > median and value > limit else None
