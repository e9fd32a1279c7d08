"""
Collects the state of this rank in the form in which megatron-core writes it to a checkpoint. Each
part of the state has objects and tensors. A tensor on this rank may be a piece of a larger tensor,
so each tensor has its position in the whole tensor.

This module sends nothing to other ranks. But megatron-core reads ranks and sizes from its process
groups, so the groups must exist. Pretended groups, which send nothing, are enough.

The optimizer state is written in megatron-core's form `dp_reshardable`, the only form that needs no
collective. In this form, each rank of the distributed optimizer writes a contiguous piece of every
gradient bucket. A rank writes the model parameters that belong to this piece. It computes these
parameters from its own master weights. The parameters in the model itself are up to date only after
the ranks have gathered them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from tft.errors import UsageError
from tft_megatron.generators import ModelPart

FORM = {"distrib_optim_sharding_type": "dp_reshardable"}
"""The argument `metadata` of `sharded_state_dict`, a method of Megatron's optimizers. It selects
the form in which optimizer state is written and read."""

REST = "rest"
"""The name of the part of the state that belongs to no optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """
    A tensor, or a piece of a tensor, with its position in the checkpoint.
    """

    key: str
    whole: tuple[int, ...]
    """The shape of the whole tensor that has this key."""
    at: tuple[int, ...]
    """The offset of this piece in the whole tensor."""
    tensor: Tensor
    first: bool = True
    """False if ranks with another part of the model write the same piece, and the reader of the
    checkpoint uses the piece that those ranks write."""
    derived: bool = False
    """True if the piece is computed from other pieces that are also written. megatron-core reads
    it, but this adaptor does not need it."""

    @property
    def name(self) -> str:
        """
        The name of this piece, unique on this rank.
        """
        return f"{self.key}@{'.'.join(map(str, self.at))}"


@dataclass(slots=True, kw_only=True)
class Content:
    """
    The data that is written for one part of the state.
    """

    tensors: list[Placed] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)  # Any: the values may have any type
    """Objects other than tensors, by the unique key that megatron-core gives each object."""
    common: dict[str, Any] = field(default_factory=dict)
    """The state that megatron-core stores once for all ranks."""


def content_of(
    wanted: int | str,
    models: Sequence[nn.Module],
    optimizer: Any,  # Any: an object of megatron-core, which gives mypy no types
) -> Content:
    """
    Return the data to write for one part of the state.

    `wanted` is the index of an optimizer among the chained optimizers, or `REST` for the state that
    belongs to no optimizer.
    """
    chained = list(getattr(optimizer, "chained_optimizers", None) or [optimizer])
    found: dict[int | str, Content] = {number: Content() for number in range(len(chained))}
    found[REST] = Content()
    named = {
        name: _bare(model).sharded_state_dict()
        for name, model in zip(model_names(len(models)), models, strict=True)
    }
    with _with_state(chained):  # megatron-core cannot write an optimizer that has no state yet
        states = optimizer.sharded_state_dict(named, metadata=dict(FORM))
        _spread_models(found, chained, named, wanted)
    for number, state in enumerate([states] if len(chained) == 1 else states.values()):
        _clean(state)
        # For a distributed optimizer, ignore the replica numbers of megatron-core (`alone=True`).
        # Ranks with another part of the model have nothing of this shard, so the reader of the
        # checkpoint must use what this rank writes.
        _spread(found[number], state, alone=isinstance(chained[number], DistributedOptimizer))
    kept = [found[number].common for number in range(len(chained))]
    for number in range(len(chained)):
        found[number].common = {}
    here = part()
    # As in Megatron, only the first part of the model stores the common state of the optimizers.
    if (here.tensor[0], here.pipeline[0]) == (0, 0):
        found[REST].common |= {"optimizer": kept[0] if len(kept) == 1 else dict(enumerate(kept))}
    else:
        found[REST].common = {}
    return found[wanted]


@contextmanager
# Any: megatron-core gives mypy no types
def _with_state(chained: Sequence[Any]) -> Iterator[None]:
    """
    While this context is open, give every torch Adam or AdamW without state its initial state.
    Remove that state afterwards.

    An optimizer has no state if all its steps so far were skipped. megatron-core cannot write an
    optimizer without state.
    """
    begun = [
        each.optimizer
        for each in chained
        if isinstance(each.optimizer, torch.optim.Adam | torch.optim.AdamW)
        and not any(each.optimizer.state.values())
    ]
    for optimizer in begun:
        for group in optimizer.param_groups:
            for p in group["params"]:
                kept = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[p] = {"step": torch.tensor(0.0), **kept}
    try:
        yield
    finally:
        for optimizer in begun:
            optimizer.state.clear()


