"""
Keeps the position of the user's data object, together with the epochs of the samplers and datasets
of its loaders.

A sampler such as torch's `DistributedSampler` draws the order of an epoch from its attribute
`epoch`, which the script sets with `set_epoch`. torchdata's `StatefulDataLoader` draws this order
when it makes its iterator, and its state does not contain the epoch. So the epoch must be set
before the loader makes its iterator, also in a replacement process, whose script has set none.

There are two epochs: that from which the present order was drawn, and the present one. They differ
if the script has called `set_epoch` since the order was drawn. The first is a part of the position.
The second is kept beside it, because the tail of a step may change it.
"""

from collections.abc import Iterator, Mapping
from inspect import GEN_CREATED, getgeneratorstate, isgenerator
from operator import index
from typing import Any

from torch.utils.data import DataLoader

from tft.errors import UsageError
from tft.spi import is_position_of_loop
from tft_pytorch.loader_parts import readers_of, samplers_of

_EPOCHS = "tft.epochs"
"""The key of the epochs in a position. A position with this key also has `_POSITION`."""
_POSITION = "tft.position"
"""The key of the position as the user's object has returned it."""

_Epochs = Mapping[str, Mapping[str, int]]
"""For each loader, the epoch of each sampler or dataset."""


class DataPosition:
    """
    Returns and restores the position of a data object. If the object is a loader that has a
    position, or has such loaders as attributes, the epochs of their samplers and datasets are a
    part of the position.
    """

    # Any: the user's own data object may have any type
    def __init__(self, source: Any) -> None:
        """
        Raises `UsageError` for a sampler or dataset that has `set_epoch`, and whose epoch cannot be
        read.
        """
        self.source = source
        inner = getattr(source, "position", None)
        self._inner = inner if isinstance(inner, DataPosition) else None
        """The position within a `Prefetcher`, which keeps the epochs of its source itself."""
        found = () if self._inner is not None else _loaders(source)
        loaders = {place: _LoaderEpochs(each) for place, each in found}
        self._loaders = {place: each for place, each in loaders.items() if each.present()}

    def state_dict(self) -> Any:
        """
        Return the position of the object. If there are no epochs, it is what the object's own
        `state_dict` returns.
        """
        position = self.source.state_dict()
        if not self._loaders:
            return position
        # note the epochs now, because the object may have drawn an order in the call above
        epochs = {place: each.drawn() for place, each in self._loaders.items()}
        return {_EPOCHS: epochs, _POSITION: position}

    def load_state_dict(self, state: Any) -> None:
        """
        Bring the object to the position `state`, which `state_dict` has returned in this or another
        process. The epochs are then those from which the order was drawn.

        Raises `UsageError` if `state` does not have the epoch of a sampler.
        """
        epochs: _Epochs = {}
        if self._loaders and isinstance(state, dict) and _EPOCHS in state:
            epochs, state = state[_EPOCHS], state[_POSITION]
        for place, loader in self._loaders.items():
            loader.go_to(epochs.get(place, {}), again=True)
        self.source.load_state_dict(state)
        # In this call of `state_dict`, torchdata's StatefulDataLoader makes its iterator: it draws
        # the order of the epoch, and random numbers. So the caller restores the random generators
        # after this call.
        self.state_dict()

    def present(self) -> _Epochs | None:
        """
        Return the present epochs, or None if there are none.
        """
        if self._inner is not None:
            kept: _Epochs | None = self.source.epochs()
            return kept
        return {place: each.present() for place, each in self._loaders.items()} or None

    def set_present(self, epochs: _Epochs | None) -> None:
        """
        Set the epochs to which the script had set them.
        """
        if self._inner is not None:
            self._inner.set_present(epochs)
        elif epochs is not None:
            for place, loader in self._loaders.items():
                loader.go_to(epochs.get(place, {}), again=False)


