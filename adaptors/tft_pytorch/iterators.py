"""
Sources of batches with a position: a plain `DataLoader`, and a source that is read one batch ahead.

Pass such an object to `session.adopt` as `data`.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol, cast

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from tft.errors import UsageError

_LARGEST_SEED = 2**31
_PRIME = 1_000_003
"""More than the batches of an epoch, so that two epochs do not use the same seed for a batch."""


class Source(Protocol):
    """
    An object that yields batches and knows its position.
    """

    def next(self) -> Any: ...  # Any: the user's own batch
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> None: ...


class Batches:
    """
    Takes the batches of a plain `DataLoader`, epoch after epoch, from any position.

    The position is a seed, the epoch and the number of batches that were taken in the epoch. After
    an incident no item before the position is read again.

    - The sampler's `set_epoch` is called at the beginning of each epoch, if it has one.
    - The loader's generator is seeded anew for each epoch, from its first seed and the epoch. Without
      a generator the loader gets one, whose seed is drawn from torch's default generator.
    - Workers seed the generators of torch, Python and numpy for each batch. So what they draw depends on
      the batch only, not on the worker or on the batches before.
    """

    def __init__(self, loader: "DataLoader[Any]") -> None:
        """
        `loader` has a dataset of items with an index, and makes batches. It is not used itself.

        Raises `UsageError` for a loader without a position, and for a sampler that draws from
        torch's default generator.
        """
        _check(loader)
        self._loader = loader
        generator = loader.generator
        self._generator = torch.Generator() if generator is None else generator
        self._seed = (
            int(torch.randint(_LARGEST_SEED, ())) if generator is None else generator.initial_seed()
        )
        self._batches = _Numbered(loader.batch_sampler)
        self._ours: DataLoader[Any] = DataLoader(
            _Seeded(loader.dataset),
            batch_sampler=cast(Any, self._batches),  # it yields more than indices
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=self._generator,
            prefetch_factor=loader.prefetch_factor,
            in_order=True,
        )
        self.epoch = 0
        """The epoch of the next batch, counted from 0."""
        self._taken = 0
        self._iterator: Iterator[Any] | None = None

    def __len__(self) -> int:
        """
        The number of batches in an epoch.
        """
        return len(self._loader)

    def next(self) -> Any:  # Any: what the loader's `collate_fn` makes
        """
        Return the next batch. After the last batch of an epoch, the next epoch begins.
        """
        while True:
            if self._iterator is None:
                self._iterator = self._begin()
            for batch in self._iterator:
                self._taken += 1
                return batch
            self.epoch, self._taken, self._iterator = self.epoch + 1, 0, None

    def __iter__(self) -> Iterator[Any]:
        """
        Yield batches without end.
        """
        while True:
            yield self.next()

    def state_dict(self) -> dict[str, int]:
        """
        Return the position.
        """
        return {"seed": self._seed, "epoch": self.epoch, "taken": self._taken}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """
        Go to a position that `state_dict` has returned, here or in another process.
        """
        self._seed, self.epoch, self._taken = state["seed"], state["epoch"], state["taken"]
        self._iterator = None

    def skip(self, batches: int) -> None:
        """
        Leave out the next `batches` batches.
        """
        epochs, self._taken = divmod(self._taken + batches, len(self))
        self.epoch += epochs
        self._iterator = None

    def _begin(self) -> Iterator[Any]:
        for sampler in _samplers(self._loader):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)
        seed = self._seed + self.epoch
        self._generator.manual_seed(seed)
        self._batches.begin(seed, self._taken)
        return iter(self._ours)


class Prefetcher:
    """
    Reads one batch ahead of the training loop, and has the position of the batch that the loop gets
    next.

    Call `next` at the head of an iteration, and `ahead` when the device has work to do, such as after
    the forward pass.
    """

    def __init__(self, source: Source) -> None:
        """
        `source` must not draw from torch's default generator, because the time of its draws would
        change what the model draws after an incident.
        """
        self._source = source
        self._ahead: list[Any] = []
        """The batch that was read ahead; empty if there is none."""
        self._before: Any = None
        """The position of the source before it returned that batch."""

    def next(self) -> Any:  # Any: as the source has it
        """
        Return the next batch: the one that was read ahead, or a new one.
        """
        return self._ahead.pop() if self._ahead else self._source.next()

    def ahead(self) -> None:
        """
        Read the next batch now. Does nothing if a batch was read ahead already.

        Raises `UsageError` if the source draws from torch's default generator.
        """
        if self._ahead:
            return
        drawn = torch.default_generator.get_state()
        self._before = self._source.state_dict()
        self._ahead.append(self._source.next())
        if not torch.default_generator.get_state().equal(drawn):
            raise UsageError(
                f"a {type(self._source).__name__} that is read ahead must not draw from torch's "
                "default generator: give it a torch.Generator of its own, and keep the generator's "
                "state in its state_dict"
            )

    def state_dict(self) -> Any:
        """
        Return the position of the batch that `next` returns next.
        """
        return self._before if self._ahead else self._source.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """
        Go to a position that `state_dict` has returned. A batch that was read ahead is dropped.
        """
        self._ahead.clear()
        self._source.load_state_dict(state)

    def skip(self, batches: int) -> None:
        """
        Leave out the next `batches` batches. The source must have a method `skip`, too.
        """
        if self._ahead and batches:
            self._ahead.clear()
            batches -= 1
        self._source.skip(batches)  # type: ignore[attr-defined]  # not each source has it


class _Numbered:
    """
    The lists of indices of a batch sampler, from the position on, each with its number.
    """

    def __init__(self, sampler: Any) -> None:  # Any: what users give a DataLoader
        self._sampler = sampler
        self._first = 0
        self.seed = 0

    def begin(self, seed: int, first: int) -> None:
        """
        Let the next epoch begin with the batch number `first`.
        """
        self.seed, self._first = seed, first

    def __iter__(self) -> Iterator[tuple[int, int, list[Any]]]:
        batches = enumerate(self._sampler)
        for number, indices in islice(batches, self._first, None):
            yield self.seed, number, list(indices)


class _Seeded(Dataset[Any]):
    """
    The items of a dataset, of which a worker seeds its generators for each batch.
    """

    def __init__(self, dataset: Any) -> None:  # Any: the user's own
        self._dataset = dataset

    def __getitems__(self, batch: tuple[int, int, Sequence[Any]]) -> list[Any]:
        seed, number, indices = batch
        if get_worker_info() is not None:  # the generators of the rank itself are left alone
            mixed = (seed * _PRIME + number) % _LARGEST_SEED
            torch.manual_seed(mixed)
            random.seed(mixed)
            numpy.random.seed(mixed)
        if hasattr(self._dataset, "__getitems__"):
            found: list[Any] = self._dataset.__getitems__(indices)
            return found
        return [self._dataset[index] for index in indices]


def _check(loader: "DataLoader[Any]") -> None:
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            "an IterableDataset has no position that Batches could know: use torchdata's "
            "StatefulDataLoader, or an object of your own with state_dict and load_state_dict"
        )
    if loader.batch_sampler is None:
        raise UsageError("Batches needs a DataLoader that makes batches: batch_size is None")
    if not len(loader):
        raise UsageError("the loader has no batch: its dataset is smaller than one batch")
    if loader.persistent_workers:
        raise UsageError("Batches starts workers for each epoch: leave out persistent_workers=True")
    for sampler in _samplers(loader):
        if hasattr(sampler, "set_epoch") or not hasattr(sampler, "generator"):
            continue
        if sampler.generator is None or sampler.generator is not loader.generator:
            raise UsageError(
                f"the order of the batches depends on a generator that Batches does not know: give "
                f"the DataLoader a generator=torch.Generator().manual_seed(...), and the same one "
                f"to its {type(sampler).__name__} if you make that yourself"
            )


def _samplers(loader: "DataLoader[Any]") -> list[Any]:  # Any: the user's own
    """
    Return the samplers that decide the order of the batches.
    """
    batches = loader.batch_sampler
    return [loader.sampler, batches, getattr(batches, "sampler", None)]
