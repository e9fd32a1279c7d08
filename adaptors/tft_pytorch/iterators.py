"""
Sources of batches that can return to an earlier position: `Batches` for a plain `DataLoader`, and
`Prefetcher` for a source that is read one batch ahead.

Pass such an object to `session.adopt` as `data`.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import chain, islice
from typing import Any, Protocol

import numpy
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    get_worker_info,
)

from tft.errors import UsageError
from tft.spi.generators import global_states
from tft_pytorch.attributes import Changes
from tft_pytorch.data_position import DataPosition
from tft_pytorch.loader_parts import members, readers_of, samplers_of
from tft_pytorch.owned_generators import kind_of, read
from tft_pytorch.plain_values import placed

_CPU = torch.device("cpu")
_LARGEST_SEED = 2**31
_PRIME = 1_000_003
"""A prime that is assumed to be larger than the number of batches in an epoch. The seed that a
loader's worker process sets for a batch is the seed of the epoch times this prime, plus the number
of the batch. So the batches of two consecutive epochs have different seeds."""


class Source(Protocol):
    """
    An object that yields batches and knows its position.
    """

    def next(self) -> Any: ...  # Any: the user's own batch, of any type
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> None: ...


def loader_like(
    loader: "DataLoader[Any]", **changed: Any
) -> "DataLoader[Any]":  # Any: arguments of DataLoader
    """
    Return a loader with the settings of `loader`, except for the arguments `changed`. Always pass
    `batch_sampler`, which is not copied. It may be any iterable of lists of indices.
    """
    names = (
        "dataset", "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn",
        "multiprocessing_context", "generator", "prefetch_factor", "in_order",
    )  # fmt: skip
    return DataLoader(**{name: getattr(loader, name) for name in names} | changed)


class Batches:
    """
    Yields the batches of a plain `DataLoader`, epoch after epoch, from any position.

    A position consists of a seed, the epoch, and the number of batches that were read in the epoch.
    To return to a position, `Batches` reads no earlier item of the dataset.

    - The sampler's `set_epoch` is called at the beginning of each epoch, if the sampler has this
      method.
    - Attributes of the user's own samplers, also of samplers within samplers, are noted when an
      epoch begins, if they have plain values: numbers, texts, containers, random generators. They
      are restored when the order of this epoch is needed again.
    - The loader's generator is seeded again for each epoch, from the generator's first seed and the
      epoch. A loader without a generator gets a new generator, whose seed is drawn from torch's
      default generator.
    - Workers seed the generators of torch, Python and numpy for each batch. So the random numbers
      that a worker draws depend on the batch only, not on the worker or on earlier batches.
    """

    def __init__(self, loader: "DataLoader[Any]") -> None:
        """
        `loader` must have a dataset whose items have an index, and must make batches. The settings
        of `loader` are copied: `Batches` never iterates over `loader` itself.

        Raises `UsageError` for a loader whose position cannot be known, for a sampler whose
        attribute `generator` is not the loader's generator, and for a random generator of the
        dataset or the collate function. A sampler without this attribute may draw from the random
        generators of the process: then `next` raises `UsageError` for the first batch.
        """
        _check(loader)
        self._loader = loader
        generator = loader.generator
        self._generator = torch.Generator() if generator is None else generator
        self._seed = (
            int(torch.randint(_LARGEST_SEED, ())) if generator is None else generator.initial_seed()
        )
        chosen = (
            loader.batch_sampler
            if isinstance(loader.sampler, SequentialSampler)
            else loader.sampler
        )
        self._batches = _Numbered(loader.batch_sampler, type(chosen).__name__)
        self._changes = _changes(loader)
        self._noted: dict[str, Any] = {}
        """The attributes of the samplers as they were when the present epoch began, as far as they
        have changed since `Batches` was made."""
        self._again = False
        """True if the samplers may have drawn the order of this epoch already. Then the attributes
        in `_noted` must be restored before the order is drawn again."""
        self._ours = loader_like(
            loader,
            dataset=_Seeded(loader.dataset),
            batch_sampler=self._batches,
            generator=self._generator,
            in_order=True,
        )
        self.epoch = 0
        """The epoch of the next batch, counted from 0."""
        self._taken = 0
        self._iterator: Iterator[Any] | None = None

    def __len__(self) -> int:
        """
        Return the number of batches in an epoch.
        """
        return len(self._loader)

    def next(self) -> Any:  # Any: a batch, as the loader's `collate_fn` makes it
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

    def state_dict(self) -> dict[str, Any]:  # Any: numbers, and plain values
        """
        Return the position of the next batch: the seed, the epoch, and how many batches of the
        epoch come before it. Attributes of samplers that have changed are a part of the position.
        """
        here = {"seed": self._seed, "epoch": self.epoch, "taken": self._taken}
        return {**here, "samplers": self._noted} if self._noted else here

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: as above
        """
        Go to the position `state`, which `state_dict` has returned in this or another process.
        """
        self._seed, self.epoch, self._taken = state["seed"], state["epoch"], state["taken"]
        self._noted = state.get("samplers", {})
        self._iterator, self._again = None, True

    def skip(self, batches: int) -> None:
        """
        Leave out the next `batches` batches.
        """
        if self._iterator is not None:
            self._iterator, self._again = None, True
        self._taken += batches
        while self._taken >= len(self):
            self._begin_order()
            if self._changes:
                for _ in self._batches:
                    pass
            self.epoch, self._taken = self.epoch + 1, self._taken - len(self)

    def _begin(self) -> Iterator[Any]:
        self._begin_order()
        return iter(self._ours)

    def _begin_order(self) -> None:
        if self._again:
            for place, changes in self._changes.items():
                noted = placed(deepcopy(self._noted.get(place, {})), _CPU)
                changes.put_back(noted, _CPU)
        else:
            noted = {place: changes.noted() for place, changes in self._changes.items()}
            self._noted = deepcopy({place: each for place, each in noted.items() if each})
        self._again = False
        for sampler in _samplers(self._loader):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)
        seed = self._seed + self.epoch
        self._generator.manual_seed(seed)
        self._batches.begin(seed, self._taken)


class Prefetcher:
    """
    Reads one batch ahead of the training loop. Its `state_dict` has the position of the batch that
    the loop gets next, not of the batch that was read ahead.

    Call `next` at the beginning of an iteration, and `ahead` when the device has work to do, for
    example after the forward pass.
    """

    def __init__(self, source: Source) -> None:
        """
        `source` must not draw from the random generators of the process. After an incident a batch
        may be read at another moment, before or after other draws of the process. `source` would
        then draw other numbers.
        """
        self._source = source
        self.position = DataPosition(source)
        """The position of the source, with the epochs of its samplers."""
        self._ahead: list[Any] = []
        """A list with the batch that was read ahead. Empty if no batch was read ahead."""
        self._epochs: tuple[object, object] = (None, None)
        """The epochs of the samplers before and after the batch was read ahead."""
        self._before: Any = None
        """The position of the source before it returned the batch that was read ahead."""

    def next(self) -> Any:  # Any: a batch of the source, of any type
        """
        Return the next batch: the batch that was read ahead, or else a new batch from the source.
        """
        return self._ahead.pop() if self._ahead else self._source.next()

    def ahead(self) -> None:
        """
        Read the next batch now. Does nothing if a batch was read ahead already.

        Raises `UsageError` if the source draws from the random generators of the process.
        """
        if self._ahead:
            return
        drawn = _drawn()
        # copy the position, because the source may return an object that it changes in place
        self._before = deepcopy(self.position.state_dict())
        before = self.position.present()
        self._ahead.append(self._source.next())
        self._epochs = before, self.position.present()
        if _drawn() != drawn:
            raise UsageError(
                f"a {type(self._source).__name__} that is read ahead must not draw from the random "
                "generators of the process (torch's default generator, random, numpy.random): give "
                "it a generator of its own, and keep the generator's state in its state_dict"
            )

    def state_dict(self) -> Any:
        """
        Return the position of the batch that `next` returns next.
        """
        return self._before if self._ahead else self.position.state_dict()

    def epochs(self) -> Any:
        """
        Return the present epochs of the source's samplers. If a batch was read ahead, they are the
        epochs before that, unless the script has called `set_epoch` since.
        """
        before, after = self._epochs
        present = self.position.present()
        return before if self._ahead and present == after else present

    def load_state_dict(self, state: Any) -> None:
        """
        Go to the position `state`, a result of `state_dict`. Drop the batch that was read ahead.
        """
        self._ahead.clear()
        self.position.load_state_dict(state)

    @property
    def skip(self) -> Callable[[int], None]:
        """
        The method `skip(batches)`, which leaves out the next `batches` batches. A `Prefetcher` has
        it only if its source has it: otherwise raises `AttributeError`.
        """
        further: Callable[[int], None] | None = getattr(self._source, "skip", None)
        if not callable(further):
            raise AttributeError(f"a {type(self._source).__name__} has no method skip(batches)")
        return partial(self._skip, further)

    def _skip(self, further: Callable[[int], None], batches: int) -> None:
        if self._ahead and batches:
            self._ahead.clear()
            batches -= 1
        further(batches)


def _drawn() -> list[object]:
    """
    Return the states of the random generators of the process, to compare them.
    """
    return [torch.default_generator.get_state().numpy().tobytes(), global_states()]


class _Numbered:
    """
    Yields the batches of a batch sampler as lists of item indices, from a given batch on. Each list
    comes with the seed and the number of its batch.
    """

    # Any: any iterable that yields lists of item indices
    def __init__(self, sampler: Any, name: str) -> None:
        """
        `name` is the class of the sampler, for messages to the user.
        """
        self._sampler = sampler
        self._name = name
        self._first = 0
        self.seed = 0

    def begin(self, seed: int, first: int) -> None:
        """
        Begin the next iteration at the batch with the number `first`, and yield `seed` with each
        batch.
        """
        self.seed, self._first = seed, first

    def __iter__(self) -> Iterator[tuple[int, int, list[Any]]]:
        """
        Yield the batches. Raises `UsageError` if the sampler draws them from the random generators
        of the process.
        """
        drawn = _drawn()
        rest = islice(enumerate(self._sampler), self._first, None)
        first = list(islice(rest, 1))
        if _drawn() != drawn:
            raise UsageError(
                f"the {self._name} of the loader draws from the random generators of the process "
                "(torch's default generator, random, numpy.random), so it would draw another order "
                "after an incident: give it a random.Random as an attribute, or let it draw from "
                "the generator of the DataLoader"
            )
        for number, indices in chain(first, rest):
            yield self.seed, number, list(indices)


class _Seeded(Dataset[Any]):
    """
    A dataset that seeds the random generators of the loader's worker process before it reads the
    items of a batch.
    """

    def __init__(self, dataset: Any) -> None:  # Any: the user's own dataset may have any type
        self._dataset = dataset

    def __getitems__(self, batch: tuple[int, int, Sequence[Any]]) -> list[Any]:
        seed, number, indices = batch
        # seed only in worker processes, because the training process must keep its own random
        # numbers
        if get_worker_info() is not None:
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
            "the DataLoader given to Batches has an IterableDataset, whose position Batches cannot "
            "know: use torchdata's StatefulDataLoader, or an object of your own with state_dict "
            "and load_state_dict"
        )
    if loader.batch_sampler is None:
        raise UsageError(
            "Batches needs a DataLoader that makes batches, but batch_size is None: set batch_size"
        )
    if not len(loader):
        raise UsageError(
            "the loader has no batch, because the dataset of the DataLoader given to Batches is "
            "smaller than one batch: set a smaller batch_size, or use a larger dataset"
        )
    if loader.persistent_workers:
        raise UsageError(
            "the DataLoader given to Batches has persistent_workers=True, but Batches starts new "
            "workers for each epoch: leave out persistent_workers"
        )
    for sampler in _samplers(loader):
        if hasattr(sampler, "set_epoch") or not hasattr(sampler, "generator"):
            continue
        if sampler.generator is None or sampler.generator is not loader.generator:
            raise _unknown_generator(sampler)
    _check_generators(loader)


def _check_generators(loader: "DataLoader[Any]") -> None:
    """
    Raise `UsageError` for a random generator that is not restored. Those of the user's own samplers
    are restored with their other attributes, and the loader's generator is seeded again.
    """
    for sampler in samplers_of(loader):
        for _, each in members(sampler):
            if each is loader.generator or not kind_of(each):
                continue
            if _is_of_torch(sampler):
                raise _unknown_generator(sampler)
            read(type(sampler).__name__, each)  # raises `UsageError` if it has no state
    for reader in readers_of(loader):
        for name, each in members(reader):
            if kind_of(each):
                raise UsageError(
                    f"the attribute {name} of {type(reader).__name__} is a random generator, and "
                    "Batches does not restore its state, so items would have other random numbers "
                    "after an incident: draw from the generators of the process (torch's default "
                    "generator, random, numpy.random), or make a generator for each item, from its "
                    "index"
                )


def _unknown_generator(sampler: object) -> UsageError:
    return UsageError(
        "the order of the batches depends on a generator that Batches does not know: give the "
        "DataLoader a generator=torch.Generator().manual_seed(...), and give the same generator to "
        f"the {type(sampler).__name__} if the script makes this sampler itself"
    )


def _is_of_torch(sampler: object) -> bool:
    return type(sampler).__module__.partition(".")[0] == "torch"


def _changes(loader: "DataLoader[Any]") -> dict[str, Changes]:
    """
    Return, for each sampler whose class is not torch's own, an object that notes how its attributes
    change. The keys are the sampler's numbers among all samplers of `loader`, as texts.
    """
    return {
        str(place): Changes(each)
        for place, each in enumerate(samplers_of(loader))
        if hasattr(each, "__dict__") and not _is_of_torch(each)
    }


def _samplers(loader: "DataLoader[Any]") -> list[Any]:  # Any: samplers may have any type
    """
    Return the samplers that decide the order of the batches, without those within other samplers.
    """
    batches = loader.batch_sampler
    return [loader.sampler, batches, getattr(batches, "sampler", None)]
