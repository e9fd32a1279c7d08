"""
The training state of this process: the user's objects, checked when they are handed over, and
what is done with them between incidents.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from tft.errors import OrderRefused, UsageError
from tft.hooks import Buffer, ShardPayload
from tft.protocol.codec import pack
from tft.protocol.messages import ShardCopies
from tft_pytorch.buckets import Wrappers
from tft_pytorch.compared import shard_parts
from tft_pytorch.kinds import DENSE
from tft_pytorch.names import named_parameters, parameter_names
from tft_pytorch.noted import Settings
from tft_pytorch.others import check_others, forget_stages
from tft_pytorch.private import Private
from tft_pytorch.rehearsal import Rehearsal, refuse_unmovable
from tft_pytorch.replicas import ReplicaOptimizer
from tft_pytorch.shards import shards_of
from tft_pytorch.state import Shard, digest, named_tensors
from tft_pytorch.trained import Trained

_PARTS = frozenset({"model", "optimizer", "scheduler", "others", "data", "rng"})


def adopt(
    parts: Mapping[str, Any],  # Any: the user's own objects
    wrap: Callable[[], Any] | None,
    contributing: Callable[[], None] | None = None,
) -> "Adopted":
    """
    Take charge of the user's objects; `UsageError` for what cannot be handled. `contributing` is
    what `tft_watch` was given.
    """
    _check(parts)
    scheduler = parts.get("scheduler")
    adopted = Adopted(
        model=parts["model"],
        optimizer=parts["optimizer"],
        others={
            **({} if scheduler is None else {"scheduler": scheduler}),
            **parts.get("others", {}),
        },
        data=parts.get("data"),
        rngs=parts.get("rng") or ("torch",),
        wrap=wrap,
        contributing=contributing,
    )
    adopted.begin()
    return adopted


class Adopted:
    """
    What `adopt` took charge of.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        others: Mapping[str, Any],  # Any: each has its own type
        data: Any,  # Any: the user's own object
        rngs: Sequence[str],
        wrap: Callable[[], Any] | None,
        contributing: Callable[[], None] | None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._wrap = wrap
        self._others = others
        self._wrappers = Wrappers(contributing)
        self._trained = Trained()
        self._trained.watch(named_parameters(model))
        self._shards = {
            shard.name: shard for shard in shards_of(model, optimizer, others, self._wrappers)
        }
        self._private = Private(model, data, rngs)
        self._private.modes.watch(
            model, *(each for each in others.values() if isinstance(each, nn.Module))
        )
        self._rehearsal = Rehearsal(self._describe)
        self._rehearsal.watch(optimizer, others)
        self._settings = Settings()
        self._settings.watch([optimizer], others.get("scheduler"))
        self._replaced: set[str] = set()
        """The shards that the script has read, until it has read all."""

    def begin(self) -> None:
        """
        Describe everything once, so that what cannot be moved is refused now, not in an incident.
        Only then is anything of the user's touched.
        """
        self._describe()
        self._private.extra.watch(self._model)
        pack(self._private.digestible())

    def _describe(self) -> None:
        for shard in self._shards.values():
            found = shard.inventory()
            refuse_unmovable(found.kept)
            shard.describe(found)

    @property
    def on_cuda(self) -> bool:
        """
        Whether gradients are summed between CUDA devices.
        """
        return any(parameter.is_cuda for parameter in self._model.parameters())

    # ------------------------------------------------------------ between steps

    def capture(self, *, closing: bool = False) -> bytes:
        """
        The private state, at an edge of an update window; at the closing one it is also noted what the
        step leaves behind. Raises `UsageError` where that could not be moved in an incident.
        """
        if closing:
            self._trained.closing()  # first: what the wrappers note counts the trained parameters
            self._wrappers.note()
            self._rehearsal.closing()
            self._settings.forget()
        return self._private.capture(closing=closing)

    def end_step(self, *, tail: bool = True) -> bytes | None:
        """
        The step has ended: note what the next one may set anew. The private state where that is another now.
        """
        self._settings.note()
        return self._private.end_step(tail=tail)

    def set_aside(self) -> Callable[[], None]:
        """
        What puts generators and modes back to what they are now.
        """
        return self._private.set_aside()

    def rollback(self, private: bytes) -> None:
        """
        Put a private state back, and what is left of the gradients.
        """
        self._private.rollback(private)
        forget_stages(self._others)

    def skip(self, batches: int) -> None:
        """
        Leave the next batches out.
        """
        self._private.skip(batches)

    def updated(self) -> None:
        """
        The update window has closed: every rank gets what others have computed of the step.
        """
        if isinstance(self._optimizer, ReplicaOptimizer):
            self._optimizer.share_out()

    # ------------------------------------------------------------ groups and wrappers

    def clear(self) -> None:
        """
        Drop the wrappers. What a half-done forward has changed is put back: this rank may have
        to give its state away.
        """
        self._wrappers.drop()
        self._trained.put_back()  # before there is another wrapper
        if isinstance(self._optimizer, ReplicaOptimizer):
            self._optimizer.clear()
        self._private.rewind()
        self._settings.put_back()

    def rebuild(self) -> Any:  # Any: whatever the user's factory returns
        """
        Call the user's factory, and bring what it built to the reduction order of the wrapper before.
        """
        self._wrappers.drop()
        replicas = self._optimizer if isinstance(self._optimizer, ReplicaOptimizer) else None
        if replicas is not None:
            replicas.regroup()
        built = self._model if self._wrap is None else self._wrap()
        self._wrappers.settle(built)
        if replicas is not None:
            replicas.settled()
        self._private.running.rest()  # DDP's constructor broadcasts all buffers
        return built

    # ------------------------------------------------------------ the shards

    def shards(self, rank: int, world: int) -> list[ShardCopies]:
        """
        Those of this rank, with all who hold them.
        """
        optimizer = self._optimizer
        if isinstance(optimizer, ReplicaOptimizer) and (optimizer.rank, optimizer.world) != (
            rank,
            world,
        ):
            raise UsageError(
                f"the ReplicaOptimizer was made for rank {optimizer.rank} of {optimizer.world}, and this "
                f"is rank {rank} of {world}: make it with session.rank and session.world"
            )
        return [
            ShardCopies(shard=shard.name, ranks=shard.holders or tuple(range(world)))
            for shard in self._shards.values()
        ]

    def give(self, shard: str) -> ShardPayload:
        """
        The shard, to be moved.
        """
        payload = self._shard(shard).give()
        if shard != DENSE:
            return payload
        return replace(payload, buffers=(*payload.buffers, *self._private.modes.give()))

    def take(self, shard: str, meta: bytes) -> Sequence[Buffer]:
        """
        Room for the shard.
        """
        room = self._shard(shard).take(meta)
        return room if shard != DENSE else [*room, *self._private.modes.take()]

    def taken(self, shard: str, meta: bytes) -> None:
        """
        The shard is whole: use it.
        """
        self._shard(shard).taken(meta)
        self._private.forget()
        if shard == DENSE:
            self._private.modes.taken()
        self._settings.forget()

    def save(self, directory: Path, shard: str) -> list[str]:
        """
        Write the shard; the names of its files.
        """
        from tft_pytorch.checkpoints import save  # late: a second of imports, see preload.py

        return save(directory, self._shard(shard))

    def stage(self, shard: str) -> Callable[[Path], list[str]]:
        """
        A copy of the shard, which can be written later.
        """
        from tft_pytorch.checkpoints import stage

        return stage(self._shard(shard))

    def load(self, directory: Path, shard: str) -> None:
        """
        Read what `save` wrote.
        """
        from tft_pytorch.checkpoints import load

        load(directory, self._shard(shard))
        self._private.forget()
        self._private.modes.forget()
        self._settings.forget()

    def beside(self, shard: str) -> bytes:
        """
        What belongs to the shard and is not the user's. Raises `OrderRefused` where the user's objects do
        not have all of it.
        """
        optimizer = self._optimizer
        if shard == DENSE and isinstance(optimizer, ReplicaOptimizer) and not optimizer.whole:
            raise OrderRefused(
                "the parameters that other ranks own are not here as they are at the end of the step: the "
                "exchange of the replica group was broken, or has yet to come"
            )
        return self._shard(shard).beside()

    def replaced(self, shard: str, beside: bytes) -> None:
        """
        The script has read the shard into the user's objects. Raises `OrderRefused` with the last of them
        where it has left masters as they were.
        """
        self._shard(shard).replaced(beside)
        self._private.forget()
        self._private.modes.forget()
        self._settings.forget()
        self._replaced.add(shard)
        if isinstance(self._optimizer, ReplicaOptimizer):
            self._optimizer.replaced(everything=shard == DENSE)
            if self._replaced == self._shards.keys():
                self._refuse_forgotten_masters(self._optimizer)

    def _refuse_forgotten_masters(self, optimizer: ReplicaOptimizer) -> None:
        self._replaced.clear()
        names = parameter_names(self._model)
        strayed = [names[parameter] for parameter in optimizer.strayed()]
        if strayed:
            raise OrderRefused(
                f"{', '.join(strayed)}: what `load` has read is not what the masters of 32 bits come to when "
                "they are rounded. Save and load these, too: optimizer.master(p) of each p of "
                "optimizer.owned, with the shard that has optimizer.optim.state_dict()"
            )

    def generators(self) -> dict[str, str]:
        """
        A digest of each generator that is kept, by name.
        """
        return self._private.generators()

    def compare(self, shard: str) -> dict[str, str]:
        """
        Digests by part, to be compared with those of the others who hold the shard.
        """
        # modes may be each rank's own: one may evaluate for all
        payload = self._shard(shard).give()
        return shard_parts(payload, self._private.running.own(payload))

    def digests(self) -> dict[str, str]:
        """
        Of all that makes up this rank's state: `parameters` (with the module buffers), `optimizer`
        (this rank's part of it), `scheduler` and the others, and what is private.
        """
        found = [shard.inventory() for shard in self._shards.values()]
        masters = {k: v for each in found for k, v in each.model.items() if k.startswith("master.")}
        optimizer = {k: v for each in found for k, v in each.of("optim.").items()}
        return {
            "parameters": digest(self._private.extra.noted()[0], named_tensors(self._model)),
            "optimizer": digest([each.optimizer_tree for each in found], optimizer | masters),
            "scheduler": digest(None, {}),
            **{
                name: digest(tree, found[0].of(f"{name}."))
                for name, tree in found[0].other_trees.items()
            },
            **self._private.digests(),
        }

    def _shard(self, name: str) -> Shard:
        if name not in self._shards:
            raise OrderRefused(f"this rank has the shards {list(self._shards)}, and no {name!r}")
        return self._shards[name]