def part() -> ModelPart:
    """
    Return the part of the model on this rank, and the ranks that have the same part.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return ModelPart(
        pipeline=(
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        ),
        tensor=(
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        ),
        experts=parallel_state.get_expert_model_parallel_world_size(),
        ranks=tuple(dist.get_process_group_ranks(group)),
    )


def model_names(count: int) -> list[str]:
    """
    Return the names under which Megatron's training program stores a model that has `count` chunks.
    """
    return ["model"] if count == 1 else [f"model{number}" for number in range(count)]


def _bare(model: nn.Module) -> Any:  # Any: megatron-core gives mypy no types
    return model.module if isinstance(model, DistributedDataParallel) else model


# Any: `state` has nested values of megatron-core, which gives mypy no types
def _clean(state: Any) -> None:
    """
    Set the padding between parameters to zero, because otherwise megatron-core would write
    uninitialized memory in place of the padding.
    """
    for bucket in _buckets(state):
        for piece in bucket:
            padding = piece.get("padding")
            if isinstance(padding, LocalNonpersistentObject) and padding.unwrap():
                for value in piece.values():
                    if isinstance(value, ShardedTensor):
                        value.data.zero_()


# Any: megatron-core gives mypy no types
def _buckets(state: Any) -> Iterator[list[dict[str, Any]]]:
    for by_dtype in state.get("param_state", {}).values():
        if isinstance(by_dtype, dict):
            for buckets in by_dtype.values():
                yield from buckets


def _spread(
    into: Content, state: Any, *, alone: bool = False
) -> None:  # Any: megatron-core gives mypy no types
    """
    Sort the values of `state` into tensors, objects and common values, and add them to `into`.

    Pass `alone=True` if no other part of the model has any of this state. The replica numbers that
    megatron-core gives its tensors are ignored then.
    """
    sharded, common = save_preprocess(state, validate_access_integrity=False)
    for value in nested_values(sharded):
        if isinstance(value, ShardedTensor):
            into.tensors.append(_placed(value, first=alone or _is_first(value.replica_id)))
        elif isinstance(value, ShardedObject):
            # Use a list, because megatron-core may have several objects with the same key.
            into.objects[value.unique_key] = [value.data]
    into.common.update(common)


# Any: `value` is a ShardedTensor, which gives mypy no types
def _placed(value: Any, *, first: bool) -> Placed:
    ahead = (1,) * value.prepend_axis_num
    return Placed(
        key=value.key,
        whole=tuple(value.global_shape),
        at=tuple(value.global_offset),
        tensor=value.data.detach().view(*ahead, *value.local_shape),
        first=first,
    )


def _is_first(replica: int | tuple[int, ...]) -> bool:
    """
    Return whether this rank's part of the model has the first copy of a tensor that several ranks
    hold.

    `replica` is the replica number that megatron-core gives the tensor. If it is a tuple, its last
    number is the index of the data-parallel rank. This number is ignored, because tft itself
    chooses which data-parallel rank writes.
    """
    return isinstance(replica, int) or not any(replica[:-1])


# ---------------------------------------------------------------- the parameters of the model


def _spread_models(
    found: Mapping[int | str, Content],
    chained: Sequence[Any],  # Any: megatron-core gives mypy no types
    named: Mapping[str, Any],
    wanted: int | str,
) -> None:
    """
    Add the state of the models to `found`. A parameter, or a contiguous piece of the parameter, is
    added to the content of the optimizer that changes it. All other state is added to the content
    `REST`.

    The pieces of a distributed optimizer take memory, so they are made only for the optimizer
    `wanted`.
    """
    owners = {id(p): number for number, each in enumerate(chained) for p in _owned(each)}
    here = {
        id(p) for each in chained if isinstance(each, DistributedOptimizer) for p in _here(each)
    }
    left: dict[str, Any] = {}
    for name, state in named.items():
        left[name] = {}
        for key, value in state.items():
            number = owners.get(id(getattr(value, "data", None)))
            if number is None or not isinstance(value, ShardedTensor | ShardedTensorFactory):
                left[name][key] = value
            elif isinstance(chained[number], DistributedOptimizer):
                if number == wanted and id(value.data) in here:
                    found[number].tensors.extend(_stretch(chained[number], value))
            else:
                _spread(found[number], {key: value})
    _spread(found[REST], left)
    if len(chained) > 1:
        # Store the objects of the part `REST` in each optimizer's shard, too. Several ranks hold
        # the shard `REST`, and only one of them writes it. If they have different experts, the
        # objects of the other experts would be missing.
        for number in range(len(chained)):
            found[number].objects |= found[REST].objects


def _owned(optimizer: Any) -> Iterator[Tensor]:  # Any: megatron-core gives mypy no types
    """
    Yield the parameters of the models that an optimizer changes.
    """
    if getattr(optimizer, "is_stub_optimizer", False):
        return
    if isinstance(optimizer, DistributedOptimizer):
        for buffer in optimizer.buffers:
            yield from buffer.params
    elif hasattr(optimizer, "float16_groups"):
        for group in (*optimizer.float16_groups, *optimizer.fp32_from_fp32_groups):
            yield from group
    else:
        yield from optimizer.get_parameters()


# Any: megatron-core gives mypy no types
def _stretch(optimizer: Any, value: Any) -> Iterator[Placed]:
    """
    Yield the pieces of a model parameter that can be computed from this rank's master weights.

    Raises `UsageError` if megatron-core would convert the parameter to another form before writing,
    because the adaptor could not convert a piece.
    """
    parameter = value.data
    of = optimizer._get_model_param_range_map(parameter)["param"]
    master = optimizer._get_main_param_and_optimizer_states(parameter)["param"]
    like = master.detach().reshape(-1).to(parameter.dtype)
    for part in _parts(value):
        if part.data.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
            raise UsageError(
                f"megatron-core writes {value.key} in another form than it has in memory, and a "
                "rank that holds only a part of it cannot convert that part. Switch the "
                "distributed optimizer off"
            )
        view = part.data.detach().view(*(1,) * part.prepend_axis_num, *part.local_shape)
        begin = view.storage_offset() - parameter.storage_offset()
        for at, shape, first in boxes(tuple(view.shape), view.stride(), begin, of.start, of.end):
            yield Placed(
                key=part.key,
                whole=tuple(part.global_shape),
                at=tuple(a + b for a, b in zip(part.global_offset, at, strict=True)),
                tensor=like.as_strided(
                    shape, view.stride(), like.storage_offset() + first - of.start
                ),
                first=_is_first(part.replica_id),
                derived=True,
            )


def _here(optimizer: Any) -> Iterator[Tensor]:  # Any: megatron-core gives mypy no types
    """
    Yield the parameters for which this rank has at least a piece of the state of the distributed
    optimizer.
    """
    if getattr(optimizer, "is_stub_optimizer", False):
        return
    for by_dtype in optimizer.gbuf_ranges:
        for ranges in by_dtype.values():
            for each in ranges:
                yield from each["param_map"]


def _parts(value: Any) -> list[Any]:  # Any: megatron-core gives mypy no types
    if isinstance(value, ShardedTensorFactory):
        return [part for part in nested_values(value.build()) if isinstance(part, ShardedTensor)]
    return [value]


Box = tuple[tuple[int, ...], tuple[int, ...], int]
"""A rectangular part of a view: its offset in the view, its shape, and the index of its first
element in memory."""


def boxes(
    shape: tuple[int, ...], stride: tuple[int, ...], begin: int, start: int, end: int
) -> Iterator[Box]:
    """
    Find the elements of a view that are in memory from index `start` up to, but not including,
    `end`. Yield boxes (rectangular parts of the view) that together contain these elements. If the
    elements of the view are in memory in row-major order, the number of boxes is as small as
    possible.

    `shape` and `stride` are those of the view, and `begin` is the index of its first element in
    memory.
    """
    last = begin + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if 0 in shape or last < start or begin >= end:
        return
    if start <= begin and last < end:
        yield (0,) * len(shape), shape, begin
        return
    # cut the view along the axis with the largest stride, because this cut gives the fewest boxes
    axis = max(range(len(shape)), key=lambda a: (shape[a] > 1, stride[a]))
    step, within = stride[axis], last - begin - (shape[axis] - 1) * stride[axis]
    inner = (*shape[:axis], 1, *shape[axis + 1 :])
    low = max(0, -((begin - start) // step))
    high = min(shape[axis], (end - 1 - begin - within) // step + 1)
    if low < high:
        yield (
            tuple(low if a == axis else 0 for a in range(len(shape))),
            tuple(high - low if a == axis else n for a, n in enumerate(shape)),
            begin + low * step,
        )
    touched = range(
        max(0, -((begin + within - start) // step)), min(shape[axis], (end - 1 - begin) // step + 1)
    )
    for i in (i for i in touched if not low <= i < high):
        for at, size, first in boxes(inner, stride, begin + i * step, start, end):
            yield (*at[:axis], i, *at[axis + 1 :]), size, first
