"""
The small GPT model of the Megatron test jobs, built over the current process groups.

Jobs under tft and jobs without tft build the same model.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import megatron.core.parallel_state as ps
import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

WORDS, LENGTH, WIDTH, MICRO_BATCH = 64, 16, 64, 1
GLOBAL_BATCH = 8


LATER = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), diagonal=1)[None, None]
PLACES = torch.arange(LENGTH)[None]


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """
    Add the options of the model and its parallel layout to `parser`, and return `parser`.
    """
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", action="store_true", help="also where all ranks have all")
    parser.add_argument(
        "--instances", type=int, default=2, help="of the distributed optimizer; 0: plain"
    )
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--balancing", default="aux_loss", help="how tokens are dealt to experts")
    parser.add_argument("--tied", action="store_true", help="embeddings and output weights are one")
    parser.add_argument("--mtp", action="store_true", help="the word after the next one, too")
    return parser


def sizes(args: argparse.Namespace) -> dict[str, int]:
    """
    Return the keyword arguments for Megatron's `initialize_model_parallel`.
    """
    return {
        "tensor_model_parallel_size": args.tp,
        "pipeline_model_parallel_size": args.pp,
        "expert_model_parallel_size": args.ep,
        "num_distributed_optimizer_instances": max(args.instances, 1),
    }


def samples(consumed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """
    Yield this rank's batches of words and targets, beginning after `consumed` samples.

    Each sequence depends only on its number in the data. The ranks of a data-parallel group share
    the numbers out among them.
    """
    number = consumed + ps.get_data_parallel_rank()
    while True:
        generator = torch.Generator().manual_seed(number)
        start = torch.randint(WORDS, (MICRO_BATCH, 1), generator=generator)
        stride = torch.randint(1, 5, (MICRO_BATCH, 1), generator=generator)
        words = (start + stride * torch.arange(LENGTH + 1)) % WORDS
        yield words[:, :-1].contiguous(), words[:, 1:].contiguous()
        number += ps.get_data_parallel_world_size() * MICRO_BATCH


def forward(batches: Iterator[tuple[torch.Tensor, torch.Tensor]], model: Any) -> tuple[Any, Any]:
    """
    Run the model on the next batch, with the signature that Megatron's schedules require.

    Returns the output and a function that computes the loss from this output.
    """
    words, targets = next(batches)
    output = model(words, PLACES, LATER, labels=targets)

    def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = output.float().mean()
        return loss, {"loss": loss.detach()}

    return output, loss_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """
    Megatron's objects for one model. Their type is `Any` because megatron-core has no type hints.
    """

    wrapped: Any
    optimizer: Any
    scheduler: Any


def build(args: argparse.Namespace) -> Built:
    """
    Build the model, its wrapper, the optimizer and the learning rate scheduler from the arguments.
    """
    dtype = torch.float32 if args.fp32 else torch.float16 if args.fp16 else torch.bfloat16
    experts: dict[str, Any] = (
        {
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "alltoall",
            "expert_model_parallel_size": args.ep,
            "moe_aux_loss_coeff": 1e-2,
            "moe_router_load_balancing_type": args.balancing,
            "add_bias_linear": False,
        }
        if args.ep > 1 or args.experts
        else {}
    )
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=WIDTH,
        num_attention_heads=4,
        ffn_hidden_size=2 * WIDTH,
        use_cpu_initialization=True,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        mtp_num_layers=1 if args.mtp else None,
        **experts,
    )
    layer = get_gpt_layer_local_spec(num_experts=experts.get("num_moe_experts"))
    model = GPTModel(
        config,
        layer,
        vocab_size=WORDS,
        max_sequence_length=LENGTH,
        pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=args.tied,
        position_embedding_type="rope",
        mtp_block_spec=get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
        if args.mtp
        else None,
    ).to(dtype)
    plain = args.instances == 0
    wrapped = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=not plain,
            num_distributed_optimizer_instances=max(args.instances, 1),
            overlap_grad_reduce=args.overlap,
            overlap_param_gather=args.overlap and not plain,
            grad_reduce_in_fp32=True,
            bucket_size=20000 if args.overlap else None,
        ),
        model,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            min_lr=1e-4,
            weight_decay=0.01,
            clip_grad=1.0,
            bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16,
            initial_loss_scale=2.0**20,
            loss_scale_window=3,
            params_dtype=dtype,
            use_distributed_optimizer=not plain,
            overlap_param_gather=args.overlap and not plain,
        ),
        [wrapped],
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-3,
        min_lr=1e-4,
        lr_warmup_steps=GLOBAL_BATCH,
        lr_decay_steps=args.steps * GLOBAL_BATCH,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=args.steps * GLOBAL_BATCH,
        wd_incr_style="constant",
    )
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap:
        config.no_sync_func = wrapped.no_sync
    return Built(wrapped=wrapped, optimizer=optimizer, scheduler=scheduler)
