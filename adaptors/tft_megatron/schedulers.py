"""
The scheduler: it is stepped in the update window, and moved with the optimizer. One that the adaptor was not given
would be neither, and the rank that takes the place of another would go on with another learning rate than the rest.
"""

import gc
from collections.abc import Mapping
from typing import Any

from tft.errors import UsageError
from tft_megatron.training import Training


class Progress:
    """
    How many steps a scheduler has counted, as a state of its own: Megatron's `load_state_dict` counts them on from
    those that it has.
    """

    def __init__(self, scheduler: Any) -> None:  # Any: Megatron's
        self._scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        """
        All that is no reference.
        """
        return {k: v for k, v in vars(self._scheduler).items() if k != "optimizer"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        As it was.
        """
        vars(self._scheduler).update(state)


def check_scheduler(training: Training) -> None:
    """
    Raises `UsageError` for one that is not Megatron's, and where there is none, but one that refers to the optimizer
    after all.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    if training.scheduler is not None:
        if not isinstance(training.scheduler, OptimizerParamScheduler):
            raise UsageError(
                "scheduler must be megatron.core's OptimizerParamScheduler, not a "
                f"{type(training.scheduler).__module__}.{type(training.scheduler).__qualname__}"
            )
        return
    from torch.optim.lr_scheduler import LRScheduler

    inner = [each.optimizer for each in training.optimizers if each.optimizer is not None]
    ours = {id(each) for each in (training.optimizer, *training.optimizers, *inner)}
    for found in gc.get_objects():
        # by its type: what looks like something else is not asked
        if issubclass(type(found), OptimizerParamScheduler | LRScheduler) and (
            id(getattr(found, "optimizer", None)) in ours
        ):
            raise UsageError(
                f"there is a scheduler ({type(found).__name__}) for this optimizer, and tft_megatron.enable was given none: "
                "hand over Megatron's OptimizerParamScheduler"
            )
