"""
The handlers that stop and clean a device.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch_npu
from mindio_ttp.framework_ttp.ttp_decorator import tft_get_repair_type

from mindspeed_llm.core.high_availability.utils import ha_constant


def stop(train_args: Any, ctx: Any) -> None:
    """
    Stop handler: stop this rank's device, so that every thread that waits for it raises.
    """
    if torch_npu.npu.stop_device(torch_npu.npu.current_device()) not in (None, 0):
        raise RuntimeError("the device could not be stopped")


def clean(is_uce_error: bool, train_args: Any, ctx: Any) -> int:
    """
    Clean handler: let the device accept work again, and replace lost memory by sound memory.
    """
    device = torch_npu.npu.current_device()
    result: int = ha_constant.RET_OK
    if is_uce_error:
        level = torch_npu.npu.check_uce_in_memory(device)
        if level == ha_constant.UCE_LOW_LEVEL:
            result = ha_constant.RET_NO_REBUILD
        elif level == ha_constant.UCE_HIGH_LEVEL:
            _replace(train_args[ha_constant.MODEL_INDEX], train_args[ha_constant.OPTIM_INDEX])
        else:
            return int(ha_constant.RET_ERROR)
    if tft_get_repair_type() == "retry":
        dist.reinit_process_group(group=None, rebuild_link=False)  # type: ignore[attr-defined]  # torch_npu adds it
    torch_npu.npu.restart_device(device)
    return result


def _replace(model: Any, optimizer: Any) -> None:
    from torch_npu.npu._recovery import update_npu_tensor_to_safe

    for chunk in model:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            update_npu_tensor_to_safe(buffer.param_data)
            update_npu_tensor_to_safe(buffer.grad_data)
    for each in optimizer.chained_optimizers:
        for tensor in each.tensors():
            update_npu_tensor_to_safe(tensor)


def synchronize() -> None:
    """
    Wait for the device.
    """
    torch.cuda.synchronize()
