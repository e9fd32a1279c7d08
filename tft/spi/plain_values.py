"""
Turns values of the user's objects into copies in a plain form, which can be packed into bytes, and
makes the values again from this form. A value that has a plain form is called plain. Numbers,
texts, arrays of numpy and random generators are plain, and so are lists, tuples, sets, deques,
dicts and dataclasses of plain values. An adaptor adds the tensors of its framework.

The plain form of a list is a list, and that of most dicts is a dict. For values of other types it
is a dict with the key `_KIND`, under which the name of the type is stored. Texts, floats and the
like are their own plain form.

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
"""The size in bytes up to which adaptors keep an attribute of a user's object. The limit is small,
because the whole rank-local state of a rank must fit into 256 KiB."""
LARGE = f"has more than {LIMIT // 1024} KiB"
"""The argument `why` of `unkept_sentence` for an attribute that is larger than `LIMIT`."""
SCALARS: frozenset[Any] = frozenset({bool, int, float, str, bytes, type(None)})
AS_THEY_ARE: frozenset[Any] = frozenset({bool, float, str, bytes, type(None)})
"""The types whose values are their own plain form. Integers are not in this set, because an integer
that is too large to be packed has another plain form."""
_CONTAINERS: frozenset[Any] = frozenset(
    {list, tuple, set, frozenset, deque, dict, OrderedDict, Counter, defaultdict}
)
_DICTS = frozenset({defaultdict, OrderedDict, Counter})
_KIND = "tft: a value of the type"
"""A dict with this key is the plain form of a value of another type. The name of the type is stored
under this key, and the content of the value under the key `_PARTS`."""
_PARTS = "of"
_DEEPEST = 30
"""How deep containers may be nested in a plain value. Without this limit, objects that refer to
each other would be copied without end."""
_WORDS = range(-(2**63), 2**64)
"""The integers that can be packed. The plain form of any other integer is its text."""
_SAMPLES = 256
"""About how many elements of a large array the function `mark_of_array` reads."""

Form = Callable[[Any, int], Any]
"""A function that returns the plain form of a value of one type. Its arguments are the value, and
the nesting depth at which the parts of the value are."""

Filled = dict[int, tuple[Any, Any]]
"""The objects into which content was put back. The key is the `id` of an object, the value is the
object and the value whose content it got."""
Owns = Callable[[object], bool]
"""A function that returns True for an object if a certain attribute has referred to this object
since before training."""


class NotPlain(Exception):
    """
    Raised for a value that has no plain form, such as an open file.
    """


@dataclass(frozen=True, slots=True)
class Large:
    """
    Takes the place of the plain form of a value that is too large and was not copied. `nbytes` is
    about the size of the value.
    """

    nbytes: int


@dataclass(frozen=True, slots=True)
class Anew:
    """
    Marks a value that must not be put back into the object that is there, because this may be the
    wrong object. A new object is made for the value.
    """

    value: Any


@dataclass(frozen=True, slots=True)
class PartsAnew:
    """
    Marks a dict or a dataclass whose parts must all get new objects, while the dict or dataclass
    itself may be put back into the object that is there.
    """

    value: Any


def of_kind(kind: str, parts: object) -> dict[str, object]:
    """
    Return the plain form of a value: a dict with the name `kind` of the value's type and with the
    content `parts`, from which the value can be made again.
    """
    return {_KIND: kind, _PARTS: parts}


class PlainValues:
    """
    Turns values into their plain form, and makes them again, for the types that one adaptor
    supports.
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
        Support the types of Python and numpy, and the types of a framework.

        `forms` maps each type of the framework to the function that returns the plain form of its
        values. Values of subclasses of these types are not plain. `makers` maps the name of a type
        in the plain form (the argument `kind` of `of_kind`) to the function that makes a value
        again. This function gets the `parts` of `of_kind` and the `place` of `placed`. `fillers`
        lists types whose values `into` puts back with a special function, which gets the old and
        the new value.

        Dataclasses of the packages in `frameworks` are not plain, because they may be bookkeeping
        of a framework. An array of more than `large` bytes or a container of more than `many`
        elements is not copied: a `Large` object takes its place. If `own_dicts` is False, a dict of
        a user's class within another value is not plain, because the plain form does not name the
        class: an ordinary dict might take its place.
        """
        self._forms: Mapping[Any, Form] = {
            **dict.fromkeys(AS_THEY_ARE, _scalar),
            Anew: self._anew, PartsAnew: self._anew, int: _large_integer, complex: _complex, list: self._list, set: self._set, frozenset: self._set,
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
            "parts anew": lambda parts, place: PartsAnew(self.placed(parts, place)),
            "dict": self._placed_dict,
            "record": self._placed_record,
            **makers,
        }
        self._fillers = fillers
        self._frameworks = frozenset(frameworks)
        self._large, self._many, self._own_dicts = large, many, own_dicts
        self._known: dict[Any, Form | None] = {}
        """By type: the result of the method `_form`, so that it is found only once."""

    def plain(self, value: Any, depth: int = 0) -> Any:  # Any: an attribute may have any type
        """
        Return the plain form of `value`: a copy from which `placed` makes the value again. `depth`
        says in how many containers the value is nested. Raises `NotPlain` if the value or a part of
        it is not plain.
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
        Return True if values of the type of `value` can be plain. The parts of `value` are not
        looked at, so it may still have a part that is not plain.
        """
        return self._form(type(value)) is not None

    # Any: an attribute, and its plain form
    def marked(self, value: Any, form: Any, owns: Owns) -> Any:
        """
        Return `form`, the result of `plain` for `value`, with marks (`Anew`). Each changeable
        object in `value` for which `owns` returns False gets a mark. The attribute did not refer to
        this object before training, so the object may be an item of a dataset. When the value is
        put back, the attribute may refer to another item, which must not be changed. So `into`
        makes a new object at the place of a mark. If all changeable parts of a dict or a dataclass
        would get a mark, it gets a single one instead (`PartsAnew`).
        """
        if is_changeable(value) and not owns(value):
            return of_kind("anew", form)
        if type(form) is not dict:
            return form
        parts = [each for each in _parts_of(value) if is_changeable(each)]
        if parts and not any(map(owns, parts)):
            return of_kind("parts anew", form)
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
        Make a value again from its plain form `value`, which `plain` has returned. `place` is
        passed to the functions that make values of the framework, for example the device on which a
        tensor will be.
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
        Put the content of `value`, a result of `placed`, into the object `old`, and return `old`.
        So other objects that refer to `old` see the content too. If `old` is of another type or
        cannot be changed, return `value` instead.

        Pass the same `filled` for all values that are put back together. It shows which objects
        have got content already. If `old` has got other content already, return `value`: two
        attributes that referred to different objects before refer to the same object now. Also
        return `value` if it is marked (`Anew`), or if `owns` is given and returns False for `old`.
        """
        filled = {} if filled is None else filled
        if isinstance(value, Anew) or (owns and is_changeable(old) and not owns(old)):
            return self._new(old, value, filled)
        if id(old) in filled:
            return old if self._same(filled[id(old)][1], value) else _unmarked(old, value)
        filled[id(old)] = old, value  # before the parts are put back: they may refer to `old`
        if isinstance(value, PartsAnew):
            found = self._into(old, value.value, filled, _owns_nothing)
        else:
            found = self._into(old, value, filled, owns)
        if found is old:
            return old
        del filled[id(old)]
        return _unmarked(old, found)

    # Any: attributes may have any type
    def into_owned(
        self, old: Any, value: Any, filled: Filled, owned: "OwnedObjects", name: str
    ) -> Any:
        """
        Return what the attribute `name` gets in the place of `old`, as `into` does. `owned` has the
        objects that the owner's attributes have had since before training. A new object that stands
        for such an object is added to them.
        """
        whole = not has_marks(value)
        found = self.into(old, value, filled, owned.by(name))
        if whole:
            owned.begin({name: found})
        return found

    def _new(self, old: Any, value: Any, filled: Filled) -> Any:
        """
        Return a new object with the content of `value`, to take the place of `old`. Attributes that
        share `old` and have the same content get the same new object.
        """
        if not is_changeable(old):
            return _unmarked(old, value)
        key = ~id(old)  # no other object has it, because an id is never negative
        if key not in filled or not self._same(filled[key][1], value):
            filled[key] = old, _unmarked(old, value)
        return filled[key][1]

    def put_back(
        self,
        owner: object,
        attributes: Mapping[str, Any],
        filled: Filled | None = None,
        owned: "OwnedObjects | None" = None,
    ) -> None:
        """
        Set attributes of the object `owner`. `attributes` has the values by name, as `placed` has
        returned them. If an attribute refers to a list, a dict or the like, the content is put into
        this object, because other objects may refer to it. With `owned`, this is done only for
        objects to which the attributes have referred since before training. Pass the same `filled`
        for all owners that are put back together.
        """
        present, filled = vars(owner), {} if filled is None else filled
        for name, value in attributes.items():
            if owned:
                found = self.into_owned(present.get(name), value, filled, owned, name)
            else:
                found = self.into(present.get(name), value, filled)
            setattr(owner, name, found)

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
        Return the function that returns the plain form of values of the type `kind`, or None if
        such values are not plain. Subclasses of tensors are not plain. One of them is the class of
        parameters, which belong to a model and must not be copied as values.
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
        # sort the elements, because the order of a set differs between processes
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
        # for a dict of any other class, the form does not name the class: the content is put back
        # into the dict that is there, which keeps its class
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
    The lists, dicts, arrays and the like to which the attributes of a user's object have referred
    since before training. Other objects may refer to them too, so content is put back into these
    objects. An object to which an attribute refers only later may be an item of a dataset, which
    must not be changed.
    """

    def __init__(self) -> None:
        self._objects: dict[tuple[str, int], object] = {}
        self.settled = False
        """True after the first call of `settle`."""

    def begin(self, attributes: Mapping[str, Any]) -> None:
        """
        Add the objects to which attributes refer now, and the objects within these. `attributes`
        has the values of the attributes by name. Call this also for new objects that an attribute
        has got in the place of such objects.
        """
        for name, value in attributes.items():
            self._objects.update({(name, id(each)): each for each in _changeable(value)})

    def settle(self, attributes: Mapping[str, Any]) -> None:
        """
        Add the objects of `attributes`, as `begin` does, just before training. The first call does
        this, and further calls do nothing.
        """
        if not self.settled:
            self.settled = True
            self.begin(attributes)

    def by(self, name: str) -> Owns:
        """
        Return a function that returns True for an object if the attribute `name` has referred to it
        since before training.
        """
        return lambda each: (name, id(each)) in self._objects


def is_changeable(value: Any) -> bool:  # Any: an attribute may have any type
    """
    Return True if `into` can change `value` in place. Random generators are left out: they are no
    items of a dataset, so their state is always put into the generator that is there.
    """
    return isinstance(value, list | set | deque | dict | numpy.ndarray) or (
        is_dataclass(value) and not isinstance(value, type) and not _frozen(value)
    )


def _parts_of(value: Any) -> Collection[Any]:
    """
    Return the parts of a dict or a dataclass, and nothing for other values.
    """
    if isinstance(value, dict):
        return value.values()
    record = is_dataclass(value) and not isinstance(value, type)
    return _content(value).values() if record else ()


def _owns_nothing(each: object) -> bool:
    return False


def _changeable(value: Any, depth: int = 0) -> Iterator[object]:
    """
    Yield `value` and the objects within it, as far as `into` may change them in place.
    """
    if is_changeable(value) and depth <= _DEEPEST:
        yield value
        for each in list(_parts_of(value)):
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
    size: int = getattr(value, "nbytes", 8)  # tensors and `Large` objects have `nbytes`
    return size


def has_marks(value: Any) -> bool:  # Any: a result of `placed`
    """
    Return True if a part of `value` is marked (see `PlainValues.marked`).
    """
    return isinstance(value, Anew | PartsAnew) or any(map(has_marks, _parts_of(value)))


def without_marks(form: Any) -> Any:  # Any: a result of `plain` or `marked`
    """
    Return a plain form without the marks of `PlainValues.marked`. Compute digests from the result:
    a process may have other marks than the process that it has replaced, although the content is
    the same.
    """
    kind = type(form)
    if kind is dict:
        if form.get(_KIND) in ("anew", "parts anew"):
            return without_marks(form[_PARTS])
        return {key: without_marks(each) for key, each in form.items()}
    if kind is list or kind is tuple:
        return kind(map(without_marks, form))
    return form


def equal(left: Any, right: Any) -> bool:  # Any: results of `plain`
    """
    Return True if two plain forms are equal and have the same types. Tensors are compared by their
    content.
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
    return bool(left == right or (left != left and right != right))  # NaN counts as equal to NaN


