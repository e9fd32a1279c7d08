"""
A small DDP job with one habit, for tests of `tft verify`.

    verify_job.py [--steps N] [--habit random|clock|epoch|evaluate|calls|once]
                  [--on RANK] [--keep FILE]

`random` draws from Python's generator in the forward pass. `clock` seeds from the time. `epoch`
keeps a number outside the state that the script hands to tft. `evaluate` evaluates after every
fourth step, with `--on` on one rank only. `calls` records after each step how often a function was
called. `once` makes the file of `--keep`, and fails if it exists.
"""

import argparse
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import tft

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--habit", default="")
parser.add_argument("--plain", action="store_true")
parser.add_argument("--on", type=int, default=None)
parser.add_argument("--keep", default="")
args = parser.parse_args()

session = tft.init()
torch.set_num_threads(1)
torch.manual_seed(0 if args.habit != "clock" else time.time_ns())
random.seed(session.rank)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
total = 0.0
calls: dict[int, int] = {}
sent: list[Any] = []  # Any: torch has no types here
if args.habit == "once" and session.rank == 0 and session.incarnation == 0:
    Path(args.keep).touch(exist_ok=False)


def batch(step: int) -> Tensor:
    """
    Return the batch of this rank, (4, 8).
    """
    generator = torch.Generator().manual_seed(1000 * session.rank + step)
    return torch.randn(4, 8, generator=generator)


def evaluate(step: int) -> None:
    """
    Record the loss of a batch that no training step uses. With `--on`, only one rank does it.
    """
    if args.on not in (None, session.rank):
        return
    with torch.no_grad():
        session.record({"loss": model(batch(-step)).mean().item(), "at": time.time()})


def count(step: int) -> None:
    """
    Record how often this function was called after this step. Rank 0 sends a number to rank 1 and
    does not wait. Rank 1 comes late for it after step 3. So rank 1 has to call the function again if
    rank 0 dies in step 4.
    """
    calls[step] = calls.get(step, 0) + 1
    if session.rank == 0:
        sent.append(dist.isend(torch.tensor(step), dst=1))
    else:
        time.sleep(1.0 if step == 3 else 0.0)
        dist.recv(torch.tensor(step), src=0)
    session.record({"calls": calls[step]})


def train(session: tft.Session) -> None:
    """
    Run the training loop.
    """
    global total
    for step in session.steps(args.steps) if not args.plain else iter(lambda: session.step, -1):
        found = session.model(batch(step))
        loss = found.square().mean()
        if args.habit == "random":
            loss = loss * (1.0 + random.random())
        if args.habit == "epoch":
            total += 1.0
            loss = loss * total
        loss.backward()
        with session.update():
            optimizer.step()
            optimizer.zero_grad()


session.adopt(model=model, optimizer=optimizer, wrap=lambda: DDP(model))
if args.habit == "evaluate":
    session.evaluate(evaluate, every=4)
if args.habit == "calls":
    session.after_step(count)
session.run(train)
