"""
Keeps the state of the objects that a data loader uses: dataset, sampler, batch sampler and collate
function. Their random generators and their plain attributes (numbers, texts, tensors and containers
of them) are rank-local state.
"""

from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from tft_pytorch.attributes import Changes, copied
from tft_pytorch.generators import generators, packed, restore, unpacked
from tft_pytorch.owned_generators import Owned, kind_of
from tft_pytorch.plain_values import placed
from torch import nn
from transformers import Trainer, TrainerCallback

from tft.spi.plain_values import LIMIT, Filled, size_of

_LEFT = (
    type, ModuleType, FunctionType, MethodType, type(len), nn.Module, Trainer, TrainerCallback,
)  # fmt: skip
"""Types of objects whose attributes are not kept: they have no state, or tft keeps it in other
ways."""
_FRAMEWORKS = frozenset({"torch", "accelerate", "transformers", "datasets"})

_Plain = dict[str, Any]  # Any: plain values
Drawn = tuple[bytes, Mapping[str, Any]]
"""The packed states of random generators, and the changed attributes of each object. An object is
named by its path from the loader."""


class Owners:
    """
    Notes and restores the random generators and the attributes of the objects that a loader uses.
    Attributes that have not changed since the constructor was called are not noted.
    """

    def __init__(self, loader: Any, device: torch.device | None = None) -> None:
        """
        `loader` is a `torch.utils.data.DataLoader`. Tensors that were on a device are put back on
        `device`. Raises `UsageError` if the state of a random generator cannot be read.
        """
        self._device = torch.device("cpu") if device is None else device
        # leave out a SeedableRandomSampler, whose generator need not be kept, because the sampler
        # seeds it again in each epoch
        self._owned = Owned(loader, but=(SeedableRandomSampler,))
        self._samplers = _watched(self._owned.samplers)
        self._readers = _watched(self._owned.readers)
        self._names = {
            place: type(owner).__name__
            for place, owner in {**self._owned.samplers, **self._owned.readers}.items()
        }

    def states(self) -> _Plain:
        """
        Return the present states of the objects that the loader uses: their random generators and
        their changed attributes.
        """
        return {"generators": self._owned.states(), "objects": self._kept()}

    def put_back(self, states: Mapping[str, Any]) -> None:
        """
        Restore the objects to a result of `states`, of this process or another one.
        """
        self._owned.restore(states["generators"])
        # a checkpoint of an earlier version of tft has no entry `objects`
        self._put_back(states.get("objects", {}), samplers=True)

    def drawn(self) -> Drawn:
        """
        Return the present states of the objects that the loader uses, and of the global random
        generators of this process.
        """
        return packed(generators(owned=self._owned)), self._kept()

    def restore(self, drawn: Drawn, *, samplers: bool = True) -> None:
        """
        Restore the global random generators and the loader's objects to `drawn`, a result of the
        method `drawn`. Leave out the samplers if `samplers` is False.
        """
        random, kept = unpacked(drawn[0]), drawn[1]
        restore(random)
        self._owned.restore(random["owned"], samplers=samplers)
        self._put_back(kept, samplers=samplers)

    def grown(self) -> Iterator[tuple[str, str]]:
        """
        Yield, for each attribute that has become too large since the last call, the class of its
        object and its name.
        """
        for place, changes in {**self._samplers, **self._readers}.items():
            for name in changes.grown():
                yield self._names[place], name

    def _kept(self) -> _Plain:
        found, room = {}, LIMIT
        for place, changes in {**self._samplers, **self._readers}.items():
            noted = changes.noted(room)
            if noted:
                found[place] = copied(noted)
                room -= size_of(noted)
        return found

    def _put_back(self, kept: Mapping[str, Any], *, samplers: bool) -> None:
        owners = {**self._samplers, **self._readers} if samplers else self._readers
        filled: Filled = {}
        for place, changes in owners.items():
            noted = placed(copied(kept.get(place, {})), self._device)
            changes.put_back(noted, self._device, filled)


def _watched(owners: Mapping[str, object]) -> dict[str, Changes]:
    found: dict[str, Changes] = {}
    for place, owner in owners.items():
        native = type(owner).__module__.partition(".")[0] in _FRAMEWORKS
        if hasattr(owner, "__dict__") and not native and not isinstance(owner, _LEFT):
            drawn = {name for name, each in vars(owner).items() if kind_of(each)}
            found[place] = Changes(owner, drawn)
    return found
