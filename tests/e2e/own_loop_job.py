"""
The GPT of `examples/gpt/train.py` in a loop that tft does not call: it survives incidents in the
middle of its steps. Usage: `own_loop_job.py --steps N [--evaluates]`.

With `--evaluates`, all ranks evaluate after every fifth step.
"""

import argparse
from sys import path
from typing import Any

import torch
import torch.distributed as dist
from tft_pytorch import OwnLoop
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_

import tft

path += [".", "examples/gpt"]
from corpus import Batches, load_corpus
from gpt import GPT, SIZES, make_optimizer, make_scheduler
from record import Record

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--evaluates", action="store_true")
args = parser.parse_args()
size = SIZES["tiny"]

session = tft.init()
torch.manual_seed(0)
model = GPT(size)
optimizer = make_optimizer(model)
scheduler = make_scheduler(optimizer, args.steps)
text = load_corpus()
data = Batches(text, batch=size.batch, context=size.context, seed=0, rank=session.rank)
record = Record(session.run_dir, session.rank)
torch.manual_seed(session.rank)
session.adopt(
    model=model, optimizer=optimizer, scheduler=scheduler, data=data, wrap=lambda: DDP(model)
)


def compute() -> None:
    """
    Compute one step.
    """
    optimizer.zero_grad()
    wrapped: Any = session.model
    loss = wrapped(*data.next())
    record.write(session.step, loss.item())
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    with session.update():
        optimizer.step()
        scheduler.step()


def evaluate(step: int) -> None:
    """
    Record the mean loss of all ranks over a batch of other data.
    """
    with torch.no_grad():
        others = Batches(text, batch=4, context=size.context, seed=step, rank=session.rank)
        mean = model.eval()(*others.next())
    dist.all_reduce(mean)
    session.record({"mean": float(mean)})


loop = OwnLoop(session)
if args.evaluates:
    session.evaluate(evaluate, every=5)
loop.enter()
while session.step <= args.steps and not session.over:
    loop.step(compute)
    loop.end_step()
loop.finish()
record.finish(session.digests())
