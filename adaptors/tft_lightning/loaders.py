"""
Gives the training data loader a position, so that it can go back to a batch of the present epoch,
or begin in the middle of an epoch in a replacement process.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from tft_pytorch.generators import generators, packed, restore, unpacked
from tft_pytorch.iterators import loader_like
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, IterableDataset

from tft.errors import UsageError
from tft_lightning.owners import Owners, Watched

_READER = "_tft_reader"
"""The name of the attribute that holds the `Reader` of a loader."""

Batch = Any  # a batch of the user's loader may have any type


_COPIES = 4
"""The number of results of `Owners.noted` in the state of a reader. They were noted before the
iterator was made, before the first batch, before the last batch, and now."""
_SEEN = (Tensor, bool, int, float, str, bytes, type(None))
"""The types of parts of a batch. If the script changes a part of these types in place, this module
notices it."""


def positioned(
    loader: Any, epoch: Callable[[], int], watched: Watched
) -> Any:  # Any: DataLoader or what Lightning takes
    """
    Make `loader` read its batches through a new `Reader`, and return `loader`. It stays the same
    object, and `isinstance` with its class stays True. `epoch` returns the present epoch. `watched`
    notes the attributes of the objects that the loader uses.

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
        vars(loader)[_READER] = Reader(loader, epoch, watched)
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

    def __init__(self, loader: Any, epoch: Callable[[], int], watched: Watched) -> None:
        self.loader = loader
        self._epoch = epoch
        self._live: _Live | None = None
        self.owners = Owners(loader, watched, copies=_COPIES)
        self._before: dict[str, Any] = {}
        """The states of the loader's objects before the present iterator was made (`iterator`) and
        before its first batch was read (`first`). A sampler may draw the order of the batches from
        the generators in these states."""
        self._loaded: Mapping[str, Any] | None = None
        """The states that `load` has received. They are restored when the next iterator begins.
        None: nothing is to be restored."""
        self._last: Mapping[str, Any] | None = None
        """The states, received by `load`, that the loader's objects had at the end of a step. They
        are restored after the last batch of that step was read again."""
        self._seek: tuple[int, bool] | None = None

    def begin(self, make: Callable[[], Iterator[Batch]]) -> Iterator[Batch]:
        """
        Return an iterator over the batches from the position of the last `seek`, or over the whole
        epoch. `make` makes the loader's own iterator.
        """
        (first, again), self._seek = self._seek or (None, False), None
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self._last = loaded["now"]
            if first is None:
                self.owners.put_back(loaded["now"])
            elif self._reaches(first, again):
                # with worker processes, the sampler has already drawn the indices of later batches:
                # do not set the sampler back
                self.owners.put_back(loaded["now"], samplers=not self.loader.num_workers)
        if first is None:
            self._before = {"iterator": self.owners.noted()}
            self._live = _Live(self, make(), 0, self._epoch())
        elif not self._reaches(first, again):
            self._live = self._rebuilt(first, make)
            if loaded is not None:
                # the new iterator has drawn the sampler's numbers again, but has not read the items
                # of earlier batches: restore the generators of the objects that read items
                before = loaded["last"] if again else None
                self.owners.put_back(before or loaded["now"], samplers=False)
                drawn = [before.get("drawn")] if before else []
                self._live.draws_again(first, [*drawn, *loaded["ahead"]])
        assert self._live is not None
        return self._live.batches(first or 0)

    def _reaches(self, first: int, again: bool) -> bool:
        # With `again`, the present iterator can be used only if it has read batch `first` already.
        # If it read the batch only now, the loader's objects would have their states of the end of
        # the step, and not those from before the batch.
        live = self._live
        return live is not None and live.reaches(first, self._epoch(), read=again)

    def was_read_again(self) -> None:
        """
        Restore the objects that read items, such as dataset and collate function, to their state at
        the end of the step. Called when the last batch of the step was read again.
        """
        if self._last is not None:
            self.owners.put_back(self._last, samplers=False)

    def first_is_read(self) -> None:
        """
        Note the state before the first batch of the epoch is read for the first time.
        """
        self._before.setdefault("first", self.owners.noted())

    def seek(self, first: int, *, again: bool = False) -> None:
        """
        Make the next iterator begin with batch `first` of the epoch. Pass `again=True` if `first`
        is the last batch of a complete step, which is read again because callbacks get this batch.
        """
        self._seek = first, again

    def trim(self, first: int) -> None:
        """
        Drop the kept batches before batch `first`.
        """
        if self._live is not None:
            self._live.trim(first)

    def state(self, last: int) -> dict[str, Any]:
        """
        Return the state from which another process can make an iterator that yields the same
        further batches. `last` is the number of the last batch of the step.
        """
        live = self._live
        before = None if live is None else live.before(last)
        ahead = [] if live is None or before is None else live.ahead(last)
        return {**self._before, "last": before, "ahead": ahead, "now": self.owners.states()}

    def load(self, state: Mapping[str, Any]) -> None:
        """
        Store `state`, a result of the method `state`. The next call of `begin` restores it.
        """
        self._before = {name: kept for name, kept in state.items() if name in ("iterator", "first")}
        self._loaded = {name: state[name] for name in ("last", "now")}
        # a checkpoint of an earlier version of tft has no entry `ahead`
        self._loaded["ahead"] = state.get("ahead", ())

    def _rebuilt(self, first: int, make: Callable[[], Iterator[Batch]]) -> "_Live":
        present = generators()
        try:
            return _Live(self, self._begun_anew(first, make), first, self._epoch())
        finally:
            restore(present)

    def _begun_anew(self, first: int, make: Callable[[], Iterator[Batch]]) -> Iterator[Batch]:
        """
        Return an iterator over the present epoch from batch `first` on. The sampler draws the same
        order of batches as when the epoch began, because the states of that moment are restored
        first.
        """
        loader, before = self.loader, self._before
        if "iterator" in before:
            self.owners.restore(before["iterator"])
        # Without worker processes, the sampler draws the order when the first batch is read. So the
        # states from just before that are restored, too.
        first_read = None if loader.num_workers else before.get("first")
        if loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
            whole = make()
            if first_read is not None:
                self.owners.restore(first_read)
            for _ in islice(whole, first):
                pass
            return whole
        rest = _Rest(loader.batch_sampler, first)
        inner: Iterator[Batch] = iter(loader_like(loader, batch_sampler=rest))
        if first_read is not None:
            self.owners.restore(first_read)
            rest.begin()
        return inner


