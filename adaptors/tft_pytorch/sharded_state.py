"""
Reads and writes the state of a rank whose model is sharded. The state consists of this rank's part
of every tensor, and the position of the part in the whole tensor.

This state does not refer to the process groups over which the model is sharded. So it can outlive
the groups, be sent to other processes, and be put into a model that is made again.

The tensors have the names of torch's own distributed checkpoints (`model.…`, `optim.state.…`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.batchnorm import _NormBase  # the base class of BatchNorm and InstanceNorm
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from tft.errors import OrderRefused, UsageError
from tft.spi import Made
from tft_pytorch.auxiliary_state import (
    check_lasting,
    check_others,
    divided,
    joined,
    load,
    mapped,
    set_directly,
)
from tft_pytorch.extra import ExtraStates, entry
from tft_pytorch.names import named_buffers, named_parameters, own_names
from tft_pytorch.replicas import LOW, ReplicaOptimizer, set_groups
from tft_pytorch.shard_content import ShardContent, Span, spans_of
from tft_pytorch.tensor_holders import Holders, TensorHolders, summed
from tft_pytorch.tensor_metadata import described, read
from tft_pytorch.trees import Disassembly, expect, put_together

_FORM = 2
"""The version of the format of a shard's description. A description of another version is
refused."""


def written(held: ShardContent) -> dict[str, Any]:  # Any: plain values and tensors
    """
    Return the content of a shard in the form that plain torch expects in a checkpoint.
    """
    optimizer = expect(put_together(held.optimizer, held.tensors), dict, "the optimizer's state")
    settings: dict[str, Any] = {}
    if optimizer["param_groups"]:
        # leave out an empty list `params`, because the parameters of such a group are in another
        # shard
        settings["optim"] = {
            "param_groups": [
                {key: value for key, value in group.items() if key != "params" or value}
                for group in optimizer["param_groups"]
            ]
        }
    settings |= {name: put_together(tree, held.tensors) for name, tree in held.others.items()}
    settings |= held.extra
    # leave out tensors that `settings` has already: the checkpoint would contain them twice
    known, _ = flatten_state_dict(settings)
    return {name: t for name, t in held.tensors.items() if name not in known} | settings


def room(meta: bytes, here: ShardContent) -> ShardContent:
    """
    Return the content of the shard that the packed description `meta` describes. Its tensors are
    new and must still be filled.

    `here` is the content of this rank's own shard. Raises `OrderRefused` if the two shards are not
    the same part of the same model.
    """
    tensors = {
        name: torch.empty(shape, dtype=dtype, device=device)
        for name, dtype, shape, device in described(read(meta, _FORM))
    }
    found = filled(meta, tensors)
    theirs, ours = _shape(found), _shape(here)
    for name in theirs.keys() | ours.keys():
        if theirs.get(name) != ours.get(name):
            raise OrderRefused(
                "the received shard belongs to another model, or to another part of the model: the "
                f"tensor {name} is {theirs.get(name, 'absent')} in the received shard, and "
                f"{ours.get(name, 'absent')} on this rank"
            )
    _refuse_other_settings(found, here)
    return found


def filled(meta: bytes, tensors: Mapping[str, Tensor]) -> ShardContent:
    """
    Return the content of the shard that the packed description `meta` describes, with `tensors` as
    its tensors.
    """
    told = read(meta, _FORM)
    return ShardContent(
        form=_FORM,
        tensors=dict(tensors),
        spans=spans_of(meta),
        optimizer=told["optimizer"],
        others=told["others"],
        layouts=told["layouts"],
    )


def _shape(held: ShardContent) -> dict[str, str]:
    spans = held.spans or {}
    return {
        name: f"{tensor.dtype} {list(tensor.shape)} of {spans.get(name, 'the whole')}"
        for name, tensor in held.tensors.items()
        if name.startswith("model.")
    }


def _refuse_other_settings(found: ShardContent, here: ShardContent) -> None:
    """
    Raise `OrderRefused` if the shard `found` does not fit the shard `here` of this rank.

    Both shards must have the settings of the same parameter groups, with the same parameters in
    each group. Otherwise settings would be used for wrong parameters. Both shards must have state
    of the same `others`, which are objects such as a scheduler. Otherwise an object whose state
    `found` lacks would stay as the factory made it.
    """
    theirs, ours = _settled(found), _settled(here)
    if theirs != ours:
        raise OrderRefused(
            "the parameter groups of the optimizer differ: the received shard has settings of the "
            f"groups {theirs}, but this rank has settings of the groups {ours}"
        )
    there, own = _group_numbers(found), _group_numbers(here)
    for name in sorted(there.keys() | own.keys()):
        if there.get(name) != own.get(name):
            raise OrderRefused(
                f"the parameter {name} is in {_group(there.get(name))} of the optimizer on the "
                f"sending rank, but in {_group(own.get(name))} on this rank"
            )
    differing = here.others.keys() - found.others.keys()
    # A shard without settings of parameter groups may get state of more objects than the shard has
    # now. For example, an object that keeps moving averages may have no averages yet on this rank.
    if ours:
        differing |= found.others.keys() - here.others.keys()
    if differing:
        raise OrderRefused(
            "the received shard has the state of the additional objects (others) "
            f"{sorted(found.others)}, but this rank has the objects {sorted(here.others)}"
        )


def _settled(held: ShardContent) -> list[int]:
    """
    Return the indices of the parameter groups whose settings, such as the learning rate, are in the
    shard.
    """
    return [number for number, group in enumerate(_groups(held)) if group.keys() - {"params"}]


def _group_numbers(held: ShardContent) -> dict[str, int]:
    """
    Return, by parameter name, the index of the parameter group to which each parameter of the shard
    belongs.
    """
    return {name: n for n, group in enumerate(_groups(held)) for name in group["params"]}


def _groups(held: ShardContent) -> list[dict[str, Any]]:  # Any: optimizers keep values of any type
    tree = expect(put_together(held.optimizer, held.tensors), dict, "the optimizer's state")
    groups: list[dict[str, Any]] = tree["param_groups"]
    return groups


def _group(number: int | None) -> str:
    return "no parameter group" if number is None else f"the parameter group {number}"


class _Draft:
    """
    The content of one shard while the tensors and values for this content are collected.
    """

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.spans: dict[str, Span] = {}
        self.state: dict[str, Any] = {}  # Any: optimizers keep values of any type
        self.groups: list[dict[str, Any]] = []
        self.others: dict[str, Any] = {}  # Any: these states may have any type
        self.layouts: dict[str, Any] = {}
        self.extra: dict[str, Any] = {}

    def finished(self) -> ShardContent:
        kept = Disassembly()
        optimizer = {"state": self.state, "param_groups": self.groups}
        return ShardContent(
            form=_FORM,
            optimizer=kept.take_apart(optimizer, "optim"),
            others={name: kept.take_apart(state, name) for name, state in self.others.items()},
            tensors=self.weights | kept.tensors,
            spans=self.spans,
            layouts=self.layouts,
            extra=self.extra,
        )


class Parts:
    """
    Reads the state out of the objects that the user's factory made, and puts state into these
    objects. Tensors are identified by their names.

    Create a `Parts` only while no forward pass runs. During a forward pass FSDP replaces the
    parameters of the model by temporary tensors, and a `Parts` would keep these temporary tensors.
    """

    def __init__(self, made: Made) -> None:
        """
        Raises `UsageError` if the state of an object in `made` cannot be kept, or if it cannot be
        known which ranks hold which tensor.
        """
        self.made = made
        _check(made)
        model: nn.Module = made.model
        own = own_names(model)
        self.parameters = named_parameters(model)
        self.buffers = named_buffers(model)
        self._extra = ExtraStates()
        self._extra.watch(model)
        self._names: dict[object, str] = {p: name for name, p in self.parameters.items()}
        self._kinds = TensorHolders(model, self.parameters, self.buffers)
        self._wrappers: dict[str, Holders] = {
            own(name): self._kinds[self._names[next(summed(module))]]
            for name, module in model.named_modules()
            if isinstance(module, DDP)
        }
        """The ranks that hold the parameters of each DDP, by the name of the DDP. The DDPs have the
        same order as in the class `Wrappers`."""
        self._replicas = made.optimizer if isinstance(made.optimizer, ReplicaOptimizer) else None
        self._dealt: frozenset[str] = frozenset()
        """The names of the parameters that a `ReplicaOptimizer` divides into shares. `_owned` has
        the names of the parameters in this rank's share."""
        self._owned: frozenset[str] = frozenset()
        if self._replicas is not None:
            groups = self._replicas.param_groups
            self._dealt = frozenset(self._names[p] for group in groups for p in group["params"])
            self._owned = frozenset(self._names[p] for p in self._replicas.owned)
            self._check_replicas(self._replicas)

    def shards(self) -> dict[str, Holders]:
        """
        Return the shards of this rank by name, each with all ranks that hold the shard.

        Tensors with the same holders form one shard. The shard with the most holders comes first.
        If the optimizer is a `ReplicaOptimizer`, this rank's share is a further shard. This share
        has the parameters that this rank updates.
        """
        found = {self._kinds.name(holders): holders for holders in self._kinds.all}
        if self._replicas is not None:
            holders = self._replicas.holders()
            found[f"optimizer.{holders[0]}"] = holders
        return found

    @property
    def column(self) -> Holders:
        """
        The ranks that compute with the same copy of the model as this rank (see
        `TensorHolders.column`).
        """
        return self._kinds.column

    def held(
        self, layouts: Sequence[Any] | None = None
    ) -> list[ShardContent]:  # Any: plain values from `Wrappers.layouts`
        """
        Return the content of this rank's shards, in the order of `shards`.

        The tensors in the result are the tensors in use, not copies. State that belongs to no
        parameter, such as the scheduler's, is in the first shard. `layouts` is the result of
        `Wrappers.layouts`: the bucket layouts of the DDPs.
        """
        kinds = {holders: _Draft() for holders in self._kinds.all}
        share = _Draft()
        first = kinds[self._kinds.all[0]]
        for name, tensor in self._weights():
            own = name.removeprefix("model.")
            if own not in self._dealt or own in self._owned:
                draft = share if own in self._owned else kinds[self._kinds[own]]
                draft.weights[name] = _part(name, tensor, draft.spans)
        optimizer: Optimizer = self.made.optimizer
        for group in optimizer.param_groups:
            names = [self._names[p] for p in group["params"]]
            for kind, draft in kinds.items():
                # List only parameters of this shard. All holders of the shard must make the same
                # list, but a holder may have other shards that another holder does not have.
                own_names = [name for name in names if self._kinds[name] == kind]
                draft.groups.append({**(group if draft is first else {}), "params": own_names})
            for name in names:
                if self.parameters[name] in optimizer.state:
                    draft = share if self._replicas is not None else kinds[self._kinds[name]]
                    draft.state[name] = self._state_of(name, draft.spans)
        for name, other in self._others().items():
            for kind, state in divided(other.state_dict(), name, self._kinds).items():
                kinds[kind].others[name] = _local(state, name, kinds[kind].spans)
        for (name, holders), layout in zip(
            self._wrappers.items(), layouts or [None] * len(self._wrappers), strict=True
        ):
            kinds[holders].layouts[name] = layout
        for name, state in self._extra.content().items():
            kinds[self._kinds.beside(name)].extra[f"model.{entry(name)}"] = state
        drafts = [*kinds.values(), *([share] if self._replicas is not None else [])]
        return [draft.finished() for draft in drafts]

    def layouts(self, held: Sequence[ShardContent]) -> list[Any]:  # Any: from `Wrappers.layouts`
        """
        Return the bucket layout of each DDP from the shards `held`, in the order of the DDPs in
        `Wrappers`. The list has None for a DDP without a layout.
        """
        known = {name: layout for part in held for name, layout in part.layouts.items()}
        return [known.get(name) for name in self._wrappers]

    def share_out(self) -> None:
        """
        If the optimizer is a `ReplicaOptimizer`, exchange the parameters with other ranks: each
        rank has updated only some of the parameters in the step.
        """
        if self._replicas is not None:
            self._replicas.share_out()

    def fill(self, held: Sequence[ShardContent]) -> None:
        """
        Put the content of the shards `held` into the model, the optimizer, the scheduler and the
        user's other objects.

        Raises `OrderRefused` if the content comes from another model.
        """
        known = {name: tensor for part in held for name, tensor in part.tensors.items()}
        spans = {name: span for part in held for name, span in (part.spans or {}).items()}
        self._fill_weights(known, spans)
        optimizer: Optimizer = self.made.optimizer
        optimizer.state.clear()
        trees = [
            expect(put_together(part.optimizer, known), dict, "the optimizer's state")
            for part in held
        ]
        groups = trees[0]["param_groups"]
        for tree in trees:
            for name, values in tree["state"].items():
                parameter = self.parameters[name]
                optimizer.state[parameter] = {
                    key: _whole(value, parameter) if f"optim.state.{name}.{key}" in spans else value
                    for key, value in values.items()
                }
        if len(groups) != len(optimizer.param_groups):
            raise OrderRefused(
                "the function make of session.adopt has returned an optimizer with "
                f"{len(optimizer.param_groups)} parameter groups, but before, or on the sending "
                f"rank, the optimizer had {len(groups)}: make must build the same optimizer each "
                "time"
            )
        set_groups(optimizer.param_groups, groups)
        for name, other in self._others().items():
            self._fill_other(name, other, held, known, spans)

    def _fill_weights(self, known: Mapping[str, Tensor], spans: Mapping[str, Span]) -> None:
        own: dict[str, Span] = {}
        with torch.no_grad():
            for name, tensor in self._weights():
                if name.removeprefix("model.") in self._dealt - self._owned:
                    continue
                part = _part(name, tensor, own)
                if (
                    name not in known
                    or known[name].shape != part.shape
                    or own.get(name) != spans.get(name)
                ):
                    raise OrderRefused(
                        f"the function make of session.adopt has returned {name} with another "
                        "shape or distribution than before: make must build the same model each "
                        "time"
                    )
                part.copy_(known[name])

    def _fill_other(
        self,
        name: str,
        other: Any,  # Any: the user's own object may have any type
        held: Sequence[ShardContent],
        known: Mapping[str, Tensor],
        spans: Mapping[str, Span],
    ) -> None:
        fresh = other.state_dict()
        placed: dict[str, DTensor] = {}

        def note(key: str, tensor: Tensor) -> Tensor:
            if isinstance(tensor, DTensor):
                placed[key] = tensor
            return tensor

        def whole(key: str, tensor: Tensor) -> Tensor:
            if key not in spans:
                return tensor
            like = placed.get(key)
            if like is None:
                like = _parameter_of(key, name, other, spans[key])
            if like is None:
                raise OrderRefused(
                    f"the function make of session.adopt has returned no distributed tensor {key}, "
                    "but has returned one before: make must build the same objects each time"
                )
            return _whole(tensor, like)

        mapped(fresh, name, note)
        parts = [put_together(part.others[name], known) for part in held if name in part.others]
        load(other, mapped(joined(parts, fresh), name, whole))

    def _others(self) -> dict[str, Any]:  # Any: the user's own objects may have any type
        scheduler = self.made.scheduler
        return {**({} if scheduler is None else {"scheduler": scheduler}), **self.made.others}

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for named in (self.parameters, self.buffers):
            for name, tensor in named.items():
                yield f"model.{name}", tensor

    # Any: optimizers keep values of any type
    def _state_of(self, name: str, spans: dict[str, Span]) -> dict[str, Any]:
        return {
            key: _part(f"optim.state.{name}.{key}", value, spans)
            if isinstance(value, Tensor)
            else value
            for key, value in self.made.optimizer.state[self.parameters[name]].items()
        }

    def _check_replicas(self, replicas: ReplicaOptimizer) -> None:
        common = set.intersection(*(set(self._kinds[name]) for name in self._dealt))
        if set(replicas.ranks) != common:
            raise UsageError(
                f"the ReplicaOptimizer is over the ranks {list(replicas.ranks)}, but the same part "
                f"of the model is on the ranks {sorted(common)}: give it the group of those ranks"
            )


