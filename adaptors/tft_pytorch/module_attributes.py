"""
Keeps the plain attributes of a model's modules that change while training, such as the probability
of a dropout layer or a counter of forward passes, and finds those that cannot be kept.

Numbers, texts, and tuples of them are kept, unless the module also changes attributes that are not. They may change at any place and differently on each
rank, so they are part of the rank-local state. Only changes since the start are noted, because most
attributes never change. Tensors, lists and other objects are not kept: a script can keep them in
buffers, or in an extra state.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from tft.errors import MalformedMessage
from tft.spi.plain_values import NotPlain, size_of
from tft_pytorch.attributes import set_by
from tft_pytorch.plain_values import is_fixed, placed, plain
from tft_pytorch.unkept import Unkept

LIMIT = 16 * 1024
"""The most bytes of all changed attributes together. There is a limit because they are copied at
every step, and because moving buffers need most of the space for the rank-local state."""
_VALUE = 1024
"""The most bytes of one value that is kept."""
_OWN = frozenset(vars(nn.Module()))
"""The attributes that each module has. tft keeps their content in other ways."""
_FRAMEWORKS = frozenset({"torch", "builtins", "typing", "abc"})
_KIND = "numbers, texts and tuples of them are kept, and this is something else"
_LARGE = (
    f"numbers, texts and tuples of them are kept up to {LIMIT // 1024} KiB in all, and this is more"
)

_UNKNOWN = object()

Read = Callable[[Mapping[str, Any]], Any]
Changed = tuple[tuple[str, Any], ...]
"""The attributes of a module that can be kept and that have changed since the start, with their
values."""


class _Watched:
    """
    The attributes of one module.
    """

    def __init__(self, module: nn.Module) -> None:
        kind: Any = type(module)
        self.fields = vars(module)
        more = {name: value for name, value in self.fields.items() if name not in _OWN}
        self.start = {name: value for name, value in more.items() if is_fixed(value)}
        """The attributes that could be kept when the training began, with their values."""
        self.users = _of_user(kind)
        layers = _of_torch(kind) if self.users else frozenset()
        self.but = _OWN | (layers & (more.keys() - self.start))
        """The attributes of a module of the user's class that are left alone."""
        self._read: Read = itemgetter(*self.start) if self.start else _nothing
        self._values = self._read(self.start)
        self._objects = {name: id(each) for name, each in more.items() if name not in self.start}
        """The other attributes at the start: which objects they were."""
        self._mixed = False
        """True if the module has also changed attributes that are not kept. Then none is kept: a
        length without its cached tensor, for example, would be wrong, and the module computes both
        anew."""
        self._number = len(self.fields)
        self._new: list[str] = []
        """The names of the attributes that the user's class has set since the start."""
        self._last: tuple[Any, Changed] = _UNKNOWN, ()
        """The values at the last call of `changed` that found a change, and its result."""

    def changed(self) -> Changed:
        """
        Return the attributes that have changed. If nothing has changed since the last call, the
        result is the same object.
        """
        try:
            if len(self.fields) != self._number:
                self._number, self._new = len(self.fields), self._added()
            values = self._read(self.fields)
            if not any(is_fixed(self.fields[name]) for name in self._new):
                if values == self._values:
                    return ()
                if values == self._last[0]:
                    return self._last[1]
        # an attribute was deleted, or is now something like an array, which has no single result
        except Exception:  # noqa: BLE001 (a class of the user's may compare as it likes)
            values = _UNKNOWN
        self._mixed = self._mixed or self._changes_others()
        changed, before = () if self._mixed else tuple(self._changed()), self._last[1]
        self._last = values, before if before == changed else changed
        return self._last[1]

    def _changes_others(self) -> bool:
        """
        Return True if an attribute that is not kept is another object than at the start, or is new.
        """
        if not self.users:
            return False
        fields, known = self.fields, self._objects
        set_since = {*self._new, *self.start} - known.keys()
        return any(id(fields.get(name)) != each for name, each in known.items()) or any(
            not is_fixed(fields.get(name)) for name in set_since
        )

    def _added(self) -> list[str]:
        known = self.but | self.start.keys()
        return [name for name in self.fields if self.users and name not in known]

    def _changed(self) -> Iterator[tuple[str, Any]]:
        for name, before in self.start.items():
            value = self.fields.get(name, before)
            differs = value is not before and is_fixed(value)
            if differs and (type(value) is not type(before) or bool(value != before)):
                yield name, value
        for name in self._new:
            if is_fixed(self.fields.get(name, self)):
                yield name, self.fields[name]

    def put_back(self, noted: Mapping[str, Any], left: frozenset[str]) -> None:
        """
        Set the changed attributes to `noted`, and all others to what they were at the start, except
        those in `left` and those that cannot be kept. Do nothing if the module has changed others.
        """
        changed = self.changed()
        if self._mixed:
            return
        for name, _ in changed:
            if name in noted or name in left:
                continue
            if name in self.start:
                self.fields[name] = self.start[name]
            else:
                del self.fields[name]
        self.fields.update(noted)


