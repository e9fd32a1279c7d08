"""
A positioned loader goes back to any batch, in the same process or in another one.
"""

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy
import pytest
import torch
from tft_lightning.loaders import _Seal, positioned, reader_of
from tft_pytorch.generators import generators, restore
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler

from tft.errors import UsageError


class Numbers(Dataset[Any]):
    """
    Numbers, each with another number that is drawn when it is read.
    """

    def __len__(self) -> int:
        """Return how many there are."""
        return 24

    def __getitem__(self, index: int) -> Any:
        """Return a number."""
        return torch.tensor(float(index))


class Stream(IterableDataset[Any]):
    """
    The same numbers without an index.
    """

    def __iter__(self) -> Iterator[Any]:
        """Yield the numbers."""
        yield from (torch.tensor(float(number)) for number in range(24))


def loaders(workers: int) -> list[Any]:
    """
    Return loaders of several kinds.
    """
    return [
        DataLoader(Numbers(), batch_size=4, num_workers=workers),
        DataLoader(Numbers(), batch_size=4, num_workers=workers, shuffle=True),
        DataLoader(
            Numbers(), batch_size=4, num_workers=workers, shuffle=True,
            generator=torch.Generator().manual_seed(5),
        ),
        DataLoader(Stream(), batch_size=4, num_workers=min(workers, 1)),
    ]  # fmt: skip


class Drawing(Dataset[Any]):
    """
    Numbers, each with one that a generator of the dataset draws when it is read.
    """

    def __init__(self) -> None:
        self.own = numpy.random.default_rng(7)

    def __len__(self) -> int:
        """Return how many there are."""
        return 24

    def __getitem__(self, index: int) -> Any:
        """Return a number, changed a little."""
        return torch.tensor(index + float(self.own.random()))


class Lazy(Sampler[int]):
    """
    Draws each index when it is wanted, from a generator of its own.
    """

    def __init__(self) -> None:
        self.generator = random.Random(9)

    def __iter__(self) -> Iterator[int]:
        return (self.generator.randrange(24) for _ in range(24))

    def __len__(self) -> int:
        return 24


class Shuffled(Sampler[int]):
    """
    Draws the order of an epoch from the generators of Python and numpy.
    """

    def __iter__(self) -> Iterator[int]:
        order = list(numpy.random.permutation(24))
        random.shuffle(order)
        return iter([int(each) for each in order])

    def __len__(self) -> int:
        return 24


OWN: dict[str, Callable[[], Any]] = {
    "lazy": lambda: DataLoader(Numbers(), batch_size=4, sampler=Lazy()),
    "weighted": lambda: DataLoader(
        Numbers(),
        batch_size=4,
        sampler=WeightedRandomSampler(
            [float(each) for each in range(24)], 24, generator=torch.Generator().manual_seed(1)
        ),
    ),
    "global": lambda: DataLoader(Numbers(), batch_size=4, sampler=Shuffled()),
    "dataset": lambda: DataLoader(Drawing(), batch_size=4, shuffle=True),
}


def begun(kind: str, taken: int) -> tuple[Any, Iterator[Any]]:
    """
    Seed all generators, and return a loader with an iterator that has read `taken` batches.
    """
    random.seed(1)
    numpy.random.seed(2)
    torch.manual_seed(3)
    loader = positioned(OWN[kind](), lambda: 0)
    epoch = iter(loader)
    read(islice(epoch, taken))
    return loader, epoch


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("taken", [0, 2, 6])
def test_a_replacement_draws_as_the_lost_process_would(kind: str, taken: int) -> None:
    """When a sampler or a dataset draws from a generator of its own, or from Python's and numpy's,
    then a replacement reads the same batches to the end of this epoch and of the next one."""
    first, epoch = begun(kind, taken)
    state, drawn = reader_of(first).state(), generators()
    rest = read(epoch)
    following = read(first)

    numpy.random.seed(99)
    random.seed(99)
    torch.manual_seed(99)
    other = positioned(OWN[kind](), lambda: 0)
    reader_of(other).load(state)
    restore(drawn)
    reader_of(other).seek(taken)
    assert read(iter(other)) == rest
    assert read(other) == following


