"""
Small helper functions of Megatron.
"""

from typing import Any

import torch
import torch.distributed as dist


def unwrap_model(model: Any) -> Any:
    """
    Return the module inside its wrappers, or the list of modules for a list.
    """
    if isinstance(model, list):
        return [unwrap_model(each) for each in model]
    while hasattr(model, "module"):
        model = model.module
    return model


def print_rank_0(message: str) -> None:
    """
    Print a message on rank 0 only.
    """
    if dist.get_rank() == 0:
        print(message, flush=True)


def is_last_rank() -> bool:
    """
    Return whether this is the last rank of the job.
    """
    return dist.get_rank() == dist.get_world_size() - 1


def print_rank_last(message: str) -> None:
    """
    Print a message on the last rank only.
    """
    if is_last_rank():
        print(message, flush=True)


def calc_params_l2_norm(model: Any) -> float:
    """
    Return a norm of this rank's own parameters.
    """
    norms = [param.detach().float().norm() for each in model for param in each.parameters()]
    return float(torch.stack(norms).norm())
