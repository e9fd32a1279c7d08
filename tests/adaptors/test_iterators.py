"""
Sources of batches with a position, with real loaders, samplers and workers.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from tft_pytorch import Batches, Prefetcher
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from tft.errors import UsageError


class Noisy(Dataset[Tensor]):
    """
    Ten items with noise from the generators of torch and Python.
    """

    def __init__(self, *, noise: bool) -> None:
        self._noise = noise

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        noise = torch.rand(()) + random.random() if self._noise else torch.zeros(())
        return noise + index


def shuffled(workers: int = 0) -> "Batches":
    """
    Return batches of a shuffling loader. With workers, its items have noise.
    """
    generator = torch.Generator().manual_seed(7)
    return Batches(
        DataLoader(
            Noisy(noise=workers > 0),
            batch_size=3,
            shuffle=True,
            num_workers=workers,
            generator=generator,
        )
    )


def distributed(workers: int = 0) -> "Batches":
    """
    Return batches of the first of two ranks, without a generator of the loader.
    """
    torch.manual_seed(3)
    data = Noisy(noise=workers > 0)
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=0)
    batches = BatchSampler(sampler, batch_size=2, drop_last=False)
    return Batches(DataLoader(data, batch_sampler=batches, num_workers=workers))


def as_one(batches: list[Tensor]) -> Tensor:
    """
    Return all items of some batches.
    """
    return torch.cat(batches)


class Turning(Sampler[int]):
    """
    A sampler whose order depends on how often it has begun.
    """

    begun = 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        return iter(random.Random(self.begun).sample(range(10), 10))

    def __len__(self) -> int:
        return 10


def turning(workers: int = 0) -> "Batches":
    """
    Return batches of a sampler that counts the epochs itself.
    """
    data = Noisy(noise=workers > 0)
    generator = torch.Generator().manual_seed(7)
    return Batches(
        DataLoader(data, batch_size=3, sampler=Turning(), num_workers=workers, generator=generator)
    )


class Around(Sampler[int]):
    """
    A sampler that passes on the items of samplers within it.
    """

    def __init__(self, *inner: Sampler[int]) -> None:
        self._inner = inner

    def __iter__(self) -> Iterator[int]:
        for each in self._inner:
            yield from each

    def __len__(self) -> int:
        return 10


class Drawing(Turning):
    """
    A sampler with random generators of its own.
    """

    def __init__(self) -> None:
        self._rng = numpy.random.default_rng(3)
        self._shuffle = torch.Generator().manual_seed(4)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(10, generator=self._shuffle)
        return iter(order[self._rng.permutation(10)].tolist())


class Sharing(DistributedSampler[int]):
    """
    A sampler that shares the items of another sampler among ranks.
    """

    def __init__(self, sampler: Sampler[int]) -> None:
        self.sampler = sampler
        super().__init__(Noisy(noise=False), num_replicas=1, rank=0)

    def __iter__(self) -> Iterator[int]:
        found = list(self.sampler)
        return iter([found[each] for each in super().__iter__()])


def within(workers: int = 0) -> "Batches":
    """
    Return batches of a sampler that is within another one, and has generators of its own.
    """
    data = Noisy(noise=workers > 0)
    generator = torch.Generator().manual_seed(7)
    return Batches(
        DataLoader(
            data, batch_size=3, sampler=Around(Drawing()), num_workers=workers, generator=generator
        )
    )


def weighted(workers: int = 0) -> "Batches":
    """
    Return batches of a weighted sampler that is shared among ranks, and draws from the generator
    of the loader.
    """
    data = Noisy(noise=workers > 0)
    generator = torch.Generator().manual_seed(7)
    sampler = Sharing(WeightedRandomSampler([1.0] * 10, 10, generator=generator))
    return Batches(
        DataLoader(data, batch_size=3, sampler=sampler, num_workers=workers, generator=generator)
    )


@pytest.mark.parametrize("make", [shuffled, distributed, turning, within, weighted])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("taken", [0, 2, 4, 5, 9])
def test_batches_go_on_from_any_position_in_another_process(
    make: Callable[[int], "Batches"], workers: int, taken: int
) -> None:
    """When batches are taken over some epochs, and another object is set to the position, then it
    returns the batches that follow, with the same random numbers of the workers. torch's default
    generator is not touched."""
    first, second = make(workers), make(workers)
    for _ in range(taken):
        first.next()
    position = first.state_dict()
    expected = [first.next() for _ in range(6)]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    second.load_state_dict(position)
    found = [second.next() for _ in range(6)]
    assert torch.get_rng_state().equal(before)
    assert as_one(found).equal(as_one(expected))
    assert second.state_dict() == first.state_dict()


def test_epochs_have_different_orders_and_every_item() -> None:
    """When two epochs are taken, then each has every item once, in another order."""
    batches = shuffled()
    epochs = [as_one([batches.next() for _ in range(len(batches))]) for _ in range(2)]
    assert [sorted(each.tolist()) for each in epochs] == [list(range(10))] * 2
    assert not epochs[0].equal(epochs[1])
    assert batches.epoch == 1  # the third epoch begins with its first batch


@pytest.mark.parametrize("make", [shuffled, turning, within])
@pytest.mark.parametrize("taken", [0, 1, 4])
def test_batches_go_back_to_an_earlier_position(make: Callable[[], "Batches"], taken: int) -> None:
    """When the object itself is set back, then it returns the same batches again."""
    batches = make()
    for _ in range(taken):
        batches.next()
    position = batches.state_dict()
    expected = [batches.next() for _ in range(5)]
    batches.load_state_dict(position)
    assert as_one([batches.next() for _ in range(5)]).equal(as_one(expected))


@pytest.mark.parametrize("make", [shuffled, turning, within])
@pytest.mark.parametrize("left_out", [1, 3, 4, 9])
def test_skipped_batches_are_left_out_over_the_end_of_an_epoch(
    make: Callable[[], "Batches"], left_out: int
) -> None:
    """When batches are skipped, then the next one is that which would have followed them."""
    first, second = make(), make()
    taken = [first.next() for _ in range(left_out + 2)]
    second.next()
    second.skip(left_out)
    assert second.next().equal(taken[-1])


class Shuffling(Turning):
    """
    A sampler that draws the order from a generator of the process.
    """

    def __init__(self, draw: Callable[[], list[int]]) -> None:
        self._draw = draw

    def __iter__(self) -> Iterator[int]:
        return iter(self._draw())


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "draw", [lambda: torch.randperm(10).tolist(), lambda: random.sample(range(10), 10)]
)
def test_a_sampler_that_draws_from_the_process_is_refused(
    draw: Callable[[], list[int]], workers: int
) -> None:
    """When the order of an epoch is drawn from a generator of the process, then the first batch is
    refused, because the order would be another one after an incident."""
    data = Noisy(noise=True)
    batches = Batches(DataLoader(data, 3, sampler=Shuffling(draw), num_workers=workers))
    with pytest.raises(
        UsageError, match="Shuffling of the loader draws from the random generators"
    ):
        batches.next()


class Unread(Turning):
    """
    A sampler with a generator without a state.
    """

    def __init__(self) -> None:
        self.rng = random.SystemRandom()


class Rolling(Noisy):
    """
    A dataset with a generator of its own.
    """

    def __init__(self) -> None:
        super().__init__(noise=False)
        self.rng = numpy.random.default_rng(0)


def mixed(rng: random.Random, batch: list[Any]) -> list[Any]:
    """
    Mix the items of a batch.
    """
    return rng.sample(batch, len(batch))


class Endless(IterableDataset[int]):
    """
    A dataset without positions.
    """

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda: DataLoader(Endless()), "has an IterableDataset, whose position"),
        (lambda: DataLoader(Noisy(noise=False), batch_size=None), "batch_size is None"),
        (
            lambda: DataLoader(Noisy(noise=False), shuffle=True),
            "does not know: give the DataLoader",
        ),
        (
            lambda: DataLoader(
                Noisy(noise=False),
                sampler=RandomSampler(Noisy(noise=False), generator=torch.Generator()),
                generator=torch.Generator(),
            ),
            "give the same generator to the RandomSampler",
        ),
        (
            lambda: DataLoader(
                Noisy(noise=False),
                sampler=Around(RandomSampler(range(10), generator=torch.Generator())),
            ),
            "give the same generator to the RandomSampler",
        ),
        (
            lambda: DataLoader(
                Noisy(noise=False),
                sampler=Sharing(WeightedRandomSampler([1.0], 10, generator=torch.Generator())),
                generator=torch.Generator(),
            ),
            "give the same generator to the WeightedRandomSampler",
        ),
        (
            lambda: DataLoader(Noisy(noise=False), sampler=Around(Unread())),
            "the Unread of the train dataloader has a SystemRandom",
        ),
        (lambda: DataLoader(Rolling(), num_workers=2), "attribute rng of Rolling is a random gen"),
        (
            lambda: DataLoader(ConcatDataset([Noisy(noise=False), Rolling()])),
            "attribute rng of Rolling is a random generator",
        ),
        (
            lambda: DataLoader(Noisy(noise=False), collate_fn=partial(mixed, random.Random(0))),
            "attribute args of partial is a random generator",
        ),
        (
            lambda: DataLoader(Noisy(noise=False), num_workers=1, persistent_workers=True),
            "leave out persistent_workers",
        ),
        (
            lambda: DataLoader(Noisy(noise=False), batch_size=11, drop_last=True),
            "the loader has no batch",
        ),
    ],
)
def test_loaders_without_a_position_are_refused(
    loader: Callable[[], "DataLoader[Any]"], words: str
) -> None:
    """When the position of a loader cannot be known, or it has no batch, then the error says why and
    what to do."""
    with pytest.raises(UsageError, match=words):
        Batches(loader())


class Counted:
    """
    A source of numbers, which may draw from a generator of the process.
    """

    def __init__(self, draw: Callable[[], object] = int) -> None:
        self._draw = draw
        self._position = 0

    def next(self) -> int:
        self._draw()
        self._position += 1
        return self._position

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position = state["position"]

    def skip(self, batches: int) -> None:
        self._position += batches


def test_a_prefetcher_has_the_position_of_the_batch_that_comes_next() -> None:
    """When a batch was read ahead, then the position is that before this batch. After the position
    is restored, the batch comes again, and no batch is skipped."""
    batches = Prefetcher(Counted())
    assert batches.next() == 1
    batches.ahead()
    batches.ahead()
    position = batches.state_dict()
    assert position == {"position": 1}
    assert [batches.next(), batches.next()] == [2, 3]
    assert batches.state_dict() == {"position": 3}
    batches.ahead()
    batches.load_state_dict(position)
    assert [batches.next(), batches.next()] == [2, 3]


class CountedInPlace(Counted):
    """
    A source that returns its own position, and changes it in place.
    """

    def __init__(self) -> None:
        super().__init__()
        self._here = {"position": 0}

    def next(self) -> int:
        self._here["position"] += 1
        return self._here["position"]

    def state_dict(self) -> dict[str, int]:
        return self._here

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._here.update(state)


def test_a_position_that_the_source_changes_in_place_stays_that_of_the_next_batch() -> None:
    """When a source changes its position in place, and a batch was read ahead, then the position is
    still that before this batch, and the batch comes again after it is restored."""
    batches = Prefetcher(CountedInPlace())
    batches.next()
    batches.ahead()
    position = batches.state_dict()
    assert position == {"position": 1}
    assert batches.next() == 2
    batches.load_state_dict(position)
    assert batches.next() == 2


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_a_prefetcher_skips_the_batch_that_was_read_ahead(left_out: int, *, ahead: bool) -> None:
    """When batches are skipped, then one that was read ahead is the first of them."""
    batches = Prefetcher(Counted())
    batches.next()
    if ahead:
        batches.ahead()
    batches.skip(left_out)
    assert batches.next() == 2 + left_out


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), random.random, numpy.random.rand])
def test_a_source_that_draws_from_the_process_is_not_read_ahead(draw: Callable[[], object]) -> None:
    """When a source draws from a generator of the process, then reading ahead is refused, because
    other numbers would be drawn after an incident."""
    batches = Prefetcher(Counted(draw))
    batches.next()
    with pytest.raises(UsageError, match="must not draw from the random generators of the process"):
        batches.ahead()
