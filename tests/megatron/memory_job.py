"""
A job that measures the memory that each rank keeps alive for a GPT of megatron-core under tft.

The job trains a few steps of a large model. It then counts the bytes that are still allocated.
These include the gradients of the last step.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from sys import path
from typing import Any

path.insert(0, str(Path(__file__).parents[2]))

import tft_megatron
import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

import tft
from tests.adaptors.living import live_bytes
from tests.megatron import shim

parser = argparse.ArgumentParser()
parser.add_argument("--instances", type=int, required=True, help="0: not distributed")
parser.add_argument("--half", action="store_true", help="gradients of 16 bits")
parser.add_argument("--width", type=int, default=248, help="no multiple of what Megatron pads to")
args = parser.parse_args()

WORDS, LENGTH, LAYERS, STEPS = 256, 8, 2, 3

torch.set_num_threads(1)
shim.install()
session = tft.init()
tft_megatron.begin(session, num_distributed_optimizer_instances=max(1, args.instances))
torch.manual_seed(0)
model_parallel_cuda_manual_seed(0)
before = live_bytes()

config = TransformerConfig(
    num_layers=LAYERS,
    hidden_size=args.width,
    num_attention_heads=4,
    use_cpu_initialization=True,
    params_dtype=torch.bfloat16,
    bf16=True,
    gradient_accumulation_fusion=False,
    bias_dropout_fusion=False,
    masked_softmax_fusion=False,
    bias_activation_fusion=False,
    persist_layer_norm=False,
    finalize_model_grads_func=finalize_model_grads,
)
model = GPTModel(
    config,
    get_gpt_layer_local_spec(),
    vocab_size=WORDS,
    max_sequence_length=LENGTH,
    share_embeddings_and_output_weights=False,
    position_embedding_type="rope",
).bfloat16()
wrapped = DistributedDataParallel(
    config,
    DistributedDataParallelConfig(
        use_distributed_optimizer=args.instances > 0,
        num_distributed_optimizer_instances=max(1, args.instances),
        grad_reduce_in_fp32=not args.half,
    ),
    model,
)
optimizer = get_megatron_optimizer(
    OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        min_lr=1e-3,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=args.instances > 0,
    ),
    [wrapped],
)
tft_megatron.enable(session, wrapped, optimizer)


def forward(_: Any, model: Any) -> tuple[Any, Any]:  # Any: Megatron has no types
    words = torch.randint(WORDS, (1, LENGTH))
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    output = model(words, torch.arange(LENGTH)[None], later, labels=words)
    return output, lambda output: (output.float().mean(), {})


def train(session: tft.Session) -> None:
    step_forward_backward = partial(get_forward_backward_func(), forward_step_func=forward)
    for _ in session.steps(STEPS):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        step_forward_backward(
            data_iterator=None,
            model=[wrapped],
            num_microbatches=1,
            seq_length=LENGTH,
            micro_batch_size=1,
            forward_only=False,
        )
        optimizer.step()


def kept() -> int:
    """
    Return how many numbers this rank's share of the optimizer holds.
    """
    found = 0
    for each in optimizer.chained_optimizers:
        found += sum(p.numel() for group in each.optimizer.param_groups for p in group["params"])
    return found


session.run(train)
told = {
    "parameters": sum(p.numel() for p in model.parameters()),
    "padded": sum(buffer.numel for buffer in wrapped.buffers),
    "kept": kept(),
    "bytes": live_bytes() - before,
}
(session.run_dir / f"memory-rank{session.rank}.json").write_text(json.dumps(told))
