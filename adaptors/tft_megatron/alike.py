"""
What Megatron's ranks send each other while they build, so that all begin with the same: the first stage's
embeddings to those that have a copy of them, where they are output weights, too, or predict several tokens; and
parameters to the other data-parallel ranks, which may have drawn others. With tft nobody was there then. It is done
when groups are formed, as long as no step is over.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from tft_megatron.training import Training


def begins(training: Training, stands: bool) -> bool:
    """
    Whether the job is at its very beginning, on every rank: `stands` says that this one has begun with the others, or
    has read a checkpoint. Then masters are right whatever the parameters are: they may be those of a step that
    was undone.
    """
    weight = next(p for chunk in training.chunks for p in chunk.parameters())
    found = torch.tensor([stands], dtype=torch.int32, device=weight.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return not found.item()


def has_trained(training: Training) -> bool:
    """
    Whether what the script hands over is of a checkpoint that it has read itself: it has trained before.
    """
    inner = [each.optimizer for each in training.optimizers if each.optimizer is not None]
    stepped = training.scheduler is not None and training.scheduler.num_steps > 0
    return stepped or any(each.state for each in inner)


def make_alike(training: Training) -> None:
    """
    Parameters and masters that have to be the same are the same.
    """
    for weight in _tied(training):
        # Megatron all-reduces them, and has set the copies to zero for that; pretended groups have reduced nothing
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
    Those of this rank that other stages have, too: as Megatron's LanguageModule finds them.
    """
    for chunk in training.chunks:
        if chunk.config.pipeline_model_parallel_size == 1:
            continue
        several = bool(getattr(chunk.config, "mtp_num_layers", None))
        for module in chunk.modules():
            shares = getattr(module, "share_embeddings_and_output_weights", None)
            if shares is not None and (shares or several) and module._is_in_embd_group():
                yield module.shared_embedding_or_output_weight()