# ---------------------------------------------------------------- what is refused


def _check(parts: Mapping[str, Any]) -> None:  # Any: the user's own objects
    unknown = sorted(parts.keys() - _PARTS)
    if unknown:
        raise UsageError(
            f"session.adopt was given {', '.join(unknown)}; the adaptor pytorch takes "
            f"{', '.join(sorted(_PARTS))}"
        )
    model, optimizer = parts.get("model"), parts.get("optimizer")
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be a torch.nn.Module, not a {type(model).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS computes gradients within its step, where a rank that loses a peer is left with half "
            "a step: use an optimizer that needs no closure"
        )
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"optimizer must be a torch.optim.Optimizer, not a {type(optimizer).__name__}"
        )
    if any(isinstance(module, DDP) for module in model.modules()):
        raise UsageError(
            "model must be the plain model: build DDP in wrap, wrap=lambda: DDP(model)"
        )
    if isinstance(optimizer, ReplicaOptimizer) and optimizer.made_over_group:
        raise UsageError(
            "the ReplicaOptimizer was made over a group, which is lost with a rank: give it rank= and "
            "world=, or make it in the function for session.adopt(make=...)"
        )
    check_plain(parts)
    for parameter in model.parameters():
        if isinstance(parameter, UninitializedParameter):
            raise UsageError("model has lazy modules: run one forward before session.adopt")
    for name, tensor in named_tensors(model).items():
        _check_tensor(name, tensor)
    known = set(model.parameters())
    if any(p not in known for group in optimizer.param_groups for p in group["params"]):
        raise UsageError(
            "the optimizer has parameters that are not the model's: put all that is trained into "
            "one torch.nn.Module"
        )


def check_plain(parts: Mapping[str, Any]) -> None:  # Any: the user's own objects
    """
    What holds however the model comes. Raises `UsageError`.
    """
    beside = {"scheduler": parts.get("scheduler"), "data": parts.get("data")}
    check_others(parts.get("others", {}), beside)
    if dist.is_initialized():
        raise UsageError(
            "tft forms the process groups itself, again after every incident: remove "
            "torch.distributed.init_process_group from the script"
        )


def _check_tensor(name: str, tensor: Tensor) -> None:
    why = None
    if tensor.device.type not in ("cpu", "cuda"):
        why = f"is on device {tensor.device}; cpu and cuda can be handled"
    elif tensor.layout != torch.strided:
        why = f"is {tensor.layout}; only dense tensors can be moved"
    elif hasattr(tensor, "device_mesh"):
        why = "is a DTensor, sharded between ranks; this adaptor handles state that all ranks share"
    elif any(
        step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        why = "is expanded, several elements in one place of memory: register a .clone() of it"
    if why is not None:
        raise UsageError(f"{name} {why}")
