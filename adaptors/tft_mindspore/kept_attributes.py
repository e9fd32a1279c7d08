"""
Saves and restores the attributes of the callbacks that a script passes to `Model.train`, such as
the counter `wait` of MindSpore's EarlyStopping.

After an incident, `Model.train` calls `on_train_begin` of all callbacks again, and many callbacks
reset their attributes there. In a replacement process, all callbacks are new objects. So the
attributes are saved as a part of the rank-local state, and restored after an incident.
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

Plain = Any  # Any: plain values have various types

_ROOM = 2 * LIMIT
"""The largest number of bytes that the saved attributes of all callbacks may have together."""
_LEFT_ALONE = (train.TrainFaultTolerance, train.LossMonitor, train.TimeMonitor)
"""The classes of callbacks whose attributes are not saved: the adaptor's own callback, and
callbacks that only print."""
_CROWDED = "has no room beside the running statistics of the model and the other attributes"


class KeptAttributes:
    """
    Saves the attributes of callbacks at the end of each step, and restores them after an incident.
    Only plain values (such as numbers, texts, lists and Tensors) can be saved. For an attribute
    that changes but cannot be saved, the user gets a sentence.
    """

    def __init__(self, callbacks: Sequence[object], step: int) -> None:
        """
        Begin to save the attributes of `callbacks`, the list of all callbacks of `Model.train`.
        `step` is the number of steps that are complete already.
        """
        self._callbacks = [each for each in callbacks if _watched(each)]
        self._left: set[tuple[int, str]] = set()
        """The attributes that change and cannot be saved. Each is a tuple of the callback's index
        in `_callbacks` and the attribute's name."""
        self._unkept: list[tuple[str, str]] = []
        """The attributes in `_left` that `unkept` has not returned yet. Each is a tuple of a name
        for the user and a sentence that says why the attribute is not saved."""
        self._marks: dict[tuple[int, str], object] = {}
        """The mark (see `_mark`) of each attribute that is too large or not plain, by the
        callback's index in `_callbacks` and the attribute's name. A changed mark shows that the
        attribute has changed."""
        self._room = _ROOM
        self._owned = [_owned_by(each) for each in self._callbacks]
        self._last: dict[str, Plain] = {"kept": [{} for _ in self._callbacks]}
        self.note(step, whole=True)

    def leave(self, room: int) -> None:
        """
        Limit the saved attributes to `room` bytes in all, because the rank-local state has no room
        for more.
        """
        self._room = min(_ROOM, room)

    @property
    def last(self) -> Mapping[str, Plain]:
        """
        Return the saved attributes: those that `note` has saved last, or those that `rollback` has
        received after that.
        """
        return self._last

    def note(self, step: int, *, whole: bool, stopped: bool = False) -> Mapping[str, Plain]:
        """
        Save the attributes at the end of `step`. Return them in the form that `rollback` takes.

        Pass `whole=False` if `Model.train` may still call callbacks for this step. Pass
        `stopped=True` if a callback has stopped the training.
        """
        room, kept = self._room, []
        for number, callback in enumerate(self._callbacks):
            found: dict[str, Plain] = {}
            before, owned = self._last["kept"][number], self._owned[number]
            for name, value in list(vars(callback).items()):
                if (number, name) in self._left:
                    continue
                try:
                    now = values.marked(value, values.plain(value), owned.by(name))
                    size = size_of(now)
                except NotPlain:
                    now, size, why = None, LIMIT + 1, "is no plain value"
                else:
                    why = LARGE if size > LIMIT else _CROWDED
                if size <= min(room, LIMIT):
                    room -= size
                    found[name] = now
                elif name in before or self._changes(number, name, value):
                    self._leave(number, name, why)
            kept.append(found)
        self._last = {"step": step, "whole": whole, "stopped": stopped, "kept": kept}
        return self._last

    def unkept(self) -> Iterator[tuple[str, str]]:
        """
        Yield the name of each attribute that has changed and cannot be saved, with a sentence for
        the user. Over all calls, each attribute is yielded only once.
        """
        while self._unkept:
            yield self._unkept.pop()

    def rollback(self, noted: Mapping[str, Plain] | None, step: int) -> str | None:
        """
        Make the next call of `put_back` restore `noted`, a result of `note` in this process or in
        an earlier process of the rank. `step` is the step to whose end the rank goes back.

        Return a sentence for the user if the callbacks have missed something: the end of `step`, or
        the stop of the training that a callback has requested.
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
        Restore the saved attributes (see `last`). Delete an attribute that the callback did not
        have when they were saved, if the class of the callback has a default value for it. The
        default then applies again.
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
        # forget the marks: when `Model.train` enters its loop again, attributes may refer to new
        # objects, and a new object does not mean that the attribute has changed
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
    # leave out the callbacks that `Model.train` itself adds: their class names begin with an
    # underscore
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
    Return a value that most likely changes when `value`, an attribute of a callback, changes. It is
    made of the identity of the object, and of its length or its attributes that are numbers or
    texts. For an array or a Tensor it is made of samples of the elements.
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
