"""
A layer of experts that are spread over a group of ranks, in the place of a block's perceptron.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Gathered(torch.autograd.Function):
    """
    The rows of all ranks of a group.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # Any: torch's own
        """
        One after another.
        """
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # Any: torch's own
        """
        What all ranks have to say of the rows of this one.
        """
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class Returned(torch.autograd.Function):
    """
    The rows of this rank, with what all of a group have made of them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # Any: torch's own
        """
        Added up.
        """
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total.chunk(dist.get_world_size(group))[dist.get_rank(group)]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # Any: torch's own
        """
        Everybody has a hand in every row.
        """
        parts = [torch.empty_like(grads[0]) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, grads[0].contiguous(), group=ctx.group)
        return torch.cat(parts), None


class Experts(nn.ModuleDict):
    """
    Those of one rank, by their number among all. Each sees every row, and what it makes counts for as much as
    the row's share of it: that computes too much, but always the same.
    """

    def forward(self, rows: Tensor, shares: Tensor) -> Tensor:
        """
        What they make of the rows, added up; `shares` has a column for each of all experts.
        """
        return torch.stack([shares[:, int(n), None] * self[n](rows) for n in self]).sum(dim=0)


def best_only(scores: Tensor) -> Tensor:
    """
    How much each row gets of each expert: nothing but of the best.
    """
    shares = scores.softmax(dim=-1)
    best = shares.argmax(dim=-1, keepdim=True)
    return torch.zeros_like(shares).scatter(-1, best, shares.gather(-1, best))


def spread(experts: nn.Module, rows: Tensor, shares: Tensor, group: dist.ProcessGroup) -> Tensor:
    """
    What the experts of all ranks of the group make of this rank's rows.
    """
    every = Gathered.apply(rows, group)  # type: ignore[no-untyped-call]  # torch has no types here
    made = experts(every, Gathered.apply(shares, group))  # type: ignore[no-untyped-call]  # as above
    return Returned.apply(made, group)  # type: ignore[no-untyped-call, no-any-return]  # as above


class Mixture(nn.Module):
    """
    A router that every rank has, and some of the experts.
    """

    def __init__(
        self, width: int, every: Mapping[str, nn.Module], group: dist.ProcessGroup
    ) -> None:
        """
        `every` has the experts of all ranks, so that each rank draws the same weights.
        """
        super().__init__()
        self.router = nn.Linear(width, len(every), bias=False)
        ranks, place = dist.get_world_size(group), dist.get_rank(group)
        self.experts: nn.Module = Experts(
            {name: expert for name, expert in every.items() if int(name) % ranks == place}
        )
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        """
        (batch, context, width) to the same.
        """
        rows = x.flatten(0, 1)
        return spread(self.experts, rows, best_only(self.router(rows)), self._group).view(x.shape)
