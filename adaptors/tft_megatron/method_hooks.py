"""
Replaces three methods of the user's Megatron objects: `optimizer.step`, `scheduler.step` and the
`update` of the gradient scaler. Megatron's classes are not changed. With the new methods, all
changes of the state happen in one update window, and no rank waits for another in that window:
there is no all-reduce in it, and Megatron's timers begin without a barrier.

This module is written for megatron-core 0.16 (see `versions.py`). This module depends on two
details of that version: the order of calls in `ChainedOptimizer.step`, and that
`DistributedOptimizer.step_with_ready_grads` calls the inherited method and then gathers parameters.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from tft.errors import UsageError
from tft_megatron.training import Training

Returned = tuple[bool, float | None, float | None]
"""The result of a step of Megatron's optimizers: whether the step was done, the gradient norm, and
the number of zeros in the gradients."""


class Replaced:
    """
    The replaced methods, which step optimizer and scheduler together in one update window.
    """

    def __init__(self, session: Any, training: Training) -> None:  # Any: a `tft.Session`
        self._session = session
        self._training = training
        self._owed: int | None = None
        """The increment by which tft has stepped the scheduler in the update window. The script
        must call `scheduler.step` with the same increment; after this call the value is None."""
        self._skipped = False
        """True if the last step of the optimizer was skipped because of its gradients."""
        self._found: list[tuple[Any, bool]] = []
        """The gradient scalers to update in the next update window, each with a flag that is True
        if gradients were NaN or infinite."""

    def install(self) -> None:
        """
        Replace the methods on the user's objects. From now on the script's own calls run the
        methods of this class.
        """
        self._training.optimizer.step = self.step
        if self._training.scheduler is not None:
            self._training.scheduler.step = self.step_scheduler
        for scaler in self._training.scalers:
            scaler.update = partial(self._note, scaler)

    def forget(self) -> None:
        """
        Forget which methods were called in an interrupted step, because the script computes the
        step again.
        """
        self._owed = None
        self._skipped = False
        self._found.clear()

    @torch.no_grad()
    def step(self) -> Returned:
        """
        Do the work of Megatron's `ChainedOptimizer.step`: first all all-reduces, then the update in
        an update window. Return what Megatron's method returns.

        If gradients are NaN or infinite, all ranks skip the update, but the step still has an
        update window. Raises `UsageError` if `scheduler.step` was not called since the previous
        step.
        """
        if self._owed is not None:
            raise UsageError(
                "optimizer.step was called again before scheduler.step: the scheduler that was "
                "given to tft_megatron.enable is stepped once after each step of the optimizer"
            )
        optimizer = self._training.optimizer
        self._skipped = optimizer.prepare_grads()
        if self._skipped:
            with self._session.update():
                self._scale()
            return False, None, None
        norm = optimizer.get_grad_norm()
        self._clip(norm)
        zeros = optimizer.count_zeros() if optimizer.config.log_num_zeros_in_grad else None
        with self._session.update(), _without_barriers(self._training.optimizers):
            self._scale()
            for each in self._training.optimizers:
                _step_alone(each)
            if self._training.scheduler is not None:
                self._owed = self._increment()
                type(self._training.scheduler).step(self._training.scheduler, self._owed)
        return True, norm, zeros

    def step_scheduler(self, increment: int) -> None:
        """
        Accept the script's call of `scheduler.step`, and do nothing: tft has stepped the scheduler
        in the update window already.

        Raises `UsageError` if no step of the optimizer came before, if that step was skipped, or if
        tft stepped the scheduler by another increment.
        """
        owed, self._owed = self._owed, None
        if self._skipped:
            raise UsageError(
                f"scheduler.step({increment}) was called although the step of the optimizer before "
                "it was skipped, because gradients were NaN or infinite: as in Megatron's own loop, "
                "call it only if the first value that optimizer.step() returns is True"
            )
        if owed is None:
            raise UsageError(
                f"scheduler.step({increment}) was called without a step of the optimizer before "
                "it: tft steps the scheduler together with the optimizer"
            )
        if owed != increment:
            raise UsageError(
                f"scheduler.step({increment}) was called, but tft had stepped the scheduler by "
                f"{owed}: give tft_megatron.enable an increment= that returns the increment of the "
                "script"
            )

    def _note(self, scaler: Any, found_inf: bool) -> None:  # Any: Megatron gives mypy no types
        """
        Record that Megatron has asked to update the gradient scaler `scaler`. The update is done in
        the next update window.

        Megatron itself would change the loss scale before the window. If a rank were lost between
        the change and the window, its replacement would have the old loss scale.
        """
        self._found.append((scaler, found_inf))

    def _scale(self) -> None:
        for scaler, found_inf in self._found:
            type(scaler).update(scaler, found_inf)
        self._found.clear()

    def _increment(self) -> int:
        if self._training.increment is not None:
            return self._training.increment()
        from megatron.core.num_microbatches_calculator import (
            get_current_running_global_batch_size,
        )

        return int(get_current_running_global_batch_size())

    def _clip(self, norm: float) -> None:
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        for each in self._training.optimizers:
            parameters = [] if each.is_stub_optimizer else each.get_parameters()
            if parameters and each.config.clip_grad > 0.0:
                clip_grad_by_total_norm_fp32(
                    parameters, max_norm=each.config.clip_grad, total_norm=norm
                )


@contextmanager
# Any: optimizers of Megatron give mypy no types
def _without_barriers(optimizers: Sequence[Any]) -> Iterator[None]:
    """
    Let Megatron's timers begin without a barrier of all ranks, also with `barrier_with_L1_time`. If
    a rank were lost in the window, all others would wait in the barrier in the middle of their
    update, and no rank would have a sound copy.
    """
    configs = {id(each.config): each.config for each in optimizers}.values()
    barriers = [(config, config.barrier_with_L1_time) for config in configs]
    try:
        for config in configs:
            config.barrier_with_L1_time = False
        yield
    finally:
        for config, barrier in barriers:
            config.barrier_with_L1_time = barrier


# Any: an optimizer of Megatron gives mypy no types
def _step_alone(optimizer: Any) -> None:
    """
    Let `optimizer` change this rank's master weights, and the parameters that are rounded from
    them. Do not gather the parameters of other ranks.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if isinstance(optimizer, DistributedOptimizer):
        super(DistributedOptimizer, optimizer).step_with_ready_grads()
    else:
        optimizer.step_with_ready_grads()
