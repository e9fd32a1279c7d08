"""
A DDP job in which one rank becomes slow.

    slow_job.py RANK PART PERCENT SINCE STEPS [WAIT]

From the step SINCE on, PART (`input`, `forward`, `backward` or `update`) takes PERCENT longer on
RANK; on all ranks, if RANK is -1. With WAIT, each part is mostly a wait of so many seconds, so that
its time hardly varies, even if there are more ranks than cores.
"""

import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import tft

RANK, PART, PERCENT = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
SINCE, STEPS = int(sys.argv[4]), int(sys.argv[5])
WAIT = float(sys.argv[6]) if len(sys.argv) > 6 else 0.0
WIDTH, ROWS = 512, 256

session = tft.init()
torch.set_num_threads(1)
began: dict[str, float] = {}


def begins(part: str) -> None:
    """
    Note when a part of the step begins.
    """
    began[part] = time.monotonic()
    time.sleep(WAIT)


def ends(part: str) -> None:
    """
    Make a part of the step as slow as it shall be, on the rank that shall be slow.
    """
    slow = RANK in (session.rank, -1) and part == PART and session.step >= SINCE
    if slow:
        time.sleep(PERCENT / 100 * (time.monotonic() - began[part]))


class Begin(torch.autograd.Function):
    """
    The output of the model: its backward pass begins here.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """
        Return `x`.
        """
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """
        Return the gradient.
        """
        begins("backward")
        return gradient


class End(torch.autograd.Function):
    """
    The output of the first layer, near which the backward pass ends.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """
        Return `x`.
        """
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """
        Return the gradient.
        """
        ends("backward")
        return gradient


# Any: the type of `apply` is not known
_begin: Any = Begin.apply
_end: Any = End.apply


class Net(nn.Module):
    """
    Some layers of the same width.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.rest = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(7)))

    def forward(self, x: Tensor) -> Any:
        """
        Map a (batch, WIDTH) tensor to a tensor of the same shape.
        """
        begins("forward")
        y = self.rest(_end(self.first(x)))
        ends("forward")
        return _begin(y)


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
session.adopt(model=model, optimizer=optimizer, wrap=lambda: DDP(model))


def batch() -> Tensor:
    """
    Return the data of a step.
    """
    begins("input")
    for _ in range(5):
        rows = torch.randn(ROWS, WIDTH).sort(dim=1).values
    ends("input")
    return rows


def train(session: tft.Session) -> None:
    """
    Train until the last step.
    """
    for _ in session.steps(STEPS):
        session.model(batch()).square().mean().backward()
        with session.update():
            begins("update")
            optimizer.step()
            ends("update")
        optimizer.zero_grad()


session.run(train)
