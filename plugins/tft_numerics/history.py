"""
Stores the last values of one number, such as the loss, and computes the limit above which a new
value is a spike.
"""

import math
from collections import deque

WINDOW = 100
"""The number of last values from which the median and the deviation are computed."""
WARM = 50
"""No value counts as a spike before this number of other values is known, because losses and norms
change quickly in the first steps of a training."""
_RENEWED = 20
"""The number of values for which the last computed median may still be used, because sorting the
values in every step would cost time. For a value far above the median, the median is computed again
at once."""
_NORMAL = 1.4826
"""The factor that converts the median absolute deviation to the standard deviation, for a normal
distribution."""
_FLOOR = 0.05
"""The smallest deviation that is assumed, as a fraction of the median. Without this minimum, a
number that hardly varies would have a spike whenever it changes by a millionth."""


class History:
    """
    The last values of one number, such as the loss, each with its step.

    Ranks with the same values, such as the norm of the gradients, must judge the next value alike.
    One of them may have seen more steps than the others before it was rolled back. A rollback
    removes the newest values. So twice as many values are stored as are used, and after a rollback
    this rank still has enough older values.
    """

    def __init__(self) -> None:
        self._values: deque[tuple[int, float]] = deque(maxlen=2 * WINDOW)
        self._fresh = 0
        """The number of values that may still be compared with `_ordinary` before `_ordinary` is
        computed again."""
        self._ordinary = 0.0
        """The value up to which a further value is certainly no spike. It was computed from the
        last values, perhaps some steps ago."""

    def add(self, step: int, value: float) -> None:
        """
        Add the value of a step whose update is not refused. Ignore NaN and Inf, which can occur in
        the mode `watch`. With NaN among the values there would be no median, and no later spike
        would be found.
        """
        if math.isfinite(value):
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
        Forget all values of this number, so that no value is a spike until enough new values are
        known.
        """
        self._fresh = 0
        self._values.clear()

    def limit(self, value: float, factor: float) -> float | None:
        """
        Return the limit above which a value is a spike, if `value` is above this limit. Otherwise
        return None.

        The limit is `factor` deviations above the median of the last values. While fewer than
        `WARM` values are known, the result is None.
        """
        if len(self._values) < WARM:
            return None
        # A value up to `_ordinary` is no spike. Nearly all values are that low, so the median must
        # be computed only rarely.
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
