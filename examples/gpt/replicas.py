"""
`train.py` with the optimizer state cut into shards, each kept by several ranks:
`tft run --nproc-per-node 4 replicas.py --copies 2`.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from corpus import Batches, load_corpus
from gpt import GPT, SIZES, make_optimizer, make_scheduler
from record import Record
from tft_pytorch import ReplicaOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

import tft

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--size", choices=SIZES, default="tiny")
parser.add_argument("--copies", type=int, default=2, help="how many ranks keep each shard")
parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
parser.add_argument(
    "--whole-gradients", action="store_true", help="of 32 bits, whatever --dtype is"
)
args = parser.parse_args()
size = SIZES[args.size]
text = load_corpus()

session = tft.init()
rank = session.rank

torch.manual_seed(args.seed)  # the same weights on every rank
model = GPT(size).to(getattr(torch, args.dtype))
cut = {"rank": rank, "world": session.world, "copies": args.copies}
optimizer = make_optimizer(model, partial(ReplicaOptimizer, optimizer=AdamW, **cut))
scheduler = make_scheduler(optimizer, args.steps)
data = Batches(text, batch=size.batch, context=size.context, seed=args.seed, rank=rank)
record = Record(session.run_dir, rank)
torch.manual_seed(1000 * args.seed + rank)  # but its own dropout on each
wrap: Callable[[], DDP] | None = partial(DDP, model)
if args.whole_gradients:  # DDP does not accept these; they are all-reduced below
    wrap = None
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
session.adopt(model=model, optimizer=optimizer, scheduler=scheduler, data=data, wrap=wrap)
print(session.topology())


def train(session: tft.Session) -> None:
    for step in session.steps(args.steps):
        loss = session.model(*data.next())
        record.write(step, loss.item())
        loss.backward()
        if args.whole_gradients:
            session.contributing()
            for gradient in (p.grad for p in model.parameters() if p.grad is not None):
                dist.all_reduce(gradient)
        clip_grad_norm_(model.parameters(), 1.0)
        with session.update():
            optimizer.step()
            scheduler.step()
        optimizer.zero_grad()
        if rank == 0 and step % 20 == 0:
            print(f"step {step} loss {loss.item():.3f}")


session.run(train)
record.finish(session.digests())
