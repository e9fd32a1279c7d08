"""
The handlers with which a job continues with fewer ranks, and later with all ranks again.
"""

import json
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch_npu
from megatron.core import mpu
from megatron.training import get_args
from mindio_ttp.framework_ttp import (
    tft_register_zit_downgrade_rebuild_handler,
    tft_register_zit_upgrade_rebuild_handler,
    tft_register_zit_upgrade_repair_handler,
    tft_register_zit_upgrade_rollback_handler,
)
from mindio_ttp.framework_ttp.ttp_decorator import get_device

from mindspeed_llm.core.high_availability import elastic_training_common as common
from mindspeed_llm.core.high_availability import groups, repair
from mindspeed_llm.core.high_availability.utils import ha_constant


def register_callbacks() -> None:
    """
    Register the four handlers of MindIO's downgrade and upgrade.
    """
    tft_register_zit_downgrade_rebuild_handler(_down)
    tft_register_zit_upgrade_rebuild_handler(_up)
    tft_register_zit_upgrade_repair_handler(_repair)
    tft_register_zit_upgrade_rollback_handler(_rollback)


def _down(dp_ranks: list[int], world_ranks: list[int], train_args: Any, params: str) -> None:
    assert json.loads(params)["scale-in-strategy"] == "DP"
    args = get_args()
    world = dist.new_group(world_ranks, use_local_synchronization=True)
    dense = dist.new_group(dp_ranks, use_local_synchronization=True)
    for name in ("_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP_WITH_CP"):
        setattr(mpu, name, dense)
    groups.reinit_all()
    common.scale_in(world_ranks, world)
    args.data_parallel_size = len(dp_ranks)
    repair.micro_batches(args.global_batch_size // args.micro_batch_size // len(dp_ranks))
    _use(train_args, dense)
    repair.rewind(train_args)
    dist.barrier()


def _use(train_args: Any, dense: Any) -> None:
    for chunk in train_args[ha_constant.MODEL_INDEX]:
        for group in chunk.bucket_groups:
            group.intra_distributed_optimizer_instance_group = dense
            for bucket in group.buckets:
                bucket.gradient_scaling_factor = 1.0 / dist.get_world_size(dense)


def _up(fault_ranks: list[int], train_args: Any, params: str) -> None:
    assert json.loads(params)["scale-out-strategy"] == "DP"
    args = get_args()
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    groups.set_reboot(False)
    common.scale_in(None, None)
    dist.destroy_process_group()
    mpu.destroy_model_parallel()
    dist.init_process_group(
        args.distributed_backend, world_size=args.world_size, rank=args.rank,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
    )  # fmt: skip
    mpu.initialize_model_parallel()
    for kind in groups.kinds:
        half = kind.half()
        kind.replica = dist.new_group(half, use_local_synchronization=True)
        kind.replica_gloo = dist.new_group(half, backend="gloo", use_local_synchronization=True)
    train_args[ha_constant.OPTIM_INDEX].take_groups()
    args.data_parallel_size = len(groups.kinds[0].ranks)
    _use(train_args, mpu.get_data_parallel_group())
    repair.micro_batches(args.global_batch_size // args.micro_batch_size // args.data_parallel_size)
    os.environ["TORCH_DIST_INIT_BARRIER"] = "0"


def _repair(
    step: int,
    need_rebuild: bool,
    error_ranks: list[int],
    info: dict[str, Any],
    train_args: Any,
    params: str,
) -> None:
    torch_npu.npu.set_device(get_device())
    repair.repair(step, need_rebuild, error_ranks, info, train_args, None)


def _rollback(step: int, train_args: Any, params: str) -> None:
    torch_npu.npu.set_device(get_device())
    repair.rollback(step, train_args, None)
