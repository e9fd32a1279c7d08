"""
The last checkpoint, written by ranks that together hold one copy of the whole state.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.training import checkpointing, get_args
from megatron.training.utils import unwrap_model

from mindspeed_llm.core.high_availability.utils import ha_constant


def save(step: int, save_info: list[dict[str, Any]], train_args: Any, ctx: Any) -> None:
    """
    Save handler: write the optimizers that this rank was chosen to save.

    For each optimizer, the first of the chosen ranks gathers the state and writes it.
    """
    args = get_args()
    model, optimizer = train_args[ha_constant.MODEL_INDEX], train_args[ha_constant.OPTIM_INDEX]
    scheduler = train_args[ha_constant.SCHEDULER_INDEX]
    args.consumed_train_samples = step * args.global_batch_size
    if scheduler.num_steps != args.consumed_train_samples:
        scheduler.step(args.consumed_train_samples - scheduler.num_steps)
    name = checkpointing.get_checkpoint_name(args.save, step).replace(
        f"{step:07d}", f"{step:07d}_tmp", 1
    )
    checkpointing.ensure_directory_exists(name)
    for told in save_info:
        index, ranks = told["type"], told["ranks"]
        chosen = optimizer.chained_optimizers[index]
        group = dist.new_group(
            ranks, backend="gloo", use_local_synchronization=True, sort_ranks=False
        )
        whole, chosen.kind.replica = chosen.kind.replica, group
        chosen.data_parallel_group = chosen.data_parallel_group_gloo = group
        chosen.finish_update()
        state = chosen.get_parameter_state_dp_zero()
        chosen.kind.replica = whole
        if dist.get_rank() == ranks[0]:
            file = checkpointing.get_distributed_optimizer_checkpoint_name(name)
            torch.save(state, f"{file}.{index}")
            found = checkpointing.generate_state_dict(
                args,
                unwrap_model(model),
                optimizer,
                scheduler,
                checkpointing.get_rng_state(),
                iteration=step,
            )
            flops = args.num_floating_point_operations_so_far
            beside = Path(f"{name}.{dist.get_rank()}")
            torch.save(found | {"num_floating_point_operations_so_far": flops}, beside)
            beside.replace(name)


def rename(step: int, train_args: Any) -> None:
    """
    Rename handler: give the complete checkpoint its final name, after all ranks have saved.
    """
    args = get_args()
    place = Path(args.save) / f"iter_{step:07d}"
    Path(f"{place}_tmp").rename(place)
    Path(checkpointing.get_checkpoint_tracker_filename(args.save)).write_text(str(step))
