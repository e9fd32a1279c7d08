"""
FusedAdam and FusedSGD on a CPU.

As in Apex, FusedAdam counts its steps per parameter group. MindSpeed-LLM sends exp_avg and
exp_avg_sq of each parameter from rank to rank, but no count of steps.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import SGD as FusedSGD

__all__ = ["FusedAdam", "FusedSGD"]


class FusedAdam(torch.optim.Optimizer):
    """
    Adam with decoupled weight decay.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **_: Any,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it never calls a closure
        """
        Update all parameters that have a gradient.
        """
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg_sq"] = torch.zeros_like(param)
                state["exp_avg"].lerp_(param.grad, 1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(param.grad, param.grad, value=1 - second)
                mean = state["exp_avg"] / (1 - first ** group["step"])
                spread = (
                    (state["exp_avg_sq"] / (1 - second ** group["step"])).sqrt_().add_(group["eps"])
                )
                param.mul_(1 - group["lr"] * group["weight_decay"]).addcdiv_(
                    mean, spread, value=-group["lr"]
                )
