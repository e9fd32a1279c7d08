"""
Copies and restores the attributes of callbacks and modules that are plain values: numbers, texts,
tensors, and lists, tuples and dicts of them.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_SCALARS = (bool, int, float, str, bytes, type(None))


class NotPlain(Exception):
    """
    Raised for a value that is not plain.
    """


def plain(value: Any) -> Any:  # Any: an attribute may have any type
    """
    Return a copy of `value` for the rank-local state. Tensors are not copied, but detached and on
    the CPU. Raises `NotPlain` if a part of it is not plain.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if kind in (list, tuple):
        return kind(plain(each) for each in value)
    if isinstance(value, dict):
        return {plain(key): plain(each) for key, each in value.items()}
    raise NotPlain


def attributes_of(owner: object, but: frozenset[str] = frozenset()) -> dict[str, Any]:
    """
    Return the plain attributes of `owner` by name, without those named in `but`.
    """
    found = {}
    for name, value in vars(owner).items():
        if name not in but:
            try:
                found[name] = plain(value)
            except NotPlain:
                continue
    return found


def put_back(owner: object, attributes: Mapping[str, Any]) -> None:
    """
    Set the attributes of `owner` to the values that `attributes_of` has returned. Lists and dicts
    keep their identity and type, since other objects may refer to them.
    """
    present = vars(owner)
    for name, value in attributes.items():
        old = present.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            old.clear()
            old.update(value)
        elif isinstance(old, list) and isinstance(value, list):
            old[:] = value
        elif isinstance(old, Tensor) and isinstance(value, Tensor):
            setattr(owner, name, value.to(old.device))
        else:
            setattr(owner, name, value)
