"""
A shard: a piece of the state of which several ranks have a copy, such as parameters, module
buffers, optimizer and scheduler.

This module names, describes, gives, takes and digests shards. `shards.py` decides which shards
there are. Names are those of torch's own distributed checkpoints (`model.…`, `optim.state.…`),
because a shard is saved under them. The master weight of a 16-bit parameter is named `master.…`.
The master is moved in place of the parameter that is rounded from it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from tft.errors import OrderRefused
from tft.spi import Buffer, ShardPayload, pack
from tft_pytorch.buckets import Wrappers
from tft_pytorch.memory import Awaited, readable
from tft_pytorch.names import named_buffers, named_parameters
from tft_pytorch.optimizer_shards import Part
from tft_pytorch.tensor_metadata import described, dtype_name, listed, read
from tft_pytorch.trees import Disassembly, Plain, expect, put_together

_FORM = 3
"""The version of a shard's description. A description of another version is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """
    The complete content of one shard at one moment.
    """

    model: dict[str, Tensor]
    kept: dict[str, Tensor]
    """The tensors that the optimizer and the others keep, by name."""
    optimizer_tree: Plain
    other_trees: dict[str, Plain]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """
        All tensors by name, in the order in which they are moved.
        """
        return self.model | self.kept

    def of(self, prefix: str) -> dict[str, Tensor]:
        """
        Return the tensors of `kept` whose names begin with `prefix`.
        """
        return {name: tensor for name, tensor in self.kept.items() if name.startswith(prefix)}


class Shard:
    """
    One shard of this rank.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        part: Part,
        *,
        holders: tuple[int, ...] = (),
        belongs: Callable[[str], bool] = lambda name: True,
        others: Mapping[str, Any] = MappingProxyType({}),  # Any: each has its own type
        wrappers: Wrappers | None = None,
    ) -> None:
        """
        `holders`: the ranks that hold a copy; empty if all ranks do. `belongs` returns whether the
        parameter or buffer with a name `model.…` is in this shard. `others`: objects with
        `state_dict` and `load_state_dict`, such as a scheduler, by name.
        """
        self.name = name
        self.holders = holders
        self.model = model
        self.part = part
        self.others = others
        self._belongs = belongs
        self._wrappers = wrappers
        self._awaited = Awaited()

    # ------------------------------------------------------------ what there is

    def inventory(self) -> Inventory:
        """
        Return the present content. Raises `UsageError` for state that cannot be moved.
        """
        kept = Disassembly()
        optimizer_tree = kept.take_apart(self.part.state(), "optim")
        other_trees = {
            name: kept.take_apart(other.state_dict(), name) for name, other in self.others.items()
        }
        return Inventory(
            model=self._weights(),
            kept=kept.tensors,
            optimizer_tree=optimizer_tree,
            other_trees=other_trees,
        )

    def has(self, name: str) -> bool:
        """
        Return whether the parameter or buffer `name` (`model.…`) belongs to this shard.
        """
        return self._belongs(name)

    def named(self) -> dict[str, Tensor]:
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
            for name, t in self.named().items()
        }

    def describe(self, inventory: Inventory) -> bytes:
        """
        Return the description of the shard: all values that are not tensors, and for each tensor
        the data that is needed to make room for it.
        """
        told: dict[str, object] = {
            "form": _FORM,
            "tensors": listed(inventory.tensors),
            "optimizer": inventory.optimizer_tree,
            "others": dict(inventory.other_trees),
            "groups": self._group_members(),
            "layouts": None if self._wrappers is None else self._wrappers.layouts(),
        }
        return pack(told)

    # ------------------------------------------------------------ moving it

    def give(self) -> ShardPayload:
        """
        Return the shard in the form in which it is moved. The buffers are the tensors' own memory
        where possible, else copies.
        """
        found = self.inventory()
        return ShardPayload(
            meta=self.describe(found),
            buffers=tuple(readable(name, tensor) for name, tensor in found.tensors.items()),
        )

    def take(self, meta: bytes) -> Sequence[Buffer]:
        """
        Make room for the shard that `meta` describes. Return the writable buffers.

        They belong to this process's own tensors where these fit, else to new tensors, such as
        those for optimizer state that this process does not have yet.
        """
        return self._awaited.make(meta, self.room(meta))

    def taken(self, meta: bytes) -> None:
        """
        Use the content of the buffers, which have all been filled.
        """
        self.settle(meta, self._awaited.filled(self.name, meta))

    def room(self, meta: bytes) -> dict[str, Tensor]:
        """
        Return the tensors to be filled, by name, in the order of the rank that gives the shard.

        Nothing is changed yet. Raises `OrderRefused` if the shard is not one of this model.
        """
        told = read(meta, _FORM)
        here = self.inventory()
        self._refuse_another_model(told, here.model)
        named = named_parameters(self.model)
        room: dict[str, Tensor] = {}
        for name, dtype, shape, device in described(told):
            known = here.tensors.get(name)
            if known is None or not _same(known, dtype, shape) or known.device.type != device:
                known = _new(dtype, shape, device, named.get(_owner(name)))
            room[name] = known
        return room

    def settle(self, meta: bytes, tensors: Mapping[str, Tensor]) -> None:
        """
        Make the optimizer, the wrappers and the others use `tensors` and the other values in
        `meta`.
        """
        told = read(meta, _FORM)
        self.part.settle(expect(put_together(told["optimizer"], tensors), dict, "its optimizer"))
        for name, other in self.others.items():
            other.load_state_dict(put_together(told["others"][name], tensors))
        if self._wrappers is not None:
            self._wrappers.restore(told["layouts"])

    # ------------------------------------------------------------ what others write

    def beside(self) -> bytes:
        """
        Return, as bytes, the state that belongs to the shard but is not in the user's objects: the
        order of gradient reduction.
        """
        layouts = None if self._wrappers is None else self._wrappers.layouts()
        return pack({"form": _FORM, "layouts": layouts})

    def replaced(self, beside: bytes) -> None:
        """
        Take note that the user's objects have other content now. `beside` was stored next to it.
        """
        told = read(beside, _FORM)
        if self._wrappers is not None:
            self._wrappers.restore(told["layouts"])

    def _group_members(self) -> list[list[str]]:
        return [group["params"] for group in self.part.state()["param_groups"]]

    def _refuse_another_model(self, told: dict[str, Any], model: dict[str, Tensor]) -> None:
        theirs = {
            name: f"{dtype_name(dtype)} {shape}"
            for name, dtype, shape, _ in described(told)
            if name.startswith(("model.", "master."))
        }
        ours = {name: f"{dtype_name(t.dtype)} {list(t.shape)}" for name, t in model.items()}
        for name in theirs.keys() | ours.keys():
            if theirs.get(name) != ours.get(name):
                raise OrderRefused(
                    f"the shard {self.name!r} is of another model: {name} is "
                    f"{theirs.get(name, 'absent')} there and {ours.get(name, 'absent')} here"
                )
        groups, own = told["groups"], self._group_members()
        if groups != own:
            raise OrderRefused(
                f"the optimizer of the shard {self.name!r} has parameter groups of "
                f"{[len(group) for group in groups]} parameters, the one here of "
                f"{[len(group) for group in own]}, or others in them"
            )
        differing = sorted(told["others"].keys() ^ self.others.keys())
        if differing:
            raise OrderRefused(
                f"the shard {self.name!r} and this rank differ in having a {differing[0]}"
            )


