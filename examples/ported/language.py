"""
A plain training script of a language model, as people write them: `torchrun --nproc-per-node 2
language.py`. `language_tft.py` is the same script with tft.

It reads the next batch while the model computes, accumulates gradients over two micro-batches, uses
autocast with a GradScaler, clips, sets the learning rate by hand, evaluates on all ranks, and rank 0
writes checkpoints.
"""

import json
import math
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from common import Decoder, arguments, corpus, sequences
from torch.nn.parallel import DistributedDataParallel as DDP

args = arguments(steps=30)
ACCUMULATION = 2

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
torch.manual_seed(1337)
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10)
wrapped = DDP(model)
torch.manual_seed(1337 + rank)
data, generator = corpus("train"), torch.Generator().manual_seed(100 + rank)


def rate(step: int) -> float:
    """
    Return the learning rate of a step: a warm-up, then half a cosine.
    """
    if step < 5:
        return 1e-3 * step / 5
    return 5e-4 * (1.0 + math.cos(math.pi * step / args.steps))


def evaluate(step: int) -> None:
    """
    Log the mean loss of some batches of the validation split over all ranks.
    """
    model.eval()
    own = torch.Generator().manual_seed(step + rank)
    with torch.no_grad():
        loss = sum(model(*sequences(corpus("val"), 4, own)) for _ in range(4)) / 4
    dist.all_reduce(loss)
    model.train()
    if rank == 0:
        print(json.dumps({"step": step, "val": loss.item() / world}), flush=True)


def save(step: int) -> None:
    """
    Write the state to a file. Rank 0 does it.
    """
    if args.out:
        path = Path(args.out, f"state-{step}.pt")
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{path}.new"
        )
        os.replace(f"{path}.new", path)


x, y = sequences(data, 4, generator)
for step in range(1, args.steps + 1):
    for group in optimizer.param_groups:
        group["lr"] = rate(step)
    for micro in range(ACCUMULATION):
        with nullcontext() if micro == ACCUMULATION - 1 else wrapped.no_sync():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = wrapped(x, y) / ACCUMULATION
            x, y = sequences(data, 4, generator)
            scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if step % 10 == 0:
        evaluate(step)
        if rank == 0:
            save(step)
if args.out:
    torch.save(model.state_dict(), Path(args.out, f"final-{rank}.pt"))
dist.destroy_process_group()
