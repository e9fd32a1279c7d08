"""
MindSpore's parameters as memory.

What is read is the parameter's own memory: `asnumpy` waits until MindSpore has carried out what it was
asked for, and shares. What is written goes through `copy_` alone. `set_data` and `load_param_into_net` give a
parameter another piece of memory, and a compiled optimizer, which all of MindSpore's own are, keeps the
old one: training then goes on without any error and without changing anything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import xxhash
from numpy.typing import NDArray

from tft.errors import MalformedMessage
from tft.protocol.codec import pack

Array = NDArray[Any]  # Any: of whatever type the user trains with
Parameter = Any  # MindSpore has no types


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """
    What is told of a parameter before its content.
    """

    name: str
    kind: str
    """Of its elements, as MindSpore calls it."""
    shape: tuple[int, ...]
    size: int
    """Bytes."""

    def listed(self) -> list[object]:
        """
        As plain values.
        """
        return [self.name, self.kind, list(self.shape), self.size]

    @classmethod
    def read(cls, told: Sequence[Any]) -> "Described":  # Any: checked here
        """
        What `listed` told. Raises `MalformedMessage`.
        """
        try:
            name, kind, shape, size = told
            return cls(
                name=str(name), kind=str(kind), shape=tuple(int(n) for n in shape), size=int(size)
            )
        except (TypeError, ValueError) as error:
            raise MalformedMessage(f"{told!r} describes no parameter") from error

    def __str__(self) -> str:
        return f"{self.kind} {list(self.shape)}"


def describe(name: str, parameter: Parameter) -> Described:
    """
    What this parameter is.
    """
    return Described(
        name=name,
        kind=str(parameter.dtype),
        shape=tuple(parameter.shape),
        size=content(parameter).nbytes,
    )


def content(parameter: Parameter) -> Array:
    """
    Its present content, in place.
    """
    found: Array = parameter.asnumpy()
    return numpy.asarray(found, order="C")  # the same one, unless it lies otherwise


def flat_bytes(array: Array) -> memoryview:
    """
    The memory of an array.
    """
    return array.reshape(-1).view(numpy.uint8).data


def room(parameter: Parameter) -> Array:
    """
    An array for another content of it.
    """
    return numpy.empty_like(content(parameter))


def put(contents: Mapping[str, Array], parameters: Mapping[str, Parameter]) -> None:
    """
    Make these the contents of the parameters of the same names; returns when they are.
    """
    from mindspore import Tensor  # heavy: only processes that train have it
    from mindspore.common.api import _no_grad  # MindSpore offers no other

    with _no_grad():  # else it is refused where a forward was left in the middle
        for name, array in contents.items():
            if array.size:
                parameters[name].copy_(Tensor.from_numpy(array))
    for name in contents:  # `copy_` only asks for it
        parameters[name].asnumpy()


def drop_unfinished_backward() -> None:
    """
    A forward that was left by an exception leaves MindSpore recording: all that is computed from then on
    would be taken for a part of it, and be kept.
    """
    from mindspore.common.api import _pynative_executor

    _pynative_executor.clear_res()
    _pynative_executor.set_grad_flag(False)


def digest(told: object, parameters: Mapping[str, Parameter]) -> str:
    """
    XXH3-128 of plain values and of parameters, with their names and types.
    """
    sum_ = xxhash.xxh3_128(pack(told))
    for name, parameter in parameters.items():
        sum_.update(pack(describe(name, parameter).listed()))
        sum_.update(flat_bytes(content(parameter)))
    return sum_.hexdigest()
