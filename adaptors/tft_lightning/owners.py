"""
Keeps the state of the objects that a data loader uses: dataset, sampler, batch sampler and collate
function. Their random generators and their plain attributes (numbers, texts, tensors and containers
of them) are rank-local state.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningDataModule
from tft_pytorch.attributes import Changes, copied
from tft_pytorch.generators import generators, packed, restore, unpacked
from tft_pytorch.owned_generators import Owned, kind_of
from tft_pytorch.plain_values import placed
from tft_pytorch.unkept import sentence
from torch import nn

from tft import Session
from tft.spi.plain_values import LIMIT, Filled, size_of
from tft_lightning.kept_attributes import frameworks_own, is_native

_LEFT = (
    type, ModuleType, FunctionType, MethodType, type(len), nn.Module, LightningDataModule,
)  # fmt: skip
"""Types of objects whose attributes are not watched: they have no state, or tft keeps it in other
ways."""
_ROOM = 2 * LIMIT
"""The maximum size in bytes of the attributes of the objects of all loaders in the rank-local
state, all copies included."""
_LARGE = (
    f"has more than {LIMIT // 1024} KiB, or the attributes of the objects that all loaders use have "
    f"more than {_ROOM // 1024} KiB, where those of the training loader count four times"
)
_UNREAD = "is a random generator whose state cannot be read, as that of a random.Random can"

Kept = Mapping[str, Any]
"""Maps the place of an object (its path from the loader) to the attributes of it that have
changed."""


class Watched:
    """
    Watches the attributes of the objects that the loaders use. An object that several loaders use
    is watched once.
    """

    def __init__(self, device: torch.device) -> None:
        """
        When attributes are restored, tensors that were on a device are put on `device`.
        """
        self.device = device
        self._found: dict[int, tuple[object, Changes, frozenset[str]]] = {}
        self._taken: WeakKeyDictionary[Owners, int] = WeakKeyDictionary()
        """By loader: the most bytes that its attributes have taken so far, with all copies."""
        self._unread: set[tuple[str, str]] = set()
        """Random generators whose state cannot be read: pairs of the class of the object that has
        the generator, and the name of the attribute."""

    def of(self, owner: object) -> Changes | None:
        """
        Return the `Changes` that watches the attributes of `owner`. The first call for `owner`
        makes it. Return None if the class of `owner` belongs to a framework, or if the state of
        `owner` is kept in other ways.
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
        Yield for each watched object: the object, the `Changes` that watches its attributes, and
        the names of the attributes that are not watched.
        """
        yield from self._found.values()

    def report(self, session: Session) -> None:
        """
        Report to the session what is not kept: attributes that have become too large since the last
        call, and random generators whose state cannot be read.
        """
        while self._unread:
            name, unread = self._unread.pop()
            session.unkept(f"{name}.{unread}", sentence(name, unread, _UNREAD))
        for owner, changes, _ in self._found.values():
            for grown in changes.grown():
                name = type(owner).__name__
                session.unkept(f"{name}.{grown}", sentence(name, grown, _LARGE))

    def leaves(self, unread: Iterable[tuple[object, str]]) -> None:
        """
        Note random generators whose state cannot be read, for the next `report`. `unread` has for
        each generator the object that has it as an attribute, and the name of the attribute.
        """
        self._unread |= {(type(owner).__name__, name) for owner, name in unread}

    def room(self, owners: "Owners") -> int:
        """
        Return how many bytes the attributes of the loader `owners` may have, all copies together.
        All loaders share `_ROOM`. For each other loader, the most bytes that it has ever had are
        subtracted, because the state may have older copies of its attributes.
        """
        return _ROOM - sum(size for each, size in self._taken.items() if each is not owners)

    def take(self, owners: "Owners", size: int) -> None:
        """
        Note that the attributes of the loader `owners` now have `size` bytes, all copies together.
        """
        self._taken[owners] = max(self._taken.get(owners, 0), size)


class Owners:
    """
    Notes and restores the random generators and the attributes of the objects that one loader uses.
    """

    # Any: a DataLoader
    def __init__(
        self, loader: Any, watched: Watched, copies: int = 1, *, lenient: bool = False
    ) -> None:
        """
        `copies` is how many results of `noted` or `states` the rank-local state may have at once.

        Raises `UsageError` if the state of a random generator cannot be read. With `lenient=True`,
        such a generator is not restored, and is reported instead.
        """
        self._watched, self._copies = watched, copies
        # Lightning may have wrapped the user's sampler in its own: then `hidden` is the user's
        hidden = getattr(getattr(loader.sampler, "dataset", None), "_sampler", None)
        self._owned = Owned(loader, wrapped=hidden, lenient=lenient)
        self._samplers = _watched(self._owned.samplers, watched)
        self._readers = _watched(self._owned.readers, watched)

    def noted(self) -> dict[str, Any]:
        """
        Return the present states of the global random generators of this process, and of the
        objects that the loader uses.
        """
        return {"drawn": packed(generators(owned=self._owned)), "kept": self._kept()}

    def restore(self, noted: Mapping[str, Any]) -> None:
        """
        Restore the global random generators and the loader's objects to a result of `noted`.
        """
        restore(unpacked(noted["drawn"]), owned=self._owned)
        self._put_back(noted["kept"], samplers=True)

    def states(self) -> dict[str, Any]:
        """
        Return the present states of the objects that the loader uses: their random generators and
        their changed attributes.
        """
        owned = self._owned.states()
        self._watched.leaves(self._owned.unread())
        return {"owned": owned, "kept": self._kept()}

    def attributes(self) -> Iterator[object]:
        """
        Yield the values of all attributes of the objects that the loader uses.
        """
        for owner in (*self._owned.samplers.values(), *self._owned.readers.values()):
            yield from getattr(owner, "__dict__", {}).values()

    def put_back(self, states: Mapping[str, Any], *, samplers: bool = True) -> None:
        """
        Restore the objects to a result of `states`. Leave out the samplers if `samplers` is False.
        """
        self._owned.restore(states["owned"], samplers=samplers)
        self._put_back(states["kept"], samplers=samplers)

    def _kept(self) -> Kept:
        found = {}
        room = whole = min(LIMIT, self._watched.room(self) // self._copies)
        for place, changes in {**self._samplers, **self._readers}.items():
            noted = changes.noted(room)
            if noted:
                found[place] = copied(noted)
                room -= size_of(noted)
        self._watched.take(self, (whole - room) * self._copies)
        return found

    def _put_back(self, kept: Kept, *, samplers: bool) -> None:
        owners = {**self._samplers, **self._readers} if samplers else self._readers
        filled: Filled = {}
        for place, changes in owners.items():
            noted = placed(copied(kept.get(place, {})), self._watched.device)
            changes.put_back(noted, self._watched.device, filled)


def _watched(owners: Mapping[str, object], watched: Watched) -> dict[str, Changes]:
    found = {place: watched.of(owner) for place, owner in owners.items()}
    return {place: changes for place, changes in found.items() if changes is not None}
