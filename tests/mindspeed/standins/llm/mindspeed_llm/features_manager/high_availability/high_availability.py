"""
What is patched into torch and megatron-core.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist
import torch_npu
from megatron.training import get_args
from mindspeed.features_manager.feature import MindSpeedFeature


class HighAvailabilityFeature(MindSpeedFeature):  # type: ignore[misc]  # as MindSpeed-LLM has it
    """
    As MindSpeed-LLM's, without its switches for what is not built here.
    """

    def __init__(self) -> None:
        super().__init__(feature_name="high-availability", optimization_level=0)

    def pre_validate_args(self, args: Any) -> None:
        """
        Nothing comes from the environment.
        """

    def validate_args(self, args: Any) -> None:
        """
        Elastic training has no experts.
        """
        assert not (args.enable_elastic_training and args.expert_model_parallel_size > 1)

    def pre_register_patches(self, patch_manager: Any, args: Any) -> None:
        """
        A replacement is in no collective before its groups are formed anew; fewer ranks have a group of their own in the
        place of the default one.
        """
        for name in ("barrier", "all_reduce", "all_gather_into_tensor", "broadcast"):
            patch_manager.register_patch(f"torch.distributed.{name}", communication_wrapper)

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        """
        Replicas, groups, and the start.
        """
        bucket_group = "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup"
        for name, new in (
            (f"{bucket_group}.start_grad_sync", start_grad_sync_wrapper),
            (f"{bucket_group}.start_param_sync", start_param_sync),
            ("megatron.training.training.get_megatron_optimizer", get_megatron_optimizer_wrapper),
            (
                "megatron.training.initialize._initialize_distributed",
                initialize_distributed_wrapper,
            ),
            ("megatron.core.optimizer.clip_grads.get_grad_norm_fp32", get_grad_norm_fp32_wrapper),
            ("torch.distributed.distributed_c10d.new_group", new_group_wrapper),
        ):
            patch_manager.register_patch(name, new)


def communication_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """
    Of a collective.
    """

    @wraps(fn)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        from mindspeed_llm.core.high_availability import elastic_training_common as common
        from mindspeed_llm.core.high_availability import tft_is_arf_reboot_node

        if tft_is_arf_reboot_node():
            return None
        place = 0 if fn.__name__ == "barrier" else 2
        given = arguments[place] if len(arguments) > place else named.get("group")
        if given is None and common.world() is not None:
            named["group"] = common.world()
            arguments = arguments[:place]
        return fn(*arguments, **named)

    return wrapper


def new_group_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """
    Groups of devices are named by their ranks; a replacement is in none of gloo's before all are formed anew.
    """

    @wraps(fn)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        from mindspeed_llm.core.high_availability import tft_is_arf_reboot_node

        gloo = named.get("backend") == "gloo"
        if gloo and tft_is_arf_reboot_node():
            return None
        if not gloo or dist.distributed_c10d._is_barrier_after_init():
            named["use_local_synchronization"] = True
        return fn(*arguments, **named)

    return wrapper


def initialize_distributed_wrapper(fn: Callable[[], None]) -> Callable[[], None]:
    """
    MindIO before process groups, replicas after them.
    """

    @wraps(fn)
    def wrapper() -> None:
        from mindspeed_llm.core.high_availability import groups, tft_init_controller_processor

        torch_npu.npu.set_device(get_args().rank % torch_npu.npu.device_count())
        tft_init_controller_processor()
        fn()
        groups.form()

    return wrapper


def get_megatron_optimizer_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """
    Megatron's own, made of optimizers with replicas.
    """

    @wraps(fn)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        import megatron.core.optimizer as megatron

        from mindspeed_llm.core.high_availability.optimizer import ReplicaChain, ReplicaOptimizer

        plain = megatron.DistributedOptimizer, megatron.ChainedOptimizer
        megatron.DistributedOptimizer, megatron.ChainedOptimizer = ReplicaOptimizer, ReplicaChain
        try:
            return fn(
                *arguments, **(named | {"use_gloo_process_groups": False})
            )  # they are the replicas'
        finally:
            megatron.DistributedOptimizer, megatron.ChainedOptimizer = plain

    return wrapper


def start_grad_sync_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """
    Every rank has the sum of all gradients, whichever part of the optimizer's state it has.
    """

    @wraps(fn)
    def wrapper(self: Any, *arguments: Any, **named: Any) -> None:
        self.ddp_config.use_distributed_optimizer = False
        self.data_parallel_group = self.intra_distributed_optimizer_instance_group
        try:
            fn(self, *arguments, **named)
        finally:
            self.ddp_config.use_distributed_optimizer = True

    return wrapper


def start_param_sync(self: Any, force_sync: bool = False) -> None:
    """
    Parameters are gathered within a replica.
    """
    from mindspeed_llm.core.high_availability.optimizer import gather

    gather(self)
    self.param_gather_dispatched = True


def get_grad_norm_fp32_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """
    Each part of the gradients is on as many ranks as have it.
    """

    @wraps(fn)
    def wrapper(grads: Any, norm_type: float = 2, grad_stats_parallel_group: Any = None) -> float:
        from mindspeed_llm.core.high_availability import elastic_training_common as common
        from mindspeed_llm.core.high_availability import groups

        there = common.holders(groups.kinds[0])
        if there is not None and dist.get_rank() not in there:
            grads = []  # another rank counts for this part
        copies = groups.REPLICAS if there is None else 1
        norm: float = fn(grads, norm_type, grad_stats_parallel_group) / copies ** (1.0 / norm_type)
        return norm

    return wrapper
