"""
Converts state to plain values (such as numbers, texts and lists) and tensors, and back. This module
takes apart the state of an optimizer or a scheduler, so that the state can be packed without
pickle. It later puts the state together again. The types are the same, with few exceptions: a
`defaultdict` becomes a dict, for example.

In the plain form a list stays a list. Every other container, also a dict, becomes a dict with one
key, which names the type of the container. So a dict of the user can never be mistaken for another
type.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import TypeVar

import numpy
import torch
from torch.utils._pytree import tree_map_only

from tft.errors import MalformedMessage, UsageError

Plain = None | bool | int | float | str | bytes | list["Plain"] | dict[str, "Plain"]
"""A plain value: a value that `tft.protocol.codec.pack` can convert to bytes (None, bool, int,
float, str, bytes, and lists and dicts of them)."""

_Shape = TypeVar("_Shape")

_SCALARS = (bool, int, float, str, bytes)
MAPS = {"dict": dict, "ordered": OrderedDict, "counter": Counter}
"""Maps the name of a type of dict, as plain values have it, to the type."""
_MAP_NAMES: dict[type, str] = {
    dict: "dict",
    defaultdict: "dict",  # the function that makes default values (default_factory) is not sent
    OrderedDict: "ordered",
    # the scheduler MultiStepLR needs a Counter, which returns 0 for a missing key
    Counter: "counter",
}


class Disassembly:
    """
    Takes trees (nested containers) apart, and gathers their tensors by name.

    A tensor that appears twice in a tree gets one name, so that `put_together` makes one tensor of
    it again. For example, parameter groups and a scheduler may share a learning rate that is a
    tensor. Two names for the same memory would also be unsafe: writing under one name would
    overwrite the other.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}

    def take_apart(self, tree: object, name: str) -> Plain:
        """
        Return the plain form of `tree`, and gather the tensors in `tree` under names that begin
        with `name`.

        Raises `UsageError`, which names the value, if a value has no plain form.
        """
        if tree is None or type(tree) in _SCALARS:
            return tree  # type: ignore[return-value]  # the condition above checks the type
        if isinstance(tree, torch.Tensor):
            known = self._names.setdefault(id(tree), name)
            if self.tensors.setdefault(known, tree) is not tree:
                raise UsageError(
                    f"two tensors have the name {known}, so one would be lost on the way to another "
                    "process or a checkpoint: some keys of dicts differ only in their types "
                    "(1 and '1'), or have dots (a.b, and b in a)"
                )
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
                "cannot move to another process: tft moves numbers, text, bytes, tensors, and "
                "lists, tuples and dicts of such values"
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
    Rebuild a tree (nested containers) from its plain form `plain`, with the tensors `tensors` in
    it. Return the tree.

    Raises `MalformedMessage` if `plain` is not a plain form that `Disassembly` makes, or if a
    tensor is missing.
    """
    if plain is None or type(plain) in _SCALARS:
        return plain
    if isinstance(plain, list):
        return [put_together(item, tensors) for item in plain]
    if not isinstance(plain, dict) or len(plain) != 1:
        raise MalformedMessage(
            f"a packed state (of an optimizer, for example) has a {type(plain).__name__} in a "
            "place where only None, a number, a text, bytes, a list or a dict with one key is valid"
        )
    [(kind, content)] = plain.items()
    if kind == "tensor" and content in tensors:
        return tensors[content]
    if kind == "tuple" and isinstance(content, list):
        return tuple(put_together(item, tensors) for item in content)
    if kind in MAPS and isinstance(content, list):
        made: dict[object, object] = MAPS[kind]()
        for key, value in content:
            made[put_together(key, tensors)] = put_together(value, tensors)
        return made
    raise MalformedMessage(
        f"a packed state (of an optimizer, for example) has an invalid entry of kind {kind!r}: the "
        "kind is unknown, the content has a wrong type, or a tensor that it names is missing"
    )


def expect(value: object, shape: type[_Shape], what: str) -> _Shape:
    """
    Return `value` if it is of the type `shape`. Otherwise raise `MalformedMessage`, in which `what`
    names the value.
    """
    if not isinstance(value, shape):
        raise MalformedMessage(f"{what} is a {type(value).__name__}, not a {shape.__name__}")
    return value


def copied(tree: _Shape) -> _Shape:
    """
    Return the nested containers `tree` with copies of their tensors in host memory. A tensor that
    appears more than once is copied once.
    """
    made: dict[tuple[object, ...], torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        where = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        if where not in made:
            made[where] = tensor.detach().to("cpu", copy=True)
        return made[where]

    return tree_map_only(torch.Tensor, copy, tree)  # type: ignore[no-any-return]  # same structure as `tree`