class ModuleAttributes:
    """
    Notes and restores the plain attributes of the modules of some models.
    """

    def __init__(self) -> None:
        self._models: tuple[nn.Module, ...] = ()
        self._watched: list[_Watched] | None = None
        """The modules. None before `begin`."""
        self._unkept: Unkept | None = None
        self._found: list[Changed] = []
        """By module: the attributes that had changed at the last call of `noted`."""
        self._noted: tuple[dict[str, Any] | None, int] = None, 0
        """The result of the last call of `noted`."""

    def watch(self, *models: nn.Module) -> None:
        """
        Keep the attributes of the modules of `models` after the next call of `begin`.
        """
        self._models, self._watched, self._unkept = models, None, None
        self._found, self._noted = [], (None, 0)

    def begin(self) -> None:
        """
        Record the present attributes as those of the start, unless this was done since `watch`.
        Called when the wrapper exists, which may set attributes too.
        """
        if self._watched is not None:
            return
        modules = [m for model in self._models for m in model.modules() if _keeps(type(m))]
        self._watched = [_Watched(module) for module in modules]
        if not modules:
            return
        self._unkept = Unkept(nn.ModuleList(self._models))
        for module, each in zip(modules, self._watched, strict=True):
            if each.users:
                self._unkept.watch(module, _always, each.but, _why)
        list(self._unkept.changed())  # from now on changes are found

    def noted(self) -> tuple[dict[str, Any] | None, int]:
        """
        Return the attributes that have changed since the start, for `put_back`, and their size in
        bytes. Return None and 0 if none has changed.
        """
        found = [each.changed() for each in self._watched or ()]
        # compared are mostly the same objects, which takes no time
        if found != self._found:
            self._found, self._noted = found, _packed(found)
        return self._noted

    def put_back(self, noted: object) -> str | None:
        """
        Restore the attributes to `noted`, a result of the method `noted` of this process or another
        one. Return a sentence if some of them were too large to be noted.

        Do nothing if `noted` is of a model with another number of modules: then the script was
        changed before the job was resumed. Raises `MalformedMessage` if it cannot be read.
        """
        if self._watched is None:
            return None
        told: Any = {"of": len(self._watched), "set": [], "left": []} if noted is None else noted
        if not isinstance(told, dict) or told.keys() != {"of", "set", "left"}:
            raise MalformedMessage(
                "the attributes of modules in the rank-local state must be a dict with the keys "
                "of, set and left"
            )
        if told["of"] != len(self._watched):
            return None
        values: dict[int, dict[str, Any]] = {}
        for name, form, numbers in told["set"]:
            value = placed(form, torch.device("cpu"))
            for number in numbers:
                values.setdefault(number, {})[name] = value
        left = frozenset(told["left"])
        for number, each in enumerate(self._watched):
            each.put_back(values.get(number, {}), left)
        return (
            f"attributes of modules are too large to be kept: {', '.join(left)}" if left else None
        )

    def unkept(self) -> dict[str, str]:
        """
        Return the attributes of the user's modules that have changed since the last call and are not
        kept, each with a sentence for the user.
        """
        if self._unkept is None:
            return {}
        noted, _ = self.noted()
        found = {f"{owner}.{name}": why for owner, name, why in self._unkept.changed()}
        found |= dict.fromkeys((noted or {"left": ()})["left"], _LARGE)
        return {what: _sentence(what, why) for what, why in found.items()}


def _packed(found: Sequence[Changed]) -> tuple[dict[str, Any] | None, int]:
    """
    Return the changed attributes of the modules as plain values, and their size in bytes. Equal values
    of an attribute in many modules take little space.
    """
    numbers: dict[tuple[str, type, Any], list[int]] = {}
    for number, changed in enumerate(found):
        for name, value in changed:
            numbers.setdefault((name, type(value), value), []).append(number)
    if not numbers:
        return None, 0
    kept: list[list[Any]] = []
    left, size = set(), 0
    for (name, _, value), having in numbers.items():
        more = _size(value) + len(name) + 4 * len(having) + 8
        if _size(value) > _VALUE or size + more > LIMIT:
            left.add(name)
            continue
        size += more
        kept.append([name, plain(value), having])
    return {"of": len(found), "set": kept, "left": sorted(left)}, size


def _size(value: Any) -> int:
    try:
        return size_of(plain(value))
    except NotPlain:  # such as an enum of a class within a function, which has no name elsewhere
        return _VALUE + 1


def _sentence(what: str, why: str) -> str:
    return (
        f"the attribute {what} of a module of the model changes while training, and tft does not keep "
        f"it ({why}): an incident does not put it back, and a replacement process begins anew with it. "
        "Keep tensors in buffers (register_buffer), and other state in get_extra_state and "
        "set_extra_state. If each step computes it anew, set it to None after its use"
    )


def _always(name: str) -> bool:
    return True


def _nothing(fields: Mapping[str, Any]) -> None:
    return None


def _why(value: object) -> str:
    return "" if is_fixed(value) else _KIND


def _keeps(kind: Any) -> bool:
    """
    Return True if attributes of modules of this class are kept: those of the user's classes, and of
    torch's layers. Wrappers of torch have bookkeeping in their attributes.
    """
    return _of_user(kind) or any(map(_is_layer, kind.__mro__))


@cache
def _of_user(kind: Any) -> bool:
    """
    Return True if a class or one of its bases comes from elsewhere than torch.
    """
    return any(base.__module__.partition(".")[0] not in _FRAMEWORKS for base in kind.__mro__)


def _is_layer(kind: Any) -> bool:
    return bool(kind.__module__.startswith("torch.nn.modules.")) and kind is not nn.Module


@cache
def _of_torch(kind: Any) -> frozenset[str]:
    """
    Return the names of the attributes that layers of torch among the bases of a user's class set. An
    example is the list of its weights that an LSTM has.
    """
    found: set[str] = set()
    for base in filter(_is_layer, kind.__mro__):
        with suppress(OSError):  # there is no source
            found |= set_by(base)
    return frozenset(found)
