"""
The state of a rank whose model is sharded, apart from the groups it is sharded over: what this rank has
of every tensor, and where in the whole that lies. It outlives the groups, moves to other processes,
and is put into a model that was made anew.

Names are those of torch's own distributed checkpoints (`model.…`, `optim.state.…`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.batchnorm import _NormBase  # of BatchNorm, InstanceNorm, SyncBatchNorm
from torch.optim import Optimizer

from tft.errors import OrderRefused, UsageError
from tft.hooks import Made
from tft.protocol.codec import pack, unpack
from tft_pytorch.described import described, listed, read
from tft_pytorch.replicas import LOW, ReplicaOptimizer
from tft_pytorch.trees import Disassembly, Plain, expect, put_together

_FORM = 1
"""Of the meta; another one is refused."""

Span = tuple[list[int], list[int]]
"""Of a tensor's part: the shape of the whole, and where the part begins in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """
    All a rank has, at one moment.
    """

    tensors: dict[str, Tensor]
    """This rank's parts, in the order in which they are moved."""
    spans: dict[str, Span]
    """Of those that are parts of a larger tensor."""
    optimizer: Plain
    scheduler: Plain
    layouts: Any = None  # Any: plain values, as `Wrappers.layouts` has them

    def bare(self) -> "Held":
        """
        The same without any content.
        """
        return replace(self, tensors={name: t.to("meta") for name, t in self.tensors.items()})

    def with_own_spans(self) -> "Held":
        """
        The same without the spans of what others hold.
        """
        return replace(self, spans={n: span for n, span in self.spans.items() if n in self.tensors})

    def settings(self) -> dict[str, Any]:  # Any: plain values
        """
        What is no tensor, as plain torch asks for it.
        """
        optimizer = expect(
            put_together(self.optimizer, self.tensors), dict, "the optimizer's state"
        )
        found: dict[str, Any] = {}
        if optimizer["param_groups"]:
            found["optim"] = {"param_groups": optimizer["param_groups"]}
        if self.scheduler is not None:
            found["scheduler"] = put_together(self.scheduler, self.tensors)
        return found

    def meta(self) -> bytes:
        """
        All that is no tensor, and of each tensor what is needed to make room for it.
        """
        return pack(
            {
                "form": _FORM,
                "tensors": listed(self.tensors),
                "spans": {name: list(span) for name, span in self.spans.items()},
                "optimizer": self.optimizer,
                "scheduler": self.scheduler,
                "layouts": self.layouts,
            }
        )


def spans_of(meta: bytes) -> dict[str, Span]:
    """
    Where the parts lie that a description speaks of; none in that of a whole state.
    """
    told = expect(unpack(meta), dict, "the description of a shard")
    return {name: (list(whole), list(at)) for name, (whole, at) in told.get("spans", {}).items()}


def room(meta: bytes, here: Held) -> Held:
    """
    What `meta` describes, with tensors that are to be filled. Raises `OrderRefused` where it is not
    the same part of the same model as `here`.
    """
    told = read(meta, _FORM)
    tensors = {
        name: torch.empty(shape, dtype=dtype, device=device)
        for name, dtype, shape, device in described(told)
    }
    found = Held(
        tensors=tensors,
        spans=spans_of(meta),
        optimizer=told["optimizer"],
        scheduler=told["scheduler"],
        layouts=told["layouts"],
    )
    theirs, ours = _shape(found), _shape(here)
    for name in theirs.keys() | ours.keys():
        if theirs.get(name) != ours.get(name):
            raise OrderRefused(
                f"the shard is of another model, or another part of it: {name} is "
                f"{theirs.get(name, 'absent')} there and {ours.get(name, 'absent')} here"
            )
    return found


def _shape(held: Held) -> dict[str, str]:
    return {
        name: f"{tensor.dtype} {list(tensor.shape)} of {held.spans.get(name, 'the whole')}"
        for name, tensor in held.tensors.items()
        if name.startswith("model.")
    }


