"""
Megatron's training loop and its parts, for a small GPT of megatron-core.

The parts are called in the order of MindSpeed-LLM's loop.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.num_microbatches_calculator import get_num_microbatches, update_num_microbatches
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import RerunDataIterator, get_rerun_state_machine
from megatron.legacy.data.data_samplers import build_pretraining_data_loader
from megatron.training import checkpointing, get_args, get_timers
from megatron.training.one_logger_utils import track_app_tag
from megatron.training.utils import print_rank_last

begins: Callable[[Any, Any, Any], None] | None = None
"""A function of the test, called with the trained objects at the beginning of a step."""
told: Callable[[int, Any], None] | None = None
"""A function of the test, called with the number of a step and its losses, before the update of the
step."""


def num_floating_point_operations(args: Any, batch_size: int) -> int:
    """
    Return a rough count of the floating-point operations of a step.
    """
    count: int = 6 * batch_size * args.seq_length * args.hidden_size**2 * args.num_layers
    return count


def get_optimizer_param_scheduler(optimizer: Any) -> Any:
    """
    Return a scheduler: warm-up over the first step, then a cosine over all steps.
    """
    args = get_args()
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.lr / 10,
        lr_warmup_steps=args.global_batch_size,
        lr_decay_steps=args.train_iters * args.global_batch_size,
        lr_decay_style="cosine",
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=args.train_iters * args.global_batch_size,
        wd_incr_style="constant",
    )


def setup_model_and_optimizer(
    model_provider: Callable[[], Any], model_type: Any
) -> tuple[Any, Any, Any]:
    """
    Return the wrapped model, its optimizer and its scheduler, loaded from a checkpoint if one is
    named.
    """
    args = get_args()
    module = model_provider().to(torch.bfloat16)
    module.model_type = model_type
    model = [
        DistributedDataParallel(
            module.config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=args.use_distributed_optimizer,
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=args.overlap_grad_reduce,
                overlap_param_gather=args.overlap_param_gather,
            ),
            module,
        )
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            min_lr=args.lr / 10,
            weight_decay=args.weight_decay,
            clip_grad=args.clip_grad,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=args.use_distributed_optimizer,
        ),
        model,
    )
    scheduler = get_optimizer_param_scheduler(optimizer)
    args.iteration, args.num_floating_point_operations_so_far = 0, 0
    if args.load is not None:
        args.iteration, args.num_floating_point_operations_so_far = checkpointing.load_checkpoint(
            model, optimizer, scheduler
        )
    return model, optimizer, scheduler


def build_train_valid_test_data_iterators(
    provider: Callable[[], tuple[Any, Any, Any]],
) -> tuple[Any, Any, Any]:
    """
    Return the data iterators, positioned after the samples that were consumed.
    """
    args = get_args()
    args.do_train, args.do_valid, args.do_test = True, False, False
    train, valid, test = provider()
    consumed = (args.consumed_train_samples, args.consumed_valid_samples, 0)
    train, valid, test = (
        None if found is None else RerunDataIterator(iter(build_pretraining_data_loader(found, at)))
        for found, at in zip((train, valid, test), consumed, strict=True)
    )
    return train, valid, test


def training_log(
    loss_dict: Any, total_loss_dict: Any, learning_rate: Any, decoupled_learning_rate: Any, iteration: int,
    loss_scale: float, report_memory_flag: bool, skipped_iter: int, grad_norm: Any, params_norm: Any,
    num_zeros_in_grad: Any,
) -> bool:  # fmt: skip
    """
    Print the losses, learning rate and gradient norm of a step.
    """
    args = get_args()
    track_app_tag(args.global_batch_size, args.world_size, args.seq_length)
    losses = ", ".join(f"{name} {float(loss):.6f}" for name, loss in loss_dict.items())
    print_rank_last(
        f"iteration {iteration}: {losses}, lr {learning_rate:.2e}, norm {grad_norm:.4f}"
    )
    return report_memory_flag


def train_step(
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    config: Any,
) -> tuple[dict[str, Any], Any]:
    """
    Train one step: forward and backward of all micro-batches, update, learning rate.
    """
    args = get_args()
    losses: Any = []
    rerun = get_rerun_state_machine()
    while rerun.should_run_forward_backward(data_iterator):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step_func,
            data_iterator=data_iterator,
            model=model,
            num_microbatches=get_num_microbatches(),
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            decoder_seq_length=args.seq_length,
            forward_only=False,
        )
    loss = {
        key: sum(each[key][0] for each in losses) / sum(each[key][1] for each in losses)
        for key in losses[0]
    }
    if told is not None:
        told(args.iteration + 1, loss)
    successful, grad_norm, _ = optimizer.step()
    assert successful
    opt_param_scheduler.step(
        increment=get_num_microbatches() * args.micro_batch_size * args.data_parallel_size
    )
    return loss, grad_norm


def train(
    forward_step_func: Any, model: Any, optimizer: Any, opt_param_scheduler: Any, train_data_iterator: Any,
    valid_data_iterator: Any, process_non_loss_data_func: Any, config: Any,
) -> tuple[int, int]:  # fmt: skip
    """
    Train the remaining steps; return the last iteration and the operations counted.
    """
    args, timers = get_args(), get_timers()
    for chunk in model:
        chunk.train()
    iteration, flops = args.iteration, args.num_floating_point_operations_so_far
    config.grad_scale_func = optimizer.scale_loss
    config.timers = timers
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap_grad_reduce:
        config.no_sync_func = model[0].no_sync
    timers("interval-time", log_level=0).start(barrier=True)
    while iteration < args.train_iters:
        update_num_microbatches(args.consumed_train_samples, consistency_check=True)
        args.curr_iteration = iteration
        if begins is not None:
            begins(model, optimizer, opt_param_scheduler)
        losses, grad_norm = train_step(
            forward_step_func, train_data_iterator, model, optimizer, opt_param_scheduler, config
        )
        iteration += 1
        batch_size = (
            mpu.get_data_parallel_world_size() * args.micro_batch_size * get_num_microbatches()
        )
        args.consumed_train_samples += batch_size
        flops += num_floating_point_operations(args, batch_size)
        rates = [group["lr"] for group in optimizer.param_groups]
        training_log(losses, {}, rates[0], None, iteration, 1.0, False, 0, grad_norm, None, None)
        args.num_floating_point_operations_so_far = flops
        args.iteration = iteration
        if args.save and args.save_interval and iteration % args.save_interval == 0:
            checkpointing.save_checkpoint(iteration, model, optimizer, opt_param_scheduler, flops)
        if args.enable_high_availability:
            from mindio_ttp.framework_ttp import tft_pause_train

            tft_pause_train(iteration)
    return iteration, flops
