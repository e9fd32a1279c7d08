"""
Train a small model. Arguments: the step in which the weights of all ranks are spoiled, and the step in
which rank 0 notices it.
"""

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import tft

sys.path.append(".")
from tests.e2e.jobs import until
from tft.spi import TrainingFault

SPOILED, NOTICED = map(int, sys.argv[1:])

session = tft.init()
torch.manual_seed(1)
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def train(session: tft.Session) -> None:
    """
    Train 20 steps.
    """
    for step in session.steps(20):
        session.model(torch.ones(8)).sum().backward()
        if step == NOTICED and session.rank == 0:
            until(
                (session.run_dir / "checkpoints" / f"step-{SPOILED:08}").exists,
                "the checkpoint with wrong numbers is written",
            )
            raise TrainingFault(
                "the numbers are wrong", kind="numeric", polluted=True, not_after=SPOILED - 1
            )
        with session.update():
            optimizer.step()
            optimizer.zero_grad()
            if step == SPOILED:
                with torch.no_grad():
                    model.weight *= 3


session.adopt(model=model, optimizer=optimizer, wrap=lambda: DDP(model))
session.run(train)
