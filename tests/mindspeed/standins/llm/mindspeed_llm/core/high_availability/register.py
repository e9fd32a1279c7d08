"""
The calls that register with `mindio_ttp`, in MindSpeed-LLM's order.
"""

import os
import re
from typing import Any

from megatron.training import get_args, training
from mindio_ttp.framework_ttp import (
    set_mindio_export_version,
    tft_exception_handler,
    tft_init_controller,
    tft_init_processor,
    tft_is_reboot_node,
    tft_register_clean_handler,
    tft_register_exception_handler,
    tft_register_rebuild_group_handler,
    tft_register_rename_handler,
    tft_register_repair_handler,
    tft_register_rollback_handler,
    tft_register_save_ckpt_handler,
    tft_register_stop_handler,
    tft_register_stream_sync_handler,
    tft_set_dp_group_info,
    tft_set_optimizer_replica,
    tft_start_controller,
    tft_start_processor,
)

from mindspeed_llm.core.high_availability import dump, faults, groups, repair


def tft_init_controller_processor() -> None:
    """
    Start MindIO's controller and processor, before any process group exists.
    """
    args = get_args()
    if args.rank == 0 and os.getenv("MINDX_TASK_ID") is None:
        tft_init_controller(
            args.rank,
            args.world_size,
            False,
            args.enable_worker_reboot,
            args.enable_elastic_training,
        )
        tft_start_controller("127.0.0.1", 8000, False, "")
    tft_init_processor(
        args.rank, args.world_size, False, False, "", args.enable_hbmfault_repair,
        args.enable_worker_reboot, args.enable_elastic_training,
    )  # fmt: skip
    tft_start_processor("127.0.0.1", 8000)
    if tft_is_reboot_node():
        groups.set_reboot(True)
        repair.keep_load(args)


def tft_register_processor() -> None:
    """
    Register the replica groups and the handlers with MindIO.
    """
    args = get_args()
    used = groups.kinds if args.expert_model_parallel_size > 1 else groups.kinds[:1]
    tft_set_optimizer_replica(
        args.rank,
        [
            {"rank_list": kind.ranks, "replica_cnt": groups.REPLICAS, "replica_shift": 0}
            for kind in used
        ],
    )
    tft_set_dp_group_info(args.rank, groups.kinds[0].ranks)
    tft_register_save_ckpt_handler(dump.save)
    tft_register_rename_handler(dump.rename)
    tft_register_stop_handler(faults.stop)
    tft_register_clean_handler(faults.clean)
    tft_register_repair_handler(repair.repair)
    tft_register_rollback_handler(repair.rollback)
    tft_register_rebuild_group_handler(groups.rebuild)
    tft_register_stream_sync_handler(faults.synchronize)
    tft_register_exception_handler("PRECISION ERROR", "RS_RETRY", _precision)


def _precision(text: str) -> str:
    found = re.search(r"load ckpt step=(\d+)", text)
    repair.load_step = int(found[1]) if found else None
    return "PRECISION ERROR"


@tft_exception_handler
def tft_train(*arguments: Any) -> Any:
    """
    Run the training loop. MindIO's decorator runs it again after every incident.
    """
    set_mindio_export_version("MindSpeed-LLM")
    if groups.tft_is_arf_reboot_node():
        raise RuntimeError("ARF FINISH")
    return training.train(*arguments)
