"""
The objects behind a loader: dataset, sampler, batch sampler and collator. Their random generators and
their plain attributes are rank-local state.
"""

from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from tft_pytorch.attributes import LIMIT, Changes
from tft_pytorch.generators import generators, packed, restore, unpacked
from tft_pytorch.owned_generators import Owned, kind_of
from tft_pytorch.plain_values import placed, size_of
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tft_lightning.kept_attributes import frameworks_own, is_native

_LEFT = (
    type, ModuleType, FunctionType, MethodType, type(len), nn.Module, LightningDataModule,
)  # fmt: skip
"""What has no state, or is kept in other ways."""

Kept = Mapping[str, Any]
"""The attributes that have changed, by the place of their object."""


class Watched:
    """
    Watches the attributes of the objects behind all loaders. An object behind several loaders is
    watched once.
    """

    def __init__(self, device: torch.device) -> None:
        """
        Tensors that were on a device are put back on `device`.
        """
        self.device = device
        self._found: dict[int, tuple[object, Changes, frozenset[str]]] = {}

    def of(self, owner: object) -> Changes | None:
        """
        Return what watches the attributes of `owner`, from the first call on. Return None for an
        object of a framework, and for one that is kept in other ways.
        """
        if not hasattr(owner, "__dict__") or isinstance(owner, _LEFT) or is_native(owner):
            return None
        if id(owner) not in self._found:
            drawn = {name for name, each in vars(owner).items() if kind_of(each)}
            but = frameworks_own(owner) | drawn
            self._found[id(owner)] = owner, Changes(owner, but), but
        return self._found[id(owner)][1]

    def all(self) -> Iterator[tuple[object, Changes, frozenset[str]]]:
        """
        Yield the objects that are watched, what watches them, and the names of the attributes that
        are left alone.
        """
        yield from self._found.values()


class Owners:
    """
    Notes and restores the random generators and the attributes of the objects behind one loader.
    """

    def __init__(self, loader: Any, watched: Watched) -> None:  # Any: a DataLoader
        # Lightning wraps a sampler of the user
        hidden = getattr(getattr(loader.sampler, "dataset", None), "_sampler", None)
        self._owned = Owned(loader, wrapped=hidden)
        self._device = watched.device
        self._samplers = _watched(self._owned.samplers, watched)
        self._readers = _watched(self._owned.readers, watched)

    def noted(self) -> dict[str, Any]:
        """
        Return the present states of the random generators of this process, and of these objects.
        """
        return {"drawn": packed(generators(owned=self._owned)), "kept": self._kept()}

    def restore(self, noted: Mapping[str, Any]) -> None:
        """
        Restore everything to a result of `noted`.
        """
        restore(unpacked(noted["drawn"]), owned=self._owned)
        self._put_back(noted["kept"], samplers=True)

    def states(self) -> dict[str, Any]:
        """
        Return the present states of these objects.
        """
        return {"owned": self._owned.states(), "kept": self._kept()}

    def put_back(self, states: Mapping[str, Any], *, samplers: bool = True) -> None:
        """
        Restore the objects to a result of `states`. The samplers only if `samplers` is True.
        """
        self._owned.restore(states["owned"], samplers=samplers)
        self._put_back(states["kept"], samplers=samplers)

    def _kept(self) -> Kept:
        found, room = {}, LIMIT
        for place, changes in {**self._samplers, **self._readers}.items():
            noted = changes.noted(room)
            if noted:
                found[place] = _copied(noted)
                room -= size_of(noted)
        return found

    def _put_back(self, kept: Kept, *, samplers: bool) -> None:
        owners = {**self._samplers, **self._readers} if samplers else self._readers
        for place, changes in owners.items():
            noted = placed(_copied(kept.get(place, {})), self._device)
            changes.put_back(noted, self._device)


def _watched(owners: Mapping[str, object], watched: Watched) -> dict[str, Changes]:
    found = {place: watched.of(owner) for place, owner in owners.items()}
    return {place: changes for place, changes in found.items() if changes is not None}


def _copied(noted: Mapping[str, Any]) -> Any:
    """
    Return a copy of what was noted, which does not change with the tensors of the object.
    """
    return tree_map_only(Tensor, Tensor.clone, dict(noted))
