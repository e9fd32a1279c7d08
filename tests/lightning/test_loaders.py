"""
A positioned loader goes back to any batch, in the same process or in another one.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from tft_lightning.evaluations import (
    Evaluations,
    noted_evaluations,
    restore_evaluations,
    set_up,
    watch,
)
from tft_lightning.loaders import _Seal, positioned, reader_of
from tft_lightning.owners import Owners, Watched
from tft_pytorch.generators import generators, restore
from tft_pytorch.plain_values import plain
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler

from tft.errors import UsageError
from tft.spi.plain_values import size_of


def watched() -> Watched:
    """
    Return what watches the objects behind loaders.
    """
    return Watched(torch.device("cpu"))


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


class Counting(Dataset[Any]):
    """
    Numbers, each with how many were read before, and with an epoch that the script sets.
    """

    def __init__(self) -> None:
        self.reads, self.epoch = 0, 0
        self.scale = torch.ones(1)
        self.recent: deque[int] = deque(maxlen=3)

    def __len__(self) -> int:
        """Return how many there are."""
        return 24

    def __getitem__(self, index: int) -> Any:
        """Return a number, changed a little."""
        self.reads += 1
        self.scale.mul_(0.99)
        self.recent.append(index)
        return index + self.scale[0] + self.reads / 64 + self.epoch + sum(self.recent)


class Passes:
    """
    A batch sampler that counts how often it was begun, as people write it.
    """

    def __init__(self) -> None:
        self.passes = 0

    def __len__(self) -> int:
        """Return how many batches there are."""
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        self.passes += 1
        order = torch.randperm(24, generator=torch.Generator().manual_seed(self.passes)).tolist()
        yield from (order[at : at + 4] for at in range(0, 24, 4))


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


class Noisy(IterableDataset[Any]):
    """
    Numbers without an index, each changed by generators of the process.
    """

    def __iter__(self) -> Iterator[Any]:
        """Yield the numbers."""
        yield from (number + torch.rand(1) + random.random() for number in range(24))


@pytest.mark.parametrize("number", [0, 2])
def test_a_replacement_draws_again_for_batches_that_were_read(number: int) -> None:
    """When items draw from the generators of the process, and a batch was read ahead, as Lightning
    does without a length, then a replacement reads the last batch and the one ahead as they were."""
    first = positioned(DataLoader(Noisy(), batch_size=4), lambda: 0, watched())
    epoch = iter(first)
    read(islice(epoch, number))
    torch.rand(3)
    last = next(epoch)
    torch.rand(5)
    following = next(epoch)
    state = reader_of(first).state(number)

    other = replacement(DataLoader(Noisy(), batch_size=4))
    reader_of(other).load(state)
    reader_of(other).seek(number, again=True)
    again = iter(other)
    assert next(again).equal(last)
    assert next(again).equal(following)


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
    "counting": lambda: DataLoader(Counting(), batch_size=4, shuffle=True),
    "passes": lambda: DataLoader(Numbers(), batch_sampler=Passes()),
    "wrapped": lambda: DataLoader(
        Numbers(),
        batch_size=4,
        sampler=DistributedSamplerWrapper(Lazy(), num_replicas=1, rank=0, shuffle=False),
    ),
}


def begun(kind: str, taken: int) -> tuple[Any, Iterator[Any]]:
    """
    Seed all generators, and return a loader with an iterator that has read `taken` batches.
    """
    random.seed(1)
    numpy.random.seed(2)
    torch.manual_seed(3)
    loader = positioned(OWN[kind](), lambda: 0, watched())
    epoch = iter(loader)
    read(islice(epoch, taken))
    return loader, epoch


def replacement(loader: Any) -> Any:
    """
    Return `loader` as a replacement has it before it gets a state: Lightning has made an iterator.
    """
    numpy.random.seed(99)
    random.seed(99)
    torch.manual_seed(99)
    other = positioned(loader, lambda: 0, watched())
    iter(other)
    return other


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("taken", [0, 2, 6])
def test_a_replacement_draws_as_the_lost_process_would(kind: str, taken: int) -> None:
    """When a sampler or a dataset draws from a generator of its own, or from Python's and numpy's,
    then a replacement reads the same batches to the end of this epoch and of the next one."""
    first, epoch = begun(kind, taken)
    state, drawn = reader_of(first).state(taken - 1), generators()
    rest = read(epoch)
    following = read(first)

    other = replacement(OWN[kind]())
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
        state, drawn = reader_of(loader).state(taken - 1), generators()
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


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("kind", OWN)
def test_a_replacement_reads_the_last_batch_again_as_it_was(kind: str, number: int) -> None:
    """When a replacement reads the last batch of the complete step again, also the first one of the
    training, then this batch and those behind it are as before, also if a hook has changed the
    dataset behind the batch."""
    first, epoch = begun(kind, number)
    last = next(epoch)
    first.dataset.epoch = 5
    state, drawn = reader_of(first).state(number), generators()
    rest = read(epoch)
    following = read(first)

    other = replacement(OWN[kind]())
    reader_of(other).load(state)
    restore(drawn)
    reader_of(other).seek(number, again=True)
    again = iter(other)
    assert next(again).equal(last)
    reader_of(other).was_read_again()
    restore(drawn)
    assert read(again) == rest
    assert read(other) == following


def test_a_sampler_that_was_read_ahead_goes_on_where_it_is() -> None:
    """When a worker has made the sampler draw ahead, and a rank goes back, then the sampler does not
    draw the same numbers again."""
    loader = positioned(
        DataLoader(Numbers(), batch_size=4, sampler=Lazy(), num_workers=1), lambda: 0, watched()
    )
    expected = read(DataLoader(Numbers(), batch_size=4, sampler=Lazy()))
    epoch = iter(loader)
    read(islice(epoch, 2))
    state = reader_of(loader).state(1)
    next(epoch)
    reader_of(loader).load(state)
    reader_of(loader).seek(2)
    assert read(iter(loader)) == expected[2:]


def test_a_survivor_forgets_what_a_later_hook_has_changed() -> None:
    """When a hook behind the step has changed the dataset, and the rank goes back to the end of this
    step, then the dataset is as it was, although no batch is read again."""
    loader, _ = begun("counting", 2)
    state = reader_of(loader).state(1)
    loader.dataset.epoch = 1
    reader_of(loader).load(state)
    reader_of(loader).seek(2)
    iter(loader)
    assert loader.dataset.epoch == 0


def test_objects_of_a_loader_that_share_a_list_by_now_get_what_each_had() -> None:
    """When the dataset and the sampler have come to refer to one list, and are put back together, then
    each has its own content again."""
    loader = DataLoader(Counting(), batch_size=4, sampler=Lazy())
    data: Any = loader.dataset
    sampler: Any = loader.sampler
    data.seen, sampler.seen = [], []
    owners = Owners(loader, watched())
    data.seen, sampler.seen = [1], [2]
    noted = owners.noted()
    data.seen = sampler.seen
    owners.restore(noted)
    assert (data.seen, sampler.seen) == ([1], [2])


def test_what_a_dataset_has_many_of_counts_as_constant() -> None:
    """When a dataset has a long list, then it is not copied, and a change of it is named."""
    data = Counting()
    data.items = [[index] for index in range(200_000)]  # type: ignore[attr-defined]
    found = watched()
    reader = reader_of(positioned(DataLoader(data), lambda: 0, found))
    data.reads = 3
    assert reader.state(0)["now"]["kept"]["dataset"]["set"] == {"reads": 3}
    ((_, changes, _),) = found.all()
    assert not changes.keeps("items")
    assert changes.keeps("reads")


class Keeping(Counting):
    """
    Keeps what it has given last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.given: list[str] = []

    def __getitem__(self, index: int) -> Any:
        """Return a number, changed a little."""
        self.given = [*self.given[-7:], "x" * 1500]
        return super().__getitem__(index)


