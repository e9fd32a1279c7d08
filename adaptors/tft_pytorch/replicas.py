"""
An optimizer whose state is cut into shards. Several ranks hold each shard, so the loss of one rank
loses no state. The shards take less memory than a whole copy of the state on every rank.

The idea comes from the replica optimizer of MindSpeed, a training library. The data-parallel group
of `d` ranks is cut into `copies` replica groups of `k = d / copies` consecutive ranks. Each replica
group shards the optimizer state as ZeRO stage 1 does (https://arxiv.org/abs/1910.02054). All ranks
have the same reduced gradients. So the copies of a shard stay equal, bit for bit, and nothing is
sent to keep them equal.

Each parameter belongs as a whole to one rank, as in torch's own `ZeroRedundancyOptimizer`. So every
optimizer can be used that updates each parameter independently of the other parameters. The results
have the same bits as without shards.
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
"""Types of parameters that are updated in float32, through a master copy of the weights."""
_ALIGNED = 64
"""The alignment in bytes of each parameter in its bucket, which is one flat tensor for several
parameters."""


class ReplicaOptimizer(Optimizer):
    """
    Runs `optimizer` over this rank's share of the parameters. After each step the ranks of the
    replica group exchange the parameters that they have updated.

    `param_groups` has all parameters, so that schedulers, gradient clipping and GradScaler work as
    usual. `state` has the optimizer state of this rank's share only.

    16-bit parameters have masters: 32-bit copies, which are part of the shard. With Adam, `d` ranks
    and 16-bit gradients, a rank needs `4 + 16 * copies / d` bytes for each parameter of the model.
    With 32-bit gradients (`grad_dtype` of a parameter), which need no 32-bit copy, a rank needs
    `6 + 12 * copies / d` bytes.

    The parameters are moved into buckets, which are flat tensors. There is one bucket for each
    owner (the rank that updates the parameters), type and device. Afterwards the parameters are
    views of the buckets. Distributed parameters stay in their own memory, and are copied into the
    buckets for each exchange.
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
        **defaults: Any,  # Any: arguments of the optimizer
    ) -> None:
        """
        `optimizer` is the class of the optimizer, `defaults` are its arguments.

        Pass the session's `rank` and `world`. For `session.adopt(make=...)` pass instead `group`,
        the group of the ranks that have the same parameters. `copies` is the number of ranks that
        hold each shard. Raises `UsageError` if the ranks cannot be cut into `copies` groups of
        equal size.
        """
        self._ready = False
        self.made_over_group = group is not None
        self.rank, self.ranks = _place(rank, world, group)
        self.world = len(self.ranks)
        self.copies = copies
        self.share, self.shares = _cut(self.rank, self.world, copies)
        whole = optimizer(params, **defaults)
        if isinstance(whole, torch.optim.LBFGS):
            raise UsageError(
                "a ReplicaOptimizer divides the update of the parameters among the ranks, which is "
                "not possible with LBFGS, because LBFGS needs all parameters at once: use another "
                "optimizer"
            )
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
        # This attribute is named `optim` as in ZeroRedundancyOptimizer, because other code looks
        # for the inner optimizer under this name.
        self.optim = optimizer(mine, **defaults)
        self.state = self.optim.state
        self._group: dist.ProcessGroup | None = None
        if group is not None and self.shares > 1:  # otherwise the method `regroup` forms the group
            self._group = dist.new_group(self._members(), use_local_synchronization=True)
        self._fresh = True
        self.whole = self.shares == 1
        """True if all parameters on this rank have the values of the same step: the parameters that
        other ranks update, and those that this rank updates."""
        self.exchanging = False
        """True if an exchange has begun and `exchanged` was not called yet. On a device, an exchange
        that was aborted looks like a complete one."""
        self._ready = True

    # ---------------------------------------------------------------- the interface of an optimizer

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch overloads it
        """
        Update the parameters of this rank's share. The method `share_out` sends the updated
        parameters to the other ranks when the update window closes.

        Raises `UsageError` for a closure, because a closure would start all-reduces with other
        ranks inside the update window.
        """
        if closure is not None:
            raise UsageError(
                "a ReplicaOptimizer takes no closure: compute the loss and its gradients before "
                "the update window opens"
            )
        self._fresh = False
        self.whole, self.exchanging = self.shares == 1, False
        self.hand_settings_down()
        for parameter, master in self._masters.items():
            _hand_down(parameter, master)
        self.optim.step()
        for parameter, master in self._masters.items():
            _give_back(parameter, master)
        # some optimizers change values in a parameter group, such as a step counter, so copy the
        # groups back
        set_groups(self.param_groups, self.optim.param_groups)
        self.refresh()

    def state_dict(self) -> dict[str, Any]:  # Any: torch declares this return type
        """
        Raise `UsageError`, because this rank has only its share of the state.
        """
        raise UsageError(
            "a ReplicaOptimizer has only this rank's share of the state, so do not call its "
            "state_dict(): tft saves all shares as one checkpoint, which plain torch can read"
        )

    # Any: torch's class Optimizer declares this type
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """
        Load this rank's share of the optimizer state `state_dict`, which must be the `state_dict`
        of an ordinary optimizer with the state of all parameters.

        Raises `UsageError` if the parameter groups of the state have other numbers of parameters
        than those of this optimizer.
        """
        every = [p for group in self.param_groups for p in group["params"]]
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        there = [len(group["params"]) for group in state_dict["param_groups"]]
        here = [len(group["params"]) for group in self.param_groups]
        if there != here:
            raise UsageError(
                f"the parameter groups of the state have {there} parameters, but those of this "
                f"optimizer have {here}: the state belongs to another optimizer"
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

    # Any: torch's class Optimizer declares this type
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """
        Add a parameter group. A group can be added only during construction, because the parameters
        are divided among the ranks only once.

        Raises `UsageError` after construction.
        """
        if self._ready:
            raise UsageError(
                "a ReplicaOptimizer cannot take more parameters, because it distributes them when "
                "it is built: build it with all of them"
            )
        super().add_param_group(param_group)

    # ---------------------------------------------------------------- methods for the adaptor

    def holders(self) -> tuple[int, ...]:
        """
        Return the ranks that hold the same share of the optimizer state as this rank.
        """
        return self.ranks[self.share :: self.shares]

    def master(self, parameter: Tensor) -> Tensor | None:
        """
        Return the master (32-bit copy) of a parameter that this rank owns. Return None if the
        parameter has no master.
        """
        return self._masters.get(parameter)

    def kept_for(self, parameter: Tensor) -> Tensor:
        """
        Return the tensor that is the key in the optimizer's `state` for a parameter that this rank
        owns. The key is the master (32-bit copy) of the parameter if there is a master, else the
        parameter itself.
        """
        return self._masters.get(parameter, parameter)

    def refresh(self) -> None:
        """
        Set each 16-bit parameter that this rank owns to the rounded value of its master (32-bit
        copy).
        """
        with torch.no_grad():
            for parameter, master in self._masters.items():
                parameter.copy_(master)

    def taken(self) -> None:
        """
        Note that this rank's share now comes from another rank or a checkpoint. Set each 16-bit
        parameter that this rank owns to the rounded value of its master (32-bit copy).

        From now on the masters are never made from the parameters.
        """
        self._fresh = False
        self.whole, self.exchanging = self.shares == 1, False
        self.refresh()

    def hand_settings_down(self) -> None:
        """
        Copy the settings of `param_groups` to the groups of the inner optimizer `optim`. A scheduler
        has changed the former only. Call this before the script saves the state of `optim`.
        """
        set_groups(self.optim.param_groups, self.param_groups)

    def reread(self) -> None:
        """
        Use the state that was loaded into the inner optimizer `optim`: take the new state object of
        `optim`, and copy the settings of its parameter groups to `param_groups`.
        """
        self.state = self.optim.state
        set_groups(self.param_groups, self.optim.param_groups)

    def replaced(self, *, everything: bool) -> None:
        """
        Note that the script has loaded new content into the inner optimizer `optim` and into the
        masters (32-bit copies of parameters).

        Pass `everything=True` if the script has loaded the parameters that other ranks own, too.
        Masters and parameters keep the loaded content: the parameters are not rounded from the
        masters, and the masters are not copied from the parameters.
        """
        self._fresh = False
        self.whole = self.whole or everything
        self.reread()

    def strayed(self) -> list[Tensor]:
        """
        Return the 16-bit parameters that this rank owns and that differ from their rounded masters
        (32-bit copies).
        """
        return [p for p, master in self._masters.items() if not _same_bits(p, master.to(p.dtype))]

    def regroup(self) -> None:
        """
        Form the replica groups within the default group, and copy each parameter from its owner to
        the other ranks. All ranks call this method at the same time.

        The 16-bit parameters that a rank owns are first rounded from their masters (32-bit copies).
        Before the first step the parameters are not rounded: then the method `settled` copies the
        parameters into the masters.
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
        Copy the parameters into their masters (32-bit copies), if no step has been done yet. Called
        after the wrapper was built, because the constructor of a DDP makes the parameters equal on
        all ranks.
        """
        if self._fresh:
            with torch.no_grad():
                for parameter, master in self._masters.items():
                    master.copy_(parameter)

    def share_out(self) -> None:
        """
        Exchange parameters within the replica group, whose ranks together update all parameters.
        Each rank sends the parameters that it updates to the other ranks of the group.

        Does nothing if there is no replica group. Call `exchanged` when the exchange is complete.
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
        self.exchanging = True

    def exchanged(self) -> None:
        """
        Note that the last exchange is complete: the device has carried it out, and no collective in
        it was aborted.
        """
        self.whole, self.exchanging = self.whole or self.exchanging, False

    def _members(self) -> tuple[int, ...]:
        """
        Return the ranks of this rank's replica group, in the order of their shares. The ranks of a
        replica group exchange parameters.
        """
        first = self.rank - self.share
        return self.ranks[first : first + self.shares]

    def clear(self) -> None:
        """
        Drop the reference to the replica group, the process group in which parameters are
        exchanged.
        """
        self._group, self.exchanging = None, False


# ---------------------------------------------------------------- division among the ranks


def _place(
    rank: int | None, world: int | None, group: dist.ProcessGroup | None
) -> tuple[int, tuple[int, ...]]:
    """
    Return the index of this rank among the ranks that have the same parameters, and then these
    ranks.

    Raises `UsageError` if neither `group` alone nor both of `rank` and `world` are given.
    """
    if group is not None and rank is None and world is None:
        return dist.get_rank(group), tuple(dist.get_process_group_ranks(group))
    if group is None and rank is not None and world is not None:
        return rank, tuple(range(world))
    raise UsageError(
        "a ReplicaOptimizer needs the rank and the world of the session, or the group of the ranks "
        "that have the same parameters"
    )


def _cut(rank: int, world: int, copies: int) -> tuple[int, int]:
    """
    Return the number of this rank's share of the optimizer state, and how many shares there are.

    Raises `UsageError` if `copies` is less than 2 or does not divide `world`.
    """
    if copies < 2:
        raise UsageError(
            f"copies={copies} means that only one rank holds each share of the optimizer state, "
            "which would be lost with this rank: give the ReplicaOptimizer at least copies=2"
        )
    if world % copies:
        raise UsageError(
            f"{world} ranks cannot be cut into {copies} replica groups of equal size: give the "
            "ReplicaOptimizer a value of copies that divides the number of ranks"
        )
    shares = world // copies
    return rank % shares, shares


def _dealt(parameters: Iterable[Tensor], shares: int) -> Mapping[Tensor, int]:
    """
    Assign each parameter to a share. Return a dict from each parameter to the number of its share.

    The parameters are assigned from the largest to the smallest. Each parameter goes to the share
    that has the fewest elements so far.
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
    One contiguous piece of memory for the parameters of one owner (the rank that updates them),
    type and device.

    Ordinary parameters are moved into the bucket, so that they can be sent without a copy. A
    distributed parameter cannot be moved, because a framework such as FSDP manages its memory. So
    this rank's part of such a parameter is copied into the bucket.
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
        Copy this rank's parts of the distributed parameters into the bucket, before an exchange.
        """
        for room, part in self._copied:
            room.copy_(part)

    def empty(self) -> None:
        """
        Copy the content of the bucket into the distributed parameters, after an exchange.
        """
        for room, part in self._copied:
            part.copy_(room)


def _as(part: Tensor, room: Tensor) -> Tensor:
    """
    Return a view of the flat buffer `room` that has the shape of the tensor `part`. If `part` is
    dense in a channels-last memory format, the view has the strides of `part` too.
    """
    dense = any(
        part.is_contiguous(memory_format=order)
        for order in (torch.channels_last, torch.channels_last_3d)
        if part.dim() == (4 if order is torch.channels_last else 5)
    )
    return room.as_strided(part.shape, part.stride()) if dense else room.view(part.shape)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """
    Return whether two 16-bit tensors have the same bits. Unlike with `==`, a NaN is equal to a NaN
    with the same bits.
    """
    return torch.equal(one.detach().view(torch.int16), other.detach().view(torch.int16))


def set_groups(groups: Iterable[dict[str, Any]], told: Iterable[dict[str, Any]]) -> None:
    """
    Copy the settings of each parameter group in `told` into the corresponding group in `groups`. Do
    not copy the entry `params`, the list of parameters.
    """
    for group, values in zip(groups, told, strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})


def _bucketed(
    parameters: Iterable[Tensor], owners: Mapping[Tensor, int], shares: int
) -> list[list[_Bucket]]:
    """
    Put the parameters into buckets, one bucket for each owner, type and device. Return a list with
    the buckets of each owner, at the index of the owner. `owners` has the index of each parameter's
    owner.
    """
    sorts: list[dict[tuple[torch.dtype, torch.device], list[Tensor]]] = [{} for _ in range(shares)]
    for parameter in parameters:
        alike = sorts[owners[parameter]]
        alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return [[_Bucket(alike) for alike in sort.values()] for sort in sorts]


def _hand_down(parameter: Tensor, master: Tensor) -> None:
    """
    Give a master (the 32-bit copy of a parameter) the gradient of its parameter, converted to the
    master's type.

    If the gradient already has that type, the master gets the same tensor, not a copy.
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
    Drop the gradient of a master (32-bit copy) if this gradient is the same tensor as the gradient
    of the parameter.

    Otherwise this tensor would stay in memory while the gradient of the next step is computed.
    """
    if parameter.grad is not None and parameter.grad.dtype == master.dtype:
        master.grad = None
