"""
Checkpoints in Megatron's format "torch".

Each model-parallel rank has one file for the model. A second file beside it holds the state of its
distributed optimizer.
"""

import os
import random
from enum import Enum, auto
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.training import get_args
from megatron.training.utils import print_rank_0, unwrap_model

_version: float | None = None


class CheckpointType(Enum):
    """
    The layout of a checkpoint.
    """

    LEGACY = auto()


def set_checkpoint_version(value: float) -> None:
    """
    Set the version of the checkpoint that is loaded.
    """
    global _version
    _version = value


def get_checkpoint_version() -> float | None:
    """
    Return the version that `set_checkpoint_version` has set, or None.
    """
    return _version


def check_checkpoint_args(checkpoint_args: Any) -> None:
    """
    Raise `AssertionError` if a checkpoint is of another model.
    """
    args = get_args()
    for name in (
        "num_layers",
        "hidden_size",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
    ):
        kept, now = getattr(checkpoint_args, name), getattr(args, name)
        assert kept == now, f"{name} of the checkpoint is {kept}, and of this job {now}"


def fix_query_key_value_ordering(model: Any, checkpoint_version: float) -> None:
    """
    Check that the version is at least 2, because earlier versions had another order.
    """
    assert checkpoint_version >= 2.0


def ensure_directory_exists(filename: str, check_parent: bool = True) -> None:
    """
    Create the parent directory of a file, or the directory itself without `check_parent`.
    """
    os.makedirs(os.path.dirname(filename) if check_parent else filename, exist_ok=True)


def get_checkpoint_tracker_filename(checkpoints_path: str) -> str:
    """
    Return the file that names the newest checkpoint.
    """
    return os.path.join(checkpoints_path, "latest_checkpointed_iteration.txt")


def get_checkpoint_name(
    checkpoints_path: str, iteration: int, release: bool = False, return_base_dir: bool = False
) -> str:
    """
    Return the file of this rank's part of the model.
    """
    base = os.path.join(checkpoints_path, "release" if release else f"iter_{iteration:07d}")
    if return_base_dir:
        return base
    part = f"mp_rank_{mpu.get_tensor_model_parallel_rank():02d}"
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        part += f"_{mpu.get_pipeline_model_parallel_rank():03d}"
    if mpu.get_expert_model_parallel_world_size() > 1:
        part += f"_{mpu.get_expert_model_parallel_rank():03d}"
    return os.path.join(base, part, "model_optim_rng.pt")


def get_distributed_optimizer_checkpoint_name(model_checkpoint_name: str) -> str:
    """
    Return the file of the optimizer's state, beside the file of the model.
    """
    return os.path.join(os.path.dirname(model_checkpoint_name), "distrib_optim.pt")


def read_metadata(tracker_filename: str) -> tuple[int, bool]:
    """
    Return the iteration of the newest checkpoint, and False because it is no release.
    """
    return int(Path(tracker_filename).read_text()), False


def _get_checkpoint_format(checkpoint_name: str) -> str:
    return "torch"


def find_checkpoint_rank_0(checkpoints_path: str, iteration: int, release: bool = False) -> str:
    """
    Return the file of rank 0's part of the model.
    """
    return get_checkpoint_name(checkpoints_path, iteration, release)


def get_rng_state(ckpt_format: str = "torch") -> list[dict[str, Any]]:
    """
    Return the states of all random number generators of this rank.
    """
    return [
        {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
        }
    ]


def generate_state_dict(
    args: Any, model: Any, optimizer: Any, opt_param_scheduler: Any, rng_state: Any,
    use_dist_ckpt: bool = False, iteration: int | None = None, optim_sd_kwargs: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """
    Return the content of the file of a model.
    """
    found: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": iteration}
    [found["model"]] = [each.state_dict_for_save_checkpoint() for each in model]
    if not args.no_save_optim:
        found["optimizer"] = optimizer.state_dict()
        found["opt_param_scheduler"] = opt_param_scheduler.state_dict()
    if not args.no_save_rng:
        found["rng_state"] = rng_state
    return found


def save_checkpoint(
    iteration: int, model: Any, optimizer: Any, opt_param_scheduler: Any, flops: int
) -> None:
    """
    Save the program's own checkpoint. All ranks must call this function.
    """
    args = get_args()
    name = get_checkpoint_name(args.save, iteration)
    ensure_directory_exists(name)
    optimizer.save_parameter_state(get_distributed_optimizer_checkpoint_name(name))
    replica = dist.get_rank(mpu.get_expert_data_parallel_group())
    if replica == 0:
        state = generate_state_dict(
            args,
            unwrap_model(model),
            optimizer,
            opt_param_scheduler,
            get_rng_state(),
            iteration=iteration,
        )
        torch.save(state | {"num_floating_point_operations_so_far": flops}, name)
    dist.barrier()
    if dist.get_rank() == 0:
        Path(get_checkpoint_tracker_filename(args.save)).write_text(str(iteration))
    dist.barrier()


def _load_base_checkpoint(
    load_dir: str | None, args: Any, rank0: bool = False, sharded_state_dict: Any = None,
    checkpointing_context: Any = None,
) -> tuple[Any, str, bool, CheckpointType | None]:  # fmt: skip
    """
    Load the file of this rank's model, with its name and layout.
    """
    tracker = get_checkpoint_tracker_filename(load_dir) if load_dir else ""
    if not os.path.isfile(tracker):
        return None, "", False, None
    iteration, release = read_metadata(tracker)
    assert load_dir is not None
    name = get_checkpoint_name(load_dir, iteration, release)
    return (
        torch.load(name, map_location="cpu", weights_only=False),
        name,
        release,
        CheckpointType.LEGACY,
    )


def load_checkpoint(model: Any, optimizer: Any, opt_param_scheduler: Any) -> tuple[int, int]:
    """
    Load the newest checkpoint into these objects.

    Returns its iteration, or 0 without a checkpoint, and its count of floating-point operations.
    """
    args = get_args()
    state, name, _, _ = _load_base_checkpoint(args.load, args)
    if state is None:
        return 0, 0
    set_checkpoint_version(state["checkpoint_version"])
    check_checkpoint_args(state["args"])
    args.consumed_train_samples = state["args"].consumed_train_samples
    args.consumed_valid_samples = state["args"].consumed_valid_samples
    update_num_microbatches(consumed_samples=args.consumed_train_samples)
    [module] = unwrap_model(model)
    module.load_state_dict(state["model"])
    if not args.no_load_optim:
        optimizer.load_state_dict(state["optimizer"])
        optimizer.load_parameter_state(get_distributed_optimizer_checkpoint_name(name))
        opt_param_scheduler.load_state_dict(state["opt_param_scheduler"])
    if not args.no_load_rng:
        [rng] = state["rng_state"]
        random.setstate(rng["random_rng_state"])
        np.random.set_state(rng["np_rng_state"])
        torch.set_rng_state(rng["torch_rng_state"])
    print_rank_0(f"loaded the checkpoint of iteration {state['iteration']}")
    return state["iteration"], state["num_floating_point_operations_so_far"]
