"""
Copies and restores the attributes of the user's objects, such as callbacks, that are plain values:
numbers, texts, tensors, and lists, tuples and dicts of them.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from tft.errors import UsageError

_SCALARS = (bool, int, float, str, bytes, type(None))
_ON_DEVICE = "tft: a tensor on the device"
"""The only key of a dict that stands for a tensor on the device of its rank."""
_TUPLE = "tft: a tuple"
"""The only key of a dict that stands for a tuple, which would become a list on its way."""

LIMIT = 32 * 1024
"""The most bytes of one attribute that are kept. The whole rank-local state has 256 KiB."""


class NotPlain(Exception):
    """
    Raised for a value that is not plain.
    """


def plain(value: Any) -> Any:  # Any: an attribute may have any type
    """
    Return a copy of `value` for the rank-local state, from which `placed` makes the value again.
    Tensors on the CPU are not copied, but detached. Raises `NotPlain` if a part of it is not plain.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value
    if isinstance(value, Tensor):
        on_host = value.detach().cpu()
        return on_host if value.device.type == "cpu" else {_ON_DEVICE: on_host}
    if kind in (list, tuple):
        each_plain = [plain(each) for each in value]
        return each_plain if kind is list else {_TUPLE: each_plain}
    if isinstance(value, dict):
        if not all(type(key) in (*_SCALARS, tuple) for key in value):
            raise NotPlain
        return {key: plain(each) for key, each in value.items()}
    raise NotPlain


def placed(value: Any, device: torch.device) -> Any:  # Any: a result of `plain`
    """
    Return the value of which `plain` has made `value`. Its tensors that were on a device are on
    `device`, which is another one if they come from another rank.
    """
    kind = type(value)
    if kind is dict:
        if value.keys() == {_ON_DEVICE}:
            return value[_ON_DEVICE].to(device)
        if value.keys() == {_TUPLE}:
            return tuple(placed(each, device) for each in value[_TUPLE])
        return {key: placed(each, device) for key, each in value.items()}
    if kind in (list, tuple):
        return kind(placed(each, device) for each in value)
    return value


def attributes_of(owner: object, but: Collection[str] = ()) -> dict[str, Any]:
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


def size_of(value: Any) -> int:  # Any: a result of `plain`
    """
    Return about how many bytes a plain value takes.
    """
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(size_of(key) + size_of(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return sum(map(size_of, value))
    return 8


class Attributes:
    """
    The plain attributes of an object that may change while training.

    An attribute that is large before training begins counts as constant, and is left out: the
    script sets it in each process.
    """

    def __init__(self, owner: object, but: Collection[str] = (), *, public: bool = False) -> None:
        """
        Watch the attributes of `owner` except those named in `but`, and with `public` except those
        whose names begin with an underscore.
        """
        self._owner = owner
        self._public = public
        self._but = frozenset(but)
        self._but |= {name for name, value in self._found().items() if size_of(value) > LIMIT}

    def noted(self) -> dict[str, Any]:
        """
        Return a copy of the attributes by name. Raises `UsageError` if one of them has grown large.
        """
        found = self._found()
        for name, value in found.items():
            if size_of(value) > LIMIT:
                raise UsageError(
                    f"the attribute {name} of {type(self._owner).__name__} has grown to more than "
                    f"{LIMIT // 1024} KiB while training, too much to keep it for a replacement "
                    "process at every step: log the values as they come, and keep a sum of them"
                )
        return found

    def put_back(self, noted: Mapping[str, Any]) -> None:
        """
        Set the attributes to a result of `noted`, of this process or another one. Those for which
        the class has a default get it back if they were not set then.
        """
        for name in self._found().keys() - noted.keys():
            if hasattr(type(self._owner), name):
                delattr(self._owner, name)
        put_back(self._owner, noted)

    def _found(self) -> dict[str, Any]:
        found = attributes_of(self._owner, self._but)
        return {n: v for n, v in found.items() if not (self._public and n.startswith("_"))}


def put_back(owner: object, attributes: Mapping[str, Any]) -> None:
    """
    Set the attributes of `owner` to the values that `attributes_of` has returned, after `placed`
    has put their tensors in place. Lists and dicts keep their identity and type, since other objects
    may refer to them.
    """
    present = vars(owner)
    for name, value in attributes.items():
        setattr(owner, name, _into(present.get(name), value))


def _into(old: Any, value: Any) -> Any:  # Any: an attribute may have any type
    """
    Return `value`, as the content of the list or dict `old` if that is of the same kind.
    """
    if isinstance(old, dict) and isinstance(value, dict):
        content = {key: _into(old.get(key), each) for key, each in value.items()}
        old.clear()
        old.update(content)
        return old
    if isinstance(old, list) and isinstance(value, list):
        old[:] = value
        return old
    if isinstance(old, Tensor) and isinstance(value, Tensor):
        return value.to(old.device)
    return value
