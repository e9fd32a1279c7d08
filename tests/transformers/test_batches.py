"""
A replacement process reads the same batches as the lost process would have read, also if the sampler,
the collator or the dataset has random generators of its own.
"""

import random
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from tft_pytorch.generators import generators, restore
from tft_transformers.batches import Position, Source
from tft_transformers.local import Local
from torch.utils.data import DataLoader, Dataset, RandomSampler, WeightedRandomSampler

from tft.errors import UsageError

_DRAWS: dict[str, Callable[[Any], Any]] = {
    "torch": lambda own: torch.rand((), generator=own).item(),
    "numpy": lambda own: own.random(),
    "numpy.RandomState": lambda own: own.random_sample(),
    "python": lambda own: own.random(),
}
_MAKERS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(3),
    "numpy": lambda: numpy.random.default_rng(3),
    "numpy.RandomState": lambda: numpy.random.RandomState(3),
    "python": lambda: random.Random(3),
}


class Numbers(Dataset[Any]):
    """
    Items that draw from a generator of the dataset, and from that of torch.
    """

    def __init__(self) -> None:
        self.rng = random.Random(4)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return index, self.rng.random(), torch.rand(()).item()


class Collator:
    """
    Draws from its own generator, which it makes when it is called first.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._own: Any = None

    def __call__(self, items: Any) -> Any:
        if self._own is None:
            self._own = _MAKERS[self._kind]()
        return [items, _DRAWS[self._kind](self._own)]


class Epochs:
    """
    A batch sampler whose order depends on the epoch, like that of `batch_rebalance`.
    """

    def __init__(self) -> None:
        self.epoch = 0

    @staticmethod
    def order(epoch: int) -> list[int]:
        """
        Return the items of an epoch in their order.
        """
        return random.Random(epoch).sample(range(24), 24)

    def set_epoch(self, epoch: int) -> None:
        """
        Take the number of the epoch.
        """
        self.epoch = epoch

    def __iter__(self) -> Any:
        order = self.order(self.epoch)
        return iter([order[at : at + 2] for at in range(0, 24, 2)])

    def __len__(self) -> int:
        return 12


def local(make: Callable[[], dict[str, Any]]) -> tuple[Source, Local]:
    """
    Return the data of one of two ranks.
    """
    loader = prepare_data_loader(
        DataLoader(**{"dataset": Numbers(), **make()}),
        num_processes=2, process_index=1, put_on_device=False, use_seedable_sampler=True,
    )  # fmt: skip
    source = Source(loader)
    trainer = Namespace(args=Namespace(device=torch.device("cpu")), model=torch.nn.Linear(1, 1))
    return source, Local(source, trainer)


def shuffled(kind: str) -> dict[str, Any]:
    """
    Return the arguments of a loader whose collator has a generator of a kind.
    """
    return {"batch_size": 2, "shuffle": True, "collate_fn": Collator(kind)}


def weighted() -> dict[str, Any]:
    """
    Return the arguments of a loader with a sampler that has a generator.
    """
    sampler = WeightedRandomSampler([1.0] * 24, 24, generator=torch.Generator().manual_seed(7))
    return {"batch_size": 2, "sampler": sampler, "collate_fn": list}


def drawing_late() -> dict[str, Any]:
    """
    Return the arguments of a loader with a sampler that draws its numbers while it is read.
    """
    generator = torch.Generator().manual_seed(7)
    sampler = RandomSampler(range(24), replacement=True, num_samples=80, generator=generator)
    return {"batch_size": 2, "sampler": Late(sampler), "collate_fn": Collator("torch")}


class Late:
    """
    A sampler that draws further numbers for each item.
    """

    def __init__(self, sampler: RandomSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Any:
        for index in self.sampler:
            yield (index + int(torch.randint(5, (), generator=self.sampler.generator))) % 24

    def __len__(self) -> int:
        return 80


class Counting:
    """
    A batch sampler whose order depends on how often it has begun.
    """

    def __init__(self) -> None:
        self.begun = 0

    def __iter__(self) -> Any:
        self.begun += 1
        order = Epochs.order(self.begun)
        return iter([order[at : at + 2] for at in range(0, 24, 2)])

    def __len__(self) -> int:
        return 12


class Progressing(Numbers):
    """
    Items that depend on how many were read before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return (*super().__getitem__(index), self.reads, random.random(), numpy.random.rand())


