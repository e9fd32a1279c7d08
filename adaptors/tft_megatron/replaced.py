"""
What is replaced in Megatron, on the user's own objects and nowhere else: `optimizer.step`, `scheduler.step`
and the `update` of the loss scale, so that everything that changes the state in place is in one update
window, and no sum with other ranks is.

Written for megatron-core 0.16 (`versions.py`): the order within `ChainedOptimizer.step`, and what
`DistributedOptimizer.step_with_ready_grads` adds to what it inherits, were read there.
"""

from functools import partial
from typing import Any

import torch

from tft.errors import UsageError
from tft_megatron.training import Training

Returned = tuple[bool, float | None, float | None]
"""What Megatron's optimizers return of a step: whether it was done, the norm, the number of zeros."""


class Replaced:
    """
    The steps of optimizer and scheduler, as one.
    """

    def __init__(self, session: Any, training: Training) -> None:  # Any: `tft.Session`
        self._session = session
        self._training = training
        self._owed: int | None = None
        """What the scheduler was stepped by in the window; the script is going to ask for it."""
        self._found: list[tuple[Any, bool]] = []
        """The loss scales that the next window changes, each with whether gradients were infinite."""

    def install(self) -> None:
        """
        From here on the script's own calls come here.
        """
        self._training.optimizer.step = self.step
        if self._training.scheduler is not None:
            self._training.scheduler.step = self.step_scheduler
        for scaler in self._training.scalers:
            scaler.update = partial(self._note, scaler)

    def forget(self) -> None:
        """
        The step the script was at is begun anew.
        """
        self._owed = None
        self._found.clear()

    @torch.no_grad()
    def step(self) -> Returned:
        """
        Megatron's `ChainedOptimizer.step`: all all-reduces first, then the window. A step that is skipped, because
        gradients were infinite, is a step too: everybody skips it.
        """
        if self._owed is not None:
            raise UsageError(
                "optimizer.step was called again before scheduler.step: the scheduler that was given to "
                "tft_megatron.enable is stepped once after each step of the optimizer"
            )
        optimizer = self._training.optimizer
        if optimizer.prepare_grads():
            with self._session.update():
                self._scale()
            return False, None, None
        norm = optimizer.get_grad_norm()
        self._clip(norm)
        zeros = optimizer.count_zeros() if optimizer.config.log_num_zeros_in_grad else None
        with self._session.update():
            self._scale()
            for each in self._training.optimizers:
                _step_alone(each)
            if self._training.scheduler is not None:
                self._owed = self._increment()
                type(self._training.scheduler).step(self._training.scheduler, self._owed)
        return True, norm, zeros

    def step_scheduler(self, increment: int) -> None:
        """
        It has been done, in the window.
        """
        owed, self._owed = self._owed, None
        if owed is None:
            raise UsageError(
                f"scheduler.step({increment}) was called without a step of the optimizer before it: tft steps "
                "the scheduler in the window of the optimizer's step"
            )
        if owed != increment:
            raise UsageError(
                f"scheduler.step({increment}) was called where tft had stepped the scheduler by {owed}: give "
                "tft_megatron.enable an increment= that returns what the script is going to ask for"
            )

    def _note(self, scaler: Any, found_inf: bool) -> None:  # Any: Megatron's
        """
        Megatron would change the loss scale before the window: who is lost between the two would have been
        followed by a process that has the scale of the step before.
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


def _step_alone(optimizer: Any) -> None:  # Any: one of Megatron's
    """
    Change masters and what is rounded from them, and leave the parameters of others alone.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if isinstance(optimizer, DistributedOptimizer):
        super(DistributedOptimizer, optimizer).step_with_ready_grads()
    else:
        optimizer.step_with_ready_grads()
