"""
The elements and bits that `bitflip` changes in a tensor, as pure functions of the tensor's bytes.
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
"""The number of the highest mantissa bit, by type of the elements. A flip of this bit changes the
value by a quarter or more, and the value stays finite."""

_NAMED = 6
"""The number of tensor names that a message lists, because a model may have thousands."""


class Memory(Protocol):
    """
    The memory of one tensor, of any framework. Elements are counted from 0, in row-major order.
    """

    dtype: str
    """The type of the elements, such as `float32`."""
    itemsize: int
    """Bytes of an element."""
    size: int
    """The number of elements."""

    def largest(self) -> int:
        """
        Return the index of the element with the largest absolute value.
        """

    def read(self) -> bytes:
        """
        Return the bytes of all elements, each in little-endian order.
        """

    def write(self, content: bytes) -> None:
        """
        Replace the bytes of all elements by `content`, which has the form that `read` returns.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """
    The bits of a tensor that flip: the same bits in each of `number` elements.
    """

    first: int
    """The index of the first element that is changed."""
    period: int | None
    """The distance from each element to the next. None if only one element is changed."""
    number: int
    bits: tuple[int, ...]
    """The numbers of the bits, counted from 0, the least significant bit."""


def pattern_of(action: Bitflip, memory: Memory) -> Pattern:
    """
    Return which bits of which elements `action` flips in the tensor with this memory.

    Raises `ChaosMissed` if the tensor does not have the element or the bit of `action`, or if it is
    too short for two elements at the distance of the period.
    """
    bits = _bits(action, memory)
    if action.element is not None and action.element >= memory.size:
        raise ChaosMissed(
            f"chaos: there is no element {action.element}: this rank has {memory.size} elements of "
            "the tensor, counted from 0"
        )
    element = memory.largest() if action.element is None else action.element
    if action.period is None:
        return Pattern(first=element, period=None, number=1, bits=bits)
    period, rest = action.period, 0
    if action.period_in_bytes:
        period, rest = divmod(action.period, memory.itemsize)
    if rest:
        raise ChaosMissed(
            f"chaos: a period of {action.period} bytes is not a multiple of the {memory.itemsize} "
            f"bytes of a {memory.dtype}"
        )
    first = element % period
    number = -(-(memory.size - first) // period)
    if number < 2:
        raise ChaosMissed(
            f"chaos: a period of {period} elements does not fit into the {memory.size} elements of "
            "the tensor on this rank: it has to meet two of them"
        )
    return Pattern(first=first, period=period, number=number, bits=bits)


def _bits(action: Bitflip, memory: Memory) -> tuple[int, ...]:
    top = _HIGHEST_MANTISSA_BIT.get(memory.dtype) if action.bit is None else action.bit
    if top is None:
        raise ChaosMissed(
            f"chaos: {memory.dtype} has no mantissa that chaos knows; name a bit with bit=B"
        )
    if top >= 8 * memory.itemsize:
        raise ChaosMissed(f"chaos: a {memory.dtype} has no bit {top}: its highest bit is "
                          f"{8 * memory.itemsize - 1}")  # fmt: skip
    if action.bits > top + 1:
        raise ChaosMissed(
            f"chaos: {action.bits} bits do not fit from bit {top} of a {memory.dtype} downwards"
        )
    return tuple(range(top, top - action.bits, -1))


def flipped(content: bytes, itemsize: int, pattern: Pattern) -> bytes:
    """
    Return the content of a tensor with the bits of the pattern flipped.
    """
    element = sum(1 << bit for bit in pattern.bits).to_bytes(itemsize, "little")
    distance = (pattern.period or 1) * itemsize
    mask = bytes(pattern.first * itemsize) + element.ljust(distance, b"\0") * pattern.number
    # one XOR of two long integers is far faster than a loop over the elements
    both = int.from_bytes(content, "little") ^ int.from_bytes(mask[: len(content)], "little")
    return both.to_bytes(len(content), "little")


T = TypeVar("T")


def choose(
    action: Bitflip, names: Sequence[str], held: Mapping[str, T], kind: str
) -> tuple[str, T]:
    """
    Return the name and the value of the tensor that `action` means.

    `names` are the names of the model's tensors, in the order in which `tensor=I` counts them.
    `held` has the tensors that this rank can flip, by name. `kind` says for messages what they are.
    If the spec has no `tensor`, return the first of `held`. Raises `ChaosMissed` if this rank does
    not have the tensor.
    """
    name = action.tensor
    if isinstance(name, int):
        if name >= len(names):
            raise ChaosMissed(
                f"chaos: there is no tensor {name}: the model has {len(names)}, counted from 0"
            )
        name = names[name]
    if name is None:
        name = next(iter(held), None)
        if name is None:
            raise ChaosMissed(f"chaos: this rank has no {kind} of any tensor of the model")
    elif name not in names:
        raise ChaosMissed(f"chaos: the model has no tensor {name}; it has {_some(names)}")
    elif name not in held:
        raise ChaosMissed(
            f"chaos: this rank has no {kind} of {name}; it has that of {_some(list(held))}"
        )
    return name, held[name]


def _some(names: Sequence[str]) -> str:
    if not names:
        return "none"
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
