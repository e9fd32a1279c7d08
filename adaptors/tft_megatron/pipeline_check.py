"""
Checks that all stages of a pipeline have the same parameter groups.

Without tft, Megatron itself makes the parameter groups equal while it builds the optimizer: each
stage asks the other stages for their parameter groups, and adds the groups that it lacks as empty
groups. With tft no other rank is connected at that time. So tft refuses stages with different
parameter groups when the first process groups are formed.
"""

from typing import Any

import torch.distributed as dist

from tft.errors import OrderRefused
from tft_megatron.training import Training

_SETTINGS = ("is_expert_parallel", "is_decoupled_lr", "wd_mult", "lr_mult", "max_lr", "min_lr")
"""The settings by which Megatron distinguishes parameter groups. No step changes these settings, so
stages that have trained can be compared by them too."""


def refuse_other_settings(training: Training) -> None:
    """
    Raise `OrderRefused` if another stage of the pipeline has other parameter groups than this
    stage. All ranks of a pipeline call this function together.
    """
    from megatron.core import parallel_state as state

    if state.get_pipeline_model_parallel_world_size() == 1:
        return
    own = [
        [{name: group.get(name) for name in _SETTINGS} for group in each.param_groups]
        for each in training.optimizers
    ]
    group = state.get_pipeline_model_parallel_group()
    # Any: the collective fills the list with lists like `own`
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, own, group=group)
    for stage, theirs in enumerate(found):
        if theirs != own:
            raise OrderRefused(
                f"stage {stage} of the pipeline has the parameter groups {theirs}, but this stage "
                f"has {own}: give all stages parameters of each kind (experts, and parameters "
                "without weight decay), or the same settings for all"
            )
