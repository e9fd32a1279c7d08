"""
Keeps the attributes of the other callbacks of a training with `Model.train`, such as the counter
`wait` of MindSpore's EarlyStopping.

After an incident, `Model.train` calls `on_train_begin` of all callbacks again, and many callbacks
begin anew there. In a replacement process, all callbacks are new. So the attributes belong to the
rank-local state of each rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy
from mindspore import Tensor, nn, train

from tft.spi.plain_values import (
    LARGE,
    LIMIT,
    Filled,
    NotPlain,
    OwnedObjects,
    mark_of_array,
    size_of,
    unkept_sentence,
)
from tft_mindspore.plain_values import values

Plain = Any  # plain values of various types

_ROOM = 2 * LIMIT
"""The most bytes of all attributes together."""
_LEFT_ALONE = (train.TrainFaultTolerance, train.LossMonitor, train.TimeMonitor)
"""Callbacks whose attributes are not kept: the adaptor's own one, and those that only print."""
_CROWDED = "has no room beside the running statistics of the model and the other attributes"


class KeptAttributes:
    """
    Notes the plain attributes of callbacks at the end of each step, and puts them back. Finds the
    attributes that change and cannot be kept.
    """

    def __init__(self, callbacks: Sequence[object], step: int) -> None:
        """
        Watch `callbacks`, all of a training that has completed `step` steps.
        """
        self._callbacks = [each for each in callbacks if _watched(each)]
        self._left: set[tuple[int, str]] = set()
        """The attributes that change and are not kept, by the number of their callback."""
        self._unkept: list[tuple[str, str]] = []
        """The names of attributes in `_left` that `unkept` has not returned yet, with sentences."""
        self._marks: dict[tuple[int, str], object] = {}
        """By number and name: the mark of an attribute that is not plain (see `_mark`)."""
        self._room = _ROOM
        self._owned = [_owned_by(each) for each in self._callbacks]
        self._last: dict[str, Plain] = {"kept": [{} for _ in self._callbacks]}
        self.note(step, whole=True)

    def leave(self, room: int) -> None:
        """
        Take at most `room` bytes, because the rank-local state has no more.
        """
        self._room = min(_ROOM, room)

    @property
    def last(self) -> Mapping[str, Plain]:
        """
        Return what was noted last, or what `rollback` was given after that.
        """
        return self._last

    def note(self, step: int, *, whole: bool, stopped: bool = False) -> Mapping[str, Plain]:
        """
        Note the attributes at the end of `step`, and return what `rollback` takes.

        Pass `whole=False` if callbacks may still be called for this step, and `stopped=True` if one
        of them has stopped the training.
        """
        room, kept = self._room, []
        for number, callback in enumerate(self._callbacks):
            found: dict[str, Plain] = {}
            before, owned = self._last["kept"][number], self._owned[number]
            for name, value in list(vars(callback).items()):
                if (number, name) in self._left:
                    continue
                try:
                    now = values.plain(value)
                    size = size_of(now)
                except NotPlain:
                    now, size, why = None, LIMIT + 1, "is no plain value"
                else:
                    why = LARGE if size > LIMIT else _CROWDED
                if size <= min(room, LIMIT):
                    room -= size
                    found[name] = values.marked(value, now, owned.by(name))
                elif name in before or self._changes(number, name, value):
                    self._leave(number, name, why)
            kept.append(found)
        self._last = {"step": step, "whole": whole, "stopped": stopped, "kept": kept}
        return self._last

    def unkept(self) -> Iterator[tuple[str, str]]:
        """
        Yield the attributes that have changed and are not kept, each with a sentence for the user,
        but none twice.
        """
        while self._unkept:
            yield self._unkept.pop()

    def rollback(self, noted: Mapping[str, Plain] | None, step: int) -> str | None:
        """
        Let the next `put_back` restore `noted`, a result of `note` of this process or another one.
        `step` is the step to whose end the rank goes back. Return a sentence if a part is lost.
        """
        if noted is None or len(noted["kept"]) != len(self._callbacks):
            return None
        self._last = dict(noted)
        with_state = [
            callback for callback, kept in zip(self._callbacks, noted["kept"], strict=True) if kept
        ]
        if not with_state:
            return None
        if noted["stopped"]:
            return (
                "a callback had stopped the training, which Model.train cannot be told again: it "
                "trains on until the callback stops it once more"
            )
        if noted["step"] == step and noted["whole"]:
            return None
        names = ", ".join(sorted({type(each).__name__ for each in with_state}))
        return (
            f"this rank was lost before its callbacks had seen the end of step {step}, which other "
            f"ranks have completed: they go on as if that step had not been ({names})"
        )

    def put_back(self) -> None:
        """
        Set the attributes to what was noted last, or to what `rollback` was given after that. Those
        for which the class has a default get it back if they were not set then.
        """
        filled: Filled = {}
        for number, (callback, noted) in enumerate(
            zip(self._callbacks, self._last["kept"], strict=True)
        ):
            present = vars(callback)
            for name in present.keys() - noted.keys():
                if hasattr(type(callback), name) and (number, name) not in self._left:
                    delattr(callback, name)
            kept = {n: values.placed(v) for n, v in noted.items() if (number, n) not in self._left}
            values.put_back(callback, kept, filled, self._owned[number])
        # the objects in a loop that is entered again are others: so do not compare with them
        self._marks.clear()

    # ------------------------------------------------------------ what is not kept

    # Any: an attribute may have any type
    def _changes(self, number: int, name: str, value: Any) -> bool:
        mark = _mark(value)
        return self._marks.setdefault((number, name), mark) != mark

    def _leave(self, number: int, name: str, why: str) -> None:
        self._left.add((number, name))
        owner = type(self._callbacks[number]).__name__
        sentence = unkept_sentence(owner, name, why, f", and {self._room // 1024} KiB in all")
        self._unkept.append((f"{owner}.{name}", sentence))


def _watched(callback: object) -> bool:
    # `Model.train` adds callbacks of its own, whose names begin with an underscore
    kind = type(callback)
    added = kind.__module__.startswith("mindspore.") and kind.__name__.startswith("_")
    return not added and not isinstance(callback, _LEFT_ALONE)


def _owned_by(callback: object) -> OwnedObjects:
    owned = OwnedObjects()
    owned.begin({name: value for name, value in vars(callback).items() if _is_kept(value)})
    return owned


def _is_kept(value: object) -> bool:
    try:
        return size_of(values.plain(value)) <= LIMIT
    except NotPlain:
        return False


def _mark(value: Any) -> object:  # Any: an attribute may have any type
    """
    Return a value that changes when `value` changes: which object it is, how long it is, and its
    simple attributes, or samples of it.
    """
    kind: Any = type(value)
    if kind is Tensor:
        value = value.asnumpy()
    if isinstance(value, numpy.ndarray):
        return mark_of_array(value)
    if kind in (list, tuple, dict, set):
        return id(value), len(value)
    if kind.__module__.startswith("mindspore.") or isinstance(value, nn.Cell):
        return id(value)
    simple = {
        name: each
        for name, each in getattr(value, "__dict__", {}).items()
        if type(each) in (bool, int, float, str)
    }
    return id(value), simple
