"""
The objects that a Megatron script trains: its model chunks, its optimizers, its scheduler.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tft_pytorch.auxiliary_state import check_others
from tft_pytorch.device import Devices, devices_of
from tft_pytorch.rank_local_state import RNGS

from tft.errors import UsageError
from tft_megatron.settings import refuse_settings

_MUON = "megatron.core.optimizer.muon"
"""The Megatron module of the optimizer Muon. Only scripts that use Muon import it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """
    The user's objects in Megatron's form. Their types are `Any`, because Megatron's package gives
    mypy no types.
    """

    chunks: Sequence[Any]
    """The Megatron DistributedDataParallel objects of this rank, one for each virtual pipeline
    stage."""
    optimizer: Any
    """Megatron's ChainedOptimizer."""
    scheduler: Any
    """Megatron's OptimizerParamScheduler, or None."""
    data: Any
    """The object with the data position (`state_dict`, `load_state_dict`), or None."""
    rngs: Sequence[str] = RNGS
    """The random generators whose states tft captures and restores, as in `session.adopt(rng=...)`.
    If the script names none, these are all generators, because functions of Megatron draw from all
    of them."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """Further objects with state, by name."""
    increment: Callable[[], int] | None = None
    """A function that returns the value by which the scheduler is stepped. If it is None, the value
    is Megatron's running global batch size."""

    @property
    def optimizers(self) -> Sequence[Any]:
        """
        Return the chained optimizers: one for the model, and one for the experts if there are any.
        """
        found: Sequence[Any] = self.optimizer.chained_optimizers
        return found

    @property
    def scalers(self) -> Sequence[Any]:
        """
        Return the gradient scalers: one for each optimizer, or one that all optimizers share. The
        list is empty if the optimizers have none.
        """
        found = [getattr(each, "grad_scaler", None) for each in self.optimizers]
        return list({id(each): each for each in found if each is not None}.values())

    @property
    def distributed(self) -> bool:
        """
        Return whether Megatron's distributed optimizer is used. With this optimizer, each
        data-parallel rank has only a share of the optimizer state.
        """
        return bool(self.chunks[0].ddp_config.use_distributed_optimizer)

    @property
    def instances(self) -> int:
        """
        Return how many ranks have the same share of the optimizer: the number of instances of the
        distributed optimizer.
        """
        return int(self.chunks[0].ddp_config.num_distributed_optimizer_instances)

    @property
    def devices(self) -> Devices:
        """
        Return the devices on which the model is. Raises `UsageError` if tft cannot handle them.
        """
        return devices_of(p for chunk in self.chunks for p in chunk.parameters())

    @staticmethod
    def of_experts(optimizer: Any) -> bool:
        """
        Return whether `optimizer` is the optimizer of the experts.
        """
        return any(group["is_expert_parallel"] for group in optimizer.param_groups)


def common_state(training: Training, step: int) -> dict[str, Any]:
    """
    Return the state at the end of `step` that Megatron's training program stores in a checkpoint
    once for all ranks. The part of this state that comes from the optimizers is not included.
    """
    found: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": step}
    if training.scheduler is not None:
        found["opt_param_scheduler"] = training.scheduler.state_dict()
        found["consumed_train_samples"] = training.scheduler.num_steps
    return found


def check(training: Training) -> None:
    """
    Check that tft can handle the user's objects. Raises `UsageError` for objects that it cannot
    handle.
    """
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import ChainedOptimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import (
        Float16OptimizerWithFloat16Params,
        FP32Optimizer,
    )

    for chunk in training.chunks:
        if type(chunk) is not DistributedDataParallel:
            raise UsageError(
                "the model given to tft_megatron.enable must be megatron.core's "
                "DistributedDataParallel, or a list of them, not a "
                f"{type(chunk).__module__}.{type(chunk).__qualname__}"
            )
    if type(training.optimizer) is not ChainedOptimizer:
        raise UsageError(
            "the optimizer given to tft_megatron.enable must be the result of "
            "get_megatron_optimizer, not a "
            f"{type(training.optimizer).__module__}.{type(training.optimizer).__qualname__}"
        )
    for optimizer in training.optimizers:
        if type(optimizer) not in (
            DistributedOptimizer,
            Float16OptimizerWithFloat16Params,
            FP32Optimizer,
        ):
            raise UsageError(
                "the optimizer given to tft_megatron.enable contains a "
                f"{type(optimizer).__name__}, whose state tft cannot keep: use Megatron's "
                "DistributedOptimizer, Float16OptimizerWithFloat16Params or FP32Optimizer"
            )
    refuse_exchanging_muon(training.optimizers)
    # check the configuration of every module, because it may differ from that of the whole model
    configs = (getattr(m, "config", None) for chunk in training.chunks for m in chunk.modules())
    refuse_settings(
        [
            *(optimizer.config for optimizer in training.optimizers),
            *(chunk.ddp_config for chunk in training.chunks),
            *{id(each): each for each in configs if each is not None}.values(),
        ]
    )
    check_others(training.others, {"data": training.data})
    for chunk in training.chunks:
        for name, parameter in chunk.named_parameters():
            if not parameter.requires_grad and not getattr(parameter, "allreduce", True):
                raise UsageError(
                    f"the parameter {name} of an expert is frozen (requires_grad is False), and "
                    "tft does not keep frozen parameters of experts"
                )


def refuse_exchanging_muon(optimizers: Sequence[Any]) -> None:
    """
    Raise `UsageError` if one of Megatron's optimizers is a Muon whose tensor-parallel ranks exchange
    momenta within the update. If a rank were lost in the update, the others of its group would
    wait for it in the middle of theirs.
    """
    muon = sys.modules.get(_MUON)
    if muon is None:
        return
    from megatron.core import parallel_state

    if (
        parallel_state.get_tensor_model_parallel_world_size() == 1
        and parallel_state.get_expert_tensor_parallel_world_size() == 1
    ):
        return
    for each in optimizers:
        inner = each.optimizer
        if isinstance(inner, muon.TensorParallelMuon) and inner.mode != "blockwise":
            raise UsageError(
                f"muon_tp_mode is {inner.mode}, which the adaptor megatron cannot handle: "
                "tensor-parallel ranks would wait for each other in the middle of an update. Set "
                "muon_tp_mode to blockwise"
            )
