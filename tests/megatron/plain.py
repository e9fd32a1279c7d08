"""
A script that trains the small GPT with megatron-core alone, under torchrun.

The script resumes from the newest checkpoint of a tft job and imports nothing of tft.

    plain.py --load CHECKPOINTS --out DIR
"""

import argparse
import os
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))

import megatron.core.parallel_state as ps
import numpy
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.num_microbatches_calculator import (
    get_num_microbatches,
    init_num_microbatches_calculator,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from record import Record

from tests.megatron import shim
from tests.megatron.gpt import (
    GLOBAL_BATCH,
    LENGTH,
    MICRO_BATCH,
    Built,
    add_arguments,
    build,
    forward,
    samples,
    sizes,
)


def load(built: Built, checkpoints: Path) -> dict[str, Any]:
    """
    Load the newest checkpoint under `checkpoints` into `built`, as Megatron's own training does.

    Returns the part of the checkpoint that all ranks have in common.
    """
    iteration = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
    distributed = [
        each
        for each in built.optimizer.chained_optimizers
        if isinstance(each, DistributedOptimizer)
    ]
    for each in distributed:
        # Without TransformerEngine and Apex, megatron-core 0.16 can only load into an optimizer
        # that already has state.
        for group in each.param_groups:
            for p in group["params"]:
                kept = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                each.optimizer.state[p] = {"step": torch.tensor(0.0), **kept}
    model = built.wrapped.module
    state = {"model": model.sharded_state_dict(), "rng_state": asked_generators()}
    place = str(checkpoints / f"iter_{iteration:07d}")
    # the options with which the checkpoint was written
    form = dist_checkpointing.load_content_metadata(place)
    state["optimizer"] = built.optimizer.sharded_state_dict(
        state["model"], is_loading=True, metadata=form
    )
    found: dict[str, Any] = dist_checkpointing.load(state, place)
    assert found["iteration"] == iteration
    model.load_state_dict(found["model"])
    # megatron-core copies directly into parameters of 32 bits, which needs `no_grad`
    with torch.no_grad():
        built.optimizer.load_state_dict(found["optimizer"])
    for each in distributed:
        # megatron-core does not restore torch's own count of steps
        for group in each.param_groups:
            for p in group["params"]:
                each.optimizer.state[p]["step"] = torch.tensor(float(group["step"]))
    built.scheduler.load_state_dict(found["opt_param_scheduler"])
    set_generators(found["rng_state"])
    return found


def asked_generators() -> Any:
    """
    Return this rank's part of `rng_state` in the form that Megatron's own training requests.
    """
    stage, stages = (
        ps.get_pipeline_model_parallel_rank(),
        ps.get_pipeline_model_parallel_world_size(),
    )
    part, parts = ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size()
    copy, copies = ps.get_data_parallel_rank(), ps.get_data_parallel_world_size()
    if ps.get_expert_model_parallel_world_size() > 1:
        return ShardedObject("rng_state", None, (stages, parts, copies), (stage, part, copy))
    return ShardedObject("rng_state", None, (stages, parts), (stage, part), replica_id=copy)


def set_generators(states: list[dict[str, Any]]) -> None:
    """
    Set this rank's random number generators from the loaded states.

    With `data_parallel_random_init`, each data-parallel rank has its own state in `states`.
    """
    kept = states[ps.get_data_parallel_rank() if len(states) > 1 else 0]
    random.setstate(kept["random_rng_state"])
    numpy.random.set_state(kept["np_rng_state"])
    torch.set_rng_state(kept["torch_rng_state"])
    get_cuda_rng_tracker().set_states(kept["rng_tracker_states"])


def train(built: Built, begun: dict[str, Any], steps: int, record: Record) -> None:
    """
    Train the remaining steps, with the calls in the order of Megatron's own `train_step`.
    """
    step_forward_backward = partial(get_forward_backward_func(), forward_step_func=forward)
    batches = samples(begun["consumed_train_samples"])
    for step in range(begun["iteration"] + 1, steps + 1):
        built.wrapped.zero_grad_buffer()
        built.optimizer.zero_grad()
        losses = step_forward_backward(
            data_iterator=batches,
            model=[built.wrapped],
            num_microbatches=get_num_microbatches(),
            seq_length=LENGTH,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        record.write(step, sum((float(each["loss"]) for each in losses), start=0.0))
        done, _, _ = built.optimizer.step()
        if done:
            built.scheduler.step(increment=GLOBAL_BATCH)


def main() -> None:
    parser = add_arguments(argparse.ArgumentParser())
    parser.add_argument("--load", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    shim.install()
    dist.init_process_group("gloo")
    ps.initialize_model_parallel(**sizes(args))
    model_parallel_cuda_manual_seed(1)
    # the seed differs from the job's, so equal numbers can only come from the checkpoint
    torch.manual_seed(1)
    built = build(args)
    replicas = ps.get_data_parallel_world_size()
    init_num_microbatches_calculator(dist.get_rank(), None, GLOBAL_BATCH, MICRO_BATCH, replicas)
    begun = load(built, args.load)
    train(built, begun, args.steps, Record(args.out, dist.get_rank()))
    assert not [name for name in sys.modules if name.split(".")[0].startswith("tft")]
    dist.barrier()
    os._exit(0)  # skips gloo's own teardown, which sometimes hangs


if __name__ == "__main__":
    main()