class Told:
    """
    Stands for a session, and gathers what is reported.
    """

    def __init__(self) -> None:
        self.told: dict[str, str] = {}

    def unkept(self, what: str, sentence: str) -> None:
        """Note what was reported."""
        self.told[what] = sentence


def test_attributes_behind_all_loaders_share_one_room() -> None:
    """When the datasets of many loaders keep much, then what does not fit into the rank-local state
    is left out and named, and the rest is kept."""
    found, session = watched(), Told()
    train = positioned(DataLoader(Keeping(), batch_size=2), lambda: 0, found)
    loop = validated(*(DataLoader(Keeping(), batch_size=2) for _ in range(8)), found=found)
    epoch = iter(train)
    kept: list[Any] = []
    for number in range(8):
        next(epoch)
        kept = [reader_of(train).state(number), noted_evaluations(loop)]
        for loader in loop._combined_loader.flattened:
            read(loader)
    size = size_of(plain(kept[0])) + size_of(plain(kept[1]))
    assert size < 96 * 1024
    found.report(session)  # type: ignore[arg-type]
    assert session.told.keys() == {"Keeping.given"}
    assert "count four times" in session.told["Keeping.given"]
    assert kept[0]["now"]["kept"]["dataset"]["set"]["reads"] == 16


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
    first = positioned(loaders(workers)[kind], lambda: 0, watched())
    whole = iter(first)
    read(islice(whole, 2))
    state, drawn = reader_of(first).state(1), torch.get_rng_state()
    rest, following = read(whole), read(first)

    other = positioned(loaders(workers)[kind], lambda: 0, watched())
    reader_of(other).load(state)
    reader_of(other).seek(2)
    taken = iter(other)
    torch.set_rng_state(drawn)
    assert read(taken) == rest
    assert read(other) == following


def test_a_survivor_reads_kept_batches_again() -> None:
    """When a loader goes back within its epoch, then it serves the batches that it has kept, and
    reads no item again."""
    loader = positioned(DataLoader(Numbers(), batch_size=4), lambda: 0, watched())
    batches = iter(loader)
    kept = list(islice(batches, 3))
    reader_of(loader).trim(1)
    reader_of(loader).seek(1)
    again = list(iter(loader))
    assert again[:2] == kept[1:]
    assert len(again) == 5


