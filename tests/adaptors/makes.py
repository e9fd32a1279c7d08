"""
Models of which a rank has several kinds of parts, made over four ranks.
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
    What all ranks have the same of: says what each row is, and to which expert it goes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.dropout = nn.Dropout(0.2)
        self.router = nn.Linear(HIDDEN, EXPERTS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """
        (batch, WIDTH) to (batch, HIDDEN), and how much of each expert a row gets: all of it of the best.
        """
        x = self.dropout(torch.tanh(self.first(x)))
        return x, best_only(self.router(x))


class Mixture(nn.Module):
    """
    A layer of experts that are spread over a group.
    """

    def __init__(self, trunk: nn.Module, experts: nn.Module, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.trunk = trunk
        self.experts = experts
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        """
        (batch, WIDTH) to (batch, HIDDEN).
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
    others: dict[str, Any] = {}  # Any: each has its own type
    if averaged:
        others["average"] = swa_utils.AveragedModel(
            nn.ModuleDict({"trunk": trunk, "experts": experts}),
            multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9),  # type: ignore[no-untyped-call]  # torch
        )
        others["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    copies = mesh["replicate"].get_group()
    model = Mixture(DDP(trunk), DDP(experts, process_group=copies), mesh["expert"].get_group())
    return _trained(model, others, copies if shares else None)


def experts() -> Made:
    """
    The trunk on all ranks, two experts on ranks 0 and 2, the others on 1 and 3.
    """
    return _mixture(averaged=False, shares=False)


def averaged_experts() -> Made:
    """
    The same with a moving average, and with losses that are scaled.
    """
    return _mixture(averaged=True, shares=False)


def shared_experts() -> Made:
    """
    The same with an optimizer whose state is told of who has the same of everything.
    """
    return _mixture(averaged=False, shares=True)


class Scaled(nn.Module):
    """
    A trunk that is cut up, behind something too small for that.
    """

    def __init__(self, small: nn.Module, trunk: nn.Module) -> None:
        super().__init__()
        self.small = small
        self.trunk = trunk

    def forward(self, x: Tensor) -> Tensor:
        """
        (batch, WIDTH) to (batch, HIDDEN).
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
    FSDP2 over two ranks, twice, and a norm in a DDP over all four; with a moving average of everything,
    which is cut up as the model is.
    """
    torch.manual_seed(0)
    small, trunk = nn.LayerNorm(WIDTH), _trunk()
    average = swa_utils.AveragedModel(
        Scaled(small, trunk),
        avg_fn=swa_utils.get_ema_avg_fn(0.9),  # type: ignore[no-untyped-call]  # torch has no types here
    )
    _cut_up(trunk)
    _cut_up(average.module.trunk)  # type: ignore[arg-type]  # a copy of the one above
    return _trained(Scaled(DDP(small), trunk), {"average": average}, None)


def compiled_shards() -> Made:
    """
    FSDP2 over two ranks, twice, and the whole compiled, with the backend that makes nothing of it.
    """
    torch.manual_seed(0)
    trunk = _trunk()
    _cut_up(trunk)
    return _trained(torch.compile(trunk, backend="eager"), {}, None)  # type: ignore[arg-type]  # a Module


def _trained(
    model: nn.Module, others: dict[str, Any], copies: dist.ProcessGroup | None
) -> Made:  # Any: each has its own type
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
