"""
Gives all ranks equal parameters at the beginning of a job. Without tft, Megatron does this while
the ranks build the model. With tft no other rank is connected at that time. So tft makes the
parameters equal when process groups are formed, as long as no step is complete.

The first pipeline stage sends its embeddings to the stages that have a copy of them, for their
output layer or to predict several tokens. In each data-parallel group, one rank sends its
parameters to the other ranks, which may have been initialised with other random values.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from tft_megatron.training import Training


def begins(training: Training, stands: bool) -> bool:
    """
    Return whether no rank has trained yet and no rank has read a checkpoint. All ranks call this
    function together.

    `stands` is True if this rank has already begun training with the other ranks, or has read a
    checkpoint. If `stands` is True on any rank, the result is False: the master weights are then
    correct on every rank. In this case the master weights must not be computed from the parameters,
    which may come from a step that was undone.
    """
    weight = next(p for chunk in training.chunks for p in chunk.parameters())
    found = torch.tensor([stands], dtype=torch.int32, device=weight.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return not found.item()


def has_trained(training: Training) -> bool:
    """
    Return whether the optimizer or the scheduler has counted steps or has state already. That is
    the case if the script itself has loaded a checkpoint.
    """
    inner = [each.optimizer for each in training.optimizers if each.optimizer is not None]
    stepped = training.scheduler is not None and training.scheduler.num_steps > 0
    return stepped or any(each.state for each in inner)


def make_alike(training: Training) -> None:
    """
    Make the parameters and master weights equal on all ranks that must have the same values. All
    ranks call this function together.
    """
    for weight in _tied(training):
        # When Megatron builds the model, it sets copies of embeddings to zero and then all-reduces
        # the copies with the original. That all-reduce did nothing, because the process groups only
        # pretended to work at that time. So broadcast the embeddings here.
        group = _embedding_group()
        dist.broadcast(weight.data, dist.get_process_group_ranks(group)[0], group=group)
    for chunk in training.chunks:
        chunk.broadcast_params()
    training.optimizer.reload_model_params()


def _embedding_group() -> dist.ProcessGroup:
    from megatron.core import parallel_state

    found: dist.ProcessGroup = parallel_state.get_embedding_group()
    return found


def _tied(training: Training) -> Iterator[torch.nn.Parameter]:
    """
    Yield the weights of this rank that other pipeline stages have too, such as embeddings. To
    select them, use the same conditions as Megatron's class LanguageModule.
    """
    for chunk in training.chunks:
        if chunk.config.pipeline_model_parallel_size == 1:
            continue
        several = bool(getattr(chunk.config, "mtp_num_layers", None))
        for module in chunk.modules():
            shares = getattr(module, "share_embeddings_and_output_weights", None)
            if shares is not None and (shares or several) and module._is_in_embd_group():
                yield module.shared_embedding_or_output_weight()