class _LoaderEpochs:
    """
    Notes and sets the epochs of the samplers and datasets of one loader.
    """

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self._loader = loader
        samplers = samplers_of(loader)
        parts = enumerate([*samplers, *readers_of(loader)])
        owners = {str(place): each for place, each in parts if hasattr(each, "set_epoch")}
        self._owners = {place: each for place, each in owners.items() if _epoch(each) is not None}
        self._samplers = {str(place) for place in range(len(samplers))} & self._owners.keys()
        """The keys of those owners that draw the order."""
        self._through: dict[str, list[Any]] = {}
        """For each of these keys, the samplers and datasets that pass the epoch on to that owner."""
        for place in sorted(owners.keys() - self._owners.keys()):
            followers = _followers(owners[place], self._owners)
            if not followers and not hasattr(owners[place], "load_state_dict"):
                raise _unreadable(owners[place])
            for follower in followers:
                self._through.setdefault(follower, []).append(owners[place])
                if int(place) < len(samplers):
                    self._samplers.add(follower)
        self._order: object = None
        """The iterator of the sampler from which the present order comes."""
        self._begun = False
        """True if the order was drawn from this iterator when it was last looked at."""
        self._drawn: Mapping[str, int] = {}

    def present(self) -> Mapping[str, int]:
        """
        Return the present epochs.
        """
        found = {place: _epoch(each) for place, each in self._owners.items()}
        return {place: epoch for place, epoch in found.items() if epoch is not None}

    def drawn(self) -> Mapping[str, int]:
        """
        Return the epochs from which the present order was drawn. Call this whenever the loader may
        have made a new iterator.
        """
        iterator = getattr(self._loader, "_iterator", None)
        order = getattr(iterator, "_sampler_iter", None)
        if order is None or order is not self._order or not self._begun:
            self._drawn = self.present()
        self._order, self._begun = order, _has_begun(iterator)
        return self._drawn

    def go_to(self, epochs: Mapping[str, int], *, again: bool) -> None:
        """
        Set the epochs, if they are not set already: `set_epoch` may be slow, or draw an order. With
        `again=True`, the order is drawn next. Then set those of samplers in any case, because their
        `set_epoch` may begin the order anew.
        """
        for place, owner in self._owners.items():
            if place not in epochs:
                raise UsageError(
                    f"the data position has no epoch of the {type(owner).__name__}, so the order of "
                    "the epoch cannot be drawn again: the position was kept by an earlier version of "
                    "tft, or by a script with another sampler. Resume from a checkpoint of this "
                    "version and this script"
                )
            if _epoch(owner) != epochs[place] or (again and place in self._samplers):
                for outer in self._through.get(place, ()):
                    outer.set_epoch(epochs[place])
                owner.set_epoch(epochs[place])


def _has_begun(iterator: Any) -> bool:  # Any: torchdata has no types
    """
    Return False if the order of an epoch is drawn with the first batch, and there was none yet. A
    sampler or dataset whose `__iter__` is a generator function draws it so late.
    """
    batches = getattr(iterator, "_sampler_iter", None)
    items = getattr(batches, "sampler_iter", None)
    read = getattr(getattr(iterator, "_dataset_fetcher", None), "dataset_iter", None)
    return not any(
        isgenerator(each) and getgeneratorstate(each) == GEN_CREATED
        for each in (batches, items, read)
    )


def _loaders(source: Any) -> Iterator[tuple[str, "DataLoader[Any]"]]:
    """
    Yield the loaders with a position that `source` is or has as attributes, each with a name.

    A position of a framework's loop has none, because the framework's adaptor keeps the epochs.
    """
    if is_position_of_loop(source):
        return
    for name, each in {"": source, **getattr(source, "__dict__", {})}.items():
        if isinstance(each, DataLoader) and hasattr(each, "load_state_dict"):
            yield name, each


def _epoch(owner: Any) -> int | None:  # Any: a sampler or dataset of any type
    """
    Return the epoch of a sampler or dataset, or None if it cannot be read.
    """
    try:
        return index(owner.epoch)
    except (AttributeError, TypeError):
        return None


def _followers(owner: Any, readable: Mapping[str, Any]) -> list[str]:
    """
    Return the keys of those in `readable` to which `owner` passes the epoch on. The epochs are then
    as before.
    """
    before = {place: _epoch(each) or 0 for place, each in readable.items()}
    if not before:
        return []
    probe = max(before.values()) + 1
    owner.set_epoch(probe)
    found = [place for place, each in readable.items() if _epoch(each) == probe]
    if found:
        owner.set_epoch(before[found[0]])
    for place, each in readable.items():
        if _epoch(each) != before[place]:
            each.set_epoch(before[place])
    return found


def _unreadable(owner: Any) -> UsageError:
    return UsageError(
        f"the {type(owner).__name__} of the loader has a method set_epoch, but no whole number as "
        "its attribute epoch, so a replacement process could not draw the order of the same epoch: "
        "let set_epoch keep its argument as self.epoch"
    )
