"""
The last values of one number, such as the loss, and the limit above which a new value is a spike (a
value far above the earlier ones).
"""

from collections import deque

WINDOW = 100
"""The number of last values from which median and deviation are computed."""
WARM = 50
"""The number of values that must be known before a new value can be a spike, because numbers change
quickly in the first steps of a training."""
_RENEWED = 20
"""The number of ordinary values after which the median is computed anew."""
_NORMAL = 1.4826
"""The standard deviation of a normal distribution, in median absolute deviations."""
_FLOOR = 0.05
"""The least deviation that is assumed, as a fraction of the median. Without it, a tiny change of a
number that hardly varies would be a spike."""


class History:
    """
    The last values of one number, each with its step.

    Ranks must judge a value alike if they have accepted the same steps. If a rank has accepted a
    step more and takes it back, it needs values older than the last `WINDOW`. So twice as many
    values are kept.
    """

    def __init__(self) -> None:
        self._values: deque[tuple[int, float]] = deque(maxlen=2 * WINDOW)
        self._fresh = 0
        """The number of values for which `_ordinary` may still be used."""
        self._ordinary = 0.0
        """The value up to which no value is a spike. It was computed at most `_RENEWED` values
        ago."""

    def add(self, step: int, value: float) -> None:
        """
        Add a value of a step that was not refused.
        """
        self._values.append((step, value))

    def back_to(self, step: int) -> None:
        """
        Forget the values of `step` and of later steps, because these steps are computed again.
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
        Return the limit that `value` exceeds if it is a spike, or None if it is no spike.

        The limit is `factor` deviations above the median of the last values. No value is a spike if
        fewer than `WARM` values are known.
        """
        if len(self._values) < WARM:
            return None
        # nearly all steps end here, so they need not compute the median
        if self._fresh and value <= self._ordinary:
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
