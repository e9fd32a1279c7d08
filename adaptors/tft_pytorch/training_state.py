"""
The training state of this process: checks of the user's objects at `session.adopt`, and the work on
these objects between incidents and during incidents.
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
from tft.spi import Buffer, ShardCopies, ShardPayload, pack
from tft_pytorch.auxiliary_state import check_others, forget_stages
from tft_pytorch.buckets import Wrappers
from tft_pytorch.names import named_parameters, parameter_names
from tft_pytorch.noted import Settings
from tft_pytorch.part_digests import shard_parts
from tft_pytorch.rank_local_state import Private
from tft_pytorch.rehearsal import Rehearsal, refuse_unmovable
from tft_pytorch.replicas import ReplicaOptimizer
from tft_pytorch.shards import shards_of
from tft_pytorch.state import Shard, digest, named_tensors
from tft_pytorch.tensor_holders import DENSE
from tft_pytorch.trained import Trained

_PARTS = frozenset({"model", "optimizer", "scheduler", "others", "data", "rng"})


def adopt(
    parts: Mapping[str, Any],  # Any: the user's own objects
    wrap: Callable[[], Any] | None,
    contributing: Callable[[], None] | None = None,
) -> "Adopted":
    """
    Take charge of the user's objects and return their `Adopted`.

    `contributing` is the function that `tft_watch` received. Raises `UsageError` for objects that
    the adaptor cannot handle.
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
    The training state that `adopt` took charge of.
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
        """The shards that the script has loaded itself; emptied when it has loaded all of them."""

    def begin(self) -> None:
        """
        Describe the whole state once, so that state that cannot be moved is refused now and not in
        an incident.

        Nothing of the user's is touched before this check. Raises `UsageError` for state that
        cannot be moved.
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
        Whether gradients are reduced between CUDA devices.
        """
        return any(parameter.is_cuda for parameter in self._model.parameters())

    # ------------------------------------------------------------ between steps

    def capture(self, *, closing: bool = False) -> bytes:
        """
        Return the rank-local state, at an edge of an update window.

        At the closing edge, also note what the step leaves behind. Raises `UsageError` if that
        could not be moved in an incident.
        """
        if closing:
            self._trained.closing()  # first: the wrappers count the trained parameters
            self._wrappers.note()
            self._rehearsal.closing()
            self._settings.forget()
        return self._private.capture(closing=closing)

    def end_step(self, *, tail: bool = True) -> bytes | None:
        """
        Note the settings that the next step may change. Return the rank-local state anew if it has
        changed since the update window closed, else None.

        `tail` True: the loop has marked the end of the step. `tail` False: the update window has
        just closed, and the tail is still to come.
        """
        self._settings.note()
        return self._private.end_step(tail=tail)

    def set_aside(self) -> Callable[[], None]:
        """
        Return a function that restores the random generators and the modes of modules to their
        present state.
        """
        return self._private.set_aside()

    def rollback(self, private: bytes) -> None:
        """
        Restore a captured rank-local state. Set the gradients to zero where the script keeps them,
        and drop the others.

        Also forget how far a `GradScaler` has come in the step that was given up.
        """
        self._private.rollback(private)
        forget_stages(self._others)

    def skip(self, batches: int) -> None:
        """
        Leave out the next `batches` batches.
        """
        self._private.skip(batches)

    def updated(self) -> None:
        """
        Give every rank the parameters that other ranks have updated. Called when the update window
        has closed.
        """
        if isinstance(self._optimizer, ReplicaOptimizer):
            self._optimizer.share_out()

    # ------------------------------------------------------------ groups and wrappers

    def clear(self) -> None:
        """
        Drop the wrappers, and undo what an unfinished forward pass has changed: this rank may have
        to give its state away.
        """
        self._wrappers.drop()
        self._trained.put_back()  # before another wrapper is built
        if isinstance(self._optimizer, ReplicaOptimizer):
            self._optimizer.clear()
        self._private.rewind()
        self._settings.put_back()

    def rebuild(self) -> Any:  # Any: whatever the user's factory returns
        """
        Call the user's factory, and give the new wrapper the order of gradient reduction of the
        wrapper before. Return what the factory built.
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
        Return the shards of this rank, each with all ranks that hold it.

        Raises `UsageError` if the `ReplicaOptimizer` was made for another rank or world size.
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
        Return the shard in the form in which it is moved.
        """
        payload = self._shard(shard).give()
        if shard != DENSE:
            return payload
        return replace(payload, buffers=(*payload.buffers, *self._private.modes.give()))

    def take(self, shard: str, meta: bytes) -> Sequence[Buffer]:
        """
        Make room for a shard with the description `meta`. Return the writable buffers.
        """
        room = self._shard(shard).take(meta)
        return room if shard != DENSE else [*room, *self._private.modes.take()]

    def taken(self, shard: str, meta: bytes) -> None:
        """
        Use the shard whose buffers have all arrived.
        """
        self._shard(shard).taken(meta)
        self._private.forget()
        if shard == DENSE:
            self._private.modes.taken()
        self._settings.forget()

    def save(self, directory: Path, shard: str) -> list[str]:
        """
        Write the shard under `directory`. Return the names of the written files.
        """
        from tft_pytorch.checkpoints import save  # late import: 1 s, see preload.py

        return save(directory, self._shard(shard))

    def stage(self, shard: str) -> Callable[[Path], list[str]]:
        """
        Copy the shard. Return a function that writes the copy later.
        """
        from tft_pytorch.checkpoints import stage

        return stage(self._shard(shard))

    def load(self, directory: Path, shard: str) -> None:
        """
        Load a shard that `save` wrote.
        """
        from tft_pytorch.checkpoints import load

        load(directory, self._shard(shard))
        self._private.forget()
        self._private.modes.forget()
        self._settings.forget()

    def beside(self, shard: str) -> bytes:
        """
        Return, as bytes, the state that belongs to the shard but is not in the user's objects.

        Raises `OrderRefused` if the user's objects do not have all of the shard now.
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
        Take note that the script has loaded the shard into the user's objects.

        When this is the last of the shards, raises `OrderRefused` if the script left master weights
        as they were.
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
        Return a digest of each random generator in the rank-local state, by name.
        """
        return self._private.generators()

    def compare(self, shard: str) -> dict[str, str]:
        """
        Return the digests of a shard by part, for comparison with the other holders of the shard.
        """
        # without the modes: they may differ between ranks, since one rank may evaluate for all
        payload = self._shard(shard).give()
        return shard_parts(payload, self._private.running.own(payload))

    def digests(self) -> dict[str, str]:
        """
        Return digests of all parts of this rank's state.

        The keys are `parameters` (with the module buffers), `optimizer` (this rank's part of it),
        `scheduler`, the names of the others, and those of the rank-local state.
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


# ---------------------------------------------------------------- checks


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
    Check what must hold however the model is handed over. Raises `UsageError`.
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
