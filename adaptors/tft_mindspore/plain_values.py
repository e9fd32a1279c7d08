"""
Copies values of the user's objects into a form that can be packed, and makes the values again:
numbers, texts, Tensors, arrays of numpy, and lists, tuples, sets, deques and dicts of them.

In that form, simple values stay what they are. Every other value becomes a list of the name of its
type and its parts.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy
from mindspore import Tensor

_SIMPLE: frozenset[Any] = frozenset({bool, float, str, bytes, type(None)})
_WORDS = range(-(2**63), 2**64)
"""The integers that can be packed."""
_DEEPEST = 30
"""How many containers may lie within each other. Objects that refer to each other would have no
end."""
_CONTAINERS = frozenset(
    {list, tuple, set, frozenset, deque, dict, OrderedDict, Counter, defaultdict}
)
LIMIT = 32 * 1024
"""The most bytes of one value. The whole rank-local state has 256 KiB."""

Plain = Any  # a result of `plain`: plain values of various types
_Form = Callable[[Any, int], Plain]


class NotPlain(Exception):
    """
    Raised for a value that is not plain.
    """


class TooLarge(NotPlain):
    """
    Raised for an array or a container of more than `LIMIT` bytes.
    """


def plain(value: Any, depth: int = 0) -> Plain:  # Any: an attribute may have any type
    """
    Return a copy of `value` from which `placed` makes the value again. Raises `NotPlain` if a part
    of it is not plain.
    """
    kind: Any = type(value)
    if kind in _SIMPLE:
        return value
    if kind is int and value in _WORDS:
        return value
    form = _FORMS.get(kind)
    if form is None and isinstance(value, numpy.generic):
        form = _number
    if form is None or depth > _DEEPEST:
        raise NotPlain
    if kind in _CONTAINERS and len(value) > LIMIT // 8:
        raise TooLarge
    return form(value, depth + 1)


def placed(value: Plain) -> Any:  # Any: the type of the value that was copied
    """
    Return the value of which `plain` has made `value`.
    """
    return _PLACED[value[0]](value[1]) if type(value) is list else value


def into(old: Any, value: Any) -> Any:  # Any: an attribute may have any type
    """
    Return `value`, a result of `placed`. If `old` is of the same kind and can be changed, return
    `old` with the content of `value`, since other objects may refer to it.
    """
    if isinstance(old, dict) and isinstance(value, dict):
        old.clear()
        old.update(value)
    elif type(old) is not type(value):
        return value
    elif isinstance(old, list):
        old[:] = value
    elif isinstance(old, set):
        old.clear()
        old.update(value)
    elif isinstance(old, deque) and old.maxlen == value.maxlen:
        old.clear()
        old.extend(value)
    else:
        return value
    return old


def size_of(value: Plain) -> int:
    """
    Return about how many bytes a plain value takes.
    """
    if type(value) is list:
        return sum(map(size_of, value))
    return len(value) if type(value) in (str, bytes) else 8


# ---------------------------------------------------------------- the forms of the types


def _large(value: Any, depth: int) -> Plain:
    return ["int", str(value)]


def _array(value: Any, depth: int) -> Plain:
    if value.dtype.hasobject or value.dtype.fields is not None:
        raise NotPlain
    if value.nbytes > LIMIT:
        raise TooLarge
    return ["array", [value.dtype.str, list(value.shape), value.tobytes()]]


def _tensor(value: Any, depth: int) -> Plain:
    if value.nbytes > LIMIT:
        raise TooLarge
    try:
        found = value.asnumpy()
    except (TypeError, RuntimeError):  # a type that numpy does not have
        raise NotPlain from None
    return ["tensor", _array(found, depth)]


def _number(value: Any, depth: int) -> Plain:
    return ["number", _array(numpy.asarray(value), depth)]


def _list(value: Any, depth: int) -> Plain:
    return [type(value).__name__, [plain(each, depth) for each in value]]


def _set(value: Any, depth: int) -> Plain:
    # the order of a set differs between processes
    return [type(value).__name__, [plain(each, depth) for each in sorted(value, key=repr)]]


def _deque(value: Any, depth: int) -> Plain:
    return ["deque", [value.maxlen, [plain(each, depth) for each in value]]]


def _dict(value: Any, depth: int) -> Plain:
    if depth > 1 and type(value) is defaultdict:
        # `into` keeps the function that makes its values, but only of an attribute itself
        raise NotPlain
    pairs = [[plain(key, depth), plain(each, depth)] for key, each in value.items()]
    return [type(value).__name__, pairs]


_FORMS: Mapping[Any, _Form] = {
    int: _large, list: _list, tuple: _list, set: _set, frozenset: _set, deque: _deque,
    dict: _dict, OrderedDict: _dict, Counter: _dict, defaultdict: _dict,
    numpy.ndarray: _array, Tensor: _tensor,
}  # fmt: skip


def _placed_array(parts: Any) -> Any:
    kind, shape, words = parts
    return numpy.frombuffer(words, numpy.dtype(kind)).reshape(shape).copy()


def _placed_dict(pairs: Any) -> dict[Any, Any]:
    return {placed(key): placed(each) for key, each in pairs}


_PLACED: Mapping[str, Callable[[Any], Any]] = {
    "int": int,
    "list": lambda parts: [placed(each) for each in parts],
    "tuple": lambda parts: tuple(placed(each) for each in parts),
    "set": lambda parts: {placed(each) for each in parts},
    "frozenset": lambda parts: frozenset(placed(each) for each in parts),
    "deque": lambda parts: deque((placed(each) for each in parts[1]), parts[0]),
    "dict": _placed_dict,
    "OrderedDict": lambda pairs: OrderedDict(_placed_dict(pairs)),
    "Counter": lambda pairs: Counter(_placed_dict(pairs)),
    "defaultdict": _placed_dict,
    "array": _placed_array,
    "number": lambda parts: _placed_array(parts[1])[()],
    "tensor": lambda parts: Tensor(_placed_array(parts[1])),
}
