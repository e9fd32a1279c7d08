"""
Random generators of Python and numpy, which adaptors keep.
"""

import random
from collections.abc import Sequence
from typing import Any

import numpy
import pytest

from tft.errors import UsageError
from tft.spi import pack, unpack
from tft.spi.generators import (
    GLOBAL,
    check_names,
    global_states,
    made,
    put_back,
    read,
    restore_global,
)


def drawn() -> list[float]:
    """
    Draw from the global generators of Python and numpy.
    """
    return [random.random(), random.gauss(), numpy.random.rand(), numpy.random.randn()]


@pytest.mark.parametrize("names", [("python", "numpy", "torch"), ("numpy",), ()])
def test_global_generators_draw_the_same_numbers_again(names: Sequence[str]) -> None:
    """When the states of global generators were packed and restored, then they draw the same numbers
    again. The others go on."""
    drawn()  # the second of two gaussian numbers is part of the state
    packed = pack(global_states(names))
    before = drawn()
    restore_global(unpack(packed))
    again = drawn()
    assert (again[:2] == before[:2]) == ("python" in names)
    assert (again[2:] == before[2:]) == ("numpy" in names)


@pytest.mark.parametrize(
    "generator",
    [numpy.random.default_rng(1), numpy.random.RandomState(1), random.Random(1)],
    ids=lambda each: type(each).__name__,
)
def test_generator_of_an_object_draws_the_same_numbers_again(generator: Any) -> None:
    """When the state of a generator is put back, or another generator is made of it, then both draw
    the numbers that were drawn behind it."""
    kind, state = unpack(pack(read(generator)))
    before = [generator.random() for _ in range(3)]
    assert [made(kind, state).random()] == before[:1]
    put_back(generator, state)
    assert [generator.random() for _ in range(3)] == before


def test_unknown_names_of_generators_are_refused() -> None:
    """When the user names generators that an adaptor does not know, then the error names them, and
    those that it knows."""
    check_names(["numpy"], GLOBAL)
    with pytest.raises(UsageError, match="unknown names cupy, jax; known are python, numpy"):
        check_names(["cupy", "numpy", "jax"], GLOBAL)
