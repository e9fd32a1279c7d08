"""
Keeps attributes of the user's objects in a Lightning training: the module, its submodules, its
metrics and the data module. Attributes that classes of Lightning and torch set are not kept here:
those of them that are needed are kept in other ways.
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
"""The most bytes that all changed attributes together may have in the rank-local state. Attributes
beyond this limit are not kept."""
_LATER = frozenset({"forward", "_hparams_initial", "_hparams_name", "_is_full_backward_hook"})
"""Names of attributes that frameworks set on the user's objects from code outside of the objects'
classes. A search through the base classes does not find them."""


def _framework(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _FRAMEWORKS


def is_native(owner: object) -> bool:
    """
    Return True if the class of `owner` is one of a framework.
    """
    return _framework(type(owner))


def frameworks_own(owner: object) -> frozenset[str]:
    """
    Return the names of the attributes of `owner` that a framework sets, not the user: those set by
    base classes of `owner`'s class that belong to a framework, and those that frameworks set from
    code outside of these classes.
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
    return frozenset(found - {"_hparams"})  # kept, because the script may change hyperparameters


def _left_alone(owner: Any) -> frozenset[str]:
    """
    Return the names of the attributes of `owner` that this module must not keep, because they
    belong to a framework or are kept in other ways. For a metric, these are its states, and the
    attributes that the classes `Metric` and `Module` set.
    """
    if isinstance(owner, MetricCollection):
        return frozenset(vars(nn.Module()))
    if isinstance(owner, Metric):
        return frozenset(vars(nn.Module())) | set_by(Metric) | frozenset(owner._defaults)
    return frameworks_own(owner)


def held_metrics(callbacks: Iterable[Any]) -> Iterator[tuple[str, nn.Module]]:
    """
    Yield the metrics and collections of metrics that callbacks have as attributes, and their
    submodules, each with a name.
    """
    for number, callback in enumerate(callbacks):
        for name, value in list(vars(callback).items()):
            if isinstance(value, Metric | MetricCollection):
                yield from value.named_modules(prefix=f"callback {number}.{name}")


class KeptAttributes:
    """
    Keeps changed attributes in the rank-local state:

    - those of the module whose names begin with an underscore;
    - those of its submodules and of the data module;
    - those of metrics, except for the states of a metric.

    Also finds attributes that change and are not kept.
    """

    def __init__(self, trainer: Trainer) -> None:
        """
        Note the attributes as they are now. Must be called before the sanity check, because a
        replacement process leaves the sanity check out, and must begin with the same attributes.
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
        """The objects, by name, whose attributes have become too large. `report` reports them."""

    def watch(
        self,
        public: Attributes,
        callbacks: Sequence[tuple[Any, Attributes]],  # Any: Lightning's own types are not visible
        data: Iterable[tuple[object, Changes, frozenset[str]]] = (),
    ) -> None:
        """
        Begin to look for attributes that change and are not kept.

        `public` keeps those attributes of the module whose names begin without an underscore.
        `callbacks` has each callback with the object that keeps its attributes. `data` has the same
        for each object that a loader uses, and the names of attributes to leave out.
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
        Return the changed attributes of each object, as `Changes.noted` returns them, by the name
        of the object. Objects without a change are left out.
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
        Restore the attributes to `noted`: a result of the method `noted` of this process or another
        one, from which `placed` has made values again. Pass the same dict `filled` for all objects
        that are restored together (see `Attributes.put_back`).
        """
        filled = {} if filled is None else filled
        for name, changes in self._changes.items():
            changes.put_back(noted.get(name, {}), self._device, filled)

    def report(self, session: Session) -> None:
        """
        Report attributes that have changed since the last call and are not kept. An attribute that
        has become too large is reported after any step, all other attributes only after a step that
        the session audits.
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
    Yield the objects whose attributes are kept, by name: the module, its submodules of the user's
    classes, the metrics of the module and of callbacks, and the data module. Submodules of metrics
    are left out unless they are metrics themselves.
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
