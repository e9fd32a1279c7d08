"""
Copies values of the user's objects in a form that can be packed, and makes the values again: numbers,
texts, tensors, arrays of numpy, random generators, and lists, tuples, sets, deques, dicts and
dataclasses of them.

In that form, lists and most dicts stay what they are. Other types become a dict with the key
`_KIND`, which names the type.
"""

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, reduce
from importlib import import_module
from pathlib import PurePath
from typing import Any

import numpy
import torch
from torch import Tensor

from tft_pytorch.owned_generators import kind_of, made, put_back_into, read

_SCALARS: frozenset[Any] = frozenset({bool, int, float, str, bytes, type(None)})
AS_THEY_ARE: frozenset[Any] = frozenset({bool, float, str, bytes, type(None)})
"""The types whose values are plain as they are."""
_DICTS = frozenset({defaultdict, OrderedDict, Counter})
_ON_DEVICE = "tft: a tensor on the device"
"""The only key of a dict that stands for a tensor on the device of its rank."""
_KIND = "tft: a value of the type"
"""The key of a dict that stands for a value of another type. The other key is `_PARTS`."""
_PARTS = "of"
_DEEPEST = 30
"""How many containers may lie within each other. Objects that refer to each other would have no end."""
_LARGE = 512 * 1024
"""The bytes of an array beyond which it is not copied, since no state has room for it."""
_WORDS = range(-(2**63), 2**64)
"""The integers that can be packed."""
_FRAMEWORKS = frozenset(
    {
        "torch", "lightning", "torchmetrics", "transformers", "accelerate", "datasets", "peft", "trl",
        "tft", "tft_pytorch",
    }
)  # fmt: skip
"""Packages whose dataclasses are left alone: they may be the bookkeeping of a framework."""

_Form = Callable[[Any, int], Any]


class NotPlain(Exception):
    """
    Raised for a value that is not plain.
    """


@dataclass(frozen=True, slots=True)
class Large:
    """
    Stands for an array that is too large to be kept.
    """

    nbytes: int


def plain(value: Any, depth: int = 0) -> Any:  # Any: an attribute may have any type
    """
    Return a copy of `value` for the rank-local state, from which `placed` makes the value again.
    Tensors on the CPU are not copied, but detached. Raises `NotPlain` if a part of it is not plain.
    """
    kind: Any = type(value)
    if kind in AS_THEY_ARE:
        return value
    form = _form(kind)
    if form is None or depth > _DEEPEST:
        raise NotPlain
    return form(value, depth + 1)


def may_be_plain(value: object) -> bool:
    """
    Return True if `value` has a type that is plain. Its parts may be of another type.
    """
    kind: Any = type(value)
    return _form(kind) is not None


def is_fixed(value: Any) -> bool:  # Any: a value that is plain
    """
    Return True if a plain value cannot be changed in place.
    """
    if type(value) in (tuple, frozenset, torch.Size):
        return all(map(is_fixed, value))
    return type(value) in _SCALARS or isinstance(value, Enum | PurePath | numpy.generic | complex)


def _of(kind: str, parts: object) -> dict[str, object]:
    return {_KIND: kind, _PARTS: parts}


# ---------------------------------------------------------------- the forms of the types


@cache
def _form(kind: type) -> _Form | None:
    """
    Return the function that copies a value of the type `kind`, or None if it is not plain.
    Subclasses of `Tensor` are not plain. Parameters are among them: a model refers to them.
    """
    if kind in _FORMS:
        return _FORMS[kind]
    for base, form in _FORMS_OF_BASES:
        if issubclass(kind, base):
            return form
    known = kind.__module__.partition(".")[0] in _FRAMEWORKS
    return _record if is_dataclass(kind) and not known else None


def _scalar(value: Any, depth: int) -> Any:
    return value


def _integer(value: int, depth: int) -> Any:
    return value if value in _WORDS else _of("int", str(value))


def _complex(value: complex, depth: int) -> Any:
    return _of("complex", [value.real, value.imag])


def _tensor(value: Tensor, depth: int) -> Any:
    if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
        raise NotPlain
    on_host = value.detach().cpu()
    return on_host if value.device.type == "cpu" else {_ON_DEVICE: on_host}


def _list(value: Any, depth: int) -> Any:
    return [plain(each, depth) for each in value]


