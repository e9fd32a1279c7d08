"""
Small things.
"""

from typing import Any

import torch
import torch.distributed as dist


def unwrap_model(model: Any) -> Any:
    """
    The modules within their wrappers: of one, or of each in a list.
    """
    if isinstance(model, list):
        return [unwrap_model(each) for each in model]
    while hasattr(model, "module"):
        model = model.module
    return model


def print_rank_0(message: str) -> None:
    """
    Said once in a job.
    """
    if dist.get_rank() == 0:
        print(message, flush=True)


def is_last_rank() -> bool:
    """
    Of all ranks.
    """
    return dist.get_rank() == dist.get_world_size() - 1


def print_rank_last(message: str) -> None:
    """
    Said by the last rank.
    """
    if is_last_rank():
        print(message, flush=True)


def calc_params_l2_norm(model: Any) -> float:
    """
    Of this rank's own parameters.
    """
    norms = [param.detach().float().norm() for each in model for param in each.parameters()]
    return float(torch.stack(norms).norm())
