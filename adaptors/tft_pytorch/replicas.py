"""
An optimizer whose state is cut into shards, with several ranks holding each: less memory than a whole
copy on every rank, and none of it is lost with one of them.

The idea is that of MindSpeed's replica optimizer: the data-parallel group of `d` ranks is cut into
`copies` replica groups of `k = d / copies` ranks, one after another, and each of them shards the
optimizer state as ZeRO stage 1 does (https://arxiv.org/abs/1910.02054). All ranks have the same reduced gradients
of gradients, so the copies of a shard go the same way, bit for bit, and nothing is sent to keep
them equal. Here whole parameters are dealt out, as torch's own `ZeroRedundancyOptimizer` does, so
that every optimizer works that looks at one parameter at a time, to the same bits as unsharded.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
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

    The parameters are moved into flat buckets, one for each owner, and are views of them afterwards;
    those that are distributed are copied there when they are shared out.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        optimizer: Callable[..., Optimizer],
        *,
        rank: int | None = None,
        world: int | None = None,
        group: dist.ProcessGroup | None = None,
        copies: int = 2,
        **defaults: Any,  # Any: the optimizer's own
    ) -> None:
        """
        `optimizer` is its class, `defaults` its arguments. `rank` and `world` are the session's; or
        `group` is that of the ranks that have the same parameters, for `session.adopt(make=...)`.
        Raises `UsageError` for ranks that cannot be cut into so many groups.
        """
        self._ready = False
        self.made_over_group = group is not None
        self.rank, self.ranks = _place(rank, world, group)
        self.world = len(self.ranks)
        self.copies = copies
        self.share, self.shares = _cut(self.rank, self.world, copies)
        whole = optimizer(params, **defaults)
        if isinstance(whole, torch.optim.LBFGS):
            raise UsageError("LBFGS looks at all parameters at once: it cannot be cut into shares")
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
        if group is not None and self.shares > 1:  # else it is formed by `regroup`
            self._group = dist.new_group(self._members(), use_local_synchronization=True)
        self._fresh = True
        self.whole = self.shares == 1
        """Whether what others own is here of the same step as what this rank owns."""
        self._ready = True

    # ---------------------------------------------------------------- as any optimizer

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch overloads it
        """
        Updates this rank's share. The others get it when the update window closes (`share_out`). Raises
        `UsageError` for a closure: all-reduces with other ranks have no place in the window.
        """
        if closure is not None:
            raise UsageError(
                "a ReplicaOptimizer takes no closure: compute the loss and its gradients before the update "
                "window opens"
            )
        self._fresh = False
        self.whole = self.shares == 1
        set_groups(self.optim.param_groups, self.param_groups)
        for parameter, master in self._masters.items():
            _hand_down(parameter, master)
        self.optim.step()
        for parameter, master in self._masters.items():
            _give_back(parameter, master)
        set_groups(self.param_groups, self.optim.param_groups)  # some count their steps there
        self.refresh()

    def state_dict(self) -> dict[str, Any]:  # Any: as in torch
        """
        Raises `UsageError`: this rank has its share only.
        """
        raise UsageError(
            "a ReplicaOptimizer has this rank's share of the state only: tft saves all shares, as one "
            "checkpoint that plain torch reads"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # Any: as in torch
        """
        Takes this rank's share out of the state of an optimizer that has all of it, as `state_dict` of
        that one returns it. Raises `UsageError` where it is of other parameters.
        """
        every = [p for group in self.param_groups for p in group["params"]]
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        if len(numbers) != len(every) or len(state_dict["param_groups"]) != len(self.param_groups):
            raise UsageError(
                f"the state is that of {len(numbers)} parameters in {len(state_dict['param_groups'])} "
                f"groups, and there are {len(every)} in {len(self.param_groups)}"
            )
        number_of = dict(zip(every, numbers, strict=True))
        groups = [
            {
                **told,
                "params": [number_of[p] for p in group["params"] if self._owners[p] == self.share],
            }
            for told, group in zip(state_dict["param_groups"], self.param_groups, strict=True)
        ]
        mine = {number for group in groups for number in group["params"]}
        state = {number: kept for number, kept in state_dict["state"].items() if number in mine}
        self.optim.load_state_dict({"state": state, "param_groups": groups})
        self.reread()

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
        return self.ranks[self.share :: self.shares]

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
        self.whole = self.shares == 1
        self.refresh()

    def reread(self) -> None:
        """
        `optim` was loaded: its state is another object now, and its settings are those of all.
        """
        self.state = self.optim.state
        set_groups(self.param_groups, self.optim.param_groups)

    def replaced(self, *, everything: bool) -> None:
        """
        The script has read into `optim` and the masters, or, if `everything`, into the parameters of all
        ranks. None of these is made from another.
        """
        self._fresh = False
        self.whole = self.whole or everything
        self.reread()

    def strayed(self) -> list[Tensor]:
        """
        The owned parameters that are not their masters, rounded.
        """
        return [p for p, master in self._masters.items() if not _same_bits(p, master.to(p.dtype))]

    def regroup(self) -> None:
        """
        Form the replica groups within the default group, which every rank does at once, and give
        everyone what the owners have: of 16 bits, what their masters come to.
        """
        if not self._fresh:
            self.refresh()
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
        for bucket in self._buckets[self.share]:
            bucket.fill()
        members = self._members()
        sent = [
            (
                bucket,
                dist.broadcast(bucket.flat, src=members[owner], group=self._group, async_op=True),
            )
            for owner, buckets in enumerate(self._buckets)
            for bucket in buckets
        ]
        for bucket, each in sent:
            each.wait()
            bucket.empty()
        self.whole = True

    def _members(self) -> tuple[int, ...]:
        """
        The replica group, in the order of the shares.
        """
        first = self.rank - self.share
        return self.ranks[first : first + self.shares]

    def clear(self) -> None:
        """
        Let go of the group.
        """
        self._group = None


# ---------------------------------------------------------------- dealing out


def _place(
    rank: int | None, world: int | None, group: dist.ProcessGroup | None
) -> tuple[int, tuple[int, ...]]:
    """
    The place of this rank among those that have the same parameters, and these.
    """
    if group is not None and rank is None and world is None:
        return dist.get_rank(group), tuple(dist.get_process_group_ranks(group))
    if group is None and rank is not None and world is not None:
        return rank, tuple(range(world))
    raise UsageError(
        "a ReplicaOptimizer is given the rank and the world of the session, or the group of those that "
        "have the same parameters"
    )


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


class _Bucket:
    """
    One stretch of memory for parameters of one owner, type and device. Those that are ordinary are
    moved into it: what is sent is sent from where it is used. Of a distributed one, whose memory is
    its framework's, this rank's part is copied.
    """

    def __init__(self, alike: list[Tensor]) -> None:
        own = [each.to_local() if isinstance(each, DTensor) else each for each in alike]
        whole = _ALIGNED // own[0].element_size()
        starts, end = [], 0
        for part in own:
            starts.append(end)
            end += -(-part.numel() // whole) * whole
        self.flat = torch.zeros(end, dtype=own[0].dtype, device=own[0].device)
        self._copied: list[tuple[Tensor, Tensor]] = []
        for parameter, part, start in zip(alike, own, starts, strict=True):
            room = _as(part, self.flat[start : start + part.numel()])
            if isinstance(parameter, DTensor):
                self._copied.append((room, part.detach()))
            else:
                room.copy_(part.detach())
                parameter.data = room

    def fill(self) -> None:
        """
        What the parameters are goes into it.
        """
        for room, part in self._copied:
            room.copy_(part)

    def empty(self) -> None:
        """
        What is in it goes into the parameters.
        """
        for room, part in self._copied:
            part.copy_(room)


def _as(part: Tensor, room: Tensor) -> Tensor:
    """
    The room in the form of what goes there, its order in memory too where it has no holes.
    """
    dense = any(
        part.is_contiguous(memory_format=order)
        for order in (torch.channels_last, torch.channels_last_3d)
        if part.dim() == (4 if order is torch.channels_last else 5)
    )
    return room.as_strided(part.shape, part.stride()) if dense else room.view(part.shape)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """
    Of 16-bit tensors; what is no number is the same as itself, too.
    """
    return torch.equal(one.detach().view(torch.int16), other.detach().view(torch.int16))


def set_groups(groups: Iterable[dict[str, Any]], told: Iterable[dict[str, Any]]) -> None:
    """
    What is told of each group of parameters goes into it, but for which they are.
    """
    for group, values in zip(groups, told, strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})


def _bucketed(
    parameters: Iterable[Tensor], owners: Mapping[Tensor, int], shares: int
) -> list[list[_Bucket]]:
    """
    One for each owner, type and device.
    """
    sorts: list[dict[tuple[torch.dtype, torch.device], list[Tensor]]] = [{} for _ in range(shares)]
    for parameter in parameters:
        alike = sorts[owners[parameter]]
        alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return [[_Bucket(alike) for alike in sort.values()] for sort in sorts]


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
