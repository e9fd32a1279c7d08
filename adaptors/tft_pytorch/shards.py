"""
Divides the training state into shards, if the script made the model and the other objects itself.
Then every rank has the whole model.

This module decides which shards exist and which tensor is in which shard. This module also reads
the content of a shard from the user's objects, and puts content into these objects.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tft.errors import OrderRefused
from tft.spi import pack
from tft_pytorch.auxiliary_state import load
from tft_pytorch.buckets import Wrappers
from tft_pytorch.extra import SUFFIX
from tft_pytorch.names import (
    named_buffers,
    named_parameters,
    named_tensors,
    own_names,
    parameter_names,
)
from tft_pytorch.optimizer_shards import OptimizerPart, Settings, Share, Whole
from tft_pytorch.replicas import ReplicaOptimizer
from tft_pytorch.shard_content import ShardContent
from tft_pytorch.tensor_holders import DENSE
from tft_pytorch.tensor_metadata import described, dtype_name, read
from tft_pytorch.trees import Disassembly, expect, put_together

_FORM = 3
"""The version of the format of a shard's description. A description of another version is
refused."""


class Shard:
    """
    One shard of the training state of this rank. The content of the shard is in the user's own
    objects.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        part: OptimizerPart,
        *,
        holders: tuple[int, ...] = (),
        belongs: Callable[[str], bool] = lambda name: True,
        others: Mapping[str, Any] = MappingProxyType({}),  # Any: the objects may have any type
        wrappers: Wrappers | None = None,
    ) -> None:
        """
        `holders` are the ranks that hold a copy of the shard. An empty tuple means all ranks.
        `belongs` takes the name (`model.…`) of a parameter or buffer, and returns whether that
        parameter or buffer is in this shard. `others` are objects with `state_dict` and
        `load_state_dict`, such as a scheduler, by name.
        """
        self.name = name
        self.holders = holders
        self.model = model
        self.part = part
        self.others = others
        self._belongs = belongs
        self._wrappers = wrappers

    # ------------------------------------------------------------ the content of the shards

    def content(self) -> ShardContent:
        """
        Return the present content of the shard. Raises `UsageError` for state that cannot be moved
        to another rank.
        """
        kept = Disassembly()
        optimizer = self.part.state()
        tree = kept.take_apart(optimizer, "optim")
        other_trees = {
            name: kept.take_apart(other.state_dict(), name) for name, other in self.others.items()
        }
        return ShardContent(
            form=_FORM,
            tensors=self._weights() | kept.tensors,
            optimizer=tree,
            others=other_trees,
            layouts=self._layouts(),
            groups=_group_members(optimizer),
        )

    def written(self) -> dict[str, Any]:  # Any: values of any type
        """
        Return the present content of the shard in the form that plain torch expects in a
        checkpoint.
        """
        content: dict[str, Any] = {"model": self._entries(), "optim": self.part.state()}
        if self.part.masters():
            content["master"] = dict(self.part.masters())
        return content | {name: other.state_dict() for name, other in self.others.items()}

    def _entries(self) -> dict[str, Any]:  # Any: tensors, and extra states of any type
        """
        Return the entries of the model that a checkpoint has for this shard: parameters, buffers
        and extra states.

        The result serves plain torch and this adaptor. Plain torch expects a tied parameter under
        each of its names, and extra states. This adaptor needs a tied parameter under one name
        only, and also the buffers that are not persistent. This adaptor keeps extra states in the
        rank-local state.
        """
        own = {name.removeprefix("model."): tensor for name, tensor in self._named().items()}
        parts = (named_parameters(self.model), named_buffers(self.model))
        known = {id(tensor) for named in parts for name, tensor in named.items() if name in own}
        called = own_names(self.model)
        asked = self.model.state_dict(keep_vars=True)
        extra = {
            called(name): state
            for name, state in asked.items()
            if name.rpartition(".")[2] == SUFFIX and self._belongs(f"model.{called(name)}")
        }
        tensors = {called(name): t.detach() for name, t in asked.items() if id(t) in known}
        return own | tensors | extra

    def _named(self) -> dict[str, Tensor]:
        """
        Return the parameters and buffers of the model that belong to this shard, by name.
        """
        return {
            name: tensor
            for name, tensor in named_tensors(self.model).items()
            if self._belongs(name)
        }

    def _weights(self) -> dict[str, Tensor]:
        masters = {f"model.{name}": master for name, master in self.part.masters().items()}
        return {
            name.replace("model.", "master.", 1) if name in masters else name: masters.get(name, t)
            for name, t in self._named().items()
        }

    # ------------------------------------------------------------ writing into the objects

    def room(self, meta: bytes) -> dict[str, Tensor]:
        """
        Return the tensors into which the content of a shard is to be copied, by name. The tensors
        are in the order in which the sending rank sends them.

        This method changes no state yet. Raises `OrderRefused` if the shard with the packed
        description `meta` does not belong to this model.
        """
        told = read(meta, _FORM)
        here = self.content()
        self._refuse_another_model(told, here)
        named = named_parameters(self.model)
        tensors = described(told)
        theirs = {name.partition(".")[2]: device for name, _, _, device in tensors if _weight(name)}
        room: dict[str, Tensor] = {}
        for name, dtype, shape, device in tensors:
            # Use this rank's existing tensor as the destination, because the model keeps using that
            # tensor. The sending rank may have its tensor on another kind of device.
            known = here.tensors.get(name)
            if known is None or not _same(known, dtype, shape):
                owner = named.get(_owner(name))
                if owner is not None and (device, shape) == (
                    theirs.get(_owner(name)),
                    list(owner.shape),
                ):
                    # The sending rank has this optimizer state on the same kind of device as the
                    # parameter of the state. So use the device of the parameter on this rank, too.
                    device = owner.device.type
                known = _new(dtype, shape, device, owner)
            room[name] = known
        return room

    def settle(self, meta: bytes, tensors: Mapping[str, Tensor]) -> None:
        """
        Put `tensors`, and the values in the packed description `meta` of the shard, into the
        optimizer, the wrappers and the user's other objects.
        """
        told = read(meta, _FORM)
        self.part.settle(
            expect(put_together(told["optimizer"], tensors), dict, "the optimizer's state")
        )
        for name, other in self.others.items():
            load(other, put_together(told["others"][name], tensors))
        if self._wrappers is not None:
            self._wrappers.restore(told["layouts"])

    # ------------------------------------------------------------ checkpoints of the script

    def beside(self) -> bytes:
        """
        Return, packed, the order in which DDP reduces the gradients. This order belongs to the
        shard, but is not in the user's objects. So a script that saves these objects itself cannot
        save the order.
        """
        return pack({"form": _FORM, "layouts": self._layouts()})

    def replaced(self, beside: bytes) -> None:
        """
        Note that the script has loaded new content of this shard into the user's objects. `beside`
        is the result of the method `beside` at the time when the script saved that content.
        """
        told = read(beside, _FORM)
        if self._wrappers is not None:
            self._wrappers.restore(told["layouts"])

    def _layouts(self) -> object:
        return None if self._wrappers is None else self._wrappers.layouts()

    def _refuse_another_model(self, told: dict[str, Any], here: ShardContent) -> None:
        model = here.named("model") | here.named("master")
        theirs = {
            name: f"{dtype_name(dtype)} {shape}"
            for name, dtype, shape, _ in described(told)
            if _weight(name)
        }
        ours = {name: f"{dtype_name(t.dtype)} {list(t.shape)}" for name, t in model.items()}
        for name in theirs.keys() | ours.keys():
            if theirs.get(name) != ours.get(name):
                raise OrderRefused(
                    f"the received shard {self.name!r} belongs to another model: the tensor {name} "
                    f"is {theirs.get(name, 'absent')} in the shard, and {ours.get(name, 'absent')} "
                    "on this rank"
                )
        groups, own = told["groups"], here.groups or []
        if groups != own:
            raise OrderRefused(
                f"the optimizer of the received shard {self.name!r} has parameter groups of "
                f"{[len(group) for group in groups]} parameters, but this rank has "
                f"{[len(group) for group in own]}, or other parameters in them"
            )
        differing = sorted(told["others"].keys() ^ self.others.keys())
        if differing:
            raise OrderRefused(
                f"the received shard {self.name!r} does not fit this rank: either only the sending "
                f"rank or only this rank has the object {differing[0]}"
            )


