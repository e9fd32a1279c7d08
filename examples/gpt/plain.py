"""
Train a small GPT with DDP: `torchrun --nproc-per-node 4 plain.py`.

`plain.py` is the ordinary script, `train.py` the same with tft: `diff plain.py train.py`.
"""

import argparse

import torch
import torch.distributed as dist
from corpus import Batches, load_corpus
from gpt import GPT, SIZES, make_optimizer, make_scheduler
from record import Record, digest_parameters
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--size", choices=SIZES, default="tiny")
parser.add_argument("--out", default="tft-runs/plain")
args = parser.parse_args()
size = SIZES[args.size]
text = load_corpus()

dist.init_process_group("gloo")

torch.manual_seed(args.seed)  # the same weights on every rank
model = GPT(size)
optimizer = make_optimizer(model)
scheduler = make_scheduler(optimizer, args.steps)
rank = dist.get_rank()
data = Batches(text, batch=size.batch, context=size.context, seed=args.seed, rank=rank)
record = Record(args.out, rank)
torch.manual_seed(1000 * args.seed + rank)  # but its own dropout on each
wrapped = DDP(model)


def train() -> None:
    for step in range(1, args.steps + 1):
        loss = wrapped(*data.next())
        record.write(step, loss.item())
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if rank == 0 and step % 20 == 0:
            print(f"step {step} loss {loss.item():.3f}")


train()
record.finish({"parameters": digest_parameters(model)})
dist.destroy_process_group()
