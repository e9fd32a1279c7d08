"""
Notes and restores the attributes of the user's objects, such as callbacks, that are plain values
(`plain_values`).
"""

import ast
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cache
from inspect import getsource
from textwrap import dedent
from typing import Any

from tft.errors import UsageError
from tft_pytorch.plain_values import (
    AS_THEY_ARE,
    NotPlain,
    into,
    may_be_plain,
    plain,
    size_of,
)

LIMIT = 32 * 1024
"""The most bytes of one attribute that are kept. The whole rank-local state has 256 KiB."""


def attributes_of(owner: object, but: Collection[str] = ()) -> dict[str, Any]:
    """
    Return the plain attributes of `owner` by name, without those named in `but`.
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
    Return the names of the attributes that the methods of a class set. Those of its bases are not
    among them.
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
    has put their tensors in place. Lists, dicts and the like keep their identity, since other
    objects may refer to them.
    """
    present = vars(owner)
    for name, value in attributes.items():
        setattr(owner, name, into(present.get(name), value))
