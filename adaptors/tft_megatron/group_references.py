"""
Finds all references to process groups in the user's objects: attributes, list items, closure
variables and so on. The search is made once. Whenever groups are formed again, tft sets the found
references to the new groups. So model and optimizer need not be built again.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tft.errors import UsageError

Role = Hashable
"""The purpose of a process group. It is the name of the Megatron variable that contains the group,
or this name with the group's place in the variable. Whenever groups are formed, there is one group
for each role, so a new group can replace the old group with the same role."""

_LEAVES = (str, bytes, int, float, complex, type(None), type, ModuleType, BuiltinFunctionType)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """
    One reference to a process group in the user's objects, which can be set to another group.
    """

    path: str
    """The path from the model, optimizer or scheduler to the reference, for messages."""
    role: Role
    put: Callable[[dist.ProcessGroup | None], None]


def find_places(
    roots: Mapping[str, object], roles: Mapping[Role, dist.ProcessGroup]
) -> list[Place]:
    """
    Find all references to the process groups in `roles` that can be reached from the objects
    `roots`. Return a list of the references.

    Raises `UsageError` for a process group that has no role. Also raises `UsageError` for a group
    where it cannot be replaced, for example in a tuple.
    """
    known: dict[int, Role] = {}
    for role, group in roles.items():
        known.setdefault(id(group), role)
    found: list[Place] = []
    seen: set[int] = set()
    ahead: deque[tuple[str, object]] = deque(roots.items())
    while ahead:
        path, holder = ahead.popleft()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        for name, value, put in _references(holder):
            where = f"{path}{name}"
            if isinstance(value, dist.ProcessGroup):
                if id(value) not in known:
                    raise UsageError(
                        f"{where} is a process group that Megatron's parallel_state does not know, "
                        "so tft cannot form this group again after a fault: use the groups of "
                        "parallel_state"
                    )
                if isinstance(put, str):
                    raise UsageError(
                        f"{where} is a process group {put}, where tft cannot replace the group "
                        "after a fault: keep the group in a list, a dict or an attribute"
                    )
                found.append(Place(path=where, role=known[id(value)], put=put))
            elif not isinstance(value, _LEAVES):
                ahead.append((where, value))
    return found


def _references(holder: object) -> Iterator[tuple[str, Any, Callable[[Any], None] | str]]:
    """
    Yield the references of the object `holder` to other objects. Each reference is a tuple of
    three: the text to append to the path of `holder`, the other object, and a function that
    replaces the other object. If the other object cannot be replaced, the third item is a text that
    says where it is. (`Any`: the other objects can have every type.)
    """
    if isinstance(holder, dict):
        for key, value in holder.items():
            yield (
                f"[{key!r}]" if isinstance(key, str | int) else "[…]",
                value,
                partial(holder.__setitem__, key),
            )
    elif isinstance(holder, list):
        for index, value in enumerate(holder):
            yield f"[{index}]", value, partial(holder.__setitem__, index)
    elif isinstance(holder, tuple | set | frozenset):
        for value in holder:
            yield "[…]", value, "in a tuple or a set"
    elif isinstance(holder, MethodType):
        how = "to which a method is bound"
        yield "", holder.__self__, how
        yield "", holder.__func__, how
    elif isinstance(holder, FunctionType):
        for cell in holder.__closure__ or ():
            yield from _of_cell(cell)
        how = "among the default values of a function"
        for name, value in _defaults(holder):
            yield f"({name}=…)", value, how
        yield "", holder.__kwdefaults__, how
    elif isinstance(holder, partial):
        how = "among the arguments of a functools.partial"
        yield "", holder.func, how
        for index, value in enumerate(holder.args):
            yield f"({index})", value, how
        yield "", holder.keywords, how
    if not isinstance(holder, Tensor) and hasattr(type(holder), "__slots__"):
        for name in _slots(type(holder)):
            if hasattr(holder, name):
                yield f".{name}", getattr(holder, name), partial(setattr, holder, name)
    attributes = getattr(holder, "__dict__", None)
    if isinstance(attributes, dict):
        for name, value in attributes.items():
            yield f".{name}", value, partial(attributes.__setitem__, name)


def _defaults(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """
    Yield the names and default values of the positional parameters of a function.
    """
    code, values = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    # from the end, because only the last parameters have default values
    yield from zip(reversed(names), reversed(values), strict=False)


def _of_cell(cell: CellType) -> Iterator[tuple[str, Any, Callable[[Any], None]]]:
    try:
        yield "(…)", cell.cell_contents, partial(setattr, cell, "cell_contents")
    except ValueError:  # raised for a closure variable that has no value yet
        return


def _slots(kind: type) -> Iterator[str]:
    for each in kind.__mro__:
        slots = each.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield name
