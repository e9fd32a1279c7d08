"""
A DDP job that evaluates after its steps.

    after_job.py HOW [--seconds S] [--every K] [--die RANK,STEP,WHERE]

HOW says how the script evaluates: - `alone`: rank 0 evaluates, through `session.evaluate`. -
`together`: all ranks evaluate the averaged weights, with an all-reduce. - `inline`: rank 0
evaluates in the loop and does not report it to tft.

WHERE says at which place a rank dies: - `update`: at the head of the step, after rank 0 has
evaluated the step before. - `evaluation`: inside the evaluation of the step.
"""

import argparse
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from sys import path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import StepLR

import tft

path += [".", "examples/gpt"]
from record import Record

from tests.e2e.job_parts import WIDTH, Batches, averaged, whole_state
from tests.once import once

STEPS = 14
parser = argparse.ArgumentParser()
parser.add_argument("how", choices=["alone", "together", "inline"])
parser.add_argument("--seconds", type=float, default=0.0)
parser.add_argument("--every", type=int, default=5)
parser.add_argument("--die", default="-1,-1,never")
args = parser.parse_args()
victim, at, where = args.die.split(",")

session = tft.init()
torch.manual_seed(7)
model = nn.Sequential(
    nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = StepLR(optimizer, step_size=2, gamma=0.9)
average = averaged(model)
batches = Batches(session.rank)
torch.manual_seed(100 + session.rank)
session.adopt(
    model=model, optimizer=optimizer, scheduler=scheduler, others={"average": average},
    data=batches, wrap=lambda: DDP(model, forward_sync_buffers=False),
)  # fmt: skip
record = Record(session.run_dir, session.rank)


def die(step: int, place: str) -> None:
    """
    Kill this process if the arguments name its rank, this step and this place. Only one process of
    the job dies.
    """
    here = (str(session.rank), str(step), place) == (victim, at, where)
    if here and once(session.run_dir / "died"):
        os.kill(os.getpid(), signal.SIGKILL)


def busy(mark: Path) -> None:
    """
    Create the file `mark` to show that the work has begun, and wait for `args.seconds` seconds.
    """
    mark.touch()
    until = time.monotonic() + args.seconds
    while time.monotonic() < until:
        time.sleep(0.01)


def copy(weights: Iterable[torch.Tensor]) -> None:
    """
    Copy `weights` into the model.
    """
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)


def evaluate(step: int) -> None:
    """
    Record a loss over separate data.

    Like some scripts, the function draws random numbers and leaves the model in evaluation mode. It
    has no `finally`: if it is broken off, the averaged weights stay in the model.
    """
    if args.how == "alone" and session.rank:
        return
    model.eval()
    stored = [each.detach().clone() for each in model.parameters()]
    if args.how == "together":
        copy(average.module.parameters())
    loss = model(torch.randn(16, WIDTH)).square().mean().detach()
    die(step, "evaluation")
    if args.how == "together":
        dist.all_reduce(loss)
        copy(stored)
    busy(session.run_dir / f"evaluates-{session.rank}-{step}")
    session.record({"loss": float(loss)})


def train(session: tft.Session) -> None:
    """
    Run the training loop.
    """
    wrapped: Any = session.model
    for step in session.steps(STEPS):
        if (victim, str(step), "update") == (str(session.rank), at, where):
            # Rank 0 must be in its evaluation first. The other ranks then wait for rank 0.
            while not (session.run_dir / f"evaluates-0-{step - 1}").exists():
                time.sleep(0.01)
            die(step, "update")
        loss = wrapped(batches.next()).square().mean()
        record.write(step, loss.item())
        loss.backward()
        with session.update():
            optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        average.update_parameters(model)
        if args.how == "inline" and session.rank == 0 and step % args.every == 0:
            busy(session.run_dir / f"evaluates-0-{step}")


if args.how != "inline":
    session.evaluate(evaluate, every=args.every, limit=600.0)
session.run(train)
scaler = GradScaler("cpu", enabled=False)
record.finish(whole_state(session, model, optimizer, scheduler, average, scaler))
