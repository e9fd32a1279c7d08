"""
The shards of this rank: parts of the state, each of which several ranks hold.

There is one shard for each optimizer. If the optimizer is distributed, the shard is this rank's
share of the optimizer. Its holders are this rank and the ranks that have the same share in the
other instances of the distributed optimizer. If the optimizer is not distributed, the holders are
all ranks that reduce their gradients together. One more shard has the state that belongs to no
optimizer. All ranks with the same part of the model hold this shard.

No shard contains the 16-bit parameters that are trained. tft computes these parameters by rounding
the 32-bit master weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from tft_pytorch.auxiliary_state import load
from tft_pytorch.backups import ShardInUse
from tft_pytorch.memory import Awaited, offered
from tft_pytorch.tensor_holders import named_after
from tft_pytorch.tensor_metadata import described, dtype_name, listed, read
from tft_pytorch.trees import Disassembly, Plain, expect, put_together
from torch import Tensor, nn

from tft.errors import OrderRefused
from tft.spi import Buffer, ShardPayload, pack
from tft_megatron.training import Training

_FORM = 1
"""The version of a shard's description. A description of another version is refused."""

_LASTING = ("weights.", "kept.")
"""Prefixes of the names of tensors that change only within update windows, so that a copy made
between two windows is exact: the weights of optimizers, and the optimizer state."""

_FIXED = ("weights.", "model.")
"""Prefixes of the names of tensors that exist from the beginning, with the same shape on all
holders of a shard. A received shard in which they differ belongs to another model, and is refused.
All other tensors exist only after an optimizer has created them."""

Tree = dict[str, Any]  # Any: optimizers and schedulers keep values of any type


class StateOwner(Protocol):
    """
    An object that owns a part of the training state, and can return or replace this part.
    """

    def content(self) -> Tree:
        """Return the present state. Its tensors are those in use, not copies."""

    def settle(self, content: Tree) -> None:
        """Replace the state by `content`, which has the form that the method `content` returns. The
        memory of the tensors in use already has the new values."""


class Share:
    """
    The part of a Megatron optimizer on this rank: the weights that the optimizer changes, and the
    optimizer state of each weight.
    """

    # Any: an optimizer of Megatron gives mypy no types
    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def content(self) -> Tree:
        """
        Return the weights and their optimizer state, by parameter group, in the order of the
        groups.
        """
        inner = self._optimizer.optimizer
        groups = [] if inner is None else [list(group["params"]) for group in inner.param_groups]
        return {
            "weights": groups,
            "kept": [[dict(inner.state.get(p, {})) for p in group] for group in groups],
        }

    def settle(self, content: Tree) -> None:
        """
        Give the optimizer the state in `content`, whose tensors may be new objects. The weights are
        not changed here: their memory already has the received values.
        """
        inner = self._optimizer.optimizer
        for group, kept in zip(self.content()["weights"], content["kept"], strict=True):
            for weight, values in zip(group, kept, strict=True):
                if values:
                    inner.state[weight] = values
                else:
                    inner.state.pop(weight, None)


class Rest:
    """
    The state that belongs to no optimizer: frozen parameters, buffers, the settings of the
    parameter groups, and the loss scale. The state also has the scheduler and the objects that the
    script has passed as `others`.
    """

    def __init__(self, training: Training) -> None:
        self._training = training

    def content(self) -> Tree:
        """
        Return the state that belongs to no optimizer.
        """
        training = self._training
        return {
            "model": {
                f"{number}.{name}": tensor
                for number, chunk in enumerate(training.chunks)
                for name, tensor in _unowned(chunk)
            },
            "settings": [
                [{k: v for k, v in group.items() if k != "params"} for group in each.param_groups]
                for each in training.optimizers
            ],
            "scalers": [scaler.state_dict() for scaler in training.scalers],
            "scheduler": None if training.scheduler is None else training.scheduler.state_dict(),
            "others": {name: other.state_dict() for name, other in training.others.items()},
        }

    def settle(self, content: Tree) -> None:
        """
        Put `content` into the parameter groups, the loss scale, the scheduler and the objects given
        as `others`.
        """
        training = self._training
        for each, groups in zip(training.optimizers, content["settings"], strict=True):
            for group, settings in zip(each.param_groups, groups, strict=True):
                group.update(settings)
        for scaler, kept in zip(training.scalers, content["scalers"], strict=True):
            scaler.load_state_dict(kept)
        if training.scheduler is not None:
            # set the attributes directly, because `load_state_dict` would add the loaded step count
            # to the present step count
            vars(training.scheduler).update(content["scheduler"])
        for name, other in training.others.items():
            load(other, content["others"][name])


