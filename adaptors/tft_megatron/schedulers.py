"""
Checks the learning rate scheduler that the script passes to `tft_megatron.enable`. tft steps this
scheduler in the update window, and sends the scheduler's state to replacement processes.

A script that has a scheduler but does not pass it is refused: a replacement process would continue
with another learning rate than the other ranks.
"""

import gc
from collections.abc import Mapping
from typing import Any

from tft.errors import UsageError
from tft_megatron.training import Training


class Progress:
    """
    Saves and restores the exact state of a scheduler. Megatron's own `load_state_dict` cannot
    restore this state, because it adds the loaded number of steps to the number that the scheduler
    has already counted.
    """

    # Any: a scheduler of Megatron gives mypy no types
    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        """
        Return all attributes of the scheduler except its reference to the optimizer.
        """
        return {k: v for k, v in vars(self._scheduler).items() if k != "optimizer"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Set the attributes of the scheduler to the values in `state`.
        """
        vars(self._scheduler).update(state)


def check_scheduler(training: Training) -> None:
    """
    Check the scheduler that the script has passed: it must be Megatron's `OptimizerParamScheduler`.
    If the script has passed none, no scheduler may exist for its optimizer. Raises `UsageError` if
    a check fails.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    if training.scheduler is not None:
        if not isinstance(training.scheduler, OptimizerParamScheduler):
            raise UsageError(
                "the scheduler given to tft_megatron.enable must be megatron.core's "
                "OptimizerParamScheduler, not a "
                f"{type(training.scheduler).__module__}.{type(training.scheduler).__qualname__}"
            )
        return
    from torch.optim.lr_scheduler import LRScheduler

    inner = [each.optimizer for each in training.optimizers if each.optimizer is not None]
    ours = {id(each) for each in (training.optimizer, *training.optimizers, *inner)}
    for found in gc.get_objects():
        # use `type` instead of `isinstance`, because `isinstance` could run code of an unrelated
        # object
        if issubclass(type(found), OptimizerParamScheduler | LRScheduler) and (
            id(getattr(found, "optimizer", None)) in ours
        ):
            raise UsageError(
                f"this optimizer has a scheduler ({type(found).__name__}), but tft_megatron.enable "
                "was given none: hand over Megatron's OptimizerParamScheduler"
            )
