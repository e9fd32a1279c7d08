"""
The attributes of the user's objects in a Lightning training: the module, its submodules, the data
module and the callbacks. Those that Lightning and torch set are left alone.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from tft_pytorch.attributes import Attributes, Changes, set_by
from tft_pytorch.unkept import Keeps, Unkept, sentence
from torch import nn
from torchmetrics import Metric, MetricCollection

from tft import Session
from tft.spi.plain_values import LIMIT, Filled, size_of

Trainer = Any  # Lightning's own types are not visible to mypy here

_FRAMEWORKS = frozenset({"torch", "lightning", "torchmetrics"})
_ROOM = 2 * LIMIT
"""The most bytes of the attributes that have changed since the start of the training."""
_LATER = frozenset({"forward", "_hparams_initial", "_hparams_name", "_is_full_backward_hook"})
"""Attributes that frameworks set from outside."""


def _framework(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _FRAMEWORKS


def is_native(owner: object) -> bool:
    """
    Return True if the class of `owner` is one of a framework.
    """
    return _framework(type(owner))


def frameworks_own(owner: object) -> frozenset[str]:
    """
    Return the names of the attributes of `owner` that classes of a framework set, which are among
    the bases of its class.
    """
    kind: Any = type(owner)
    return _set_by_frameworks(kind)


@cache
def _set_by_frameworks(kind: type) -> frozenset[str]:
    found: set[str] = set(_LATER)
    for fresh in (LightningModule, LightningDataModule, nn.Module):
        if issubclass(kind, fresh):
            found |= vars(fresh()).keys()
    for base in kind.__mro__:
        if _framework(base) and base is not nn.Module:
            with suppress(OSError, TypeError):  # a class that was made while running has no source
                found |= set_by(base)
    return frozenset(found - {"_hparams"})  # the script may change these


def _left_alone(owner: Any) -> frozenset[str]:
    """
    Return the names of the attributes of `owner` that are not kept, or in other ways. Of a metric
    these are its states and what the class `Metric` sets.
    """
    if isinstance(owner, MetricCollection):
        return frozenset(vars(nn.Module()))
    if isinstance(owner, Metric):
        return frozenset(vars(nn.Module())) | set_by(Metric) | frozenset(owner._defaults)
    return frameworks_own(owner)


def held_metrics(callbacks: Iterable[Any]) -> Iterator[tuple[str, nn.Module]]:
    """
    Yield the metrics and collections of metrics that callbacks have as attributes, with their parts.
    """
    for number, callback in enumerate(callbacks):
        for name, value in list(vars(callback).items()):
            if isinstance(value, Metric | MetricCollection):
                yield from value.named_modules(prefix=f"callback {number}.{name}")


class KeptAttributes:
    """
    Keeps the changes of four kinds of attributes: those of the module that begin with an
    underscore, those of its submodules, those of metrics that are no states, and those of the
    data module. Finds the attributes that change and cannot be kept.
    """

    def __init__(self, trainer: Trainer) -> None:
        """
        Begin before the sanity check, which a later replacement process leaves out.
        """
        module = trainer.lightning_module
        self._device = module.device
        self._objects = dict(_objects(trainer))
        self._changes = {
            name: Changes(each, _left_alone(each), underscored=each is module)
            for name, each in self._objects.items()
        }
        self._unkept = Unkept(module)
        self._large: set[str] = set()
        """The objects with attributes that have grown too large."""

    def watch(
        self,
        public: Attributes,
        callbacks: Sequence[tuple[Any, Attributes]],  # Any: Lightning's own types are not visible
        data: Iterable[tuple[object, Changes, frozenset[str]]] = (),
    ) -> None:
        """
        Look for attributes that are not kept. `public` keeps the other attributes of the module,
        and those in `callbacks` the attributes of the callbacks. `data` has the objects behind
        loaders, each with what keeps its attributes, and the names of those to leave alone.
        """
        for owner, changes, but in data:
            self._unkept.watch(owner, changes.keeps, but)
        for name, each in self._objects.items():
            changes = self._changes[name]
            keeps = _either(changes, public) if name == "module" else changes.keeps
            self._unkept.watch(each, keeps, _left_alone(each))
        for callback, attributes in callbacks:
            if not _framework(type(callback)):
                self._unkept.watch(callback, attributes.keeps, frameworks_own(callback))

    def noted(self) -> dict[str, Any]:
        """
        Return what has changed, by object.
        """
        found, room = {}, _ROOM
        for name, changes in self._changes.items():
            noted = changes.noted(room)
            if noted:
                found[name] = noted
                if noted["left"]:
                    self._large.add(name)
                room -= size_of(noted)
        return found

    def put_back(self, noted: Mapping[str, Any], filled: Filled | None = None) -> None:
        """
        Restore a result of `noted` of this process or another one, after `placed`. Pass the same
        `filled` for all owners that are put back together.
        """
        filled = {} if filled is None else filled
        for name, changes in self._changes.items():
            changes.put_back(noted.get(name, {}), self._device, filled)

    def report(self, session: Session) -> None:
        """
        Report the attributes that have changed since the last call and are not kept. Those that
        have grown too large are reported in any step, the others only in an audited one.
        """
        for name in self._large:
            for grown in self._changes[name].grown():
                owner = type(self._objects[name]).__name__
                session.unkept(f"{owner}.{grown}", sentence(owner, grown))
        self._large.clear()
        if session.audited:
            for what, told in self._unkept.sentences():
                session.unkept(what, told)


def _either(underscored: Changes, public: Attributes) -> Keeps:
    return lambda name: underscored.keeps(name) if name.startswith("_") else public.keeps(name)


def _objects(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """
    Yield the module, its submodules of the user's classes, its metrics and those of callbacks, and the
    data module. Other parts of metrics are left out.
    """
    module = trainer.lightning_module
    yield "module", module
    metrics = {
        id(part) for each in module.modules() if isinstance(each, Metric) for part in each.modules()
    }
    for name, each in module.named_modules():
        known = id(each) in metrics or _framework(type(each))
        if each is not module and (not known or isinstance(each, Metric | MetricCollection)):
            yield f"module.{name}", each
    own = {id(each) for each in module.modules()}
    for name, each in held_metrics(trainer.callbacks):
        if isinstance(each, Metric | MetricCollection) and id(each) not in own:
            yield name, each
    if trainer.datamodule is not None:
        yield "data", trainer.datamodule
