"""
Copies values of the user's objects in a form that can be packed, and makes the values again: numbers,
texts, arrays of numpy, random generators, and lists, tuples, sets, deques, dicts and dataclasses of
them. An adaptor adds the tensors of its framework.

In that form, lists and most dicts stay what they are. Other types become a dict with the key
`_KIND`, which names the type.

This module needs numpy, so `tft.spi` does not import it.
"""

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import reduce
from importlib import import_module
from pathlib import PurePath
from typing import Any

import numpy

from tft.errors import UsageError
from tft.spi import generators

LIMIT = 32 * 1024
"""The most bytes of one attribute of an object that adaptors keep. The whole rank-local state has
256 KiB."""
LARGE = f"has more than {LIMIT // 1024} KiB"
"""Why an attribute is not kept, for `unkept_sentence`."""
SCALARS: frozenset[Any] = frozenset({bool, int, float, str, bytes, type(None)})
AS_THEY_ARE: frozenset[Any] = frozenset({bool, float, str, bytes, type(None)})
"""The types whose values are stored without a change. Values of other types are stored in a plain form."""
_CONTAINERS: frozenset[Any] = frozenset(
    {list, tuple, set, frozenset, deque, dict, OrderedDict, Counter, defaultdict}
)
_DICTS = frozenset({defaultdict, OrderedDict, Counter})
_KIND = "tft: a value of the type"
"""The key of a dict that stands for a value of another type. The other key is `_PARTS`."""
_PARTS = "of"
_DEEPEST = 30
"""How many containers may lie within each other. Objects that refer to each other would have no end."""
_WORDS = range(-(2**63), 2**64)
"""The integers that can be packed."""
_SAMPLES = 256
"""How many elements of an array `mark_of_array` looks at."""

Form = Callable[[Any, int], Any]
"""Returns the plain form of a value of one type. Takes the value, and how deep its parts lie."""

Filled = dict[int, tuple[Any, Any]]
"""The objects that have got their content back, by their `id`, each with the value it was given."""
Owns = Callable[[object], bool]
"""Returns True for an object that an attribute has had from the start."""


class NotPlain(Exception):
    """
    Raised for a value that is not plain.
    """


@dataclass(frozen=True, slots=True)
class Large:
    """
    Stands for a value that is too large to be kept.
    """

    nbytes: int


@dataclass(frozen=True, slots=True)
class Anew:
    """
    Stands for a value that gets an object of its own when it is put back.
    """

    value: Any


def of_kind(kind: str, parts: object) -> dict[str, object]:
    """
    Return the plain form of a value whose type has the name `kind` there.
    """
    return {_KIND: kind, _PARTS: parts}