def counting() -> dict[str, Any]:
    """
    Return the arguments of a loader whose sampler and dataset have counters.
    """
    return {"dataset": Progressing(), "batch_sampler": Counting(), "collate_fn": list}


LOADERS: dict[str, Callable[[], dict[str, Any]]] = {
    **{kind: partial(shuffled, kind) for kind in _MAKERS},
    "weighted": weighted,
    "drawing late": drawing_late,
    "counting": counting,
}


def seed() -> None:
    """
    Seed the generators of the process.
    """
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize(("epoch", "taken"), [(0, 2), (1, 0), (1, 4), (0, 100)])
def test_a_replacement_reads_the_same_batches(name: str, epoch: int, taken: int) -> None:
    """When a process is replaced at a position in an epoch, then its batches and generators are those
    of the lost process, until the end of the next epoch."""

    def read(source: Source, most: int = 1000) -> list[Any]:
        found = []
        for _ in range(most):
            try:
                found.append(source.next())
            except StopIteration:
                break
        return found

    seed()
    source, here = local(LOADERS[name])
    here.load_state_dict(here.state_dict())  # as each process does when training begins
    for each in range(epoch + 1):
        source.begin(each, 0)
        read(source, taken if each == epoch else 1000)
    state, random_state = here.state_dict(), generators()
    expected = read(source)
    source.begin(epoch + 1, 0)
    expected += read(source)
    at_end = here.state_dict()

    seed()
    source, here = local(LOADERS[name])
    restore(random_state)
    here.load_state_dict(state)
    assert here.state_dict() == state
    here.settle()
    found = read(source)
    source.begin(epoch + 1, 0)
    found += read(source)
    assert found == expected
    assert here.state_dict() == at_end


def test_a_sampler_behind_another_one_knows_the_epoch() -> None:
    """When a process enters within an epoch, then the sampler of `batch_rebalance`, which accelerate
    hides, knows the number of the epoch."""
    for enters in (False, True):
        source, _ = local(lambda: {"batch_sampler": Epochs(), "collate_fn": list})
        source.begin(1, 2)
        if enters:
            source.position = Position(1, 2, source.owners.drawn()[0])
        indices = [index for index, *_ in source.next()]
        assert indices == list(Epochs.order(1)[10:12])


def test_a_survivor_reads_the_same_batch_again() -> None:
    """When an operation is repeated, then the generators of the collator are those from before,
    although the collator had none yet."""
    source, here = local(LOADERS["torch"])
    source.begin(0, 0)
    before, random_state, position = here.noted(), generators(), source.position
    first = source.next()
    here.put_back(before)
    restore(random_state)
    source._open.taken = -1  # what was read ahead is lost
    source.position = position
    assert source.next() == first


def test_a_generator_that_cannot_be_read_is_refused() -> None:
    """When a collator has a generator whose state nobody can read, then a sentence names it."""
    collator = Collator("torch")
    collator._own = random.SystemRandom()
    with pytest.raises(UsageError, match="collate_fn of the train dataloader has a SystemRandom"):
        local(lambda: {"batch_size": 2, "collate_fn": collator})


def test_a_loader_that_keeps_its_workers_is_refused() -> None:
    """When the workers of the loader live on from one epoch to the next, then this is refused."""
    with pytest.raises(UsageError, match="set dataloader_persistent_workers=False"):
        local(lambda: {"batch_size": 2, "num_workers": 1, "persistent_workers": True})
