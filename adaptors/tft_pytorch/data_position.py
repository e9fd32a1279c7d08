"""
Keeps the position of the user's data object, together with the epochs of the samplers and datasets
of its loaders.

A sampler such as torch's `DistributedSampler` draws the order of an epoch from its attribute
`epoch`, which the script sets with `set_epoch`. torchdata's `StatefulDataLoader` draws this order
when it makes its iterator, and its state does not contain the epoch. So the epoch must be set
before the loader makes its iterator, also in a replacement process, whose script has set none.
"""

from collections.abc import Iterator, Mapping, Sequence
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

_Epochs = Mapping[str, Sequence[int]]
"""For each sampler or dataset, two epochs: that from which the present order was drawn, and the
present one. They differ if the script has called `set_epoch` since the order was drawn."""


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
        loaders = {place: _LoaderEpochs(each) for place, each in _loaders(source)}
        self._loaders = {place: each for place, each in loaders.items() if each.noted()}

    def state_dict(self) -> Any:
        """
        Return the position of the object. If there are no epochs, it is what the object's own
        `state_dict` returns.
        """
        position = self.source.state_dict()
        if not self._loaders:
            return position
        # note the epochs now, because the object may have drawn an order in the call above
        epochs = {place: each.noted() for place, each in self._loaders.items()}
        return {_EPOCHS: epochs, _POSITION: position}

    def load_state_dict(self, state: Any) -> None:
        """
        Bring the object to the position `state`, which `state_dict` has returned in this or another
        process.

        Raises `UsageError` if `state` does not have the epoch of a sampler.
        """
        epochs: Mapping[str, _Epochs] = {}
        # without loaders, these keys may be those of a `Prefetcher`, which keeps epochs itself
        if self._loaders and isinstance(state, dict) and _EPOCHS in state:
            epochs, state = state[_EPOCHS], state[_POSITION]
        for place, loader in self._loaders.items():
            loader.set_drawn(epochs.get(place, {}))
        self.source.load_state_dict(state)
        # In this call of `state_dict`, torchdata's StatefulDataLoader makes its iterator: it draws
        # the order of the epoch, and random numbers. So the caller restores the random generators
        # after this call.
        self.state_dict()
        for place, loader in self._loaders.items():
            loader.set_present(epochs[place])


class _LoaderEpochs:
    """
    Notes and sets the epochs of the samplers and datasets of one loader.
    """

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self._loader = loader
        parts = enumerate([*samplers_of(loader), *readers_of(loader)])
        self._owners = {str(place): each for place, each in parts if hasattr(each, "set_epoch")}
        self._order: object = None
        """The iterator of the sampler from which the present order comes."""
        self._drawn: dict[str, int] = {}
        """The epochs when this iterator was first seen here."""

    def noted(self) -> _Epochs:
        """
        Return the epochs. Call this whenever the loader may have made a new iterator.
        """
        present = {place: _epoch(each) for place, each in self._owners.items()}
        iterator = getattr(self._loader, "_iterator", None)
        order = getattr(iterator, "_sampler_iter", None)
        if order is None or order is not self._order:
            self._order, self._drawn = order, present
        return {place: [self._drawn[place], epoch] for place, epoch in present.items()}

    def set_drawn(self, epochs: _Epochs) -> None:
        """
        Set the epochs from which the order is drawn again.
        """
        for place, owner in self._owners.items():
            if place not in epochs:
                raise UsageError(
                    f"the data position has no epoch of the {type(owner).__name__}, so the order of "
                    "the epoch cannot be drawn again: the position was kept by an earlier version of "
                    "tft, or by a script with another sampler. Resume from a checkpoint of this "
                    "version and this script"
                )
            owner.set_epoch(epochs[place][0])

    def set_present(self, epochs: _Epochs) -> None:
        """
        Set the epochs to which the script had set them, after the order was drawn again.
        """
        for place, owner in self._owners.items():
            drawn, present = epochs[place]
            if drawn != present:
                owner.set_epoch(present)


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


def _epoch(owner: Any) -> int:  # Any: a sampler or dataset of any type
    try:
        return index(owner.epoch)
    except (AttributeError, TypeError):
        raise UsageError(
            f"the {type(owner).__name__} of the loader has a method set_epoch, but no whole number "
            "as its attribute epoch, so a replacement process could not draw the order of the same "
            "epoch: let set_epoch keep its argument as self.epoch"
        ) from None
