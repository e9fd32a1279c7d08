"""
Checks, when some update windows close, whether the training state can be moved to another rank.

Optimizers have no state before their first step, so the check is not possible at the start of the
job. A check in an incident would be too late.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import numpy
import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from tft.errors import UsageError
from tft_pytorch.memory import readable
from tft_pytorch.replicas import ReplicaOptimizer

_KEPT = frozenset({"state", "param_groups", "defaults"})
"""The names of those attributes of optimizers that need no check. Their content is moved to the
other rank, or never changes."""
_PASSING = frozenset({"grad_scale", "found_inf", "_step_count"})
"""The names of attributes that GradScaler and schedulers set in an optimizer. These attributes need
no check, because the state of the GradScaler or scheduler has the same values."""
_DEPTH = 6
_PLAIN = (Tensor, nn.Parameter)

Look = dict[str, object]
"""The values in the attributes of an optimizer, by the path of each attribute. A tensor is
represented by its shape and a digest."""


class Rehearsal:
    """
    Checks whether the state can be moved to another rank, when update windows number 1, 2, 4, 8 and
    so on close. In a long training so few checks cost next to nothing.
    """

    def __init__(
        self,
        describe: Callable[[], dict[str, Tensor]],
        refuse_overlaps: Callable[[dict[str, Tensor]], None],
    ) -> None:
        """
        `describe` is a function that makes the description of the state which another rank would
        receive, and returns the tensors of this state. `describe` raises `UsageError` for state that
        cannot be sent. `refuse_overlaps` raises `UsageError` for tensors that share memory.
        """
        self._describe = describe
        self._refuse_overlaps = refuse_overlaps
        self._refusal = ""
        """Why the next update window is refused. Empty: it is not refused."""
        self._closed = 0
        self._optimizer: Optimizer | None = None
        self._others: Mapping[str, object] = {}
        self._before: Look = {}

    def watch(self, optimizer: Optimizer, others: Mapping[str, object]) -> None:
        """
        Check `optimizer` from now on. `others` are the objects that are kept in addition to the
        optimizer.
        """
        # a ReplicaOptimizer keeps its state in its inner optimizer `optim`
        self._optimizer = optimizer.optim if isinstance(optimizer, ReplicaOptimizer) else optimizer
        self._others = others
        self._before = self._look()

    def let_go(self) -> None:
        """
        Drop the references to the optimizer and to the objects that are kept in addition to it.
        """
        self._optimizer, self._others = None, {}

    def closing(self) -> None:
        """
        Check the state if a check is due. Called when an update window closes.

        Raises `UsageError` for state that cannot be moved to another rank. An incident would lose
        such state, and so would a last checkpoint. Tensors that share memory can be written to a
        checkpoint, so the method `opening` refuses the next window for them.
        """
        self._closed += 1
        if self._closed & (self._closed - 1) or self._optimizer is None:
            return
        kind = type(self._optimizer).__name__
        try:
            tensors = self._describe()
        except UsageError as error:
            raise UsageError(_immovable(kind, error)) from None
        try:
            self._refuse_overlaps(tensors)
        except UsageError as error:
            # not raised now: a last checkpoint can have this state, as soon as the step is complete
            self._refusal = _immovable(kind, error)
        before, self._before = self._before, self._look()
        strange = sorted({_root(name) for name in self._changed(before, self._before)})
        if strange:
            raise UsageError(
                f"the optimizer {kind} keeps state in its attributes, which a process that replaces "
                f"this rank would not get: {', '.join(strange)}. Keep this state in "
                "optimizer.state[parameter] or in a parameter group; or hand over "
                f"others={{{strange[0]!r}: an object whose state_dict() and load_state_dict() have "
                "it}"
            )

    def opening(self) -> None:
        """
        Raise `UsageError` before an update window opens, if the last check has found tensors that
        share memory. The state is whole then, so that a last checkpoint can be written.
        """
        if self._refusal:
            raise UsageError(self._refusal)

    def _changed(self, before: Look, now: Look) -> Iterator[str]:
        assert self._optimizer is not None
        shapes = {
            str(list(p.shape)) for group in self._optimizer.param_groups for p in group["params"]
        }
        for name, found in now.items():
            if name in before:
                if before[name] != found:
                    yield name
            # A new attribute is allowed in general, because an optimizer may set it once and never
            # change it. But a new tensor with the shape of a parameter is state of that parameter.
            elif isinstance(found, tuple) and found[0] in shapes - {"[]"}:
                yield name

    def _look(self) -> Look:
        if self._optimizer is None:
            return {}
        optimizer = self._optimizer
        seen: set[int] = {id(optimizer), id(optimizer.state), id(optimizer.param_groups)}
        seen |= {id(each) for each in self._others.values()}
        seen |= {id(value) for kept in optimizer.state.values() for value in _values(kept)}
        for group in optimizer.param_groups:
            seen |= {id(value) for value in group.values()}
            seen |= {id(each) for p in group["params"] for each in (p, p.grad)}
        gathered = _Gathered(_package(optimizer), seen)
        for name, value in vars(optimizer).items():
            if name not in _KEPT | _PASSING | self._others.keys():
                gathered.gather(name, value, _DEPTH)
        return gathered.found


def refuse_unmovable(tensors: Mapping[str, Tensor]) -> None:
    """
    Raise `UsageError` if the optimizer state among `tensors` has a tensor that is not plain and
    dense.
    """
    for name, tensor in tensors.items():
        if name.startswith("optim.") and (
            type(tensor) not in _PLAIN or tensor.layout != torch.strided or tensor.is_quantized
        ):
            raise UsageError(
                f"the tensor {name} is a {type(tensor).__name__} of layout {tensor.layout}; tft "
                "can move only plain, dense tensors to another process"
            )


def _immovable(kind: str, why: UsageError) -> str:
    return (
        f"after a step of {kind}, the state of the optimizer cannot be moved to another process, so "
        f"no fault could be repaired: {why}. Use an optimizer whose state has only tensors and plain "
        "values"
    )


def _values(kept: object) -> Iterable[object]:
    return kept.values() if isinstance(kept, dict) else ()


def _root(name: str) -> str:
    return name.partition(".")[0]


def _package(value: object) -> str:
    return _root(type(value).__module__)


class _Gathered:
    """
    Collects the numbers, tensors and random generators in the attributes of an optimizer. A
    comparison of the collections before and after a step shows whether the step has changed the
    attributes.
    """

    def __init__(self, package: str, seen: set[int]) -> None:
        """
        `package` is the name of the package of the optimizer's class. `seen` has the `id` of each
        object that must not be inspected.
        """
        self.found: Look = {}
        self._package = package
        self._seen = seen

    def gather(self, name: str, value: object, depth: int) -> None:
        """
        Collect the values in `value`, at most `depth` levels deep. The names of the collected
        values begin with `name`.
        """
        if isinstance(value, bool | str | bytes | type | nn.Module) or callable(value):
            return
        if isinstance(value, int | float | complex | numpy.generic):
            self.found[name] = str(value)
            return
        if value is None or id(value) in self._seen or depth == 0:
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Generator):
            self.found[name] = value.get_state().numpy().tobytes()
        elif isinstance(value, Tensor):
            if type(value) in _PLAIN and value.layout == torch.strided and not value.is_meta:
                digest = xxhash.xxh3_64_intdigest(readable(name, value).view)
                self.found[name] = (str(list(value.shape)), digest)
        else:
            for key, item in self._items(value):
                self.gather(f"{name}.{key}", item, depth - 1)

    # Any: an attribute of an optimizer may have any type
    def _items(self, value: Any) -> Iterable[tuple[object, object]]:
        if isinstance(value, dict):
            keys = (key if isinstance(key, str | int) else n for n, key in enumerate(value))
            return zip(keys, value.values(), strict=True)
        if isinstance(value, list | tuple | set | frozenset):
            return enumerate(value)
        # Inspect only objects that belong to the optimizer. If the optimizer refers to a trainer,
        # for example, the counters of the trainer do not belong to the optimizer.
        own = is_dataclass(value) or isinstance(value, Optimizer)
        if own or _package(value) == self._package != "__main__":
            return tuple(vars(value).items()) if hasattr(value, "__dict__") else ()
        return ()
