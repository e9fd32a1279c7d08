"""
Removes from Megatron's objects the temporary state of a step that was interrupted. Otherwise the
next step would fail. This module does not drop the gradients; the rollback drops them.
"""

import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from tft_megatron.training import Training

_SPARSE = "megatron.core.transformer.experimental_attention_variant.dsa"
"""The Megatron module that collects the losses of sparse attention for the log."""


def forget(training: Training) -> None:
    """
    Reset the temporary state in Megatron's objects, as if the interrupted step had not begun.
    """
    let_go(training)
    for chunk in training.chunks:
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            _reset(group)
    for timer in _timers(training):
        timer.reset()  # reset the timer, because Megatron cannot start a running timer again
    _begin_reruns_anew()


def let_go(training: Training) -> None:
    """
    Drop the references to process groups that Megatron keeps outside of the user's objects. Such
    references are in cached values, such as rotary embeddings, in values that Megatron collects
    for its log, and in activations that the backward pass was to recompute.
    """
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    for chunk in training.chunks:
        for module in chunk.modules():
            # Megatron caches rotary embeddings by the arguments of calls, which include process
            # groups
            cleared = getattr(type(module).forward, "cache_clear", None)
            if cleared is not None:
                cleared()
            for name, value in list(vars(module).items()):
                # drop a recomputation that the backward pass has not made, because it keeps the
                # autograd graph of its micro-batch, with all activations
                if isinstance(value, CheckpointWithoutOutput):
                    setattr(module, name, None)
            for keeper in _dispatchers(module):
                # drop tensors of the last step, because the autograd graph of a tensor refers to
                # process groups
                for name, value in list(vars(keeper).items()):
                    if isinstance(value, Tensor) and value.grad_fn is not None:
                        setattr(keeper, name, None)
    get_moe_layer_wise_logging_tracker().clear()
    MTPLossLoggingHelper.tracker.clear()
    sparse = sys.modules.get(_SPARSE)  # only scripts that use sparse attention import this module
    if sparse is not None:
        sparse.DSAIndexerLossLoggingHelper.tracker.clear()


def forget_counts(training: Training) -> None:
    """
    Reset the numbers of tokens for each expert, which the routers of experts count during a step.

    Megatron itself resets these numbers after the all-reduces of a step. When a fault comes, some
    ranks may have reset the numbers and others not. All ranks must begin the step with the same
    numbers, so all ranks reset them.
    """
    from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors

    for chunk in training.chunks:
        reset_model_temporary_tensors(chunk.config, [chunk])


def _reset(group: Any) -> None:  # Any: an object of Megatron, which gives mypy no types
    """
    Reset a group of gradient buckets to its state before the first batch.

    With the first batch, Megatron begins the all-reduces of gradients at other moments than with
    later batches. For a replacement process, the next batch is the first batch. All ranks must
    begin their all-reduces in the same order, so the surviving ranks treat the next batch as their
    first batch too.
    """
    group.param_gather_handle = group.grad_reduce_handle = None
    group.param_gather_dispatched = False
    group.is_first_batch = group.is_last_microbatch = True
    group.per_param_grad_ready_counts = {}
    group.golden_per_param_grad_ready_counts = {}


def _dispatchers(module: nn.Module) -> Iterator[Any]:  # Any: Megatron gives mypy no types
    """
    Yield the objects that distribute tokens to the experts of `module`: the token dispatcher, and
    its communication manager if it has one. Yield nothing for a module without experts.
    """
    dispatcher = getattr(module, "token_dispatcher", None)
    for each in (dispatcher, getattr(dispatcher, "_comm_manager", None)):
        if each is not None:
            yield each


def _timers(training: Training) -> Iterator[Any]:  # Any: Megatron gives mypy no types
    from megatron.core.timers import Timers

    configs = [each.config for each in (*training.chunks, *training.optimizers)]
    found = {id(each): each for each in (getattr(config, "timers", None) for config in configs)}
    for timers in found.values():
        if isinstance(timers, Timers):
            yield from timers._timers.values()


def _begin_reruns_anew() -> None:
    """
    Replace Megatron's rerun state machine, which repeats steps with suspicious results, by a new
    one with the same settings. This drops the state of the interrupted step.
    """
    from megatron.core import rerun_state_machine as reruns

    old = reruns._GLOBAL_RERUN_STATE_MACHINE
    if old is not None:
        reruns.destroy_rerun_state_machine()
        reruns.initialize_rerun_state_machine(
            state_save_func=old.state_save_func,
            state_restore_func=old.state_restore_func,
            mode=old.mode,
            error_injector=old.error_injector,
            result_rejected_tracker_filename=old.result_rejected_tracker_filename,
        )
