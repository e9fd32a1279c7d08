"""
Repair of a rank's state, from another rank or a checkpoint, and rollback of all ranks to one step.
"""

import io
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator
from megatron.core.rerun_state_machine import destroy_rerun_state_machine
from megatron.legacy.data.data_samplers import build_pretraining_data_loader
from megatron.training import checkpointing, get_args, global_vars, training
from mindio_ttp.framework_ttp import RepairType
from mindio_ttp.framework_ttp.ttp_decorator import tft_report_load_ckpt_step

from mindspeed_llm.core.high_availability import groups
from mindspeed_llm.core.high_availability.utils import ha_constant

load_step: int | None = None
"""The step of the checkpoint that an error of this rank has named."""
_loaded = False
_load: list[str | None] = []


def keep_load(args: Any) -> None:
    """
    Keep a replacement from loading a checkpoint when it starts; it receives its state from other
    ranks.
    """
    _load[:] = [args.load]
    args.load = None


def restore_load(args: Any) -> None:
    """
    Allow a replacement to load checkpoints again, as all other ranks may.
    """
    if _load:
        args.load = _load.pop()


def repair(
    step: int,
    need_rebuild: bool,
    error_ranks: list[int],
    info: dict[str, Any],
    train_args: Any,
    ctx: Any,
) -> None:
    """
    Repair handler: send state, receive state, or load a checkpoint, as `info` says.
    """
    kind = RepairType(info["repair_type"])
    if kind in (RepairType.RT_LOAD_CKPT, RepairType.RT_LOAD_REBUILD):
        _load_checkpoint(train_args)
    elif kind is RepairType.RT_SEND:
        _send(info, train_args)
    else:
        _receive(info, train_args)


def _send(info: dict[str, Any], train_args: Any) -> None:
    optimizer, scheduler = (
        train_args[ha_constant.OPTIM_INDEX],
        train_args[ha_constant.SCHEDULER_INDEX],
    )
    group, _ = groups.for_repair(info["rank_list"])
    args = get_args()
    for index, to in zip(info["type"], info["dst"], strict=True):
        buffer = io.BytesIO()
        told = {
            "optimizer": optimizer.state_dict_by_idx(index),
            "scheduler": scheduler.state_dict(),
            "iteration": args.iteration,
            "samples": args.consumed_train_samples,
            "flops": args.num_floating_point_operations_so_far,
        }
        torch.save(told, buffer)
        content = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8).to("npu")
        dist.send(torch.tensor([content.numel()]).to("npu"), to, group=group)
        dist.send(content, to, group=group)
    for index, to in zip(info["type"], info["dst"], strict=True):
        for tensor in optimizer.chained_optimizers[index].tensors():
            dist.send(tensor, to, group=group)


def _receive(info: dict[str, Any], train_args: Any) -> None:
    optimizer, scheduler = (
        train_args[ha_constant.OPTIM_INDEX],
        train_args[ha_constant.SCHEDULER_INDEX],
    )
    group, _ = groups.for_repair(info["rank_list"])
    args = get_args()
    told = []
    for source in info["src"]:
        size = torch.tensor([0], device="npu")
        dist.recv(size, source, group=group)
        content = torch.empty(int(size), dtype=torch.uint8, device="npu")
        dist.recv(content, source, group=group)
        told.append(torch.load(io.BytesIO(content.cpu().numpy().tobytes()), weights_only=False))
    optimizer.load_state_dict_memory([each["optimizer"] for each in told])
    scheduler.num_steps = 0
    scheduler.load_state_dict(told[0]["scheduler"])
    args.iteration, args.consumed_train_samples = told[0]["iteration"], told[0]["samples"]
    args.num_floating_point_operations_so_far = told[0]["flops"]
    for index, source in zip(info["type"], info["src"], strict=True):
        for tensor in optimizer.chained_optimizers[index].tensors():
            dist.recv(tensor, source, group=group)


def _load_checkpoint(train_args: Any) -> None:
    global _loaded
    args, optimizer = get_args(), train_args[ha_constant.OPTIM_INDEX]
    train_args[ha_constant.SCHEDULER_INDEX] = training.get_optimizer_param_scheduler(optimizer)
    _choose(args)
    args.iteration, args.num_floating_point_operations_so_far = checkpointing.load_checkpoint(
        train_args[ha_constant.MODEL_INDEX], optimizer, train_args[ha_constant.SCHEDULER_INDEX]
    )
    assert args.iteration, "there is no checkpoint to load"
    _loaded = True
    tft_report_load_ckpt_step(args.iteration)


def _choose(args: Any) -> None:
    global load_step
    step, load_step = load_step, None
    if step is None:
        return
    tracker = checkpointing.get_checkpoint_tracker_filename(args.load)
    if os.path.isdir(checkpointing.get_checkpoint_name(args.load, step, return_base_dir=True)):
        if dist.get_rank() == 0:
            Path(tracker).write_text(str(step))
        dist.barrier()


def rollback(step: int, train_args: Any, ctx: Any) -> None:
    """
    Rollback handler: set scheduler, parameters, data and counters to the end of `step`.
    """
    global _loaded
    args = get_args()
    restore_load(args)
    step = args.iteration if _loaded else step
    _loaded = False
    scheduler = train_args[ha_constant.SCHEDULER_INDEX]
    args.consumed_train_samples = step * args.global_batch_size
    if scheduler.num_steps != args.consumed_train_samples:
        scheduler.step(args.consumed_train_samples - scheduler.num_steps)
    train_args[ha_constant.OPTIM_INDEX].finish_update()
    rewind(train_args)
    dist.barrier()
    groups.end_repair()
    args.iteration = step


def rewind(train_args: Any) -> None:
    """
    Position the data after the valid samples, and reset the timers and the rerun state of Megatron.
    """
    global_vars._GLOBAL_TIMERS = None
    global_vars._set_timers(get_args())
    data = train_args[ha_constant.TRAIN_DATA_INDEX]
    dataset = data.iterable._dataset
    data.iterable = iter(build_pretraining_data_loader(dataset, get_args().consumed_train_samples))
    data.saved_microbatches, data.replaying, data.replay_pos = [], False, 0
    destroy_rerun_state_machine()


def micro_batches(number: int) -> None:
    """
    Set the number of micro-batches that this rank trains in a step.
    """
    num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR.num_micro_batches = number
