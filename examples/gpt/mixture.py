"""
A layer of experts that are spread over a group of ranks. It replaces a block's perceptron.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Gathered(torch.autograd.Function):
    """
    Gathers the rows of all ranks of a group.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # Any: torch's own
        """
        Return the rows of all ranks, one rank after another.
        """
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # Any: torch's own
        """
        Return the gradient of this rank's rows: the sum of the gradients from all ranks.
        """
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class Returned(torch.autograd.Function):
    """
    Returns this rank's rows: the sum of the results of all ranks of a group.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # Any: torch's own
        """
        Sum the results of all ranks, and return the rows of this rank.
        """
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total.chunk(dist.get_world_size(group))[dist.get_rank(group)]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # Any: torch's own
        """
        Return the gradients of all rows, because every rank contributes to every row.
        """
        parts = [torch.empty_like(grads[0]) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, grads[0].contiguous(), group=ctx.group)
        return torch.cat(parts), None


class Experts(nn.ModuleDict):
    """
    The experts of one rank, by their number among all experts.

    Each expert computes every row. Its result counts by the row's share of that expert. This is
    more work than needed, but always the same work.
    """

    def forward(self, rows: Tensor, shares: Tensor) -> Tensor:
        """
        Return the sum of the experts' results for the rows. `shares` has one column for each of all
        experts.
        """
        return torch.stack([shares[:, int(n), None] * self[n](rows) for n in self]).sum(dim=0)


def best_only(scores: Tensor) -> Tensor:
    """
    Return the share of each expert in each row: the softmax for the best expert, 0 for the others.
    """
    shares = scores.softmax(dim=-1)
    best = shares.argmax(dim=-1, keepdim=True)
    return torch.zeros_like(shares).scatter(-1, best, shares.gather(-1, best))


def spread(experts: nn.Module, rows: Tensor, shares: Tensor, group: dist.ProcessGroup) -> Tensor:
    """
    Return the sum of what the experts of all ranks of the group compute for this rank's rows.
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
        `every` holds the experts of all ranks, so that each rank draws the same weights.
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
        Map (batch, context, width) to the same shape.
        """
        rows = x.flatten(0, 1)
        return spread(self.experts, rows, best_only(self.router(rows)), self._group).view(x.shape)
