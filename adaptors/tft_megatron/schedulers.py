"""
Schedulers that the adaptor was not given: it would not step them in the window, nor move what they keep, and the
rank that takes the place of another would go on with another learning rate than the rest.
"""

import gc
from typing import Any

from tft.errors import UsageError
from tft_megatron.training import Training


def refuse_unseen(training: Training) -> None:
    """
    Raises `UsageError` where there is no scheduler, and one that refers to the optimizer after all. Without any, it
    takes something else that tells whether a step was ever done.
    """
    if training.scheduler is not None:
        return
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
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
                "give it as the scheduler"
            )
    for each in inner:
        if _keeps_nothing(each):
            raise UsageError(
                f"a {type(each).__name__} without momentum keeps nothing, so without a scheduler nobody can tell "
                "whether a step was ever done: give tft_megatron.enable a scheduler"
            )


def _keeps_nothing(optimizer: Any) -> bool:  # Any: torch's, or one that is like it
    return any(group.get("momentum") == 0 for group in optimizer.param_groups)
