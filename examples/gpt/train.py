"""
Train a small GPT with DDP and tft: `tft run --nproc-per-node 4 train.py`. The job survives faults.

`plain.py` is the ordinary script, `train.py` the same with tft: `diff plain.py train.py`.
"""

import argparse

import torch
from corpus import Batches, load_corpus
from gpt import GPT, SIZES, make_optimizer, make_scheduler
from record import Record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_

import tft

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--size", choices=SIZES, default="tiny")
args = parser.parse_args()
size = SIZES[args.size]
text = load_corpus()

session = tft.init()

torch.manual_seed(args.seed)  # the same weights on every rank
model = GPT(size)
optimizer = make_optimizer(model)
scheduler = make_scheduler(optimizer, args.steps)
rank = session.rank
data = Batches(text, batch=size.batch, context=size.context, seed=args.seed, rank=rank)
record = Record(session.run_dir, rank)
torch.manual_seed(1000 * args.seed + rank)  # but its own dropout on each
session.adopt(
    model=model, optimizer=optimizer, scheduler=scheduler, data=data, wrap=lambda: DDP(model)
)


def train(session: tft.Session) -> None:
    for step in session.steps(args.steps):
        loss = session.model(*data.next())
        record.write(step, loss.item())
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        with session.update():
            optimizer.step()
            scheduler.step()
        optimizer.zero_grad()
        if rank == 0 and step % 20 == 0:
            print(f"step {step} loss {loss.item():.3f}")


session.run(train)
record.finish(session.digests())
