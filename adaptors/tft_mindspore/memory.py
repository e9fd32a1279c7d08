"""
Reads and writes the memory of MindSpore's parameters.

Reading returns the parameter's own memory: the method `asnumpy` waits until MindSpore has carried
out all pending operations, and returns an array that shares the memory. Writing uses the method
`copy_` only. `set_data` and `load_param_into_net` would give a parameter another piece of memory.
But MindSpore's optimizers are compiled, and a compiled optimizer keeps writing to the old piece.
Training would then continue without an error, but the parameters would never change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import xxhash
from numpy.typing import NDArray

from tft.errors import MalformedMessage
from tft.spi import pack

Array = NDArray[Any]  # Any: the elements may have any type
Parameter = Any  # Any: a parameter of MindSpore, which gives mypy no types


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """
    The description of a parameter, which is sent to another rank before the parameter's content.
    """

    name: str
    kind: str
    """MindSpore's name of the type of the elements, such as `Float32`."""
    shape: tuple[int, ...]
    size: int
    """The size of the content in bytes."""

    def listed(self) -> list[object]:
        """
        Return the description as plain values.
        """
        return [self.name, self.kind, list(self.shape), self.size]

    @classmethod
    def read(cls, told: Sequence[Any]) -> "Described":  # Any: the values are not checked yet
        """
        Return the description that `listed` has converted to the plain values `told`. Raises
        `MalformedMessage` if `told` has another form.
        """
        try:
            name, kind, shape, size = told
            return cls(
                name=str(name), kind=str(kind), shape=tuple(int(n) for n in shape), size=int(size)
            )
        except (TypeError, ValueError) as error:
            raise MalformedMessage(
                f"a received description of a parameter cannot be read: {told!r}"
            ) from error

    def __str__(self) -> str:
        return f"{self.kind} {list(self.shape)}"


def describe(name: str, parameter: Parameter) -> Described:
    """
    Return the description of `parameter`.
    """
    return Described(
        name=name,
        kind=str(parameter.dtype),
        shape=tuple(parameter.shape),
        size=content(parameter).nbytes,
    )


def content(parameter: Parameter) -> Array:
    """
    Return the present content of `parameter` as an array. The array shares the parameter's memory.
    """
    found: Array = parameter.asnumpy()
    # `asarray` copies the array only if the array is not in row-major order; otherwise the result
    # is still the parameter's memory
    return numpy.asarray(found, order="C")


def flat_bytes(array: Array) -> memoryview:
    """
    Return the memory of an array as bytes.
    """
    return array.reshape(-1).view(numpy.uint8).data


def room(parameter: Parameter) -> Array:
    """
    Return a new array of the same type and shape as `parameter`, for content that will arrive from
    another rank.
    """
    return numpy.empty_like(content(parameter))


def put(contents: Mapping[str, Array], parameters: Mapping[str, Parameter]) -> None:
    """
    Write each array in `contents` into the parameter of the same name. Return when MindSpore has
    carried out all these copies.
    """
    from mindspore import Tensor  # imported here, because only training processes need MindSpore
    from mindspore.common.api import _no_grad  # MindSpore has no public function for this

    with _no_grad():  # with gradients switched on, `copy_` fails after an interrupted forward pass
        for name, array in contents.items():
            if array.size:
                parameters[name].copy_(Tensor.from_numpy(array))
    # wait for the copies: `copy_` only starts a copy, and `asnumpy` waits for the end of the copy
    for name in contents:
        parameters[name].asnumpy()


def drop_unfinished_backward() -> None:
    """
    Make MindSpore stop recording a forward pass that an exception has interrupted.

    Without this call, MindSpore would record all later computations as a part of that forward pass,
    and would keep their results in memory.
    """
    from mindspore.common.api import _pynative_executor

    _pynative_executor.clear_res()
    _pynative_executor.set_grad_flag(False)


def digest(told: object, parameters: Mapping[str, Parameter]) -> str:
    """
    Return one digest (XXH3-128, hexadecimal) of the plain values `told` and of `parameters`, with
    their names, types, shapes and content.
    """
    sum_ = xxhash.xxh3_128(pack(told))
    for name, parameter in parameters.items():
        sum_.update(pack(describe(name, parameter).listed()))
        sum_.update(flat_bytes(content(parameter)))
    return sum_.hexdigest()
