"""
Values of the user's objects come back from packed bytes with their types, and in place.
"""

import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from enum import Enum, Flag
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tft_pytorch.plain_values import into, placed, plain
from torch import nn

from tft.spi import pack, unpack
from tft.spi.plain_values import NotPlain, equal, size_of

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "left right")


class Colour(Enum):
    """
    Values of an enumeration.
    """

    RED = 1
    BLUE = 2


class Bits(Flag):
    """
    Values that can be joined.
    """

    ONE = 1
    TWO = 2


@dataclass
class Meter:
    """
    A dataclass of the user.
    """

    total: float
    last: list[int]


@dataclass(frozen=True, slots=True)
class Fixed:
    """
    A dataclass that cannot be changed.
    """

    at: int


def sent(value: Any) -> Any:
    """
    Return what another process makes of `value`.
    """
    return placed(unpack(pack(plain(value))), CPU)


@pytest.mark.parametrize(
    "value",
    [
        {3, 1, 2}, frozenset("ab"), {(1, "a"), (2, "b")}, deque([1, 2, 3], maxlen=3), deque(["a"]),
        numpy.float32(1.5), numpy.float64(0.1), numpy.int64(-3), numpy.bool_(True),
        numpy.datetime64("2026-01-01"), 2**70, -(2**70), 1.5j, float("inf"), (1, (2, [3])), Pair(1, [2]),
        torch.Size([2, 3]), Colour.BLUE, Meter(1.5, [1, 2]), Fixed(3), Path("a/b"),
        {Colour.RED: 1, (1, 2): 2, numpy.int64(3): 3}, OrderedDict(b=1, a=2), Counter("abca"),
        {"deep": [{"set": {1}}, Meter(0.0, [])]},
    ],
    ids=lambda each: type(each).__name__,
)  # fmt: skip
def test_values_come_back_equal_and_of_the_same_type(value: Any) -> None:
    """When a value was packed and unpacked, then it is equal, and of the same type."""
    found = sent(value)
    assert type(found) is type(value)
    assert found == value
    if isinstance(value, deque):
        assert found.maxlen == value.maxlen
    if isinstance(value, dict):
        assert list(map(type, found)) == list(map(type, value))


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "int8", "uint64", "complex64", "bool", "<U3"]
)
def test_arrays_come_back(dtype: str) -> None:
    """When an array was packed, then type, shape and content are the same, and it can be changed."""
    array = numpy.arange(6).reshape(2, 3).astype(dtype)
    found = sent(array)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert (found == array).all()
    found[0, 0] = found[1, 1]
    assert sent(array.T).tolist() == array.T.tolist()


@pytest.mark.parametrize(
    "generator",
    [
        numpy.random.default_rng(1), numpy.random.RandomState(1), random.Random(1),
        torch.Generator().manual_seed(1),
    ],
    ids=lambda each: type(each).__name__,
)  # fmt: skip
def test_generators_draw_the_same_numbers_again(generator: Any) -> None:
    """When a generator is put back in place, or made anew, then it draws the same numbers again."""

    def draw(each: Any) -> object:
        if isinstance(each, torch.Generator):
            return torch.rand(3, generator=each).tolist()
        return [each.random() for _ in range(3)]

    noted = unpack(pack(plain(generator)))
    drawn = draw(generator)
    assert draw(placed(noted, CPU)) == drawn
    assert into(generator, placed(noted, CPU)) is generator
    assert draw(generator) == drawn


def test_a_defaultdict_makes_missing_values_as_before() -> None:
    """When a defaultdict is made anew, then its factory is the same. With a function without a name,
    its content is put into the defaultdict that is there."""
    found = sent({"a": defaultdict(list, {1: [2]})})["a"]
    assert found[7] == []
    nameless = defaultdict(lambda: 5, {1: 2})
    noted = unpack(pack(plain(nameless)))
    nameless.clear()
    assert into(nameless, placed(noted, CPU)) is nameless
    assert nameless == {1: 2}
    assert nameless[3] == 5


@pytest.mark.parametrize(
    "value",
    [
        object(), len, [object()], {object()}, {"a": print}, {object: 1}, nn.Linear(1, 1),
        nn.Parameter(torch.zeros(1)), [nn.Parameter(torch.zeros(1))], Bits.ONE | Bits.TWO,
        random.SystemRandom(), numpy.array([object()]), numpy.zeros(1, [("a", int)]), iter([]),
        numpy.ma.masked_array([1]), torch.eye(2).to_sparse(), torch.empty(1, device="meta"), Meter(object(), []),  # type: ignore[arg-type]
    ],
    ids=lambda each: type(each).__name__,
)  # fmt: skip
def test_what_cannot_be_made_again_is_not_plain(value: Any) -> None:
    """When another process could not make a value, or it is part of a model, then it is not plain."""
    with pytest.raises(NotPlain):
        plain(value)


def test_values_within_themselves_are_not_plain() -> None:
    """When a list has itself as a part, then it is not plain. A class within a function is not found
    by its name, so its values are not plain either."""
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(NotPlain):
        plain(circle)

    @dataclass
    class Inner:
        at: int

    with pytest.raises(NotPlain):
        plain(Inner(1))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({1}, {2}), ([1], [2, 3]), (deque([1], 2), deque([2, 3], 2)), (Counter("a"), Counter("b")),
        (OrderedDict(a=1), OrderedDict(b=2)), (Meter(1.0, []), Meter(2.0, [3])),
    ],
    ids=lambda each: type(each).__name__,
)  # fmt: skip
def test_containers_keep_their_identity(old: Any, new: Any) -> None:
    """When the content of a set, deque, dict or dataclass is put back, then it is the same object."""
    assert into(old, sent(new)) is old
    assert old == new


def test_values_that_cannot_be_changed_are_replaced() -> None:
    """When the present value is of another kind, or cannot be changed, then it is replaced."""
    array = numpy.zeros(2)
    assert into(array, numpy.ones(2)) is array
    assert array.tolist() == [1, 1]
    for old, new in (
        (numpy.zeros(2), numpy.ones(3)), (deque([1], 2), deque([1], 3)), (Fixed(1), Fixed(2)),
        ({1}, frozenset({2})), (None, [1]), ({}, OrderedDict(a=1)), (1, 2),
    ):  # fmt: skip
        assert into(old, new) is new


def test_sizes_and_comparisons_look_at_the_content() -> None:
    """When plain values are compared, then types count, and tensors are compared by content."""
    noted = plain({"a": [1, torch.zeros(2)], "b": numpy.zeros(4)})
    assert size_of(noted) > 40
    assert equal(noted, plain({"a": [1, torch.zeros(2)], "b": numpy.zeros(4)}))
    assert not equal(noted, plain({"a": [1.0, torch.zeros(2)], "b": numpy.zeros(4)}))
    assert not equal(noted, plain({"a": [1, torch.ones(2)], "b": numpy.zeros(4)}))
    assert not equal(plain([1]), plain([1, 2]))
    assert size_of(plain([numpy.zeros(100_000)])) == 800_000
    assert not equal(plain({"a": 1}), plain({"b": 1}))
