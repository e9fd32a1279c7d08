"""
An optimizer whose state is cut into shards, with several ranks holding each: less memory than a whole
copy on every rank, and none of it is lost with one of them.

The idea is that of MindSpeed's replica optimizer: the data-parallel group of `d` ranks is cut into
`copies` replica groups of `k = d / copies` ranks, one after another, and each of them shards the
optimizer state as ZeRO stage 1 does (https://arxiv.org/abs/1910.02054). All ranks have the same sums
of gradients, so the copies of a shard go the same way, bit for bit, and nothing is sent to keep
them equal. Here whole parameters are dealt out, as torch's own `ZeroRedundancyOptimizer` does, so
that every optimizer works that looks at one parameter at a time, to the same bits as unsharded.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from tft.errors import UsageError

LOW = frozenset({torch.float16, torch.bfloat16})
"""Types of parameters that are updated in float32, through a master copy of their weights."""
_ALIGNED = 64
"""Bytes: where each parameter begins in its bucket."""


class ReplicaOptimizer(Optimizer):
    """
    `optimizer` over this rank's share of the parameters; after each step the replica group shares
    out what its ranks have computed. `param_groups` has all parameters, so that schedulers, gradient
    clipping and GradScaler work as ever; `state` has this rank's share.

    Parameters of 16 bits have masters of 32 bits, which are part of the shard: with Adam, and
    gradients of 16 bits, a rank has `4 + 16 * copies / d` bytes for each parameter of the model; with
    gradients of 32 bits (`grad_dtype` of a parameter), which need no copy, `6 + 12 * copies / d`.

    The parameters are moved into flat buckets, one for each owner, and are views of them afterwards.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        optimizer: Callable[..., Optimizer],
        *,
        rank: int,
        world: int,
        copies: int = 2,
        **defaults: Any,  # Any: the optimizer's own
    ) -> None:
        """
        `optimizer` is its class, `defaults` its arguments, `rank` and `world` are the session's.
        Raises `UsageError` for ranks that cannot be cut into so many groups.
        """
        self._ready = False
        self.rank = rank
        self.world = world
        self.copies = copies
        self.share, self.shares = _cut(self.rank, self.world, copies)
        whole = optimizer(params, **defaults)
        super().__init__(whole.param_groups, whole.defaults)
        every = [p for group in self.param_groups for p in group["params"]]
        self._owners = _dealt(every, self.shares)
        self._buckets = _bucketed(every, self._owners, self.shares)
        self.owned = [p for p in every if self._owners[p] == self.share]
        self._masters: dict[Tensor, Tensor] = {
            p: p.detach().float() for p in self.owned if p.dtype in LOW
        }
        mine = [
            {
                **group,
                "params": [
                    self.kept_for(p) for p in group["params"] if self._owners[p] == self.share
                ],
            }
            for group in self.param_groups
        ]
        # of this name, as in ZeroRedundancyOptimizer, for whoever looks for what does the work
        self.optim = optimizer(mine, **defaults)
        self.state = self.optim.state
        self._group: dist.ProcessGroup | None = None
        self._fresh = True
        self._ready = True

    # ---------------------------------------------------------------- as any optimizer

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch overloads it
        """
        Updates this rank's share. The others get it when the update window closes (`share_out`).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._fresh = False
        for place, whole in enumerate(self.param_groups):
            ours = self.optim.param_groups[place]
            ours.update({name: value for name, value in whole.items() if name != "params"})
        for parameter, master in self._masters.items():
            _hand_down(parameter, master)
        self.optim.step()
        for parameter, master in self._masters.items():
            _give_back(parameter, master)
        self.refresh()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # Any: as in torch
        """
        Only while it is made: who owns what is dealt out once.
        """
        if self._ready:
            raise UsageError(
                "a ReplicaOptimizer cannot take further parameters: they are dealt out when it is "
                "made; make one with all of them"
            )
        super().add_param_group(param_group)

    # ---------------------------------------------------------------- for the adaptor

    def holders(self) -> tuple[int, ...]:
        """
        The ranks that hold the same share.
        """
        return tuple(range(self.share, self.world, self.shares))

    def master(self, parameter: Tensor) -> Tensor | None:
        """
        What an owned parameter is rounded from; None: it is its own master.
        """
        return self._masters.get(parameter)

    def kept_for(self, parameter: Tensor) -> Tensor:
        """
        What the state of an owned parameter belongs to.
        """
        return self._masters.get(parameter, parameter)

    def refresh(self) -> None:
        """
        Round the owned parameters from their masters.
        """
        with torch.no_grad():
            for parameter, master in self._masters.items():
                parameter.copy_(master)

    def taken(self) -> None:
        """
        The share has come from elsewhere, with masters that are not to be made anew.
        """
        self._fresh = False
        self.refresh()

    def regroup(self) -> None:
        """
        Form the replica groups within the default group, which every rank does at once, and give
        everyone what the owners have.
        """
        self._group = None
        for first in range(0, self.world, self.shares) if self.shares > 1 else ():
            members = list(range(first, first + self.shares))
            group = dist.new_group(members)
            if self.rank in members:
                self._group = group
        self.share_out()

    def settled(self) -> None:
        """
        The wrapper is built, and has made the parameters of all ranks equal: before the first step
        that is what the masters are made from.
        """
        if self._fresh:
            with torch.no_grad():
                for parameter, master in self._masters.items():
                    master.copy_(parameter)

    def share_out(self) -> None:
        """
        Every rank of the replica group gets the parameters that the others own.
        """
        if self._group is None:
            return
        first = self.rank - self.share
        sent = [
            dist.broadcast(bucket, src=first + owner, group=self._group, async_op=True)
            for owner, buckets in enumerate(self._buckets)
            for bucket in buckets
        ]
        for each in sent:
            each.wait()

    def clear(self) -> None:
        """
        Let go of the group.
        """
        self._group = None


# ---------------------------------------------------------------- dealing out


def _cut(rank: int, world: int, copies: int) -> tuple[int, int]:
    """
    The share of this rank, and how many shares there are.
    """
    if copies < 2:
        raise UsageError(
            f"copies={copies}: a share that one rank alone holds is lost with it; a ReplicaOptimizer "
            "keeps at least two"
        )
    if world % copies:
        raise UsageError(f"{world} ranks cannot be cut into {copies} replica groups of equal size")
    shares = world // copies
    return rank % shares, shares


def _dealt(parameters: Iterable[Tensor], shares: int) -> Mapping[Tensor, int]:
    """
    The owner of each: the largest first, each to who has least so far.
    """
    load = [0] * shares
    owners: dict[Tensor, int] = {}
    for parameter in sorted(parameters, key=lambda p: -p.numel()):
        owner = min(range(shares), key=load.__getitem__)
        owners[parameter] = owner
        load[owner] += parameter.numel()
    return owners


def _bucketed(
    parameters: Iterable[Tensor], owners: Mapping[Tensor, int], shares: int
) -> list[list[Tensor]]:
    """
    Moves the parameters into one stretch of memory for each owner, type and device: what is sent
    is sent from where it is used.
    """
    sorts: list[dict[tuple[torch.dtype, torch.device], list[Tensor]]] = [{} for _ in range(shares)]
    for parameter in parameters:
        alike = sorts[owners[parameter]]
        alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return [[_flat(alike) for alike in sort.values()] for sort in sorts]


def _flat(alike: list[Tensor]) -> Tensor:
    whole = _ALIGNED // alike[0].element_size()
    starts, end = [], 0
    for parameter in alike:
        starts.append(end)
        end += -(-parameter.numel() // whole) * whole
    flat = torch.zeros(end, dtype=alike[0].dtype, device=alike[0].device)
    for parameter, start in zip(alike, starts, strict=True):
        room = flat[start : start + parameter.numel()].view(parameter.shape)
        room.copy_(parameter.detach())
        parameter.data = room
    return flat


def _hand_down(parameter: Tensor, master: Tensor) -> None:
    """
    The gradient of a parameter, in its master's type: itself, if it has that type.
    """
    gradient = parameter.grad
    if gradient is None or gradient.dtype == master.dtype:
        master.grad = gradient
    elif master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad.copy_(gradient)


def _give_back(parameter: Tensor, master: Tensor) -> None:
    """
    A gradient that is the parameter's own ends with it: kept here it would live on beside the next.
    """
    if parameter.grad is not None and parameter.grad.dtype == master.dtype:
        master.grad = None
