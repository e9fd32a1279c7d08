"""
Overrides methods of TorchTitan's Trainer. The loop and the step are TorchTitan's own.

`Trainer.train` calls `should_continue_training` before each step, and then `train_step`. So the
override of `should_continue_training` begins a step of the session, and the override of
`train_step` has the update window.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torchtitan.distributed import ParallelDims

from tft import Session
from tft.errors import UsageError
from tft_torchtitan.position import Position
from tft_torchtitan.progress import Progress

_SLEEPS = 60.0
"""The time limit in seconds for the code of `Trainer.train` after its loop, in which rank 0 sleeps
for two seconds."""


class Job(Protocol):
    """
    The methods of the job that the overridden methods of the Trainer call.
    """

    session: Session
    progress: Progress
    position: Position


@contextmanager
def postponed(container: Any) -> Iterator[list[None]]:  # Any: TorchTitan has no types
    """
    Let `container.step()` do nothing within the `with` block. Yield a list with an entry for each
    call.
    """
    calls: list[None] = []
    container.step = lambda: calls.append(None)
    try:
        yield calls
    finally:
        del container.step  # from now on, `step` is the method of the class again


class TrainerSteps:
    """
    Overrides of methods of TorchTitan's Trainer. A class that derives from this class and from a
    Trainer trains in the steps of the session.
    """

    job: Job
    config: Any
    steps: Iterator[int]
    """The steps of the session that remain."""
    optimizers: Any
    lr_schedulers: Any
    step: int
    row: dict[str, Any]
    """The arguments with which TorchTitan logs the metrics of the present step."""

    def init_distributed(self) -> Any:  # Any: TorchTitan has no types
        """
        Return the sizes of the parallel dimensions, over the groups that tft has formed.
        """
        # TorchTitan's own `init_distributed`, which is not called, does the same when it forms the
        # groups
        torch.autograd.set_multithreading_enabled(False)
        return ParallelDims.from_config(self.config.parallelism, dist.get_world_size())

    def batch_generator(self, data_iterable: Iterable[Any]) -> Iterator[Any]:
        """
        Yield the batches, and note that the position has changed.
        """
        batches = super().batch_generator(data_iterable)  # type: ignore[misc]
        for batch in batches:
            self.job.position.taken()
            yield batch

    def should_continue_training(self) -> bool:
        """
        End the present step, and begin the next one. Return False if there is none.
        """
        goes_on = next(self.steps, None) is not None
        if not goes_on:
            self.job.session.expect(_SLEEPS)
        return goes_on and super().should_continue_training()  # type: ignore[misc]

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """
        Compute a step. TorchTitan's own `train_step` calls the optimizers and schedulers before it
        reduces the metrics over all ranks. These calls are postponed until it has returned, and are
        made in the update window then. So an incident that interrupts the all-reduces of the
        metrics comes before the update, and the whole step can be repeated. The metrics do not
        depend on the update.
        """
        with postponed(self.optimizers) as updates, postponed(self.lr_schedulers) as rates:
            super().train_step(data_iterator)  # type: ignore[misc]
        if (len(updates), len(rates)) != (1, 1):
            raise UsageError(
                f"step {self.step} of {type(self).__name__} has called optimizers.step() "
                f"{len(updates)} times and lr_schedulers.step() {len(rates)} times: tft needs one "
                "call of each in a step"
            )
        progress, row = self.job.progress, self.row
        self.row = {}
        with self.job.session.update():
            self.optimizers.step()
            self.lr_schedulers.step()
            progress.step, progress.row = self.step, row

    def note_row(self, *args: Any, **kwargs: Any) -> None:
        """
        Keep the metrics of the present step until the step has ended. TorchTitan calls this method
        in the place of `MetricsProcessor.log`.
        """
        self.row = {"args": list(args), "kwargs": kwargs}
