"""
Notes and restores attributes of the user's objects, such as callbacks. Only attributes with plain
values are noted: numbers, texts, tensors, arrays, and containers of them (see `plain_values`).
"""

import ast
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from inspect import getsource
from textwrap import dedent
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tft.errors import UsageError
from tft.spi.plain_values import (
    AS_THEY_ARE,
    LIMIT,
    Filled,
    NotPlain,
    OwnedObjects,
    equal,
    size_of,
)
from tft_pytorch.plain_values import (
    into_owned,
    is_fixed,
    marked,
    may_be_plain,
    placed,
    plain,
    put_back,
)

_CONTAINERS = (list, tuple, set, frozenset, deque, dict)


def attributes_of(owner: object, but: Collection[str] = ()) -> dict[str, Any]:
    """
    Return the attributes of `owner` that have plain values, by name. Leave out those named in
    `but`.
    """
    found = {}
    for name, value in vars(owner).items():
        if name in but:
            continue
        if type(value) in AS_THEY_ARE:
            found[name] = value
        elif may_be_plain(value):
            with suppress(NotPlain):
                found[name] = plain(value)
    return found


@cache
def set_by(kind: type) -> frozenset[str]:
    """
    Return the names of the attributes that the methods of the class `kind` set on `self`.
    Attributes that only methods of its base classes set are not included.
    """
    nodes = ast.walk(ast.parse(dedent(getsource(kind))))
    return frozenset(
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


class Attributes:
    """
    The attributes of an object that have plain values and may change while training.

    An attribute that is large before training begins counts as constant. It is not noted, because
    the script sets it in each process.
    """

    def __init__(self, owner: object, but: Collection[str] = (), *, public: bool = False) -> None:
        """
        Watch the attributes of `owner`, except those named in `but`. With `public=True`, also leave
        out attributes whose names begin with an underscore.
        """
        self._owner = owner
        self._public = public
        self._but = frozenset(but)
        self._owned = OwnedObjects()
        found = self._found()
        self._constant = frozenset(name for name in found if size_of(found[name]) > LIMIT)
        self._but |= self._constant
        self._owned.begin(self._of_names(found))

    def noted(self) -> dict[str, Any]:
        """
        Return a copy of the attributes by name. Raises `UsageError` if an attribute has grown to
        more than `LIMIT` bytes.
        """
        found = self._found()
        attributes = self._of_names(found)
        self._owned.settle(attributes)
        for name, value in found.items():
            if size_of(value) > LIMIT:
                raise UsageError(
                    f"the attribute {name} of {type(self._owner).__name__} has grown to more than "
                    f"{LIMIT // 1024} KiB while training, too much to keep it for a replacement "
                    "process at every step: log each value when it is computed, and keep only a "
                    "sum of the values"
                )
        return {n: marked(attributes[n], v, self._owned.by(n)) for n, v in found.items()}

    def put_back(self, noted: Mapping[str, Any], filled: Filled | None = None) -> None:
        """
        Set the attributes to `noted`, a result of the method `noted` of this process or another
        one. An attribute that is not in `noted` gets its default back, if its class has one.

        If several owners are put back together, pass the same dict `filled` for all of them. It
        collects the objects that have their content back, because two owners may share an object.
        """
        found = self._found()
        self._owned.settle(self._of_names(found))
        for name in found.keys() - noted.keys():
            if hasattr(type(self._owner), name):
                delattr(self._owner, name)
        put_back(self._owner, noted, filled, self._owned)

    def keeps(self, name: str) -> bool:
        """
        Return False if the attribute `name` counts as constant, so that it is never noted.
        """
        return name not in self._constant

    def _of_names(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: vars(self._owner)[name] for name in names}

    def _found(self) -> dict[str, Any]:
        found = attributes_of(self._owner, self._but)
        return {n: v for n, v in found.items() if not (self._public and n.startswith("_"))}


class Changes:
    """
    The attributes of an object, as far as they differ from what they were before training.

    This class is for objects with many attributes of which few change. Attributes that do not
    change are not noted, because the script sets them in each process. Large values are not noted
    either.
    """

    def __init__(
        self, owner: object, but: Collection[str] = (), *, underscored: bool = False
    ) -> None:
        """
        Watch the attributes of `owner`, except those named in `but`. With `underscored=True`, watch
        only attributes whose names begin with an underscore.
        """
        self._owner = owner
        self._but = but
        self._underscored = underscored
        self._constant: set[str] = set()
        """The names of attributes that were too large before training began. They are not noted."""
        self._left: set[str] = set()
        """The names of attributes that have grown too large while training. They are no longer
        noted, and `put_back` does not change them."""
        self._grown: list[str] = []
        self._start: dict[str, Any] = {}
        self._owned = OwnedObjects()
        self._fixed: dict[str, object] = {}
        """By attribute: a value that cannot be changed in place, or that is not noted in any case.
        The attribute need not be compared as long as it refers to this object."""
        for name, value in list(vars(owner).items()):
            self._note_start(name, value)
        self._owned.begin({name: vars(owner)[name] for name in self._start})

    def _note_start(self, name: str, value: Any) -> None:
        if _has_many_parts(value):
            self._constant.add(name)
            return
        try:
            noted = plain(value) if self._watches(name) else None
        except NotPlain:
            if not may_be_plain(value):
                self._fixed[name] = value
            return
        if not self._watches(name) or is_fixed(value):
            self._fixed[name] = value
        if self._watches(name):
            if size_of(noted) > LIMIT:
                self._constant.add(name)
            else:
                self._start[name] = copied(noted)

    def noted(self, room: int = LIMIT) -> dict[str, Any]:
        """
        Return how the attributes differ from what they were before training, as a dict:

        - `set` has the values of attributes that have changed, by name.
        - `gone` has the names of attributes that were deleted.
        - `left` has the names of attributes whose value is not noted. It is no longer plain, or too
          large: the values in `set` may have `room` bytes in all.

        Return an empty dict if nothing has changed.
        """
        changed, left, attributes = {}, [], vars(self._owner)
        self._settle()
        for name, value in attributes.items():
            if self._fixed.get(name, self) is value or not self._watches(name):
                continue
            if name in self._left:
                left.append(name)
                continue
            try:
                now = plain(value)
            except NotPlain:
                if name in self._start:
                    left.append(name)
                continue
            if name in self._start and equal(now, self._start[name]):
                continue
            now = marked(value, now, self._owned.by(name))
            size = size_of(now)
            if size > min(room, LIMIT):
                left.append(name)
                self._grows(name, value)
                continue
            room -= size
            changed[name] = now
        gone = [name for name in self._start if name not in attributes]
        if not changed and not gone and not left:
            return {}
        return {"set": changed, "gone": gone, "left": sorted(left)}

    def _grows(self, name: str, value: Any) -> None:
        self._left.add(name)
        if not _computed(value):
            self._grown.append(name)

    def put_back(
        self, noted: Mapping[str, Any], device: torch.device, filled: Filled | None = None
    ) -> None:
        """
        Set the attributes to `noted`, a result of the method `noted` of this process or another one
        from which `placed` has made values again. Tensors that were on a device before training are
        put on `device`.

        If several owners are put back together, pass the same dict `filled` for all of them,
        because they may share an object, which is filled only once.
        """
        filled = {} if filled is None else filled
        self._settle()
        changed, left = noted.get("set", {}), {*noted.get("left", ()), *self._left}
        gone, attributes = noted.get("gone", ()), vars(self._owner)
        for name, value in list(self._plain()):
            if name in left or name in changed:
                continue
            if name not in self._start or name in gone:
                del attributes[name]
            elif not equal(value, self._start[name]):
                self._set(name, placed(copied(self._start[name]), device), filled)
        for name in self._start.keys() - attributes.keys() - {*left, *gone, *changed}:
            attributes[name] = placed(copied(self._start[name]), device)
        for name, value in changed.items():
            self._set(name, value, filled)

    def grown(self) -> list[str]:
        """
        Return the names of the attributes that have become too large since the last call. Leave out
        attributes that each step computes again, because no step needs their old value.
        """
        found, self._grown = self._grown, []
        return found

    def keeps(self, name: str) -> bool:
        """
        Return True if the attribute `name` is noted when it changes.
        """
        return name in self._but or not (name in self._left or name in self._constant)

    # Any: a result of `placed`
    def _set(self, name: str, value: Any, filled: Filled) -> None:
        attributes = vars(self._owner)
        attributes[name] = into_owned(attributes.get(name), value, filled, self._owned, name)

    def _settle(self) -> None:
        plain_names = [name for name, _ in self._plain()] if not self._owned.settled else []
        self._owned.settle({name: vars(self._owner)[name] for name in plain_names})

    def _watches(self, name: str) -> bool:
        return (
            name not in self._but
            and name not in self._constant
            and (not self._underscored or name.startswith("_"))
        )

    def _plain(self) -> Iterator[tuple[str, Any]]:
        for name, value in vars(self._owner).items():
            if self._watches(name) and name not in self._left and may_be_plain(value):
                with suppress(NotPlain):
                    yield name, plain(value)


def _has_many_parts(value: object) -> bool:
    """
    Return True if `value` has a large tensor, or containers with very many parts. Such a value is
    not copied, because the copy would take long: a dataset may have a list of millions of items, or
    all its items on a device.
    """
    waiting, left = [value], LIMIT
    while waiting:
        each = waiting.pop()
        if type(each) is Tensor and each.numel() * each.element_size() > LIMIT:
            return True
        if isinstance(each, _CONTAINERS):
            left -= len(each)
            if left < 0:
                return True
            waiting.extend(each.values() if isinstance(each, dict) else each)
    return False


def _computed(value: object) -> bool:
    """
    Return True if a tensor in `value` has an autograd graph. Such a tensor was computed in this
    step, and the next step computes it again.
    """
    return any(isinstance(each, Tensor) and each.grad_fn for each in tree_leaves(value))


# Any: a result of `plain`
def copied(value: Any) -> Any:
    """
    Return a copy of `value`, a plain value, with copies of its tensors. Plain values share tensors
    with the user's objects, which may change these tensors in place later.
    """
    return tree_map_only(Tensor, Tensor.clone, value)