class Parts:
    """
    A model that was made, by names: what is taken out of it, and put into it.

    Made while the model is at rest: FSDP swaps its parameters in the forward pass, and what has the
    names then is not what is kept.
    """

    def __init__(self, made: Made) -> None:
        self.made = made
        _check(made)
        model: nn.Module = made.model
        own = _own_names(model)
        self.parameters: dict[str, nn.Parameter] = {
            own(name): parameter for name, parameter in model.named_parameters()
        }
        self._buffers = {own(name): tensor for name, tensor in model.named_buffers()}
        self._names: dict[object, str] = {p: name for name, p in self.parameters.items()}
        self._replicas = made.optimizer if isinstance(made.optimizer, ReplicaOptimizer) else None
        self._dealt: frozenset[str] = frozenset()
        """Names of what a `ReplicaOptimizer` deals out, and of the share that it has here."""
        self._owned: frozenset[str] = frozenset()
        if self._replicas is not None:
            groups = self._replicas.param_groups
            self._dealt = frozenset(self._names[p] for group in groups for p in group["params"])
            self._owned = frozenset(self._names[p] for p in self._replicas.owned)

    def shards(self, rank: int, world: int) -> dict[str, tuple[int, ...]]:
        """
        The shards of this rank with all who hold them, each named for the first: its part of the model
        and of the optimizer; and where the optimizer is cut into shares, its share, with what that
        updates, apart from the rest. Raises `UsageError` where nobody can say who holds what.
        """
        copies = self.copies(rank, world)
        found = {f"part.{copies[0]}": copies}
        if self._replicas is not None:
            if self._replicas.ranks != copies:
                raise UsageError(
                    f"the ReplicaOptimizer is over the ranks {list(self._replicas.ranks)}, and the same "
                    f"part of the model is on {list(copies)}: give it the group of these"
                )
            holders = self._replicas.holders()
            found[f"optimizer.{holders[0]}"] = holders
        return found

    def held(self, layouts: Any = None) -> list[Held]:  # Any: as in `Held`
        """
        What this rank has, in the order of `shards`. The tensors are those in use, not copies.
        """
        spans: dict[str, Span] = {}
        rest, share = {}, {}
        for name, tensor in self._weights():
            own = name.removeprefix("model.")
            if own not in self._dealt:
                rest[name] = _part(name, tensor, spans)
            elif own in self._owned:
                share[name] = _part(name, tensor, spans)
        kept, kept_by_share = Disassembly(), Disassembly()
        optimizer = self._optimizer_state(spans)
        state = {"state": optimizer["state"], "param_groups": []}
        if self._replicas is not None:
            optimizer["state"] = {}
        scheduler = self.made.scheduler
        settings = None if scheduler is None else scheduler.state_dict()
        found = [
            Held(
                optimizer=kept.take_apart(optimizer, "optim"),
                scheduler=kept.take_apart(settings, "scheduler"),
                tensors=rest | kept.tensors,
                spans=spans,
                layouts=layouts,
            )
        ]
        if self._replicas is not None:
            tree = kept_by_share.take_apart(state, "optim")
            tensors = share | kept_by_share.tensors
            found.append(Held(optimizer=tree, scheduler=None, tensors=tensors, spans=spans))
        return [each.with_own_spans() for each in found]

    def share_out(self) -> None:
        """
        Get what others have computed of the step, where the optimizer is cut into shares.
        """
        if self._replicas is not None:
            self._replicas.share_out()

    def fill(self, parts: Sequence[Held]) -> None:
        """
        Put back what was held. Raises `OrderRefused` for a model that is another one.
        """
        held = parts[0]
        known = {name: tensor for part in parts for name, tensor in part.tensors.items()}
        spans = {name: span for part in parts for name, span in part.spans.items()}
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
                        f"what was made has another {name} than what was made before"
                    )
                part.copy_(known[name])
        optimizer: Optimizer = self.made.optimizer
        state = expect(put_together(held.optimizer, known), dict, "the optimizer's state")
        kept = expect(put_together(parts[-1].optimizer, known), dict, "the optimizer's state")
        optimizer.state.clear()
        for name, values in kept["state"].items():
            parameter = self.parameters[name]
            optimizer.state[parameter] = {
                key: _whole(value, parameter) if f"optim.state.{name}.{key}" in spans else value
                for key, value in values.items()
            }
        for group, values in zip(optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})
        if self.made.scheduler is not None:
            self.made.scheduler.load_state_dict(put_together(held.scheduler, known))

    def copies(self, rank: int, world: int) -> tuple[int, ...]:
        """
        The ranks that have the same part of everything. Read from the mesh and the placements of each
        parameter that is distributed, and the group of each DDP.
        """
        shared = set(range(world))
        replicated = dict(_replicated(self.made.model))
        for name, parameter in self.parameters.items():
            if isinstance(parameter, DTensor):
                shared &= _same_part(parameter)
            elif parameter in replicated:
                shared &= replicated[parameter]
            else:
                raise UsageError(
                    f"{name} is neither distributed over a mesh nor in a DDP: who has a copy of it "
                    "cannot be known"
                )
        return tuple(sorted(shared | {rank}))

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for named in (self.parameters, self._buffers):
            for name, tensor in named.items():
                yield f"model.{name}", tensor

    def _optimizer_state(self, spans: dict[str, Span]) -> dict[str, Any]:  # Any: what they keep
        optimizer: Optimizer = self.made.optimizer
        groups = [
            {**group, "params": [self._names[p] for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        state = {
            name: {
                key: _part(f"optim.state.{name}.{key}", value, spans)
                if isinstance(value, Tensor)
                else value
                for key, value in optimizer.state[self.parameters[name]].items()
            }
            for group in groups
            for name in group["params"]
            if self.parameters[name] in optimizer.state
        }
        return {"state": state, "param_groups": groups}


def _check(made: Made) -> None:
    if not isinstance(made, Made):
        raise UsageError(f"make must return a Made, not a {type(made).__name__}")
    if not isinstance(made.model, nn.Module) or not isinstance(made.optimizer, Optimizer):
        raise UsageError(
            "make must return Made(model=a Module, optimizer=an Optimizer of its parameters)"
        )
    for name, module in made.model.named_modules():
        if isinstance(module, _NormBase) and module.track_running_stats:
            raise UsageError(
                f"{name} keeps running statistics, which differ between those who have the same part; "
                "use a norm without them"
            )
    replicas = made.optimizer if isinstance(made.optimizer, ReplicaOptimizer) else None
    if replicas is not None and not replicas.made_over_group:
        raise UsageError(
            "a ReplicaOptimizer that make returns must be given the group of the ranks that have the "
            "same parameters, group="
        )
    if replicas is not None and any(p.dtype in LOW for p in made.model.parameters()):
        raise UsageError(
            "a ReplicaOptimizer whose parameters of 16 bits have masters cannot be kept by make=; have "
            "parameters of 32 bits, and FSDP2's MixedPrecisionPolicy compute in 16"
        )
    known = set(made.model.parameters())
    if any(p not in known for group in made.optimizer.param_groups for p in group["params"]):
        raise UsageError("the optimizer has parameters that are not the model's")


def _own_names(model: nn.Module) -> Callable[[str], str]:
    """
    Names without the `module.` that each DDP adds to what is in it, as torch's own
    `get_state_dict` has them: a checkpoint is read into models that have no such wrapper.
    """
    added = [
        f"{name}.module." if name else "module."
        for name, module in model.named_modules()
        if isinstance(module, nn.parallel.DistributedDataParallel)
    ]

    def own(name: str) -> str:
        for prefix in reversed(added):  # the innermost first: the others stand before it
            if name.startswith(prefix):
                name = prefix.removesuffix("module.") + name.removeprefix(prefix)
        return name

    return own


def _part(name: str, tensor: Tensor, spans: dict[str, Span]) -> Tensor:
    """
    What this rank has of a tensor; where that lies is noted.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    spans[name] = (list(tensor.shape), list(offset))
    return tensor.to_local().detach()


def _whole(part: Tensor, like: nn.Parameter) -> Tensor:
    """
    The distributed tensor of which this rank has that part, placed as its parameter is.
    """
    assert isinstance(like, DTensor)
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape,
        stride=like.stride(),
    )  # fmt: skip


def _same_part(tensor: DTensor) -> set[int]:
    """
    The ranks at the same place of the mesh, but for dimensions along which it is replicated.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return set()
    place = tuple(
        slice(None) if placement.is_replicate() else at
        for placement, at in zip(placements, coordinate, strict=True)
    )
    return {int(rank) for rank in mesh.mesh[place].reshape(-1).tolist()}


def _replicated(model: nn.Module) -> Iterator[tuple[Tensor, set[int]]]:
    """
    The parameters of each DDP, with the ranks of its group.
    """
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            ranks = set(torch.distributed.get_process_group_ranks(module.process_group))
            for parameter in module.parameters():
                yield parameter, ranks