@pytest.mark.parametrize("kind", OWN)
def test_a_survivor_draws_as_if_nothing_had_happened(kind: str) -> None:
    """When a rank goes back to a state within an epoch or at its end, after it has read further,
    then it reads the same batches again, and those after them."""
    for taken in (2, 6):
        loader, epoch = begun(kind, taken)
        reader_of(loader).trim(taken)
        state, drawn = reader_of(loader).state(), generators()
        further = epoch if taken < 6 else iter(loader)
        expected = read(islice(further, 2))

        reader_of(loader).load(state)
        restore(drawn)
        if taken < 6:
            reader_of(loader).seek(taken)
        again = iter(loader)
        assert read(islice(again, 2)) == expected
        rest = read(again)
        assert len(rest) == (6 - taken - 2 if taken < 6 else 4)


def read(batches: Any) -> list[list[float]]:
    """
    Return the batches as lists.
    """
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", range(4))
def test_a_replacement_reads_the_rest_of_the_epoch(kind: int, workers: int) -> None:
    """When another process takes over the state of a loader in the middle of an epoch, then it reads
    the batches that the first one would have read, also in the next epoch."""
    torch.manual_seed(3)
    first = positioned(loaders(workers)[kind], lambda: 0)
    whole = iter(first)
    read(islice(whole, 2))
    state, drawn = reader_of(first).state(), torch.get_rng_state()
    rest, following = read(whole), read(first)

    other = positioned(loaders(workers)[kind], lambda: 0)
    reader_of(other).load(state)
    reader_of(other).seek(2)
    taken = iter(other)
    torch.set_rng_state(drawn)
    assert read(taken) == rest
    assert read(other) == following


def test_a_survivor_reads_kept_batches_again() -> None:
    """When a loader goes back within its epoch, then it serves the batches that it has kept, and
    reads no item again."""
    loader = positioned(DataLoader(Numbers(), batch_size=4), lambda: 0)
    batches = iter(loader)
    kept = list(islice(batches, 3))
    reader_of(loader).trim(1)
    reader_of(loader).seek(1)
    again = list(iter(loader))
    assert again[:2] == kept[1:]
    assert len(again) == 5


def test_a_batch_that_was_changed_in_place_is_read_again() -> None:
    """When a training step has changed a kept batch in place, then the batch is read anew."""
    loader = positioned(DataLoader(Numbers(), batch_size=4), lambda: 0)
    whole = read(loader)
    reader_of(loader).seek(0)
    first = next(iter(loader))
    first.add_(100)
    reader_of(loader).seek(0)
    assert read(loader) == whole


def test_seal_of_a_batch_sees_every_change() -> None:
    """When a tensor of a batch is replaced, removed or changed in place, or when a part of the batch
    is an object of another kind, then the batch counts as changed, so that it is read again."""
    same = {"x": torch.ones(2), "n": 1}
    assert _Seal(same).holds(same)
    changes: list[Callable[[dict[str, Any]], Any]] = [
        lambda batch: batch.update(x=batch["x"] * 2),
        lambda batch: batch.pop("n"),
        lambda batch: batch["x"].mul_(2),
        lambda batch: batch.update(n=2),
    ]
    for change in changes:
        seal = _Seal(batch := {"x": torch.ones(2), "n": 1})
        change(batch)
        assert not seal.holds(batch)
    unknown = {"x": object()}
    assert not _Seal(unknown).holds(unknown)


def test_a_list_of_batches_is_refused() -> None:
    """When the training data are no DataLoader, then this is said."""
    with pytest.raises(UsageError, match="DataLoader"):
        positioned([1, 2, 3], lambda: 0)
