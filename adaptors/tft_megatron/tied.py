"""
Embeddings that are output weights, too: the last stage of a pipeline has a copy of what the first one has.

Megatron brings it there with a sum while it builds the model; with tft there was nobody to sum with then, so
it is brought there when the first groups are formed.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from tft_megatron.training import Training


def tie_embeddings(training: Training) -> None:
    """
    The first stage's weights in the last stage, and in its masters: before the first update. Afterwards both
    change in the same way.
    """
    from megatron.core import parallel_state as state

    if state.get_pipeline_model_parallel_world_size() == 1:
        return
    for weight in _tied(training):
        group = state.get_embedding_group()
        fresh = torch.tensor([not _updated(training)], dtype=torch.int32, device=weight.device)
        dist.all_reduce(fresh, op=dist.ReduceOp.MIN, group=group)
        if fresh.item():
            dist.broadcast(weight.data, dist.get_process_group_ranks(group)[0], group=group)
            training.optimizer.reload_model_params()


def _tied(training: Training) -> Iterator[torch.nn.Parameter]:
    for chunk in training.chunks:
        for module in chunk.modules():
            if (
                getattr(module, "share_embeddings_and_output_weights", False)
                and module._is_in_embd_group()
            ):
                yield module.shared_embedding_or_output_weight()


def _updated(training: Training) -> bool:
    """
    Whether a step has ever changed something here: then optimizers have something to keep.
    """
    inner = [each.optimizer for each in training.optimizers]
    return any(optimizer is not None and optimizer.state for optimizer in inner)
