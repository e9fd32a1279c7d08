"""
Train a small GPT of megatron-core: `torchrun --nproc-per-node 4 plain.py`. On a machine without
CUDA, add `--without-cuda tests/megatron/shim.py` and run it from the root of the project.

`plain.py` is the ordinary script, `train.py` the same with tft: `diff plain.py train.py`.
"""

import pieces
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

args = pieces.arguments()

dist.init_process_group()
rank = dist.get_rank()
parallel_state.initialize_model_parallel(**pieces.sizes(args))
torch.manual_seed(args.seed)
model_parallel_cuda_manual_seed(args.seed)

config = pieces.transformer(args)
model = [DistributedDataParallel(config, pieces.gradients(args), pieces.gpt(config))]
optimizer = get_megatron_optimizer(pieces.adam(), model)
scheduler = pieces.schedule(optimizer, args.steps)
config.grad_scale_func = optimizer.scale_loss
data = pieces.batches(args)
record = pieces.Record(args.out, rank)
forward_backward = get_forward_backward_func()


def train() -> None:
    for step in range(1, args.steps + 1):
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        told = forward_backward(
            forward_step_func=pieces.forward_step,
            data_iterator=pieces.micro_batches(data),
            model=model,
            num_microbatches=get_num_microbatches(),
            seq_length=pieces.CONTEXT,
            micro_batch_size=pieces.MICRO_BATCH,
            forward_only=False,
        )
        loss = pieces.loss_of(told)
        if loss is not None:
            record.write(step, loss)
        done, _, _ = optimizer.step()
        if done:
            scheduler.step(increment=pieces.GLOBAL_BATCH)
        if loss is not None and rank == dist.get_world_size() - 1 and step % 20 == 0:
            print(f"step {step} loss {loss:.3f}")


train()
record.finish({"parameters": pieces.digest(model)})
dist.destroy_process_group()