# ---------------------------------------------------------------- names and descriptions


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """
    Return the parameters and all buffers of a model, by name (`model.…`).

    A tied parameter appears once. Buffers that `state_dict` leaves out are included.
    """
    return {
        f"model.{name}": tensor.detach()
        for named in (named_parameters(model), named_buffers(model))
        for name, tensor in named.items()
    }


def _owner(name: str) -> str:
    """
    Return the name of the parameter to which `optim.state.PARAMETER.KEY` belongs.
    """
    return name.removeprefix("optim.state.").rpartition(".")[0]


def _same(tensor: Tensor, dtype: torch.dtype, shape: list[int]) -> bool:
    return tensor.dtype == dtype and list(tensor.shape) == shape


def _new(dtype: torch.dtype, shape: list[int], device: str, owner: Tensor | None) -> Tensor:
    """
    Return a new tensor for optimizer state that does not exist here yet.

    The tensor is on the device of its parameter `owner` if that is of the kind `device`. If it also
    has the shape of the parameter, it has the same memory layout.
    """
    if owner is not None and owner.device.type == device:
        if list(owner.shape) == shape:
            return torch.empty_like(owner, dtype=dtype, requires_grad=False)
        return torch.empty(shape, dtype=dtype, device=owner.device)
    return torch.empty(shape, dtype=dtype, device=device)


def digest(tree: Plain, tensors: Mapping[str, Tensor]) -> str:
    """
    Return the digest of plain values and tensors, with the tensors' names, types and shapes
    (XXH3-128, hexadecimal).
    """
    sum_ = xxhash.xxh3_128(pack(tree))
    for name, tensor in tensors.items():
        sum_.update(pack([name, dtype_name(tensor.dtype), list(tensor.shape)]))
        sum_.update(readable(name, tensor).view)
    return sum_.hexdigest()