def test_a_batch_that_was_changed_in_place_is_read_again() -> None:
    """When a training step has changed a kept batch in place, then the batch is read anew."""
    loader = positioned(DataLoader(Numbers(), batch_size=4), lambda: 0, watched())
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
        positioned([1, 2, 3], lambda: 0, watched())


def validated(*loaders: Any, found: Watched | None = None) -> Any:
    """
    Return what stands for Lightning's loop of the validations, whose loaders are watched.
    """
    found = found or watched()
    for loader in loaders:
        watch(loader, found)
    return SimpleNamespace(_combined_loader=SimpleNamespace(flattened=[*loaders]))


@pytest.mark.parametrize("data", [Drawing, Counting])
def test_a_validation_that_is_repeated_reads_the_same(data: Any) -> None:
    """When a validation is interrupted, or is the first one of a replacement that has left out the
    sanity check, then the dataset draws and counts as it would have in the first process."""
    first = validated(DataLoader(data(), batch_size=4))
    (loader,) = first._combined_loader.flattened
    read(islice(loader, 2))
    noted = noted_evaluations(first)
    expected = read(loader)
    restore_evaluations(first, noted)
    assert read(loader) == expected

    other = validated(DataLoader(data(), batch_size=4))
    restore_evaluations(other, noted)
    assert read(other._combined_loader.flattened[0]) == expected


def test_a_generator_without_a_state_is_left_as_it_is_in_a_validation() -> None:
    """When the dataset of a validation has a generator of the system, whose state cannot be read,
    then training begins, and the generator is named. The dataset for training is refused."""
    data, found, session = Drawing(), watched(), Told()
    vars(data)["own"] = random.SystemRandom()
    loop = validated(DataLoader(data, batch_size=4), found=found)
    noted = noted_evaluations(loop)
    found.report(session)  # type: ignore[arg-type]
    assert session.told.keys() == {"Drawing.own"}
    assert "cannot be read" in session.told["Drawing.own"]
    restore_evaluations(loop, noted)
    assert isinstance(vars(data)["own"], random.SystemRandom)
    with pytest.raises(UsageError, match="the dataset of the train dataloader has a SystemRandom"):
        positioned(DataLoader(data), lambda: 0, found)


def test_a_step_does_not_pay_for_the_loaders_of_validations() -> None:
    """When nothing was validated since the last step, then what is behind the loaders is not noted
    again. It is noted again behind a validation, after an incident, and when an attribute was set."""
    loop = validated(DataLoader(Drawing(), batch_size=4))
    (loader,) = loop._combined_loader.flattened
    loop.run = lambda: read(loader)
    evaluations = Evaluations(loop)
    first = evaluations.noted()
    assert evaluations.noted() is first
    loop.run()
    second = evaluations.noted()
    assert second not in (None, first)
    evaluations.restore(first)
    assert evaluations.noted() == first
    loader.dataset.epoch = 5
    third: Any = evaluations.noted()
    assert third[0]["states"]["kept"]["dataset"]["set"] == {"epoch": 5}
    assert evaluations.noted() is third
    evaluations.restore(None)
    assert evaluations.noted() is None


def test_workers_that_stay_draw_their_number_once() -> None:
    """When the iterator of a validation loader with workers that stay was made before the step, then
    a replacement makes it without drawing a number. When it was made behind the step, then it is
    made again, and draws again."""

    def loop() -> Any:
        return validated(
            DataLoader(Numbers(), batch_size=4, num_workers=1, persistent_workers=True)
        )

    first, other = loop(), loop()
    unmade = noted_evaluations(first)
    expected = read(first._combined_loader.flattened[0])
    drawn = torch.get_rng_state()
    restore_evaluations(other, noted_evaluations(first))
    assert read(other._combined_loader.flattened[0]) == expected
    assert torch.get_rng_state().equal(drawn)
    restore_evaluations(other, unmade)
    assert read(other._combined_loader.flattened[0]) == expected
    assert not torch.get_rng_state().equal(drawn)


def test_validation_loaders_that_did_not_exist_are_made_anew() -> None:
    """When the loaders of validations did not exist at the end of the step, then all ranks make them
    again, together."""
    loop = validated(DataLoader(Numbers()))
    restore_evaluations(loop, noted_evaluations(SimpleNamespace(_combined_loader=None)))
    assert loop._combined_loader is None


def test_a_replacement_makes_the_loaders_for_validation_at_once() -> None:
    """When a replacement begins, then it makes these loaders before training, also if it validates
    much later. A training without validation has none."""
    trainer: Any = SimpleNamespace(enable_validation=True, training=False, validating=False)
    asked: list[bool] = []
    loop = SimpleNamespace(setup_data=lambda: asked.append(trainer.validating))
    trainer.fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace(val_loop=loop))
    set_up(trainer)
    assert asked == [True]
    assert trainer.training
    trainer.enable_validation = False
    set_up(trainer)
    assert asked == [True]