class PlainValues:
    """
    Copies values, and makes them again, for one adaptor.
    """

    def __init__(
        self,
        *,
        forms: Mapping[Any, Form],
        makers: Mapping[str, Callable[[Any, Any], Any]],
        fillers: Sequence[tuple[type, Callable[[Any, Any], Any]]] = (),
        frameworks: Collection[str],
        large: int,
        many: int = sys.maxsize,
        own_dicts: bool = True,
    ) -> None:
        """
        Add to the types of Python and numpy those of a framework: `forms` has their forms, and
        `makers` makes the values again, from the parts in `of_kind` and the `place` of `placed`.
        Subclasses of these types are not plain. `fillers` has types of which `into` puts values back
        by these functions, from the old value and the new one.

        Dataclasses of the packages `frameworks` are not plain: they may be the bookkeeping of a
        framework. `Large` stands for arrays of more than `large` bytes, and for containers of more
        than `many` parts, which are not copied. Dicts of the user's own classes are plain within
        another value only with `own_dicts`: another process may have a dict there.
        """
        self._forms: Mapping[Any, Form] = {
            **dict.fromkeys(AS_THEY_ARE, _scalar),
            Anew: self._anew, int: _large_integer, complex: _complex, list: self._list, set: self._set, frozenset: self._set,
            deque: self._deque, numpy.ndarray: self._array, **forms,
        }  # fmt: skip
        self._forms_of_bases: Sequence[tuple[type, Form]] = (
            (Enum, _enum), (tuple, self._tuple), (dict, self._dict), (numpy.generic, _number),
            (PurePath, _path), (numpy.random.Generator, _generator),
            (numpy.random.RandomState, _generator), (random.Random, _generator),
        )  # fmt: skip
        self._makers: Mapping[str, Callable[[Any, Any], Any]] = {
            **_MAKERS,
            "tuple": lambda parts, place: tuple(self.placed(parts, place)),
            "set": lambda parts, place: set(self.placed(parts, place)),
            "frozenset": lambda parts, place: frozenset(self.placed(parts, place)),
            "deque": lambda parts, place: deque(self.placed(parts[1], place), parts[0]),
            "named": lambda parts, place: _class(parts[0])._make(self.placed(parts[1], place)),
            "anew": lambda parts, place: Anew(self.placed(parts, place)),
            "dict": self._placed_dict,
            "record": self._placed_record,
            **makers,
        }
        self._fillers = fillers
        self._frameworks = frozenset(frameworks)
        self._large, self._many, self._own_dicts = large, many, own_dicts
        self._known: dict[Any, Form | None] = {}
        """The results of `_form` by type."""

    def plain(self, value: Any, depth: int = 0) -> Any:  # Any: an attribute may have any type
        """
        Return a copy of `value` from which `placed` makes the value again. Raises `NotPlain` if a
        part of it is not plain.
        """
        kind: Any = type(value)
        if kind in AS_THEY_ARE or (kind is int and value in _WORDS):
            return value
        form = self._form(kind)
        if form is None or depth > _DEEPEST:
            raise NotPlain
        if kind in _CONTAINERS and len(value) > self._many:
            return Large(8 * len(value))
        return form(value, depth + 1)

    def may_be_plain(self, value: object) -> bool:
        """
        Return True if `value` has a type that is plain. Its parts may be of another type.
        """
        return self._form(type(value)) is not None

    # Any: an attribute, and its plain form
    def marked(self, value: Any, form: Any, owns: Owns) -> Any:
        """
        Return `form`, the result of `plain` for `value`, with a mark at each object for which `owns`
        returns False: an attribute refers to another object now than at the start, such as an item
        of a dataset. `into` does not fill the object that is at the place of a mark, because it may
        be another item.
        """
        if is_changeable(value) and not owns(value):
            return of_kind("anew", form)
        if type(form) is not dict:
            return form
        if _KIND not in form:
            return {key: self.marked(value[key], each, owns) for key, each in form.items()}
        kind, parts = form[_KIND], form[_PARTS]
        if kind == "dict" and isinstance(value, dict):
            pairs = zip(parts[2], value.values(), strict=True)
            parts = [*parts[:2], [[k, self.marked(v, each, owns)] for (k, each), v in pairs]]
        elif kind == "record":
            content = _content(value)
            marked = {n: self.marked(content[n], each, owns) for n, each in parts[1].items()}
            parts = [parts[0], marked]
        return of_kind(kind, parts)

    def placed(self, value: Any, place: Any = None) -> Any:  # Any: a result of `plain`
        """
        Return the value of which `plain` has made `value`. `place` is for values of the framework:
        the device on which they will be, for example.
        """
        kind = type(value)
        if kind is dict:
            if _KIND in value:
                return self._makers[value[_KIND]](value[_PARTS], place)
            return {key: self.placed(each, place) for key, each in value.items()}
        if kind in (list, tuple):
            return kind(self.placed(each, place) for each in value)
        return value

    # Any: attributes may have any type
    def into(
        self, old: Any, value: Any, filled: Filled | None = None, owns: Owns | None = None
    ) -> Any:
        """
        Return `value`, a result of `placed`. If `old` is of the same kind and can be changed, return
        `old` with the content of `value`, since other objects may refer to it.

        Pass the same `filled` for values that are put back together. If it has `old` with other
        content already, two names refer to one object now that had two: then return `value`. Return
        `value` also where it is marked, or where `owns` is given and returns False for `old`.
        """
        filled = {} if filled is None else filled
        if isinstance(value, Anew) or (owns and is_changeable(old) and not owns(old)):
            return _unmarked(old, value)
        if id(old) in filled:
            return old if self._same(filled[id(old)][1], value) else _unmarked(old, value)
        filled[id(old)] = old, value  # before its parts, which may refer to it
        found = self._into(old, value, filled, owns)
        if found is old:
            return old
        del filled[id(old)]
        return _unmarked(old, found)

    def put_back(
        self,
        owner: object,
        attributes: Mapping[str, Any],
        filled: Filled | None = None,
        owned: "OwnedObjects | None" = None,
    ) -> None:
        """
        Set attributes of `owner` to values that `placed` has returned. Lists, dicts and the like
        keep their identity, since other objects may refer to them: all, or with `owned` those that
        the attributes have had from the start. Pass the same `filled` for all owners that are put
        back together.
        """
        present, filled = vars(owner), {} if filled is None else filled
        for name, value in attributes.items():
            owns = owned.by(name) if owned else None
            setattr(owner, name, self.into(present.get(name), value, filled, owns))

    def _into(self, old: Any, value: Any, filled: Filled, owns: Owns | None) -> Any:
        if isinstance(old, dict) and type(value) in (dict, type(old)):
            content = {k: self.into(_part(old, k, v), v, filled, owns) for k, v in value.items()}
            old.clear()
            old.update(content)
            return old
        for kind, fill in self._fillers:
            if isinstance(old, kind) and isinstance(value, kind):
                return fill(old, value)
        if type(old) is not type(value):
            return value
        if generators.kind_of(old):
            generators.put_back(old, generators.read(value)[1])
            return old
        if is_dataclass(old) and not _frozen(old):
            self._fill_record(old, value, filled, owns)
            return old
        return _filled(old, value)

    def _same(self, left: Any, right: Any) -> bool:
        return equal(self.plain(left), self.plain(right))

    # ------------------------------------------------------------ the forms of the types

    def _form(self, kind: Any) -> Form | None:
        """
        Return the function that copies a value of the type `kind`, or None if it is not plain.
        Subclasses of tensors are not plain. Parameters are among them: a model refers to them.
        """
        try:
            return self._known[kind]
        except KeyError:
            self._known[kind] = found = self._find(kind)
            return found

    def _find(self, kind: Any) -> Form | None:
        if kind in self._forms:
            return self._forms[kind]
        for base, form in self._forms_of_bases:
            if issubclass(kind, base):
                return form
        known = kind.__module__.partition(".")[0] in self._frameworks
        return self._record if is_dataclass(kind) and not known else None

    def _anew(self, value: Anew, depth: int) -> Any:
        return self.plain(value.value, depth)

    def _list(self, value: Any, depth: int) -> Any:
        return [self.plain(each, depth) for each in value]

    def _tuple(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind is tuple:
            return of_kind("tuple", self._list(value, depth))
        if not hasattr(kind, "_make"):
            raise NotPlain
        return of_kind("named", [_named(kind), self._list(value, depth)])

    def _set(self, value: Any, depth: int) -> Any:
        # the order of a set differs between processes
        return of_kind(type(value).__name__, self._list(sorted(value, key=repr), depth))

    def _deque(self, value: Any, depth: int) -> Any:
        return of_kind("deque", [value.maxlen, self._list(value, depth)])

    def _dict(self, value: Any, depth: int) -> Any:
        kind, makes = ["builtins", "dict"], ["", ""]
        if depth > 1 and not self._own_dicts and type(value) not in _CONTAINERS:
            raise NotPlain
        if type(value) in _DICTS:
            kind = _named(type(value))
            try:
                makes = _named(getattr(value, "default_factory", None) or type(None))
            except NotPlain:
                makes = _named(no_function)
        # a dict of another class keeps it where the content is put back into the dict that is there
        if kind == ["builtins", "dict"] and SCALARS.issuperset(map(type, value)):
            return {key: self.plain(each, depth) for key, each in value.items()}
        pairs = [[self.plain(key, depth), self.plain(each, depth)] for key, each in value.items()]
        return of_kind("dict", [kind, makes, pairs])

    def _array(self, value: Any, depth: int) -> Any:
        return Large(value.nbytes) if value.nbytes > self._large else array_form("array", value)

    def _record(self, value: Any, depth: int) -> Any:
        content = {name: self.plain(each, depth) for name, each in _content(value).items()}
        return of_kind("record", [_named(type(value)), content])

    # ------------------------------------------------------------ making values again

    def _placed_dict(self, parts: Any, place: Any) -> Any:
        kind, makes = _class(parts[0]), _class(parts[1])
        found = kind(makes) if kind is defaultdict else kind()
        for key, each in parts[2]:
            found[self.placed(key, place)] = self.placed(each, place)
        return found

    def _placed_record(self, parts: Any, place: Any) -> Any:
        kind = _class(parts[0])
        found = kind.__new__(kind)
        for name, each in parts[1].items():
            object.__setattr__(found, name, self.placed(each, place))
        return found

    def _fill_record(self, old: Any, value: Any, filled: Filled, owns: Owns | None) -> None:
        content = _content(value)
        for name in _content(old).keys() - content.keys():
            object.__delattr__(old, name)
        for name, each in content.items():
            object.__setattr__(old, name, self.into(getattr(old, name, None), each, filled, owns))


class OwnedObjects:
    """
    The lists, dicts, arrays and the like that the attributes of an object have from the start. Other
    objects may refer to them, so their content is put back into them. An attribute that refers to
    another object later may refer to an item of a dataset, which must not be changed.
    """

    def __init__(self) -> None:
        self._objects: dict[tuple[str, int], object] = {}
        self.settled = False
        """True after the first call of `settle`."""

    def begin(self, attributes: Mapping[str, Any]) -> None:
        """
        Add the objects of `attributes`, by name.
        """
        for name, value in attributes.items():
            self._objects.update({(name, id(each)): each for each in _changeable(value)})

    def settle(self, attributes: Mapping[str, Any]) -> None:
        """
        Add the objects of `attributes` before training begins: only the first call adds something.
        """
        if not self.settled:
            self.settled = True
            self.begin(attributes)

    def by(self, name: str) -> Owns:
        """
        Return the function that says which objects the attribute `name` has from the start.
        """
        return lambda each: (name, id(each)) in self._objects


def is_changeable(value: Any) -> bool:  # Any: an attribute may have any type
    """
    Return True if `into` can change `value` in place.
    """
    return (
        isinstance(value, list | set | deque | dict | numpy.ndarray)
        or (is_dataclass(value) and not isinstance(value, type) and not _frozen(value))
        or bool(generators.kind_of(value))
    )


def _changeable(value: Any, depth: int = 0) -> Iterator[object]:
    """
    Yield the objects that `into` changes when it puts `value` back.
    """
    if is_changeable(value) and depth <= _DEEPEST:
        yield value
        record = is_dataclass(value)
        parts = (
            value.values()
            if isinstance(value, dict)
            else _content(value).values()
            if record
            else ()
        )
        for each in list(parts):
            yield from _changeable(each, depth + 1)


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
    size: int = getattr(value, "nbytes", 8)  # of a tensor, or `Large`
    return size


def without_marks(form: Any) -> Any:  # Any: a result of `plain` or `marked`
    """
    Return a plain form without the marks of `PlainValues.marked`. Digests are made of this form: a
    process that has replaced another one has other objects than that one had, with the same content.
    """
    kind = type(form)
    if kind is dict:
        if form.get(_KIND) == "anew":
            return without_marks(form[_PARTS])
        return {key: without_marks(each) for key, each in form.items()}
    if kind is list or kind is tuple:
        return kind(map(without_marks, form))
    return form


def equal(left: Any, right: Any) -> bool:  # Any: results of `plain`
    """
    Return True if two plain values are the same, also in their types. Tensors are compared by content.
    """
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(
            equal(each, right[key]) for key, each in left.items()
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    if hasattr(left, "dtype"):  # a tensor of torch
        return left.dtype == right.dtype and bool(left.equal(right))
    return bool(left == right or (left != left and right != right))  # NaN is like NaN


# ---------------------------------------------------------------- the forms of the types


def _scalar(value: Any, depth: int) -> Any:
    return value


def _large_integer(value: int, depth: int) -> Any:
    return of_kind("int", str(value))


def _complex(value: complex, depth: int) -> Any:
    return of_kind("complex", [value.real, value.imag])


def array_form(kind: str, array: Any) -> dict[str, object]:  # Any: an array of any type
    """
    Return the plain form of an array of numpy, under the name `kind`. `array_of` makes it again from
    the parts. Raises `NotPlain` for arrays of objects or records.
    """
    dtype = array.dtype
    if dtype.hasobject or dtype.fields is not None:
        raise NotPlain
    return of_kind(kind, [dtype.str, list(array.shape), array.tobytes()])


def array_of(parts: Any) -> Any:  # Any: an array of any type
    """
    Return a new array from the parts of a result of `array_form`.
    """
    return numpy.frombuffer(parts[2], numpy.dtype(parts[0])).reshape(parts[1]).copy()


def _number(value: Any, depth: int) -> Any:
    return array_form("number", value)


def _path(value: Any, depth: int) -> Any:
    return of_kind("path", [_named(type(value)), str(value)])


def _enum(value: Any, depth: int) -> Any:
    if value.name not in type(value).__members__:  # several flags at once
        raise NotPlain
    return of_kind("enum", [_named(type(value)), value.name])


def _generator(value: Any, depth: int) -> Any:
    try:
        return of_kind("generator", generators.read(value))
    except NotImplementedError:  # such as that of a random.SystemRandom
        raise NotPlain from None


_MAKERS: Mapping[str, Callable[[Any, Any], Any]] = {
    "int": lambda parts, place: int(parts),
    "complex": lambda parts, place: complex(*parts),
    "array": lambda parts, place: array_of(parts),
    "number": lambda parts, place: array_of(parts)[()],
    "path": lambda parts, place: _class(parts[0])(parts[1]),
    "enum": lambda parts, place: _class(parts[0])[parts[1]],
    "generator": lambda parts, place: generators.made(*parts),
}
"""The functions that make values again that have no other values as parts."""


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


# ---------------------------------------------------------------- putting values back


def no_function() -> None:
    """
    Stand for the function of a defaultdict that has no name by which another process finds it. `into`
    takes that of the defaultdict that is there. Raises `UsageError` if there was none.
    """
    raise UsageError(
        "a defaultdict that tft has put back has no function that makes missing values: that function "
        "has no name by which a replacement process finds it, such as a lambda. Make the defaultdict "
        "where its object is made, or give it a function of a module, such as int or list"
    )


# Any: attributes may have any type
def _unmarked(old: Any, value: Any) -> Any:
    """
    Return `value` without marks (see `PlainValues.marked`), to take the place of `old`.
    """
    value = _bare(value)
    _lend_functions(old, value)
    return _of_class(old, value)


def _of_class(old: Any, value: Any) -> Any:
    """
    Return `value`, in which each dict has the class of the dict at its place in `old`. The plain form
    of a dict of a user's class does not have its class.
    """
    if type(value) is not dict or not isinstance(old, dict):
        return value
    content = {key: _of_class(old.get(key), each) for key, each in value.items()}
    if type(old) in _CONTAINERS:
        return content
    found = copy(old)
    found.clear()
    found.update(content)
    return found


def _bare(value: Any) -> Any:
    if isinstance(value, Anew):
        return _bare(value.value)
    if isinstance(value, dict):
        for key, each in value.items():
            value[key] = _bare(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for name, each in _content(value).items():
            object.__setattr__(value, name, _bare(each))
    return value


def _lacks_function(value: Any) -> bool:
    value = value.value if isinstance(value, Anew) else value
    return isinstance(value, defaultdict) and value.default_factory is no_function


def _part(old: dict[Any, Any], key: Any, value: Any) -> Any:
    """
    Return the part of `old` into which `value` is put back. A missing defaultdict is made by the
    function of `old`, since it may have a function without a name.
    """
    if key not in old and _lacks_function(value) and not _lacks_function(old):
        made = getattr(old, "default_factory", None)
        return made() if made else None
    return old.get(key)


# Any: attributes may have any type
def _lend_functions(old: Any, value: Any) -> None:
    """
    Give each defaultdict in `value` without its function that of the one at its place in `old`.
    """
    if isinstance(old, dict) and isinstance(value, dict):
        if isinstance(value, defaultdict) and _lacks_function(value):
            value.default_factory = getattr(old, "default_factory", no_function)
        for key, each in value.items():
            _lend_functions(_part(old, key, each), each)
    elif type(old) is type(value) and isinstance(old, list | tuple):
        for each, new in zip(old, value, strict=False):
            _lend_functions(each, new)


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


def _frozen(record: Any) -> bool:
    return bool(record.__dataclass_params__.frozen)


def _filled(old: Any, value: Any) -> Any:
    if isinstance(old, list):
        old[:] = value
    elif isinstance(old, set) or (isinstance(old, deque) and old.maxlen == value.maxlen):
        old.clear()
        old.update(value) if isinstance(old, set) else old.extend(value)
    elif isinstance(old, numpy.ndarray) and _can_hold(old, value):
        old[...] = value
    else:
        return value
    return old


def _can_hold(old: Any, value: Any) -> bool:
    """
    Return True if the content of `value` can be written into the array `old`. A view is of other data,
    such as a row of a dataset, to which that content does not belong.
    """
    same = (old.shape, old.dtype) == (value.shape, value.dtype)
    return same and old.base is None and bool(old.flags.writeable)


# ---------------------------------------------------------------- what is not kept


def unkept_sentence(owner: str, name: str, why: str, more: str = "") -> str:
    """
    Return a sentence about an attribute of an object of the class `owner` that changes and is not
    kept. `more` follows the advice what to use instead.
    """
    return (
        f"the attribute {name} of {owner} changes while training, and tft does not keep it, because it "
        f"{why}: an incident does not put it back, and a replacement process begins anew with it. "
        "Use numbers, texts, tensors, arrays, and lists, sets and dicts of them, each up to "
        f"{LIMIT // 1024} KiB{more}"
    )


def mark_of_array(array: Any) -> object:  # Any: an array of any type
    """
    Return a value that changes when the array changes: its shape, and samples of it. Those of an array
    of objects say which objects they are.
    """
    flat = array.reshape(-1)
    sample = flat[:: max(1, flat.size // _SAMPLES)]
    return [array.shape, sample.tobytes()]  # the bytes of objects are their addresses
