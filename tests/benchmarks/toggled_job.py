"""
The example's training loop, in which what observers do is switched on and off in turns: one block
of steps with the plugins of the job, one block without. All ranks switch at the same step.
"""

import argparse
import json
import time
from sys import path

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_

import tft

path.append("examples/gpt")
from corpus import Batches, load_corpus
from gpt import GPT, SIZES, make_optimizer, make_scheduler

FLAGS = ("watch_windows", "watch_tails", "watch_ends", "watch_releases", "watch_numbers")

parser = argparse.ArgumentParser()
parser.add_argument("--blocks", type=int, default=1400)
parser.add_argument("--block", type=int, default=5)
parser.add_argument("--warm", type=int, default=30)
parser.add_argument("--size", choices=SIZES, default="tiny")
args = parser.parse_args()
size = SIZES[args.size]
steps = args.warm + args.blocks * args.block

session = tft.init()
torch.manual_seed(0)
model = GPT(size)
optimizer = make_optimizer(model)
scheduler = make_scheduler(optimizer, steps)
data = Batches(load_corpus(), batch=size.batch, context=size.context, seed=0, rank=session.rank)
session.adopt(
    model=model, optimizer=optimizer, scheduler=scheduler, data=data, wrap=lambda: DDP(model)
)
observers = session._observers
wanted = {flag: getattr(observers, flag, False) for flag in FLAGS}
times: dict[str, list[float]] = {"time": [], "processor": []}


def train(session: tft.Session) -> None:
    for step in session.steps(steps):
        times["time"].append(time.perf_counter())
        times["processor"].append(time.thread_time())
        on = step <= args.warm or (step - args.warm - 1) // args.block % 2 == 0
        for flag, value in wanted.items():
            setattr(observers, flag, value and on)
        loss = session.model(*data.next())
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        with session.update():
            optimizer.step()
            scheduler.step()
        optimizer.zero_grad()


session.run(train)
if session.rank == 0:
    (session.run_dir / "times.json").write_text(
        json.dumps({"warm": args.warm, "block": args.block, "times": times})
    )
