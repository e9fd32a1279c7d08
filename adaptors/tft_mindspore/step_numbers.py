"""
Records the numbers by which plugins judge a step: the norms of the gradients, before and after the
gradients are averaged over the ranks.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from tft.spi import Numbers

Array = NDArray[Any]  # Any: gradients have several types


class Watch:
    """
    Records the norms of the gradients of the present step. Only the training thread uses it.
    """

    def __init__(self) -> None:
        self._watching = False
        self.forget()

    def begin(self) -> None:
        """
        Start recording. Before this call, `averaged` records nothing.
        """
        self._watching = True

    def forget(self) -> None:
        """
        Drop the norms that were recorded until now. They belong to a step that was interrupted, or
        to arrays that the script has averaged after the update of a step, which are no gradients.
        """
        self._squares: float | None = None
        self._own: list[float] = []

    def averaged(self, own: Sequence[Array], means: Sequence[Array]) -> None:
        """
        Record the norm of the arrays in `own`, which this rank has passed to an all-reduce by
        average, and of the averages in `means`. If there are none, nothing is recorded.
        """
        if self._watching and means:
            self._own.append(math.sqrt(_squares(own)))
            self._squares = (self._squares or 0.0) + _squares(means)

    def take(self) -> Numbers:
        """
        Return the norms of the present step, and begin to record the next step. In the result,
        `norm` is the norm of all averages of the step. `norm` is None if nothing was averaged.
        """
        norm = None if self._squares is None else math.sqrt(self._squares)
        numbers = Numbers(norm=norm, own=tuple(self._own))
        self.forget()
        return numbers


watch = Watch()
"""The object that records the norms in this process."""


def _squares(arrays: Sequence[Array]) -> float:
    """
    Return the sum of the squares of all elements in the arrays. The sum is NaN or Inf if an element
    is not finite, or if the sum overflows.
    """
    total = 0.0
    for array in arrays:
        flat = array.reshape(-1)
        flat = flat if flat.dtype.itemsize >= 4 else flat.astype(numpy.float32)
        with numpy.errstate(over="ignore", invalid="ignore"):
            total += float(numpy.vdot(flat, flat))
    return total
