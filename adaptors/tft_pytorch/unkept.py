"""
Finds attributes of the user's objects that change while training, but that a replacement process
does not get, because their values are not plain or are too large.

Marks of these attributes are compared at the ends of the first steps. To take little time, a mark
has only numbers, lengths, versions of tensors, samples of arrays, and the ends of containers. So a
change in the middle of a long list is not noticed.
"""

import operator
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain, count, islice
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from tft.spi.plain_values import LARGE, SCALARS, NotPlain, mark_of_array, unkept_sentence
from tft_pytorch.plain_values import plain

_ENDS = 8
"""How many elements at each end of a list, dict or other container are compared."""
_FEW = 8
"""How many elements of a tensor are compared, in addition to its version counter."""
_DEEPEST = 3
"""The nesting depth of objects within objects down to which attributes are compared."""
_SCALARS = SCALARS | {complex}
_LEFT = (
    FunctionType, MethodType, ModuleType, type, Optimizer, LRScheduler, Dataset, Sampler, DataLoader,
)  # fmt: skip
"""Types of objects that are not compared: tft keeps their state in other ways, or they have
none."""
_PLACES = ("stdlib", "platstdlib", "purelib", "platlib")

Keeps = Callable[[str], bool]
Why = Callable[[Any], str]
"""A function that returns why a value is not kept, and an empty text if it is."""


class Unkept:
    """
    Compares the attributes of some objects from time to time, and finds attributes that have
    changed and that tft does not keep for a replacement process.
    """

    def __init__(self, model: nn.Module) -> None:
        """
        `model` is the model that tft trains. Its modules, parameters and buffers are not compared,
        because tft keeps their state in other ways.
        """
        parts = (model.modules(), model.parameters(), model.buffers())
        self._own = {id(each) for each in chain.from_iterable(parts)}
        self._objects: list[tuple[Any, Keeps, frozenset[str], Why]] = []
        self._before: dict[tuple[int, str], object] | None = None

    def watch(
        self,
        owner: object,
        keeps: Keeps,
        but: frozenset[str] = frozenset(),
        why: Why | None = None,
    ) -> None:
        """
        Compare the attributes of `owner` except those in `but`. `keeps` takes the name of an
        attribute, and returns False if its value is too large to be kept. Pass `why` if tft does not
        keep all plain values.
        """
        self._objects.append((owner, keeps, but, why or _why))
        self._own.add(id(owner))

    def sentences(self) -> Iterator[tuple[str, str]]:
        """
        Yield the names of the attributes that have changed since the last call and are not kept,
        each with a sentence for the user.
        """
        for owner, name, why in self.changed():
            yield f"{owner}.{name}", sentence(owner, name, why)

    def changed(self) -> Iterator[tuple[str, str, str]]:
        """
        Yield the attributes that have changed since the last call and are not kept: the class of
        the object, the name of the attribute, and why it is not kept.
        """
        before, self._before = self._before, {}
        for number, (owner, keeps, but, reason) in enumerate(self._objects):
            for name, value in list(vars(owner).items()):
                if name in but or type(value) in _SCALARS:
                    continue
                why = reason(value) if keeps(name) else LARGE
                if why:
                    mark = self._mark(value, 0)
                    self._before[number, name] = mark
                    if before is not None and before.get((number, name), mark) != mark:
                        yield type(owner).__name__, name, why

    def _mark(self, value: Any, depth: int) -> object:
        kind = type(value)
        if kind in _SCALARS:
            return value
        if depth > _DEEPEST or id(value) in self._own or isinstance(value, _LEFT):
            return None
        if isinstance(value, Tensor):
            return _mark_of_tensor(value)
        if isinstance(value, nn.Module):
            tensors = chain(value.parameters(), value.buffers())
            return [_mark_of_tensor(each) for each in tensors if id(each) not in self._own]
        if isinstance(value, numpy.ndarray):
            return mark_of_array(value)
        if isinstance(value, dict):
            return [len(value), *(self._mark(each, depth + 1) for each in _ends(value.values()))]
        if isinstance(value, list | tuple | set | frozenset | deque):
            return [len(value), *(self._mark(each, depth + 1) for each in _ends(value))]
        return self._mark_of_object(value, depth)

    def _mark_of_object(self, value: Any, depth: int) -> object:
        if isinstance(value, GeneratorType):
            frame = value.gi_frame
            return None if frame is None else self._mark(dict(frame.f_locals), depth + 1)
        if isinstance(value, _BaseDataLoaderIter):
            return value._num_yielded
        if isinstance(value, count):
            return repr(value)
        if type(value).__module__ == "builtins":
            return operator.length_hint(value, -1) if hasattr(value, "__next__") else None
        kind: Any = type(value)
        if _of_user(kind):
            return self._mark(getattr(value, "__dict__", None), depth + 1)
        return None


def sentence(owner: str, name: str, why: str = LARGE) -> str:
    """
    Return a sentence about an attribute of an object of the class `owner` that is not kept.
    """
    return unkept_sentence(
        owner, name, why,
        ", or a buffer of the model. If each step computes it again, set it to None after its use",
    )  # fmt: skip


def _why(value: object) -> str:
    """
    Return why a value is not plain, or an empty text if the value is plain and so can be kept.
    """
    try:
        plain(value)
    except NotPlain:
        return f"is no plain value, or has a part that is none ({_called(value)})"
    return ""


def _called(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _mark_of_tensor(value: Tensor) -> object:
    # a tensor with an autograd graph was computed in this step, and the next step computes it
    # again, so its changes do not count
    if value.grad_fn is not None or value.device.type == "meta":
        return None
    version = 0 if value.is_inference() else value._version
    if type(value) not in (Tensor, nn.Parameter) or not value.is_contiguous():
        return [id(value), version]
    # a change through `.data` does not increase the version counter, so compare some elements, too
    flat = value.detach().view(-1)
    few = flat[:: max(1, flat.numel() // _FEW)]
    return [value.shape, version, repr(few.tolist())]


def _ends(values: Any) -> Iterator[Any]:
    """
    Yield the first and the last parts of a container.
    """
    yield from islice(values, _ENDS)
    if hasattr(values, "__reversed__"):
        yield from islice(reversed(values), _ENDS)


@cache
def _of_user(kind: type) -> bool:
    """
    Return True if a class is the user's own, not one of Python or of an installed package.
    """
    top = kind.__module__.partition(".")[0]
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if top == "__main__":
        return True
    if top == "tft" or top.startswith("tft_"):
        return False
    installed = tuple(sysconfig.get_path(each) for each in _PLACES)
    return (
        top not in sys.stdlib_module_names and file is not None and not file.startswith(installed)
    )
