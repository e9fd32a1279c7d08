"""
Factories of models for four ranks, where each rank holds several kinds of parts.
"""

from typing import Any

import torch
import torch.distributed as dist
from mixture import Experts, best_only, spread
from tft_pytorch import Made, ReplicaOptimizer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import swa_utils

from tests.adaptors.ranks import WIDTH

HIDDEN = 32
EXPERTS = 4


class Trunk(nn.Module):
    """
    The part of the model that all ranks hold. It transforms each row and chooses the expert for the
    row.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.dropout = nn.Dropout(0.2)
        self.router = nn.Linear(HIDDEN, EXPERTS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """
        Map (batch, WIDTH) to (batch, HIDDEN), and return the share of each expert in each row.

        The best expert has the whole share of a row.
        """
        x = self.dropout(torch.tanh(self.first(x)))
        return x, best_only(self.router(x))


class Mixture(nn.Module):
    """
    A model of a trunk and a layer of experts that are spread over the ranks of a group.
    """

    def __init__(self, trunk: nn.Module, experts: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.trunk = trunk
        self.experts = experts
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        """
        Map (batch, WIDTH) to (batch, HIDDEN).
        """
        x, shares = self.trunk(x)
        return x + spread(self.experts, x, shares, self._group)


def _mixture(*, averaged: bool, shares: bool) -> Made:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "expert"))
    torch.manual_seed(0)
    trunk = Trunk()
    every = {str(n): nn.Linear(HIDDEN, HIDDEN) for n in range(EXPERTS)}
    first = 2 * mesh.get_local_rank("expert")
    experts = Experts({n: every[n] for n in list(every)[first : first + 2]})
    others: dict[str, Any] = {}  # Any: the values have different types
    if averaged:
        others["average"] = swa_utils.AveragedModel(
            nn.ModuleDict({"trunk": trunk, "experts": experts}),
            multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9),  # type: ignore[no-untyped-call]  # torch has no types here
        )
        others["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    copies = mesh["replicate"].get_group()
    model = Mixture(DDP(trunk), DDP(experts, process_group=copies), mesh["expert"].get_group())
    return _trained(model, others, copies if shares else None)


def experts() -> Made:
    """
    Make a model with the trunk on all ranks, two experts on ranks 0 and 2, and two others on ranks
    1 and 3.
    """
    return _mixture(averaged=False, shares=False)


def averaged_experts() -> Made:
    """
    Make the model of `experts` with a moving average of its parameters and with a loss scaler.
    """
    return _mixture(averaged=True, shares=False)


def shared_experts() -> Made:
    """
    Make the model of `experts` with a `ReplicaOptimizer`, whose state is cut into shards.
    """
    return _mixture(averaged=False, shares=True)


class Scaled(nn.Module):
    """
    A small layer that is not sharded, followed by a trunk that is sharded.
    """

    def __init__(self, small: nn.Module, trunk: nn.Module) -> None:
        super().__init__()
        self.small = small
        self.trunk = trunk

    def forward(self, x: Tensor) -> Tensor:
        """
        Map (batch, WIDTH) to (batch, HIDDEN).
        """
        return self.trunk(self.small(x))  # type: ignore[no-any-return]  # torch has no types here


def _cut_up(trunk: nn.Sequential) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(trunk, mesh=mesh)


def _trunk() -> nn.Sequential:
    layers = [nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Dropout(0.2), nn.Linear(HIDDEN, HIDDEN)]
    return nn.Sequential(*layers)


def small_beside_shards() -> Made:
    """
    Make a sharded trunk behind a small norm layer, with a moving average of both.

    FSDP2 shards the trunk over two ranks, in two replicas. DDP copies the norm layer to all four
    ranks. The average is sharded in the same way as the model.
    """
    torch.manual_seed(0)
    small, trunk = nn.LayerNorm(WIDTH), _trunk()
    average = swa_utils.AveragedModel(
        Scaled(small, trunk),
        avg_fn=swa_utils.get_ema_avg_fn(0.9),  # type: ignore[no-untyped-call]  # torch has no types here
    )
    _cut_up(trunk)
    _cut_up(average.module.trunk)  # type: ignore[arg-type]  # it is a copy of `trunk`
    return _trained(Scaled(DDP(small), trunk), {"average": average}, None)


def compiled_shards() -> Made:
    """
    Make a trunk that FSDP2 shards over two ranks in two replicas, wrapped by `torch.compile`.

    The backend `eager` runs the model without any change.
    """
    torch.manual_seed(0)
    trunk = _trunk()
    _cut_up(trunk)
    return _trained(torch.compile(trunk, backend="eager"), {}, None)  # type: ignore[arg-type]  # it returns a Module


def _trained(
    model: nn.Module, others: dict[str, Any], copies: dist.ProcessGroup | None
) -> Made:  # Any: the values have different types
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(groups, lr=torch.tensor(1e-3))
        if copies is None
        else ReplicaOptimizer(groups, torch.optim.AdamW, group=copies, copies=2, lr=1e-3)
    )
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)
    return Made(model=model, optimizer=optimizer, scheduler=scheduler, others=others)