# ---------------------------------------------------------------- the forms of the types


def _scalar(value: Any, depth: int) -> Any:
    return value


def _large_integer(value: int, depth: int) -> Any:
    return of_kind("int", str(value))


def _complex(value: complex, depth: int) -> Any:
    return of_kind("complex", [value.real, value.imag])


def array_form(kind: str, array: Any) -> dict[str, object]:  # Any: an array of any type
    """
    Return the plain form of an array of numpy, with `kind` as the name of its type. The function
    `array_of` makes the array again. Raises `NotPlain` for an array of objects or of records.
    """
    dtype = array.dtype
    if dtype.hasobject or dtype.fields is not None:
        raise NotPlain
    return of_kind(kind, [dtype.str, list(array.shape), array.tobytes()])


def array_of(parts: Any) -> Any:  # Any: an array of any type
    """
    Make an array again. `parts` is the content that `array_form` has stored in the plain form.
    """
    return numpy.frombuffer(parts[2], numpy.dtype(parts[0])).reshape(parts[1]).copy()


def _number(value: Any, depth: int) -> Any:
    return array_form("number", value)


def _path(value: Any, depth: int) -> Any:
    return of_kind("path", [_named(type(value)), str(value)])


def _enum(value: Any, depth: int) -> Any:
    # the value may be a combination of flags, which is no member and so has no name of its own
    if value.name not in type(value).__members__:
        raise NotPlain
    return of_kind("enum", [_named(type(value)), value.name])