def shards_of(
    model: nn.Module,
    optimizer: Optimizer,
    others: Mapping[str, Any],  # Any: the objects may have any type
    wrappers: Wrappers,
) -> list[Shard]:
    """
    Return the shards of this rank. Without a `ReplicaOptimizer` there is only the shard `dense`,
    which every rank holds.

    With a `ReplicaOptimizer` there is a second shard `optimizer.N`, where `N` is the number of this
    rank's share. The second shard has the parameters that this rank owns (updates), and their
    optimizer state. The shard `dense` then has only the state that belongs to no share.
    """
    if not isinstance(optimizer, ReplicaOptimizer):
        whole = Whole(model, optimizer)
        return [Shard(DENSE, model, whole, others=others, wrappers=wrappers)]
    names = {p: f"model.{name}" for p, name in parameter_names(model).items()}
    dealt = frozenset(names[p] for group in optimizer.param_groups for p in group["params"])
    owned = frozenset(names[p] for p in optimizer.owned)
    return [
        Shard(
            DENSE,
            model,
            Settings(model, optimizer),
            belongs=lambda name: name not in dealt,
            others=others,
            wrappers=wrappers,
        ),
        Shard(
            f"optimizer.{optimizer.share}",
            model,
            Share(model, optimizer),
            holders=optimizer.holders(),
            belongs=owned.__contains__,
        ),
    ]


# ---------------------------------------------------------------- descriptions of shards


def _group_members(optimizer: Mapping[str, Any]) -> list[list[str]]:  # Any: values of any type
    return [group["params"] for group in optimizer["param_groups"]]


def _weight(name: str) -> bool:
    return name.startswith(("model.", "master."))


def _owner(name: str) -> str:
    """
    Return the parameter name in `name`, which has the form `optim.state.PARAMETER.KEY`.
    """
    return name.removeprefix("optim.state.").rpartition(".")[0]


def _same(tensor: Tensor, dtype: torch.dtype, shape: list[int]) -> bool:
    return tensor.dtype == dtype and list(tensor.shape) == shape


def _new(dtype: torch.dtype, shape: list[int], device: str, owner: Tensor | None) -> Tensor:
    """
    Return a new tensor for optimizer state that does not exist on this rank yet.

    `device` is a kind of device. `owner` is the parameter to which the state belongs. If `owner` is
    on a device of this kind, the new tensor is on the same device. If the tensor also has the shape
    of `owner`, it has the memory layout of `owner` too.
    """
    if owner is not None and owner.device.type == device:
        if list(owner.shape) == shape:
            return torch.empty_like(owner, dtype=dtype, requires_grad=False)
        return torch.empty(shape, dtype=dtype, device=owner.device)
    return torch.empty(shape, dtype=dtype, device=device)
