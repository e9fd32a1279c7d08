"""
The numbers of a step: the norm of what the ranks have averaged in it, which are the gradients.
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
    Notes the numbers of the present step. Used on the training thread.
    """

    def __init__(self) -> None:
        self._watching = False
        self.forget()

    def begin(self) -> None:
        """
        Note numbers from now on.
        """
        self._watching = True

    def forget(self) -> None:
        """
        Drop the numbers of a step that was not finished.
        """
        self._squares: float | None = None
        self._own: list[float] = []

    def averaged(self, own: Sequence[Array], means: Sequence[Array]) -> None:
        """
        Note what this rank has given to an average, and the result. Integers are not gradients.
        """
        if self._watching and any(_is_real(each) for each in means):
            self._own.append(math.sqrt(_squares(own)))
            self._squares = (self._squares or 0.0) + _squares(means)

    def take(self) -> Numbers:
        """
        Return the numbers of the present step, and forget them.
        """
        norm = None if self._squares is None else math.sqrt(self._squares)
        numbers = Numbers(norm=norm, own=tuple(self._own))
        self.forget()
        return numbers


watch = Watch()
"""The numbers of this process."""


def _is_real(array: Array) -> bool:
    return not numpy.issubdtype(array.dtype, numpy.integer) and array.dtype != numpy.bool_


def _squares(arrays: Sequence[Array]) -> float:
    """
    Return the sum of the squares of all elements, NaN or Inf where one is not finite or they
    overflow.
    """
    total = 0.0
    for array in arrays:
        if _is_real(array):
            flat = array.reshape(-1)
            flat = flat if flat.dtype.itemsize >= 4 else flat.astype(numpy.float32)
            with numpy.errstate(over="ignore", invalid="ignore"):
                total += float(numpy.vdot(flat, flat))
    return total
