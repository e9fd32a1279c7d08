"""
Computes which elements and bits of a tensor the action `bitflip` changes, and flips these bits in a
copy of the tensor's bytes. This module does not change the tensor itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tft_chaos.actions import ChaosMissed
from tft_chaos.spec import Bitflip

_HIGHEST_MANTISSA_BIT = {
    "float64": 51,
    "float32": 22,
    "float16": 9,
    "bfloat16": 6,
    "float8_e4m3fn": 2,
    "float8_e5m2": 1,
}
"""Maps each type of elements to the number of the highest bit of the mantissa, where bit 0 is the
least significant bit of the element. A flip of this bit changes a normal value by a quarter or
more. The new value is not NaN or Inf, except that a float8_e4m3fn of 352 or -352 becomes NaN."""

_NAMED = 6
"""The largest number of tensor names that an error message lists. A model may have thousands of
tensors."""


class Memory(Protocol):
    """
    The memory of one tensor, of any framework. Elements are counted from 0, in row-major order.
    """

    dtype: str
    """The type of the elements, such as `float32`."""
    itemsize: int
    """The size of an element in bytes."""
    size: int
    """The number of elements."""

    def largest(self) -> int:
        """
        Return the index of the element with the largest absolute value.
        """

    def read(self) -> bytes:
        """
        Return the content of the tensor as bytes, in which each element is little-endian.
        """

    def write(self, content: bytes) -> None:
        """
        Replace the content of the tensor by the bytes `content`.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """
    The bits of a tensor that the action `bitflip` flips: the same bits in each of `number`
    elements.
    """

    first: int
    """The index of the first element that is changed."""
    period: int | None
    """The distance between two successive changed elements. None if only one element is changed."""
    number: int
    """The number of elements that are changed."""
    bits: tuple[int, ...]
    """The numbers of the bits that flip in each element. Bit 0 is the least significant bit."""


def pattern_of(action: Bitflip, memory: Memory) -> Pattern:
    """
    Return the elements and bits that `action` flips in the tensor with the memory `memory`.

    Raises `ChaosMissed` if the tensor does not have the element or the bit of `action`, or if the
    period is so long that fewer than two elements would be changed.
    """
    bits = _bits(action, memory)
    if action.element is not None and action.element >= memory.size:
        raise ChaosMissed(
            f"chaos: no bit was flipped, because the tensor has no element {action.element}: this "
            f"rank has {memory.size} elements of the tensor, counted from 0"
        )
    element = memory.largest() if action.element is None else action.element
    if action.period is None:
        return Pattern(first=element, period=None, number=1, bits=bits)
    period, rest = action.period, 0
    if action.period_in_bytes:
        period, rest = divmod(action.period, memory.itemsize)
    if rest:
        raise ChaosMissed(
            f"chaos: no bit was flipped, because a period of {action.period} bytes is not a "
            f"multiple of the {memory.itemsize} bytes of a {memory.dtype}"
        )
    first = element % period
    number = -(-(memory.size - first) // period)
    if number < 2:
        raise ChaosMissed(
            f"chaos: no bit was flipped, because a period of {period} elements meets fewer than "
            f"two of the {memory.size} elements of the tensor on this rank: give a smaller period"
        )
    return Pattern(first=first, period=period, number=number, bits=bits)


def _bits(action: Bitflip, memory: Memory) -> tuple[int, ...]:
    top = _HIGHEST_MANTISSA_BIT.get(memory.dtype) if action.bit is None else action.bit
    if top is None:
        raise ChaosMissed(
            "chaos: no bit was flipped, because the plugin chaos does not know the mantissa of the "
            f"type {memory.dtype}: name the bit with bit=B"
        )
    if top >= 8 * memory.itemsize:
        raise ChaosMissed(
            f"chaos: no bit was flipped, because a {memory.dtype} has no bit {top}: its highest "
            f"bit is {8 * memory.itemsize - 1}"
        )
    if action.bits > top + 1:
        raise ChaosMissed(
            f"chaos: no bits were flipped, because bits={action.bits} is more than the bits from "
            f"bit {top} of a {memory.dtype} down to bit 0: give a smaller number of bits"
        )
    return tuple(range(top, top - action.bits, -1))


def flipped(content: bytes, itemsize: int, pattern: Pattern) -> bytes:
    """
    Return `content`, the bytes of a tensor, with the bits of the pattern flipped. `itemsize` is the
    number of bytes of an element.
    """
    element = sum(1 << bit for bit in pattern.bits).to_bytes(itemsize, "little")
    distance = (pattern.period or 1) * itemsize
    mask = bytes(pattern.first * itemsize) + element.ljust(distance, b"\0") * pattern.number
    # flip all bits with one XOR of two long integers, because a loop over the elements is slow
    both = int.from_bytes(content, "little") ^ int.from_bytes(mask[: len(content)], "little")
    return both.to_bytes(len(content), "little")


T = TypeVar("T")


def choose(
    action: Bitflip, names: Sequence[str], held: Mapping[str, T], kind: str
) -> tuple[str, T]:
    """
    Return the name of the tensor that `action` changes, and the entry of this tensor in `held`.

    `names` are the names of the model's tensors. If the spec has `tensor=I` with a number I, I is
    an index in `names`. `held` has an entry for each tensor that this rank can change. If the spec
    has no `tensor`, the first entry is chosen. `kind` says what `held` contains, for error
    messages. Raises `ChaosMissed` if `held` has no such tensor.
    """
    name = action.tensor
    if isinstance(name, int):
        if name >= len(names):
            raise ChaosMissed(
                f"chaos: no bit was flipped, because there is no tensor number {name}: the model "
                f"has {len(names)} tensors, counted from 0"
            )
        name = names[name]
    if name is None:
        name = next(iter(held), None)
        if name is None:
            raise ChaosMissed(
                "chaos: no bit was flipped, because this rank has no "
                f"{kind} of any tensor of the model"
            )
    elif name not in names:
        raise ChaosMissed(
            f"chaos: no bit was flipped, because the model has no tensor {name}; the model has the "
            f"tensors {_some(names)}"
        )
    elif name not in held:
        raise ChaosMissed(
            f"chaos: no bit was flipped, because this rank has no {kind} of {name}; it has the "
            f"{kind} of {_some(list(held))}"
        )
    return name, held[name]


def _some(names: Sequence[str]) -> str:
    if not names:
        return "none"
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
