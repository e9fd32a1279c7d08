"""
Finds out before the first step whether a training loop marks the ends of its steps itself, by
calls of `Session.end_step`.

The first such call comes in the tail of the first step (its code after the update window). What is
due after that step, such as a periodic checkpoint, would otherwise be done before the tail.
"""

import dis
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

_NAME = "end_step"
_DEPTH = 3
"""How many calls deep functions of the script are read."""


def marks_ends(train: Callable[..., object], session: object) -> bool:
    """
    Return True if `train`, or a function of the script that `train` calls by its name, has a call
    of `session.end_step`. The code is only read. A call that is hidden in another way, for example
    in an object of another module, is not found.
    """
    skipped, owner = 0, None
    while isinstance(train, partial):
        skipped, train = skipped + len(train.args), train.func
    if isinstance(train, MethodType):
        skipped, owner, train = skipped + 1, type(train.__self__), train.__func__
    if not isinstance(train, FunctionType):
        return False
    named = train.__code__.co_varnames[skipped : skipped + 1]
    reader = _Reader(session, {"session", *named}, owner)
    return reader.calls(train, _DEPTH)


class _Reader:
    """
    Reads functions of the script, each once. `names` are the names that the session has in them,
    and `owner` is the class of the method with which the search began, or None.
    """

    def __init__(self, session: object, names: set[str], owner: type | None) -> None:
        self._session = session
        self._names = names
        self._owner = owner
        self._read: set[CodeType] = set()

    def calls(self, function: FunctionType, depth: int) -> bool:
        """
        Return True if the function, or a function that it calls at most `depth` calls deep, has a
        call of `end_step` of the session.
        """
        known = function.__globals__
        for code in _codes(function.__code__):
            if code in self._read:
                continue
            self._read.add(code)
            if self._has(code, known):
                return True
            for name in code.co_names if depth else ():
                called = known.get(name, getattr(self._owner, name, None))
                if isinstance(called, FunctionType) and self.calls(called, depth - 1):
                    return True
        return False

    def _has(self, code: CodeType, known: Mapping[str, Any]) -> bool:  # Any: values of the script
        before: object = None
        for instruction in dis.get_instructions(code):
            if instruction.argval == _NAME and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                # an instruction that loads two variables at once names both, the session last
                named = before[-1] if isinstance(before, tuple) else before
                if named in self._names or known.get(str(named)) is self._session:
                    return True
            before = instruction.argval
        return False


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)
