"""
Train a small GPT of megatron-core with tft: `tft run --adaptor megatron --nproc-per-node 4
train.py`. The job survives faults. On a machine without CUDA, add `--without-cuda
tests/megatron/shim.py` and run it from the root of the project.

`plain.py` is the ordinary script, `train.py` the same with tft: `diff plain.py train.py`.
"""

import pieces
import tft_megatron
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

import tft

args = pieces.arguments()

session = tft.init()
rank = session.rank
tft_megatron.begin(session, **pieces.sizes(args))
torch.manual_seed(args.seed)
model_parallel_cuda_manual_seed(args.seed)

config = pieces.transformer(args)
model = [DistributedDataParallel(config, pieces.gradients(args), pieces.gpt(config))]
optimizer = get_megatron_optimizer(pieces.adam(), model)
scheduler = pieces.schedule(optimizer, args.steps)
config.grad_scale_func = optimizer.scale_loss
data = pieces.batches(args)
record = pieces.Record(session.run_dir, rank)
tft_megatron.enable(session, model, optimizer, scheduler, data=data)
forward_backward = get_forward_backward_func()


def train(session: tft.Session) -> None:
    for step in session.steps(args.steps):
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
        if loss is not None and rank == session.world - 1 and step % 20 == 0:
            print(f"step {step} loss {loss:.3f}")


session.run(train)
record.finish(session.digests())
