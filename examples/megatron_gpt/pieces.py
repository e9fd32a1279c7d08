"""
The parts of both scripts: a small GPT of megatron-core, its data and its loss.

`corpus` and `record` are the modules of the other example, in the directory next to this one.
"""

import argparse
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "gpt"))

from corpus import Batches, load_corpus
from record import Record

__all__ = ["Record"]

TOKENS = 256
"""One token for each byte value."""
WIDTH = 64
LAYERS = 2
CONTEXT = 32
MICRO_BATCH = 2
GLOBAL_BATCH = 16
"""The samples of all ranks in a step. With four ranks, each accumulates the gradients of two
micro-batches."""
LEARNING_RATE = 1e-3


def arguments() -> argparse.Namespace:
    """
    Return the arguments of both scripts. Also sets the CUDA device, or the replacement for CUDA.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument("--instances", type=int, default=2, help="copies of each optimizer shard")
    parser.add_argument("--out", default="tft-runs/megatron-plain", help="of plain.py")
    parser.add_argument(
        "--without-cuda", help="a file whose install() makes do where there is none"
    )
    args = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    elif args.without_cuda:
        runpy.run_path(args.without_cuda)["install"]()
    torch.set_num_threads(1)
    return args


def sizes(args: argparse.Namespace) -> dict[str, int]:
    """
    Return how the model is spread over ranks, for `initialize_model_parallel`.
    """
    return {
        "tensor_model_parallel_size": args.tensor_parallel,
        "pipeline_model_parallel_size": args.pipeline_parallel,
        "num_distributed_optimizer_instances": args.instances,
    }


def transformer(args: argparse.Namespace) -> TransformerConfig:
    """
    Return the configuration of the model: bf16, without anything that needs TransformerEngine or
    Apex.
    """
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=4,
        tensor_model_parallel_size=args.tensor_parallel,
        pipeline_model_parallel_size=args.pipeline_parallel,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        use_cpu_initialization=not torch.cuda.is_available(),
        hidden_dropout=0.1,  # more than zero, so that the random state of a rank affects its losses
        attention_dropout=0.1,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        finalize_model_grads_func=finalize_model_grads,
    )


def gradients(args: argparse.Namespace) -> DistributedDataParallelConfig:
    """
    Return the configuration of the gradients.

    There are `args.instances` copies of the optimizer state. With the default of 2, the state is
    cut over half of the ranks.
    """
    return DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        num_distributed_optimizer_instances=args.instances,
        grad_reduce_in_fp32=True,
    )


def gpt(config: TransformerConfig) -> GPTModel:
    """
    Return this rank's part of the model.
    """
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=TOKENS,
        max_sequence_length=CONTEXT,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    return model.to(torch.cuda.current_device(), torch.bfloat16)


def adam() -> OptimizerConfig:
    """
    Return the configuration of the optimizer. Master weights and moments are in fp32.
    """
    return OptimizerConfig(
        optimizer="adam",
        lr=LEARNING_RATE,
        min_lr=LEARNING_RATE / 10,
        weight_decay=0.1,
        clip_grad=1.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
    )


def schedule(optimizer: Any, steps: int) -> OptimizerParamScheduler:  # Any: Megatron has no types
    """
    Return a schedule: a tenth of the samples to warm up, then half a cosine. It counts samples, as
    Megatron does.
    """
    samples = steps * GLOBAL_BATCH
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=LEARNING_RATE,
        min_lr=LEARNING_RATE / 10,
        lr_warmup_steps=samples // 10,
        lr_decay_steps=samples,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=samples,
        wd_incr_style="constant",
    )


def batches(args: argparse.Namespace) -> Batches:
    """
    Return this rank's data, and set the number of micro-batches.

    Ranks that hold parts of one copy of the model read the same data.
    """
    place = parallel_state.get_data_parallel_rank()
    copies = parallel_state.get_data_parallel_world_size()
    init_num_microbatches_calculator(dist.get_rank(), None, GLOBAL_BATCH, MICRO_BATCH, copies)
    return Batches(load_corpus(), batch=MICRO_BATCH, context=CONTEXT, seed=args.seed, rank=place)


def micro_batches(data: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    """
    Yield batches, one after another, for as long as Megatron asks.
    """
    while True:
        yield data.next()


def forward_step(
    batch: Iterator[tuple[Tensor, Tensor]], model: Any
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Mapping[str, Tensor]]]]:  # Any: see above
    """
    Compute one micro-batch, as Megatron calls it. Returns the losses and the function that averages
    them.
    """
    here = torch.cuda.current_device()
    tokens, labels = (each.to(here) for each in next(batch))
    places = torch.arange(CONTEXT, device=here).expand_as(tokens)
    unseen = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool, device=here).triu(1)[None, None]
    return model(tokens, places, unseen, labels=labels), partial(mean_loss)


def mean_loss(losses: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
    """
    Return the mean loss over the tokens of a micro-batch, in nats per byte, and a copy to report.
    """
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}  # Megatron divides the other in place


def loss_of(step: list[Mapping[str, Tensor]]) -> float | None:
    """
    Return the mean loss of the micro-batches of a step; None except on the last stage of a
    pipeline.
    """
    return sum(each["loss"].item() for each in step) / len(step) if step else None


def digest(model: list[Any]) -> str:
    """
    Return the digest (XXH3-128, hexadecimal) of all parameters, in their order.
    """
    told = xxhash.xxh3_128()
    for chunk in model:
        for parameter in chunk.parameters():
            told.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return told.hexdigest()