def _tuple(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind in (tuple, torch.Size):
        return _of("tuple" if kind is tuple else "size", _list(value, depth))
    if not hasattr(kind, "_make"):
        raise NotPlain
    return _of("named", [_named(kind), _list(value, depth)])


def _set(value: Any, depth: int) -> Any:
    # the order of a set differs between processes
    return _of(type(value).__name__, _list(sorted(value, key=repr), depth))


def _deque(value: Any, depth: int) -> Any:
    return _of("deque", [value.maxlen, _list(value, depth)])


def _dict(value: Any, depth: int) -> Any:
    kind, makes = ["builtins", "dict"], ["", ""]
    if type(value) in _DICTS:
        with suppress(NotPlain):
            makes = _named(getattr(value, "default_factory", None) or type(None))
            kind = _named(type(value))
    # a dict of another class keeps it where the content is put back into the dict that is there
    if kind == ["builtins", "dict"] and _SCALARS.issuperset(map(type, value)):
        return {key: plain(each, depth) for key, each in value.items()}
    pairs = [[plain(key, depth), plain(each, depth)] for key, each in value.items()]
    return _of("dict", [kind, makes, pairs])


def _array(value: Any, depth: int) -> Any:
    dtype = value.dtype
    if dtype.hasobject or dtype.fields is not None:
        raise NotPlain
    if value.nbytes > _LARGE:
        return Large(value.nbytes)
    return _of("array", [dtype.str, list(value.shape), value.tobytes()])


def _number(value: Any, depth: int) -> Any:
    if value.dtype.hasobject or value.dtype.fields is not None:
        raise NotPlain
    return _of("number", [value.dtype.str, value.tobytes()])


def _path(value: Any, depth: int) -> Any:
    return _of("path", [_named(type(value)), str(value)])


def _enum(value: Any, depth: int) -> Any:
    if value.name not in type(value).__members__:  # several flags at once
        raise NotPlain
    return _of("enum", [_named(type(value)), value.name])


def _generator(value: Any, depth: int) -> Any:
    if isinstance(value, random.SystemRandom):
        raise NotPlain
    return _of("generator", read("attribute", value))


def _record(value: Any, depth: int) -> Any:
    content = {name: plain(each, depth) for name, each in _content(value).items()}
    return _of("record", [_named(type(value)), content])


def _content(record: Any) -> dict[str, Any]:
    """
    Return the attributes of a dataclass.
    """
    if hasattr(record, "__dict__"):
        return dict(vars(record))
    return {
        each.name: getattr(record, each.name)
        for each in fields(record)
        if hasattr(record, each.name)
    }


_FORMS: Mapping[Any, _Form] = {
    **dict.fromkeys(AS_THEY_ARE, _scalar),
    int: _integer, complex: _complex, list: _list, set: _set, frozenset: _set, deque: _deque,
    numpy.ndarray: _array, Tensor: _tensor,
}  # fmt: skip
_FORMS_OF_BASES: tuple[tuple[type, _Form], ...] = (
    (Enum, _enum), (tuple, _tuple), (dict, _dict), (numpy.generic, _number),
    (PurePath, _path), (torch.Generator, _generator), (numpy.random.Generator, _generator),
    (numpy.random.RandomState, _generator), (random.Random, _generator),
)  # fmt: skip


# ---------------------------------------------------------------- classes by name


def _named(kind: Any) -> list[str]:
    """
    Return the names under which another process finds a class. Raises `NotPlain` if it is not found.
    """
    names = [getattr(kind, "__module__", ""), getattr(kind, "__qualname__", "")]
    if kind is type(None):
        return ["", ""]
    here = sys.modules.get(names[0])
    if "<" in names[1] or here is None or _inner(here, names[1]) is not kind:
        raise NotPlain
    return names


def _inner(where: object, path: str) -> Any:
    return reduce(lambda each, name: getattr(each, name, None), path.split("."), where)


def _class(names: list[str]) -> Any:
    return None if names == ["", ""] else _inner(import_module(names[0]), names[1])


# ---------------------------------------------------------------- making values again


def placed(value: Any, device: torch.device) -> Any:  # Any: a result of `plain`
    """
    Return the value of which `plain` has made `value`. Its tensors that were on a device are on
    `device`, which is another one if they come from another rank.
    """
    kind = type(value)
    if kind is dict:
        if _KIND in value:
            return _PLACED[value[_KIND]](value[_PARTS], device)
        if value.keys() == {_ON_DEVICE}:
            return value[_ON_DEVICE].to(device)
        return {key: placed(each, device) for key, each in value.items()}
    if kind in (list, tuple):
        return kind(placed(each, device) for each in value)
    return value


def _placed_dict(parts: Any, device: torch.device) -> Any:
    kind, makes = _class(parts[0]), _class(parts[1])
    found = kind(makes) if kind is defaultdict else kind()
    for key, each in parts[2]:
        found[placed(key, device)] = placed(each, device)
    return found


def _placed_record(parts: Any, device: torch.device) -> Any:
    kind = _class(parts[0])
    found = kind.__new__(kind)
    for name, each in parts[1].items():
        object.__setattr__(found, name, placed(each, device))
    return found


_PLACED: Mapping[str, Callable[[Any, torch.device], Any]] = {
    "int": lambda parts, device: int(parts),
    "complex": lambda parts, device: complex(*parts),
    "tuple": lambda parts, device: tuple(placed(parts, device)),
    "size": lambda parts, device: torch.Size(parts),
    "set": lambda parts, device: set(placed(parts, device)),
    "frozenset": lambda parts, device: frozenset(placed(parts, device)),
    "deque": lambda parts, device: deque(placed(parts[1], device), parts[0]),
    "named": lambda parts, device: _class(parts[0])._make(placed(parts[1], device)),
    "dict": _placed_dict,
    "array": lambda parts, device: (
        numpy.frombuffer(parts[2], numpy.dtype(parts[0])).reshape(parts[1]).copy()
    ),
    "number": lambda parts, device: numpy.frombuffer(parts[1], numpy.dtype(parts[0]))[0],
    "path": lambda parts, device: _class(parts[0])(parts[1]),
    "enum": lambda parts, device: _class(parts[0])[parts[1]],
    "generator": lambda parts, device: made(*parts),
    "record": _placed_record,
}


def into(old: Any, value: Any) -> Any:  # Any: an attribute may have any type
    """
    Return `value`, a result of `placed`. If `old` is of the same kind and can be changed, return
    `old` with the content of `value`, since other objects may refer to it.
    """
    if isinstance(old, dict) and type(value) in (dict, type(old)):
        content = {key: into(old.get(key), each) for key, each in value.items()}
        old.clear()
        old.update(content)
        return old
    if isinstance(old, Tensor) and isinstance(value, Tensor):
        return value.to(old.device)
    if type(old) is not type(value):
        return value
    if kind_of(old):
        put_back_into(old, read("attribute", value)[1])
        return old
    return _filled(old, value)


def _filled(old: Any, value: Any) -> Any:
    if isinstance(old, list):
        old[:] = value
    elif isinstance(old, set) or (isinstance(old, deque) and old.maxlen == value.maxlen):
        old.clear()
        old.update(value) if isinstance(old, set) else old.extend(value)
    elif (
        isinstance(old, numpy.ndarray)
        and (old.shape, old.dtype) == (value.shape, value.dtype)
        and old.flags.writeable
    ):
        old[...] = value
    elif is_dataclass(old) and not _frozen(old):
        _fill_record(old, value)
    else:
        return value
    return old


def _frozen(record: Any) -> bool:
    return bool(record.__dataclass_params__.frozen)


def _fill_record(old: Any, value: Any) -> None:
    content = _content(value)
    for name in _content(old).keys() - content.keys():
        object.__delattr__(old, name)
    for name, each in content.items():
        object.__setattr__(old, name, into(getattr(old, name, None), each))


# ---------------------------------------------------------------- sizes and comparisons


def size_of(value: Any) -> int:  # Any: a result of `plain`
    """
    Return about how many bytes a plain value takes.
    """
    kind = type(value)
    if kind is str or kind is bytes:
        return len(value)
    if kind is dict:
        return sum(size_of(key) + size_of(each) for key, each in value.items())
    if kind is list or kind is tuple:
        return sum(map(size_of, value))
    return value.nbytes if isinstance(value, Tensor | Large) else 8


def equal(left: Any, right: Any) -> bool:  # Any: results of `plain`
    """
    Return True if two plain values are the same, also in their types.
    """
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(
            equal(each, right[key]) for key, each in left.items()
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right)
