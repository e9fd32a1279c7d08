"""
The patches of torch and megatron-core that the high availability needs.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist
import torch_npu
from megatron.training import get_args
from mindspeed.features_manager.feature import MindSpeedFeature


class HighAvailabilityFeature(MindSpeedFeature):  # type: ignore[misc]  # the base class has no types
    """
    MindSpeed-LLM's feature of this name, without the switches for parts that the stand-in lacks.
    """

    def __init__(self) -> None:
        super().__init__(feature_name="high-availability", optimization_level=0)

    def pre_validate_args(self, args: Any) -> None:
        """
        Do nothing: the stand-in reads no settings from the environment.
        """

    def validate_args(self, args: Any) -> None:
        """
        Refuse elastic training of a model with experts.
        """
        assert not (args.enable_elastic_training and args.expert_model_parallel_size > 1)

    def pre_register_patches(self, patch_manager: Any, args: Any) -> None:
        """
        Register the patches of the collectives.

        A replacement skips collectives until its groups are formed. If fewer ranks train, a group
        of these ranks takes the place of the default group.
        """
        for name in ("barrier", "all_reduce", "all_gather_into_tensor", "broadcast"):
            patch_manager.register_patch(f"torch.distributed.{name}", communication_wrapper)

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        """
        Register the patches of the optimizer, the groups and the start.
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
    Wrap a collective so that a replacement skips it, and so that fewer ranks use their own group.
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
    Wrap `new_group` so that device groups are named by their ranks.

    A replacement creates no gloo group before all groups are formed again.
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
    Wrap the initialization: start MindIO before the process groups, form the replicas after them.
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
    Wrap Megatron's function so that it builds optimizers with replicas.
    """

    @wraps(fn)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        import megatron.core.optimizer as megatron

        from mindspeed_llm.core.high_availability.optimizer import ReplicaChain, ReplicaOptimizer

        plain = megatron.DistributedOptimizer, megatron.ChainedOptimizer
        megatron.DistributedOptimizer, megatron.ChainedOptimizer = ReplicaOptimizer, ReplicaChain
        try:
            # Megatron need not create Gloo groups, because the replica groups have their own
            return fn(*arguments, **(named | {"use_gloo_process_groups": False}))
        finally:
            megatron.DistributedOptimizer, megatron.ChainedOptimizer = plain

    return wrapper


def start_grad_sync_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """
    Wrap the gradient synchronization so that every rank gets the all-reduced gradients of all
    parameters.
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
    Gather the parameters within a replica.
    """
    from mindspeed_llm.core.high_availability.optimizer import gather

    gather(self)
    self.param_gather_dispatched = True


def get_grad_norm_fp32_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """
    Wrap the gradient norm so that parts held by several ranks count once.
    """

    @wraps(fn)
    def wrapper(grads: Any, norm_type: float = 2, grad_stats_parallel_group: Any = None) -> float:
        from mindspeed_llm.core.high_availability import elastic_training_common as common
        from mindspeed_llm.core.high_availability import groups

        there = common.holders(groups.kinds[0])
        if there is not None and dist.get_rank() not in there:
            grads = []  # another rank counts the gradients of this part
        copies = groups.REPLICAS if there is None else 1
        norm: float = fn(grads, norm_type, grad_stats_parallel_group) / copies ** (1.0 / norm_type)
        return norm

    return wrapper
