"""
A job in which ranks stop in collectives that do not fit together.

    hanging_job.py HOW STEPS

When a process first computes step 60, rank 1 does not enter an all-reduce that the others enter
(`skip`), enters another collective (`other`), or waits in one group for rank 0, which waits in
another group for rank 1 (`deadlock`). With `none` nothing happens. When the step is computed again,
nothing goes wrong.
"""

import sys
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import tft

HOW, STEPS, WRONG = sys.argv[1], int(sys.argv[2]), 60
session = tft.init()
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
groups: list[Any] = []
went_wrong: list[int] = []


def wrap() -> nn.Module:
    """
    Build the wrapper, and two more groups of all ranks.
    """
    groups[:] = [dist.new_group(), dist.new_group()]
    return DDP(model)


session.adopt(model=model, optimizer=optimizer, wrap=wrap)


def average(step: int) -> None:
    """
    Average something over all ranks, except where this shall go wrong.
    """
    first, second = groups
    if step != WRONG or HOW == "none" or went_wrong or session.incarnation:
        dist.all_reduce(torch.ones(4), group=first)
        return
    went_wrong.append(step)
    if HOW == "skip":
        if session.rank == 1:
            threading.Event().wait(60)  # rank 1 is here
        dist.all_reduce(torch.ones(4), group=first)  # the others wait here
    elif HOW == "other":
        if session.rank == 1:
            gathered = [torch.ones(4) for _ in range(session.world)]
            dist.all_gather(gathered, torch.ones(4), group=first)  # another collective
        dist.all_reduce(torch.ones(4), group=first)
    elif HOW == "deadlock":
        order = (first, second) if session.rank == 0 else (second, first)
        for group in order:
            dist.all_reduce(torch.ones(4), group=group)  # in another order


def train(session: tft.Session) -> None:
    """
    Train until the last step.
    """
    for step in session.steps(STEPS):
        threading.Event().wait(0.02)  # so that the job's step times are known soon
        session.model(torch.ones(2, 8)).square().mean().backward()
        average(step)
        with session.update():
            optimizer.step()
        optimizer.zero_grad()


session.run(train)
