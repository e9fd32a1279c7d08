"""
A DDP job that logs values at each place where a script may: before the backward pass on rank 0,
after the update window on all ranks, and on rank 1 in a function that is called after every fourth
step.

    logged_ddp_job.py STEPS
"""

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import tft

session = tft.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.adopt(model=model, optimizer=optimizer, wrap=lambda: DDP(model))


def train(session: tft.Session) -> None:
    """
    Run the training loop.
    """
    for _ in session.steps(int(sys.argv[1])):
        batch = torch.rand(4, 8) + session.rank
        loss = (session.model(batch) - batch).pow(2).mean()
        if session.rank == 0:
            session.log(loss=loss.detach())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with session.update():
            optimizer.step()
            optimizer.zero_grad()
        session.log(norm=norm)


def evaluate(step: int) -> None:
    """
    Log the sum of the weights.
    """
    with torch.no_grad():
        total = sum(float(parameter.double().sum()) for parameter in model.parameters())
        model(torch.ones(1, 8))
    if session.rank == 1:
        session.log({"val/weights": total})


session.after_step(evaluate, every=4)
session.run(train)