def _generator(value: Any, depth: int) -> Any:
    try:
        return of_kind("generator", generators.read(value))
    except NotImplementedError:  # a generator without a state, such as random.SystemRandom
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
"""By name of a type in the plain form: the function that makes a value again. These are the types
whose values contain no other values."""


# ---------------------------------------------------------------- classes by name


def _named(kind: Any) -> list[str]:
    """
    Return the names of the module and of the class `kind` in it, by which another process finds the
    class. For the type of None, both names are empty. Raises `NotPlain` if the class cannot be
    found by its names.
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
    Take the place of the function of a defaultdict (`default_factory`) that another process cannot
    find by a name, such as a lambda. When the defaultdict is put back, `into` takes the function of
    the defaultdict that is there. If none is there, this function stays in its place, and raises
    `UsageError` when it is called.
    """
    raise UsageError(
        "a defaultdict that tft has put back cannot make missing values: a replacement process could "
        "not find its function by a name, as is the case for a lambda. Create the defaultdict when "
        "its object is created, or give it a function of a module, such as int or list"
    )


# Any: attributes may have any type
def _unmarked(old: Any, value: Any) -> Any:
    """
    Return `value` without marks (see `PlainValues.marked`), to take the place of `old`. A
    defaultdict gets the function, and a dict of a user's class gets the class, that the object at
    the same place in `old` has.
    """
    value = _bare(value)
    _lend_functions(old, value)
    return _of_class(old, value)