class _Live:
    """
    One iterator over an epoch, with the batches that it has read and that may be needed again.
    """

    def __init__(self, reader: Reader, inner: Iterator[Batch], first: int, epoch: int) -> None:
        self._reader = reader
        self._inner = inner
        self._next = first
        self._epoch = epoch
        self._kept: dict[int, tuple[Batch, Any, Any, _Seal]] = {}
        """The batches by their number in the epoch, each with the states before and after it was
        read, and a seal that tells whether it was changed since."""

        self._draws: dict[int, Any] = {}
        """By number of a batch that another process has read already: the states that the random
        generators of that process had before it read the batch."""

    def draws_again(self, first: int, drawn: Sequence[Any]) -> None:
        """
        Restore the random generators of the process before each batch from `first` on is read.
        `drawn` has their state for each of these batches.
        """
        self._draws = {first + at: each for at, each in enumerate(drawn) if each is not None}

    def reaches(self, first: int, epoch: int, *, read: bool) -> bool:
        """
        Return True if this iterator can yield the batches of `epoch` from `first` on: it keeps them
        unchanged, or has not read them yet. With `read=True`, return True only if it has read batch
        `first`.
        """
        if epoch != self._epoch or first + read > self._next:
            return False
        kept = [self._kept.get(number) for number in range(first, self._next)]
        # check that no hook and no training_step has changed a batch, for example its tensors
        return all(each is not None and each[3].holds(each[0]) for each in kept)

    def trim(self, first: int) -> None:
        self._kept = {number: kept for number, kept in self._kept.items() if number >= first}

    def before(self, number: int) -> Any:
        """
        Return the states that the objects of the loader had before batch `number` was read. Return
        None if these states are not known.
        """
        return self._kept[number][1] if number in self._kept else None

    def ahead(self, number: int) -> list[Any]:
        """
        Return, for each batch after batch `number` that was read ahead, the states that the random
        generators of the process had before this batch was read.
        """
        read = (self._kept[each] for each in range(number + 1, self._next))
        return [before["drawn"] for _, before, _, _ in read]

    def batches(self, first: int) -> Iterator[Batch]:
        """
        Yield the batches from `first` on.
        """
        number, owners = first, self._reader.owners
        # worker processes read batches ahead, so the states that the objects have when a batch is
        # taken do not belong to this batch, and are not noted
        alone = not self._reader.loader.num_workers
        while True:
            if number in self._kept:
                batch, _, after, _ = self._kept[number]
                if after is not None:
                    owners.restore(after)
            else:
                if number == 0:
                    self._reader.first_is_read()
                if number in self._draws:
                    restore(unpacked(self._draws.pop(number)))
                drawn = packed(generators()) if alone else None
                before = {**owners.states(), "drawn": drawn} if alone else None
                try:
                    batch = next(self._inner)
                except StopIteration:
                    return
                after = owners.noted() if alone else None
                self._kept[number] = batch, before, after, _Seal(batch)
                self._next = number + 1
            number += 1
            yield batch


class _Seal:
    """
    Tells whether a batch is still as it was read: it has the same tensors at the same places, and
    none of them was changed in place. A batch with an object whose changes cannot be noticed counts
    as changed.
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
    Yields the lists of indices that a batch sampler yields, from batch number `first` on.
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
