"""
Reads the batches of the Trainer's data loader with an exact position. The class `Source` does this
in the place of accelerate's loader.

accelerate's loader reads one batch ahead. It can return to a position only if it reads all batches
before that position again. `Source` reads the same batches in the same order, and also one batch
ahead, but can begin at any position without reading earlier items.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from accelerate import skip_first_batches
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import send_to_device

from tft.errors import UsageError
from tft_transformers.owners import Owners

_NONE: Any = object()


@dataclass(frozen=True, slots=True)
class Position:
    """
    The position of the next batch of this rank.
    """

    epoch: int = 0
    taken: int = 0
    """The number of batches of this epoch that the training loop has received."""
    began: bytes = b""
    """The packed states of the random generators at the beginning of the epoch. Empty if the first
    batch of the epoch was not read yet."""
    ahead: bytes = b""
    """The packed states of the random generators before the next batch was read ahead."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """The changed attributes of the objects that the loader uses: under `began` those at the
    beginning of the epoch, under `ahead` those before the next batch was read ahead."""


class Source:
    """
    Yields the batches of one loader of accelerate, epoch after epoch.

    Its state is the position.
    """

    def __init__(self, loader: Any) -> None:  # Any: accelerate has no types
        """
        Raises `UsageError` if `loader` was not made by accelerate, reads for other ranks, or keeps
        its workers from one epoch to the next.
        """
        if type(loader) is not DataLoaderShard:
            raise UsageError(
                "the train dataloader must be what accelerator.prepare makes of a "
                f"torch.utils.data.DataLoader, but it is a {type(loader).__name__}: let "
                "get_train_dataloader return self.accelerator.prepare(DataLoader(...))"
            )
        if loader.base_dataloader.persistent_workers:
            # A loader draws a seed for its workers when it starts them. Persistent workers are
            # started only once, but a replacement process starts its workers in a later epoch, and
            # would draw one more seed.
            raise UsageError(
                "the train dataloader keeps its workers from one epoch to the next, and then a new "
                "process draws other random numbers: set dataloader_persistent_workers=False"
            )
        self._loader = loader
        self.owners = Owners(loader.base_dataloader, loader.device)
        self.position = Position()
        self._open = _Open()

    def begin(self, epoch: int, taken: int) -> None:
        """
        Go to the batch number `taken` of the epoch `epoch`. Call this method only if no rank has
        begun this epoch in this job yet, because the order of its batches will be drawn anew.
        """
        self.position = Position(epoch, taken)

    def next(self) -> Any:  # Any: a batch, as the loader's `collate_fn` makes it
        """
        Return the next batch of the epoch, on the device. Raises `StopIteration` at its end.
        """
        if not self._open.at(self.position):
            self._open = self._opened()
        batch = self._open.ahead
        if batch is _NONE:
            raise StopIteration
        ahead, kept = self.owners.drawn()
        self._open.ahead = next(self._open.iterator, _NONE)
        self.position = replace(
            self.position,
            taken=self.position.taken + 1,
            began=self._open.began,
            ahead=ahead,
            kept={"began": self._open.kept, "ahead": kept},
        )
        self._open.taken = self.position.taken
        device, fast = self._loader.device, self._loader._non_blocking
        return batch if device is None else send_to_device(batch, device, non_blocking=fast)

    def state_dict(self) -> dict[str, Any]:  # Any: numbers and bytes
        """
        Return the position of the next batch.
        """
        here = self.position
        return {
            "epoch": here.epoch, "taken": here.taken, "began": here.began, "ahead": here.ahead,
            "kept": here.kept,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: a result of `state_dict`
        """
        Go to a position that `state_dict` has returned, in this or another process. Batches are
        read when they are needed.
        """
        self.position = Position(**state)

    # ------------------------------------------------------------ opening at a position

    def _opened(self) -> "_Open":
        """
        Begin to read at the position, and read the first batch.
        """
        here = self.position
        if here.began:
            return self._reopened(here)
        began, kept = self.owners.drawn()
        self._set_epoch(here.epoch)
        skips = skip_first_batches(self._loader, here.taken) if here.taken else self._loader
        iterator = iter(skips.base_dataloader)
        return _Open(here.epoch, here.taken, began, kept, iterator, next(iterator, _NONE))

    def _reopened(self, here: Position) -> "_Open":
        """
        Begin to read at the position `here` in an epoch that was begun before, and read the first
        batch. To get the same batches as before, restore generators and objects for a moment: to
        their states of the beginning of the epoch while the order of batches is drawn, then to
        those of the first reading of this batch while it is read. Afterwards restore their present
        states.
        """
        present, kept = self.owners.drawn(), here.kept.get("began", {})
        try:
            self.owners.restore((here.began, kept))
            self._set_epoch(here.epoch)
            skips = skip_first_batches(self._loader, here.taken)
            skips.batch_sampler.batch_sampler = _Restoring(
                skips.batch_sampler.batch_sampler, here.taken, self._before_batch
            )
            iterator = iter(skips.base_dataloader)
            return _Open(here.epoch, here.taken, here.began, kept, iterator, next(iterator, _NONE))
        finally:
            self.owners.restore(present)

    def _before_batch(self) -> None:
        """
        Restore the generators and objects to the states with which the batch at the position was
        read for the first time. Leave out samplers, because they have drawn the numbers for this
        batch already.
        """
        here = self.position
        if here.ahead:
            self.owners.restore((here.ahead, here.kept.get("ahead", {})), samplers=False)

    def _set_epoch(self, epoch: int) -> None:
        """
        Call `set_epoch` of the loader, and of a sampler that is wrapped in another sampler.
        """
        self._loader.set_epoch(epoch)
        sampler = getattr(self._loader.batch_sampler, "batch_sampler", None)
        if sampler is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


@dataclass(slots=True)
class _Open:
    """
    An epoch that is being read. `ahead` is the batch that was read ahead, with the number `taken`.
    """

    epoch: int = -1
    taken: int = -1
    began: bytes = b""
    kept: Mapping[str, Any] = field(default_factory=dict)
    iterator: Iterator[Any] = field(default_factory=lambda: iter(()))
    ahead: Any = _NONE

    def at(self, position: Position) -> bool:
        """
        Return whether the batch that was read ahead is that of `position`.
        """
        here = (self.epoch, self.taken, self.began)
        return here == (position.epoch, position.taken, position.began)


class _Restoring:
    """
    A batch sampler that calls `restores()` right before it yields the indices of batch number
    `first`. `restores` restores random generators, so that the items of that batch draw the same
    numbers as when they were read for the first time.
    """

    def __init__(self, sampler: Any, first: int, restores: Callable[[], None]) -> None:
        """
        `sampler` is any batch sampler.
        """
        self._sampler = sampler
        self._first = first
        self._restores = restores

    def __iter__(self) -> Iterator[Any]:
        for number, indices in enumerate(self._sampler):
            if number == self._first:
                self._restores()
            yield indices

    def __len__(self) -> int:
        return len(self._sampler)