def _of_class(old: Any, value: Any) -> Any:
    """
    Return `value`, in which each dict gets the class of the dict at the same place in `old`,
    because the plain form does not name the class of a user's dict.
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
    if isinstance(value, Anew | PartsAnew):
        return _bare(value.value)
    if isinstance(value, dict):
        for key, each in value.items():
            value[key] = _bare(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for name, each in _content(value).items():
            object.__setattr__(value, name, _bare(each))
    return value


def _lacks_function(value: Any) -> bool:
    value = value.value if isinstance(value, Anew | PartsAnew) else value
    return isinstance(value, defaultdict) and value.default_factory is no_function


def _part(old: dict[Any, Any], key: Any, value: Any) -> Any:
    """
    Return the entry `key` of the dict `old`. The caller takes from this entry what `value` lacks.
    If `old` has no such entry, and `value` is a defaultdict that lacks its function, return what
    the function of the defaultdict `old` makes: this may be a defaultdict with the function.
    """
    if key not in old and _lacks_function(value) and not _lacks_function(old):
        made = getattr(old, "default_factory", None)
        return made() if made else None
    return old.get(key)


# Any: attributes may have any type
def _lend_functions(old: Any, value: Any) -> None:
    """
    Give each defaultdict in `value` that lacks its function (see `no_function`) the function of the
    defaultdict at the same place in `old`.
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
    Return True if the content of `value` can be written into the array `old`. Return False for a
    view: it shows a part of another array, such as a row of a dataset, which must not be changed.
    """
    same = (old.shape, old.dtype) == (value.shape, value.dtype)
    return same and old.base is None and bool(old.flags.writeable)


# ---------------------------------------------------------------- what is not kept


def unkept_sentence(owner: str, name: str, why: str, more: str = "") -> str:
    """
    Return a warning that an attribute changes in training and that tft does not keep it. `owner` is
    the class of the attribute's object, `name` the attribute, and `why` the reason. `more` is
    appended to the advice on what to use instead.
    """
    return (
        f"the attribute {name} of {owner} changes while training, and tft does not keep it, because it "
        f"{why}: an incident does not put it back, and a replacement process begins anew with it. "
        "Use numbers, texts, tensors, arrays, and lists, sets and dicts of them, each up to "
        f"{LIMIT // 1024} KiB{more}"
    )


def mark_of_array(array: Any) -> object:  # Any: an array of any type
    """
    Return the shape of an array and samples of its elements. If two results differ, the array has
    changed. For an array of objects, the samples say which objects the elements are.
    """
    flat = array.reshape(-1)
    sample = flat[:: max(1, flat.size // _SAMPLES)]
    return [array.shape, sample.tobytes()]  # the bytes of objects are their addresses
