"""
The epochs of samplers and datasets are a part of the data position, with torchdata's loader and
torch's samplers. A second loader takes the place of that of a replacement process.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tft_pytorch import Prefetcher
from tft_pytorch.adopted_maker import adopt
from tft_pytorch.state_store import StateStore
from torch import nn
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, Sampler, SequentialSampler
from torchdata.stateful_dataloader import (  # type: ignore[import-untyped]  # it has no types
    StatefulDataLoader,
)
from torchdata.stateful_dataloader.sampler import (  # type: ignore[import-untyped]  # it has no types
    StatefulDistributedSampler,
)

from tft.errors import UsageError

Loader = Any
"""A `StatefulDataLoader`, which has no types."""


def adopted(data: Any) -> StateStore:  # Any: an object with a position
    """
    Return the adopted state of a small model, with `data`, as a session begins with it.
    """
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = adopt({"model": model, "optimizer": optimizer, "data": data}, None)
    state.rollback(state.capture())
    return state


class Items(Dataset[int]):
    """
    A dataset of 24 items, which depend on the epoch.
    """

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """
        Go to an epoch.
        """
        self.epoch = epoch

    def __len__(self) -> int:
        return 24

    def __getitem__(self, item: int) -> int:
        return 100 * self.epoch + item


class Around(Sampler[int]):
    """
    A sampler of the user that passes on the items of another one.
    """

    def __init__(self, inner: Sampler[int]) -> None:
        self._inner = inner

    def __iter__(self) -> Iterator[int]:
        return iter(self._inner)

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]  # a sampler of torch has a length


def sharded(kind: type[DistributedSampler[int]] = DistributedSampler) -> DistributedSampler[int]:
    """
    Return the sampler of the first of two ranks, with twelve items in an epoch.
    """
    return kind(range(24), num_replicas=2, rank=0, seed=5)  # type: ignore[arg-type]  # a range has items


def loader(sampler: Sampler[int], **more: Any) -> Loader:
    """
    Return a loader with six batches of two items.
    """
    dataset = more.pop("dataset", range(24))
    generator = torch.Generator().manual_seed(1)
    return StatefulDataLoader(dataset, 2, sampler=sampler, generator=generator, **more)


def plain(workers: int) -> tuple[Loader, Callable[[int], None]]:
    """
    Return a loader with torch's sampler, and the function that goes to an epoch.
    """
    sampler = sharded()
    return loader(sampler, num_workers=workers), sampler.set_epoch


def stateful(workers: int) -> tuple[Loader, Callable[[int], None]]:
    """
    Return the same with torchdata's sampler.
    """
    sampler = sharded(StatefulDistributedSampler)
    return loader(sampler, num_workers=workers), sampler.set_epoch


def wrapped(workers: int) -> tuple[Loader, Callable[[int], None]]:
    """
    Return the same with a sampler around torch's.
    """
    sampler = sharded()
    return loader(Around(sampler), num_workers=workers), sampler.set_epoch


def batched(workers: int) -> tuple[Loader, Callable[[int], None]]:
    """
    Return the same with a batch sampler of torch, which draws the order with the first batch.
    """
    sampler = sharded()
    batches = BatchSampler(sampler, 2, drop_last=False)
    made = StatefulDataLoader(range(24), batch_sampler=batches, num_workers=workers)
    return made, sampler.set_epoch


def augmented(workers: int) -> tuple[Loader, Callable[[int], None]]:
    """
    Return a loader whose items depend on the epoch.
    """
    items = Items()
    made = loader(SequentialSampler(items), dataset=items, num_workers=workers)
    return made, items.set_epoch


MAKERS = [plain, stateful, wrapped, batched, augmented]


def end_workers(*iterators: Any) -> None:  # Any: torchdata has no types
    """
    End the worker processes of these iterators now, because the garbage collector would wait for
    them.
    """
    for each in iterators:
        if hasattr(each, "_shutdown_workers"):
            each._shutdown_workers()


def taken(batches: Any, count: int) -> list[list[int]]:  # Any: torchdata has no types
    """
    Return the next batches.
    """
    return [next(batches).tolist() for _ in range(count)]


@pytest.mark.parametrize("again", [False, True], ids=["once", "again"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", MAKERS)
def test_rest_of_an_epoch_comes_in_its_order_in_another_process(
    make: Callable[[int], tuple[Loader, Callable[[int], None]]], workers: int, *, again: bool
) -> None:
    """When a rank dies in the second epoch, then its replacement and the survivors take the batches
    that were lost. The script sets the epoch at its beginning only, or again after the incident. A
    survivor may have begun the third epoch already."""
    data, set_epoch = make(workers)
    state = adopted(data)
    first = iter(data)
    list(first)
    set_epoch(1)
    batches = iter(data)
    taken(batches, 2)
    local_state = state.capture()
    lost = taken(batches, 3)
    set_epoch(2)
    end_workers(first, batches)

    other, set_other = make(workers)
    for each, restored, go_to in ((data, state, set_epoch), (other, adopted(other), set_other)):
        restored.rollback(local_state)
        if again:
            go_to(1)
        rest = iter(each)
        assert taken(rest, 3) == lost
        end_workers(rest)


def test_an_order_that_was_drawn_before_the_epoch_was_set_is_drawn_again() -> None:
    """When a script counts epochs from 1, so that the first order was drawn before it called
    `set_epoch`, then a replacement has the same order, and the epoch that the script had set."""
    data, set_epoch = plain(0)
    state = adopted(data)
    set_epoch(1)
    batches = iter(data)
    taken(batches, 2)
    local_state = state.capture()
    lost = taken(batches, 3)

    other, _ = plain(0)
    restored = adopted(other)
    restored.rollback(local_state)
    assert other.sampler.epoch == 1
    assert taken(iter(other), 3) == lost
    assert restored.digests()["data"] == state.digests()["data"]
    restored.rollback(local_state)
    assert taken(iter(other), 3) == lost


class Source:
    """
    A source of the user around a loader, which counts the epochs by its sampler.
    """

    def __init__(self) -> None:
        self.sampler = sharded()
        self.loader = loader(self.sampler)
        self._batches: Iterator[Any] | None = None

    def next(self) -> Any:  # Any: torchdata has no types
        """
        Return the next batch.
        """
        if self._batches is None:
            self._batches = iter(self.loader)
        batch = next(self._batches, None)
        if batch is None:
            self.sampler.set_epoch(self.sampler.epoch + 1)
            self._batches = None
            return self.next()
        return batch

    def state_dict(self) -> Any:  # Any: torchdata has no types
        """
        Return the position.
        """
        return self.loader.state_dict()

    def load_state_dict(self, state: Any) -> None:  # Any: torchdata has no types
        """
        Go to a position.
        """
        self.loader.load_state_dict(state)
        self._batches = None


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("before", [5, 6, 7, 9])
def test_a_source_around_a_loader_goes_on_in_its_epoch(before: int, *, ahead: bool) -> None:
    """When a `Prefetcher` reads a source of the user around a loader, also over the end of an
    epoch, then a replacement and a survivor take the batches that were lost."""
    data = Prefetcher(Source())
    state = adopted(data)
    for _ in range(before):
        data.next()
    if ahead:
        data.ahead()
    local_state = state.capture()
    lost = [data.next().tolist() for _ in range(9)]

    other = Prefetcher(Source())
    for each, restored in ((data, state), (other, adopted(other))):
        restored.rollback(local_state)
        assert [each.next().tolist() for _ in range(9)] == lost


class Delegating(Around):
    """
    A sampler that passes the epoch on.
    """

    def __init__(self, inner: DistributedSampler[int]) -> None:
        super().__init__(inner)
        self.set_epoch = inner.set_epoch


class Collated(Items):
    """
    A dataset with a class method that makes batches.
    """

    @classmethod
    def collate(cls, items: list[int]) -> torch.Tensor:
        """
        Make a batch.
        """
        return torch.tensor(items)


def test_a_class_is_no_owner_of_an_epoch() -> None:
    """When a class method of a dataset collates, then its class is not asked for an epoch."""
    items = Collated()
    state = adopted(loader(SequentialSampler(items), dataset=items, collate_fn=Collated.collate))
    state.rollback(state.capture())


def test_an_epoch_that_is_set_in_the_tail_of_a_step_counts() -> None:
    """When a script calls `set_epoch` after the update window of the last step of an epoch, then
    the next epoch has its order after an incident in the next step, on all ranks."""
    data, set_epoch = plain(0)
    state = adopted(data)
    batches = iter(data)
    taken(batches, 6)
    closed = state.capture(closing=True)
    set_epoch(1)
    ended = state.end_step(tail=True)
    assert ended is not None
    assert ended != closed
    lost = taken(iter(data), 3)
    other, _ = plain(0)
    for each, restored in ((data, state), (other, adopted(other))):
        restored.rollback(ended)
        assert each.sampler.epoch == 1
        rest = iter(each)
        found = [batch.tolist() for batch in rest] or [batch.tolist() for batch in iter(each)]
        assert found[:3] == lost


class Lazy(Around):
    """
    A sampler that draws the order with the first item.
    """

    def set_epoch(self, epoch: int) -> None:
        """
        Go to an epoch.
        """
        self._inner.set_epoch(epoch)  # type: ignore[attr-defined]  # it has an epoch

    def __iter__(self) -> Iterator[int]:
        yield from self._inner


def test_an_order_that_is_drawn_with_the_first_item_has_the_epoch_set_before_it() -> None:
    """When a script calls `set_epoch` after `session.adopt`, and the sampler draws its order with
    the first item, then the order is drawn again from that epoch."""
    data = loader(Lazy(sharded()))
    state = adopted(data)
    data.sampler.set_epoch(1)
    batches = iter(data)
    taken(batches, 1)
    local_state, lost = state.capture(), taken(batches, 3)
    other = loader(Lazy(sharded()))
    for each, restored in ((data, state), (other, adopted(other))):
        restored.rollback(local_state)
        assert taken(iter(each), 3) == lost


class Counted(Items):
    """
    A dataset that notes the calls of `set_epoch`.
    """

    def __init__(self) -> None:
        self.calls: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        """
        Go to an epoch.
        """
        self.calls.append(epoch)
        super().set_epoch(epoch)


def test_an_epoch_that_is_set_already_is_not_set_again() -> None:
    """When nothing has to change, then `set_epoch` is not called: it may draw an order."""
    items = Counted()
    items.set_epoch(1)
    data = loader(SequentialSampler(items), dataset=items)
    state = adopted(data)
    iter(data)
    state.rollback(state.capture())
    assert items.calls == [1]


class Unreadable(Around):
    """
    A sampler that keeps its epoch to itself.
    """

    def set_epoch(self, epoch: int) -> None:
        """
        Go to an epoch.
        """


def test_a_sampler_whose_epoch_cannot_be_read_is_refused() -> None:
    """When a sampler has `set_epoch` and no attribute `epoch`, then it is refused with a sentence
    that says what to do."""
    with pytest.raises(UsageError, match=r"the Unreadable of the loader .* as self\.epoch"):
        adopted(loader(Unreadable(SequentialSampler(range(24)))))


class Private(Around):
    """
    A sampler that keeps its epoch to itself, and does not pass it on.
    """

    def set_epoch(self, epoch: int) -> None:
        """
        Go to an epoch.
        """
        self._private = epoch


def test_a_sampler_with_a_private_epoch_round_another_one_is_refused() -> None:
    """When a sampler keeps its epoch to itself, and the one within it has an epoch that stays 0,
    then it is refused."""
    with pytest.raises(UsageError, match=r"the Private of the loader .* as self\.epoch"):
        adopted(loader(Private(sharded())))


class Buckets(Around):
    """
    A sampler that passes its epoch on, and draws an order of its own from it.
    """

    def __init__(self, inner: DistributedSampler[int]) -> None:
        super().__init__(inner)
        self._own = 0

    def set_epoch(self, epoch: int) -> None:
        """
        Go to an epoch.
        """
        self._own = epoch
        self._inner.set_epoch(epoch)  # type: ignore[attr-defined]  # it has an epoch

    def __iter__(self) -> Iterator[int]:
        items = list(self._inner)
        generator = torch.Generator().manual_seed(self._own)
        return iter([items[at] for at in torch.randperm(len(items), generator=generator)])


@pytest.mark.parametrize("kind", [Delegating, Buckets])
def test_a_sampler_that_passes_the_epoch_on_gets_it_in_another_process(kind: Any) -> None:
    """When a sampler passes the epoch on, and draws from it too or not, then a replacement has the
    order of the epoch."""
    data = loader(kind(sharded()))
    state = adopted(data)
    list(data)
    data.sampler.set_epoch(1)
    batches = iter(data)
    taken(batches, 2)
    local_state, lost = state.capture(), taken(batches, 3)
    other = loader(kind(sharded()))
    adopted(other).rollback(local_state)
    assert taken(iter(other), 3) == lost


class Views(Dataset[int]):
    """
    A dataset that passes the epoch on to the one within it.
    """

    def __init__(self, inner: Items) -> None:
        self._inner = inner

    def set_epoch(self, epoch: int) -> None:
        """
        Go to an epoch.
        """
        self._inner.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, item: int) -> int:
        return self._inner[item]


def test_epochs_that_differ_are_left_as_they_are() -> None:
    """When sampler and dataset have different epochs at `session.adopt`, then both stay."""
    sampler, items = sharded(), Items()
    sampler.set_epoch(5)
    adopted(loader(sampler, dataset=Views(items)))
    assert (sampler.epoch, items.epoch) == (5, 0)


class Cursor(Around):
    """
    A sampler whose `set_epoch` makes the order, and which moves through it.
    """

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """
        Go to an epoch.
        """
        self.epoch = epoch
        generator = torch.Generator().manual_seed(epoch)
        self.order, self.at = torch.randperm(12, generator=generator).tolist(), 0

    def __iter__(self) -> Iterator[int]:
        while self.at < len(self.order):
            self.at += 1
            yield self.order[self.at - 1]


def test_a_sampler_that_moves_through_its_order_begins_it_anew() -> None:
    """When `set_epoch` makes the order and a cursor in it, then a survivor of an incident within
    the epoch takes the batches that were lost."""
    sampler = Cursor(sharded())
    sampler.set_epoch(0)
    data = loader(sampler)
    state = adopted(data)
    batches = iter(data)
    taken(batches, 2)
    local_state, lost = state.capture(), taken(batches, 3)
    state.rollback(local_state)
    assert taken(iter(data), 3) == lost


def test_a_position_without_the_epoch_of_a_sampler_is_refused() -> None:
    """When a position has no epoch, as in a checkpoint of an earlier version, then it is refused:
    the rest of the epoch would come in another order."""
    state, other = adopted(loader(SequentialSampler(range(24)))), adopted(plain(0)[0])
    with pytest.raises(UsageError, match="has no epoch of the DistributedSampler"):
        other.rollback(state.capture())