def _parameter_of(key: str, name: str, other: object, span: Span) -> DTensor | None:
    """
    Return the distributed parameter to whose state the tensor `key` belongs. Return None if `other`
    is no optimizer, if the parameter is not distributed, or if the parameter does not have the
    shape of the whole tensor (`span`).

    A new optimizer has no state before its first step. The state that is put into it is distributed
    in the same way as its parameters. `name` is the name of `other`.
    """
    if not set_directly(other):
        return None
    parameters = (p for group in other.param_groups for p in group["params"])
    for number, parameter in enumerate(parameters):
        if key.startswith(f"{name}.state.{number}.") and isinstance(parameter, DTensor):
            return parameter if list(parameter.shape) == list(span[0]) else None
    return None


def _local(state: Any, name: str, spans: dict[str, Span]) -> Any:  # Any: state of any type
    """
    Return `state` with each distributed tensor replaced by this rank's part of the tensor. Note the
    position of each part in `spans`.
    """
    return mapped(state, name, lambda key, t: _part(key, t, spans) if isinstance(t, DTensor) else t)


def _check(made: Made) -> None:
    if not isinstance(made, Made):
        raise UsageError(
            f"the function make of session.adopt must return a Made, not a {type(made).__name__}"
        )
    if not isinstance(made.model, nn.Module) or not isinstance(made.optimizer, Optimizer):
        raise UsageError(
            "the function make of session.adopt must return Made(model=a Module, optimizer=an "
            "Optimizer of its parameters)"
        )
    for name, module in made.model.named_modules():
        if isinstance(module, _NormBase) and module.track_running_stats:
            raise UsageError(
                f"the layer {name} keeps running statistics, which differ between ranks that hold "
                "the same part of the model: use a normalization layer without running statistics"
            )
    replicas = made.optimizer if isinstance(made.optimizer, ReplicaOptimizer) else None
    if replicas is not None and not replicas.made_over_group:
        raise UsageError(
            "a ReplicaOptimizer that make returns must be given the group of the ranks that have "
            "the same parameters: pass it as the argument group"
        )
    if replicas is not None and any(p.dtype in LOW for p in made.model.parameters()):
        raise UsageError(
            "the function make of session.adopt has returned a ReplicaOptimizer for 16-bit "
            "parameters: tft cannot keep the 32-bit masters of a model that FSDP2 shards. Make the "
            "parameters with 32 bits, and let FSDP2's MixedPrecisionPolicy compute in 16 bits"
        )
    check_lasting(made.optimizer)
    check_others(made.others, {"scheduler": made.scheduler})
    known = set(made.model.parameters())
    if any(p not in known for group in made.optimizer.param_groups for p in group["params"]):
        raise UsageError(
            "make has returned an optimizer with parameters that do not belong to the model"
        )


def _part(name: str, tensor: Tensor, spans: dict[str, Span]) -> Tensor:
    """
    Return this rank's part of the tensor `name`. If the tensor is distributed, note the position of
    the part in `spans`.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    spans[name] = (list(tensor.shape), list(offset))
    return tensor.to_local().detach()


def _whole(part: Tensor, like: Tensor) -> Tensor:
    """
    Return the distributed tensor of which this rank has `part`. The result has the mesh, placements
    and shape of `like`.
    """
    assert isinstance(like, DTensor)
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape,
        stride=like.stride(),
    )  # fmt: skip