def _unowned(chunk: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in chunk.named_parameters():
        if not parameter.requires_grad:
            yield name, parameter
    yield from chunk.named_buffers()


class Shard:
    """
    One shard of this rank. Reads the content of the shard, and replaces it by received content.
    """

    def __init__(self, name: str, holders: tuple[int, ...], part: StateOwner) -> None:
        self.name = name
        self.holders = holders
        self.part = part
        self._awaited = Awaited()

    def taken_apart(self) -> tuple[Plain, dict[str, Tensor]]:
        """
        Return the present state of the shard: its values that are no tensors, and its tensors by
        name.

        Raises `UsageError` for state that cannot be moved to another rank.
        """
        kept = Disassembly()
        content = self.part.content()
        plain: dict[str, Plain] = {key: kept.take_apart(content[key], key) for key in content}
        return plain, kept.tensors

    def give(self) -> ShardPayload:
        """
        Return the shard in the form in which it is sent to another rank. Where possible the buffers
        in the result are the memory of the tensors, else copies.
        """
        meta, tensors = self._described()
        return ShardPayload(
            meta=meta, buffers=tuple(offered(name, tensor) for name, tensor in tensors.items())
        )

    def in_use(self) -> ShardInUse:
        """
        Return the shard as it is now, so that the caller can copy it in memory. The field `lasting`
        of the result names the tensors that do not change before the next update window. Module
        buffers may change earlier.
        """
        meta, tensors = self._described()
        lasting = {
            name
            for name, tensor in tensors.items()
            if name.startswith(_LASTING) or isinstance(tensor, nn.Parameter)
        }
        return ShardInUse(meta=meta, tensors=tensors, lasting=lasting)

    def _described(self) -> tuple[bytes, dict[str, Tensor]]:
        plain, tensors = self.taken_apart()
        return pack({"form": _FORM, "tensors": listed(tensors), "content": plain}), tensors

    def room(self, meta: bytes) -> dict[str, Tensor]:
        """
        Return the tensors to be filled, by name, in the order in which the sending rank sends them.
        Each is this rank's tensor in use if its type and shape fit, otherwise a new tensor. `meta`
        is the description of the sent shard.

        Raises `OrderRefused` if the sent shard belongs to another model, or to another part of this
        model.
        """
        told = read(meta, _FORM)
        _, here = self.taken_apart()
        self._refuse_another(told, here)
        found = {}
        for name, dtype, shape, device in described(told):
            # Use this rank's existing tensor if its type and shape fit, because the model refers to
            # this tensor. The kind of device need not match: `device` is the kind of the sending
            # rank.
            known = here.get(name)
            if known is None or (known.dtype, list(known.shape)) != (dtype, shape):
                known = torch.empty(shape, dtype=dtype, device=device)
            found[name] = known
        return found

    def take(self, meta: bytes) -> Sequence[Buffer]:
        """
        Reserve memory for the shard that `meta` describes. Return the memory as writable buffers.
        """
        return self._awaited.make(meta, self.room(meta))

    def taken(self, meta: bytes) -> None:
        """
        Put the received shard, which `meta` describes, into use. This method is called when all
        buffers that `take` returned have been filled.
        """
        self.settle(meta, self._awaited.filled(self.name, meta))

    def settle(self, meta: bytes, tensors: Mapping[str, Tensor]) -> None:
        """
        Replace the state of this shard by `tensors`, and by the values in the description `meta`.
        """
        plain = expect(read(meta, _FORM)["content"], dict, "the content of a shard")
        self.part.settle({key: put_together(plain[key], tensors) for key in plain})

    def _refuse_another(self, told: Mapping[str, Any], here: Mapping[str, Tensor]) -> None:
        theirs = {
            name: f"{dtype_name(dtype)} {shape}"
            for name, dtype, shape, _ in described(told)
            if name.startswith(_FIXED)
        }
        ours = {
            name: f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
            for name, tensor in here.items()
            if name.startswith(_FIXED)
        }
        for name in sorted(theirs.keys() | ours.keys()):
            if theirs.get(name) != ours.get(name):
                raise OrderRefused(
                    f"the received shard {self.name!r} belongs to another model, or to another "
                    f"part of the model: the tensor {name} is {theirs.get(name, 'absent')} in the "
                    f"received shard, and {ours.get(name, 'absent')} on this rank"
                )


def shards_of(training: Training, rank: int) -> list[Shard]:
    """
    Return the shards of this rank. Their holders are read from the present process groups.
    Pretended groups, which send nothing, are enough.
    """
    from megatron.core import parallel_state as state

    alike = _ranks(state.get_data_parallel_group(with_context_parallel=True))
    shards = [Shard(f"rest.{named_after(alike)}", alike, Rest(training))]
    for number, optimizer in enumerate(training.optimizers):
        holders = _holders(training, optimizer, rank)
        shards.append(Shard(f"optimizer{number}.{named_after(holders)}", holders, Share(optimizer)))
    return shards


# Any: `optimizer` is an object of Megatron, which gives mypy no types
def _holders(training: Training, optimizer: Any, rank: int) -> tuple[int, ...]:
    """
    Return the ranks that hold the same part of the state of `optimizer` as this rank. This rank is
    among them.
    """
    from megatron.core import parallel_state as state

    if training.distributed:
        # do not ask whether `optimizer` is that of the experts: Megatron uses the same process
        # group for both optimizers
        several = training.instances > 1
        return (
            _ranks(state.get_inter_distributed_optimizer_instance_group()) if several else (rank,)
        )
    if training.of_experts(optimizer):
        return _ranks(state.get_expert_data_parallel_group())
    return _ranks(state.get_data_parallel_group(with_context_parallel=True))


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))
