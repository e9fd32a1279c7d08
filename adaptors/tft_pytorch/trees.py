"""
State as plain values beside tensors: what an optimizer or a scheduler keeps, taken apart so that
it can be packed without pickle, and put together again with the same types.

A plain list stands for a list; every other container is a map of one key that names its type, so
a dict of the user's can never be taken for one of ours.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import TypeVar

import numpy
import torch
from torch.utils._pytree import tree_map_only

from tft.errors import MalformedMessage, UsageError

Plain = None | bool | int | float | str | bytes | list["Plain"] | dict[str, "Plain"]
"""What `tft.protocol.codec.pack` takes."""

_Shape = TypeVar("_Shape")

_SCALARS = (bool, int, float, str, bytes)
_MAPS = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
_MAP_NAMES: dict[type, str] = {
    dict: "dict",
    defaultdict: "dict",  # its factory is the receiver's own business
    OrderedDict: "ordered",
    Counter: "counter",  # MultiStepLR asks its milestones for epochs that are not in them
}


class Disassembly:
    """
    Trees being taken apart; their tensors are gathered by name.

    A tensor that appears twice has one name: tensors that were one must be one afterwards (a
    learning rate that is a tensor is shared by groups and scheduler), and no two names may lead
    to the same memory, or what is written under one would be overwritten under the other.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}

    def take_apart(self, tree: object, name: str) -> Plain:
        """
        The plain form of `tree`; its tensors are given names that begin with `name`. Raises
        `UsageError` naming the value that has no plain form.
        """
        if tree is None or type(tree) in _SCALARS:
            return tree  # type: ignore[return-value]  # the line above says which types these are
        if isinstance(tree, torch.Tensor):
            known = self._names.setdefault(id(tree), name)
            self.tensors[known] = tree
            return {"tensor": known}
        if isinstance(tree, numpy.generic):
            return self.take_apart(tree.item(), name)
        if type(tree) is list:
            return self._each(tree, name)
        if isinstance(tree, tuple) and type(tree) in (tuple, torch.Size):
            return {"tuple": self._each(tree, name)}
        kind = _MAP_NAMES.get(type(tree))
        if kind is None or not isinstance(tree, dict):
            raise UsageError(
                f"{name} holds a {type(tree).__module__}.{type(tree).__qualname__}, which tft "
                "cannot move to another process: it moves numbers, text, bytes, tensors, and "
                "lists, tuples and dicts of them"
            )
        pairs: list[Plain] = [
            [self.take_apart(key, f"{name} (a key)"), self.take_apart(value, f"{name}.{key}")]
            for key, value in tree.items()
        ]
        return {kind: pairs}

    def _each(self, items: Iterable[object], name: str) -> list[Plain]:
        return [self.take_apart(item, f"{name}.{i}") for i, item in enumerate(items)]


def put_together(plain: object, tensors: Mapping[str, torch.Tensor]) -> object:
    """
    What `Disassembly` took apart, with these tensors in it. Raises `MalformedMessage`.
    """
    if plain is None or type(plain) in _SCALARS:
        return plain
    if isinstance(plain, list):
        return [put_together(item, tensors) for item in plain]
    if not isinstance(plain, dict) or len(plain) != 1:
        raise MalformedMessage(f"a {type(plain).__name__} that is no part of a packed state")
    [(kind, content)] = plain.items()
    if kind == "tensor" and content in tensors:
        return tensors[content]
    if kind == "tuple" and isinstance(content, list):
        return tuple(put_together(item, tensors) for item in content)
    if kind in _MAPS and isinstance(content, list):
        made: dict[object, object] = _MAPS[kind]()
        for key, value in content:
            made[put_together(key, tensors)] = put_together(value, tensors)
        return made
    raise MalformedMessage(f"a {kind!r} that is no part of a packed state")


def expect(value: object, shape: type[_Shape], what: str) -> _Shape:
    """
    `value`, if it is what it should be. Raises `MalformedMessage`.
    """
    if not isinstance(value, shape):
        raise MalformedMessage(f"{what} is a {type(value).__name__}, not a {shape.__name__}")
    return value


def copied(tree: _Shape) -> _Shape:
    """
    The same with copies of its tensors, in host memory. What was one tensor is one again.
    """
    made: dict[tuple[object, ...], torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        where = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if where not in made:
            made[where] = tensor.detach().to("cpu", copy=True)
        return made[where]

    return tree_map_only(torch.Tensor, copy, tree)  # type: ignore[no-any-return]  # of the same shape
