"""
The training data loader with a position: it can go back to a batch of the present epoch, or begin in
the middle of an epoch.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from tft_pytorch.iterators import loader_like
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, IterableDataset

from tft.errors import UsageError

_READER = "_tft_reader"
"""The attribute of a positioned loader that has its reader."""

Batch = Any  # a batch of the user's loader may have any type


_SEEN = (Tensor, bool, int, float, str, bytes, type(None))
"""The parts of a batch whose changes can be seen."""


def positioned(
    loader: Any, epoch: Callable[[], int]
) -> Any:  # Any: DataLoader or what Lightning takes
    """
    Give `loader` a `Reader`, and return it. The loader stays the same object with the same type for
    `isinstance`. `epoch` returns the present epoch.

    Raises `UsageError` if `loader` is no `DataLoader`.
    """
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"the training loader is a {type(loader).__name__}, whose position tft cannot keep: "
            "return one torch.utils.data.DataLoader from train_dataloader"
        )
    if hasattr(loader, "state_dict"):
        raise UsageError(
            f"the training loader is a {type(loader).__name__}, which keeps a position of its own. "
            "After an incident this position would be wrong in the checkpoints of Lightning: use a "
            "torch.utils.data.DataLoader, whose position tft keeps"
        )
    if _READER not in vars(loader):
        kind = type(loader)

        def begin(self: Any) -> Iterator[Batch]:
            return reader_of(self).begin(lambda: kind.__iter__(self))

        loader.__class__ = type(
            kind.__name__, (kind,), {"__module__": kind.__module__, "__iter__": begin}
        )
        vars(loader)[_READER] = Reader(loader, epoch)
    return loader


def reader_of(loader: Any) -> "Reader":
    """
    Return the reader of a loader that `positioned` has returned.
    """
    reader: Reader = vars(loader)[_READER]
    return reader


class Reader:
    """
    Reads the batches of one loader, and keeps those that may be needed again.
    """

    def __init__(self, loader: Any, epoch: Callable[[], int]) -> None:
        self._loader = loader
        self._epoch = epoch
        self._live: _Live | None = None
        self._before: dict[str, Any] = {}
        """torch's random states before the present iterator was made, and before its first batch
        was read. A sampler may draw the order of the batches from them."""
        self._seek: int | None = None

    def begin(self, make: Callable[[], Iterator[Batch]]) -> Iterator[Batch]:
        """
        Return an iterator over the batches from the position of the last `seek`, or over the whole
        epoch. `make` makes the loader's own iterator.
        """
        first, self._seek = self._seek, None
        if first is None:
            self._before = {"iterator": torch.get_rng_state(), "generator": self._generator()}
            self._live = _Live(self, make(), 0, self._epoch())
        elif self._live is None or not self._live.reaches(first, self._epoch()):
            self._live = self._rebuilt(first, make)
        live = self._live
        return live.batches(first or 0)

    def first_is_read(self) -> None:
        """
        Note the random state before the first batch of the epoch is read for the first time.
        """
        self._before.setdefault("first", torch.get_rng_state())

    def seek(self, first: int) -> None:
        """
        Let the next iterator begin with batch `first` of the epoch.
        """
        self._seek = first

    def trim(self, first: int) -> None:
        """
        Drop the kept batches before batch `first`.
        """
        if self._live is not None:
            self._live.trim(first)

    def state(self) -> dict[str, Any]:
        """
        Return what another process needs to make the same iterator.
        """
        return {**self._before, "now": self._generator()}

    def load(self, state: Mapping[str, Any]) -> None:
        """
        Take over the result of `state`.
        """
        self._before = {name: kept for name, kept in state.items() if name != "now"}
        if state.get("now") is not None and self._loader.generator is not None:
            self._loader.generator.set_state(state["now"])

    def _generator(self) -> Any:
        generator = self._loader.generator
        return None if generator is None else generator.get_state()

    def _rebuilt(self, first: int, make: Callable[[], Iterator[Batch]]) -> "_Live":
        loader, before = self._loader, self._before
        now = self._generator()
        if "iterator" in before:
            torch.set_rng_state(before["iterator"])
        if now is not None and before.get("generator") is not None:
            loader.generator.set_state(before["generator"])
        if loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
            inner = make()
            for _ in islice(inner, first):
                pass
        else:
            rest = _Rest(loader.batch_sampler, first)
            inner = iter(loader_like(loader, batch_sampler=rest))
            if not loader.num_workers:
                if "first" in before:
                    torch.set_rng_state(before["first"])
                rest.begin()
        if now is not None:
            loader.generator.set_state(now)
        return _Live(self, inner, first, self._epoch())


class _Live:
    """
    One iterator over an epoch, with the batches that it has read and that may be needed again.
    """

    def __init__(self, reader: Reader, inner: Iterator[Batch], first: int, epoch: int) -> None:
        self._reader = reader
        self._inner = inner
        self._next = first
        self._epoch = epoch
        self._kept: dict[int, tuple[Batch, Any, _Seal]] = {}
        """The batches by their number in the epoch, each with the random states after it was read,
        and a seal that tells whether it was changed since."""

    def reaches(self, first: int, epoch: int) -> bool:
        """
        Return True if the batches of `epoch` from `first` on can be had from this iterator.
        """
        if epoch != self._epoch or first > self._next:
            return False
        kept = [self._kept.get(number) for number in range(first, self._next)]
        # a hook or a training_step may have changed a batch, for example replaced its tensors
        return all(each is not None and each[2].holds(each[0]) for each in kept)

    def trim(self, first: int) -> None:
        self._kept = {number: kept for number, kept in self._kept.items() if number >= first}

    def batches(self, first: int) -> Iterator[Batch]:
        """
        Yield the batches from `first` on.
        """
        number = first
        while True:
            if number in self._kept:
                batch, states, _ = self._kept[number]
                if states is not None:
                    _set_rng_states(states)
            else:
                if number == 0:
                    self._reader.first_is_read()
                try:
                    batch = next(self._inner)
                except StopIteration:
                    return
                states = (
                    None
                    if self._reader._loader.num_workers
                    else _collect_rng_states(include_cuda=False)
                )
                self._kept[number] = batch, states, _Seal(batch)
                self._next = number + 1
            number += 1
            yield batch


class _Seal:
    """
    Tells whether a batch is as it was read: the same tensors at the same places, not changed in
    place. An object of another kind, whose changes cannot be seen, counts as changed.
    """

    def __init__(self, batch: Batch) -> None:
        self._leaves, self._form = tree_flatten(batch)
        self._versions = self._counted()

    def holds(self, batch: Batch) -> bool:
        """
        Return whether `batch`, which was given to the constructor, is unchanged.
        """
        leaves, form = tree_flatten(batch)
        return (
            form == self._form
            and all(a is b for a, b in zip(leaves, self._leaves, strict=True))
            and self._versions is not None
            and self._counted() == self._versions
        )

    def _counted(self) -> list[int] | None:
        if not all(isinstance(each, _SEEN) for each in self._leaves):
            return None
        return [each._version for each in self._leaves if isinstance(each, Tensor)]


class _Rest:
    """
    The lists of a batch sampler from a given batch on.
    """

    def __init__(self, sampler: Any, first: int) -> None:  # Any: any iterable of lists of indices
        self._sampler = sampler
        self._first = first
        self._lists: Iterator[Any] | None = None

    def begin(self) -> None:
        """
        Read the lists up to the first one that is wanted. The sampler draws the order of the epoch
        when its first list is read.
        """
        lists = iter(self._sampler)
        for _ in islice(lists, self._first):
            pass
        self._lists = chain(list(islice(lists, 1)), lists)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._lists is None:
            self.begin()
        assert self._lists is not None
        return next(self._lists)
