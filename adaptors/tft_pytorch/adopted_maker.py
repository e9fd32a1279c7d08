"""
Keeps the training state in objects that the script makes itself and passes to
`session.adopt(model=..., optimizer=...)`. Every rank has the whole model.

The objects live as long as the process. Only the wrapper, such as a DDP, is made again for new
process groups.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from tft.errors import OrderRefused, UsageError
from tft.spi import Made, check_parts
from tft_pytorch.auxiliary_state import check_lasting, check_others
from tft_pytorch.buckets import Wrappers
from tft_pytorch.device import Devices, devices_of, unusable
from tft_pytorch.names import named_tensors, parameter_names
from tft_pytorch.replicas import ReplicaOptimizer
from tft_pytorch.shard_content import ShardContent
from tft_pytorch.shards import Shard, shards_of
from tft_pytorch.state_store import StateStore, others_of
from tft_pytorch.tensor_holders import DENSE, Holders
from tft_pytorch.trees import Plain
from tft_pytorch.waiting_time import waiting_time

_PARTS = frozenset({"model", "optimizer", "scheduler", "others", "data", "rng"})


def adopt(
    parts: Mapping[str, Any],  # Any: the user's own objects may have any type
    wrap: Callable[[], Any] | None,
    contributing: Callable[[], None] | None = None,
    *,
    early: bool = False,
    attributes: bool = False,
) -> StateStore:
    """
    Take charge of the user's objects, such as model and optimizer. Return the training state.

    The function `contributing` is called in every step before this rank contributes its gradients
    to the last all-reduce of the step. If `early` is True, `contributing` is called at the end of
    each forward pass, too. tft passes both values to the adaptor's hook `tft_watch`. If
    `attributes` is True, plain attributes of modules are kept. Raises `UsageError` for objects that
    the adaptor cannot handle.
    """
    _check(parts)
    made = Made(
        model=parts["model"],
        optimizer=parts["optimizer"],
        scheduler=parts.get("scheduler"),
        others=parts.get("others", {}),
    )
    maker = AdoptedMaker(made, wrap, Wrappers(contributing, early=early))
    rngs = parts.get("rng") or ("torch",)
    return StateStore(maker, parts.get("data"), rngs, attributes=attributes)


class AdoptedMaker:
    """
    Gives access to the user's objects that were passed to `session.adopt`. Implements the protocol
    `tft_pytorch.state_store.Maker`.
    """

    lasting = True

    def __init__(self, made: Made, wrap: Callable[[], Any] | None, wrappers: Wrappers) -> None:
        self.made = made
        self.wrappers = wrappers
        self._wrap = wrap
        shards = shards_of(made.model, made.optimizer, others_of(made), wrappers)
        self._shards: dict[str, Shard] = {shard.name: shard for shard in shards}
        self._replaced: set[str] = set()
        """The names of the shards whose content the script itself has loaded from its own
        checkpoint. The set is emptied when the script has loaded all shards."""

    @property
    def devices(self) -> Devices:
        model = self.made.model
        return devices_of(chain(model.parameters(), model.buffers()))

    @property
    def _replicas(self) -> ReplicaOptimizer | None:
        optimizer = self.made.optimizer
        return optimizer if isinstance(optimizer, ReplicaOptimizer) else None

    # ------------------------------------------------------------ the shards of this rank

    column: Holders = ()

    def shards(self) -> Mapping[str, Holders]:
        return {name: shard.holders for name, shard in self._shards.items()}

    def learn(self, rank: int, world: int, learned: Callable[[nn.Module], None]) -> None:
        optimizer = self._replicas
        if optimizer is not None and (optimizer.rank, optimizer.world) != (rank, world):
            raise UsageError(
                f"the ReplicaOptimizer was made for rank {optimizer.rank} of {optimizer.world}, "
                f"but this is rank {rank} of {world}: give the ReplicaOptimizer "
                "rank=session.rank and world=session.world"
            )

    def contents(self, shards: Collection[str]) -> dict[str, ShardContent]:
        return {shard: self._shards[shard].content() for shard in shards}

    def written(self, shard: str, content: ShardContent) -> Mapping[str, Any]:
        from tft_pytorch.checkpoints import with_all  # this import takes 1 s

        return with_all(content.tensors, self._shards[shard].written())

    def weights(self, contents: Sequence[ShardContent]) -> Mapping[str, Tensor]:
        # every rank has the whole model, so the shards in `contents` are not needed
        return named_tensors(self.made.model)

    def others(self, contents: Sequence[ShardContent]) -> Mapping[str, Plain]:
        return contents[0].others

    # ------------------------------------------------------------ changes of the content

    def room(self, shard: str, meta: bytes) -> Mapping[str, Tensor]:
        return self._shards[shard].room(meta)

    def settle(self, shard: str, meta: bytes, tensors: Mapping[str, Tensor]) -> None:
        self._shards[shard].settle(meta, tensors)

    def beside(self, shard: str) -> bytes:
        optimizer = self._replicas
        if shard == DENSE and optimizer is not None and not optimizer.whole:
            raise OrderRefused(
                "this rank cannot hand over all parameters: it has no values from the end of the step "
                "for the parameters that other ranks of its replica group update, because the "
                "exchange of the updated parameters was interrupted, or has not happened yet"
            )
        if optimizer is not None:
            optimizer.hand_settings_down()
        return self._shards[shard].beside()

    def replaced(self, shard: str, beside: bytes) -> None:
        self._shards[shard].replaced(beside)
        self._replaced.add(shard)
        if self._replicas is not None:
            self._replicas.replaced(everything=shard == DENSE)
            if self._replaced == self._shards.keys():
                self._refuse_forgotten_masters(self._replicas)

    def _refuse_forgotten_masters(self, optimizer: ReplicaOptimizer) -> None:
        self._replaced.clear()
        names = parameter_names(self.made.model)
        strayed = [names[parameter] for parameter in optimizer.strayed()]
        if strayed:
            raise OrderRefused(
                "the function `load` has read 16-bit parameters that differ from their rounded "
                f"32-bit master weights: {', '.join(strayed)}. Save and load the masters as well: "
                "optimizer.master(p) of each p of optimizer.owned, with the shard that has "
                "optimizer.optim.state_dict()"
            )

    # ------------------------------------------------------------ groups and wrappers

    def release(self) -> None:
        if self._replicas is not None:
            self._replicas.clear()

    # Any: the user's function `wrap` may return anything
    def build(self, kept: Mapping[str, ShardContent]) -> Any:
        replicas = self._replicas
        if replicas is not None:
            replicas.regroup()
        built = self.made.model
        if self._wrap is not None:
            # The function may use streams of its own, as Lightning does. Then the constructor of
            # DDP reads and writes the parameters in these streams. So wait before the call until
            # the parameters are written, and after it until that work is done.
            self.devices.synchronize()
            built = self._wrap()
            self.devices.synchronize()
        self.wrappers.settle(built)
        waiting_time.watch(built)
        if replicas is not None:
            replicas.settled()
        return built


# ---------------------------------------------------------------- checks


def _check(parts: Mapping[str, Any]) -> None:  # Any: the user's own objects may have any type
    check_parts(parts, _PARTS, "pytorch")
    model, optimizer = parts.get("model"), parts.get("optimizer")
    if not isinstance(model, nn.Module):
        raise UsageError(
            "the model given to session.adopt must be a torch.nn.Module, not a "
            f"{type(model).__name__}"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "the optimizer LBFGS computes gradients within its own step, so a rank that loses "
            "another rank would be left with half an update: use an optimizer that needs no closure"
        )
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            "the optimizer given to session.adopt must be a torch.optim.Optimizer, not a "
            f"{type(optimizer).__name__}"
        )
    check_lasting(optimizer)
    if any(isinstance(module, DDP) for module in model.modules()):
        raise UsageError(
            "the model given to session.adopt must be the model without DDP: build the DDP in the "
            "function wrap, as wrap=lambda: DDP(model)"
        )
    if isinstance(optimizer, ReplicaOptimizer) and optimizer.made_over_group:
        raise UsageError(
            "the ReplicaOptimizer was made over a process group, which is lost when a rank is "
            "lost: give the ReplicaOptimizer rank= and world=, or make it in the function for "
            "session.adopt(make=...)"
        )
    check_plain(parts)
    for parameter in model.parameters():
        if isinstance(parameter, UninitializedParameter):
            raise UsageError(
                "the model has lazy modules, whose parameters do not exist yet: run one forward "
                "pass before session.adopt"
            )
    for name, tensor in named_tensors(model).items():
        _check_tensor(name, tensor)
    known = set(model.parameters())
    if any(p not in known for group in optimizer.param_groups for p in group["params"]):
        raise UsageError(
            "the optimizer has parameters that do not belong to the model: put all trained "
            "parameters into one torch.nn.Module"
        )


def check_plain(parts: Mapping[str, Any]) -> None:  # Any: the user's own objects may have any type
    """
    Check those arguments of `session.adopt` that need the same check with and without a factory
    function that makes the model.

    Raises `UsageError` if an object (the scheduler, the data, or one of `others`) has no
    `state_dict` and `load_state_dict`. Also raises it for an unusable name in `others`, or if the
    script has already initialized torch.distributed.
    """
    beside = {"scheduler": parts.get("scheduler"), "data": parts.get("data")}
    check_others(parts.get("others", {}), beside)
    if dist.is_initialized():
        raise UsageError(
            "tft forms the process groups itself, again after every incident: remove "
            "torch.distributed.init_process_group from the script"
        )


def _check_tensor(name: str, tensor: Tensor) -> None:
    why: str | None = unusable(tensor.device.type)
    if why:
        pass
    elif tensor.layout != torch.strided:
        why = f"is {tensor.layout}; only dense tensors can be moved to another rank"
    elif hasattr(tensor, "device_mesh"):
        why = (
            "is a DTensor, sharded between ranks: make the model in a function, and hand over the "
            "function as session.adopt(make=...)"
        )
    elif any(
        step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        why = (
            "is expanded, so that several elements are in one place of memory: register a .clone() "
            "of the tensor"
        )
    if why:
        raise UsageError(f"{name} {why}")
