"""
A DDP job in which one rank computes wrong numbers at some batches.

    numerics_job.py --steps N [--wrong WHAT,RANK,BATCH,TIMES ...] [--without BATCH ...]

`WHAT` is `loss` (its value is NaN), `infinite` (it is Inf), `spike` (it is a thousand times larger),
`gradient` (NaN in a gradient before it is reduced) or `norm` (a gradient a million times larger).
The numbers are wrong the first `TIMES` times that the rank computes with this batch; 0: always. A job
with `--without` never draws these batches. With `--tail`, rank 0 computes a loss of NaN in the tail
of every second step, which changes nothing. With `--critic`, each step trains a second model, which is
among `others`. Then `WHAT` may be `critic`: NaN in a gradient of this model before it is reduced.
"""

import argparse
import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from sys import path
from typing import Any

import torch
from tft_pytorch import ReplicaOptimizer
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_

import tft

path.append("examples/gpt")
from record import Record

WIDTH = 8

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--wrong", action="append", default=[])
parser.add_argument("--without", type=int, action="append", default=[])
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--replicas", action="store_true")
parser.add_argument("--scaler", type=float, default=0.0, help="the initial scale; 0: none")
parser.add_argument("--no-clip", action="store_true")
parser.add_argument("--tail", action="store_true")
parser.add_argument("--critic", action="store_true")
args = parser.parse_args()


class Batches:
    """
    The batches of one rank: the batch at a position is always the same.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.position = 0

    def next(self) -> Tensor:
        """
        Return the next batch.
        """
        self.position += 1
        while self.position in args.without:
            self.position += 1
        torch_seed = random.Random(f"{self._rank}/{self.position}").getrandbits(32)
        return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(torch_seed))

    def skip(self, batches: int) -> None:
        """
        Leave out the next `batches` batches.
        """
        self.position += batches

    def state_dict(self) -> dict[str, int]:
        """
        Return the position.
        """
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """
        Continue at a position.
        """
        self.position = state["position"]


class Wrong:
    """
    The wrong numbers of this rank: by batch, what is wrong and how many more times.
    """

    def __init__(self, rank: int) -> None:
        self._left: dict[int, tuple[str, int]] = {}
        for text in args.wrong:
            what, victim, batch, times = text.split(",")
            if int(victim) == rank:
                self._left[int(batch)] = (what, int(times) or 1_000)
        self.present = ""

    def begins(self, batch: int) -> None:
        """
        Find out what is wrong with this batch.
        """
        what, left = self._left.get(batch, ("", 0))
        self.present = what if left else ""
        if left:
            self._left[batch] = (what, left - 1)

    def loss(self, loss: Tensor) -> Tensor:
        """
        Return the loss of the present batch, right or wrong.
        """
        factors = {"loss": float("nan"), "infinite": float("inf"), "spike": 1000.0}
        return loss * factors.get(self.present, 1.0)

    def critic(self, gradient: Tensor) -> Tensor:
        """
        Return a gradient of the critic, before it is reduced.
        """
        return gradient * (float("nan") if self.present == "critic" else 1.0)

    def gradient(self, gradient: Tensor) -> Tensor:
        """
        Return a gradient of the present batch, before it is reduced.
        """
        factors = {"gradient": float("nan"), "norm": 1e6}
        return gradient * factors.get(self.present, 1.0)


session = tft.init()
rank = session.rank
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(WIDTH, 16),
    nn.BatchNorm1d(16),
    nn.Dropout(0.1),
    nn.Linear(16, 16),
    nn.Tanh(),
    nn.Linear(16, 1),
)
critic = nn.Linear(WIDTH, 1)
critics = torch.optim.SGD(critic.parameters(), lr=0.01, momentum=0.9)
make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
if args.replicas:
    make = partial(
        ReplicaOptimizer, optimizer=torch.optim.AdamW, rank=rank, world=session.world, copies=2
    )
optimizer = make(model.parameters(), lr=0.001)
scaler = GradScaler("cpu", enabled=args.scaler > 0, init_scale=args.scaler, growth_interval=20)
data = Batches(rank)
wrong = Wrong(rank)
record = Record(session.run_dir, rank)
torch.manual_seed(1000 + rank)
others: dict[str, Any] = {"scaler": scaler} if args.scaler else {}  # Any: each has its own type
if args.critic:
    others |= {"critic": critic, "critics": critics}


def wrap() -> Any:  # Any: one wrapper or two
    """
    Return the wrapper of the model, and with `--critic` also that of the critic.
    """
    return [DDP(model), DDP(critic)] if args.critic else DDP(model)


session.adopt(model=model, optimizer=optimizer, data=data, others=others, wrap=wrap)
third: Any = dict(model.named_parameters())["3.weight"]  # Any: `register_hook` has no types
third.register_hook(wrong.gradient)
weight: Any = critic.weight  # Any: as above
weight.register_hook(wrong.critic)


def micro_batch(wrapped: Any) -> float:  # Any: the wrapper
    """
    Compute one micro-batch, and return its loss.
    """
    batch = data.next()
    wrong.begins(data.position)
    loss: Any = wrong.loss(wrapped(batch).square().mean() + 1.0)  # Any: `backward` has no types
    scaler.scale(loss).backward()
    return float(loss.item())


def train(session: tft.Session) -> None:
    """
    Train all steps.
    """
    wrapped, *critical = session.model if args.critic else [session.model]
    for step in session.steps(args.steps):
        losses = []
        for micro in range(args.accumulate):
            last = micro == args.accumulate - 1
            with nullcontext() if last else wrapped.no_sync():
                losses.append(micro_batch(wrapped))
        for each in critical:
            each(torch.full((4, WIDTH), 1.0 / step)).square().mean().backward()
        record.write(step, sum(losses))
        scaler.unscale_(optimizer)
        if not args.no_clip:
            clip_grad_norm_(model.parameters(), 1.0)
        with session.update():
            scaler.step(optimizer)
            scaler.update()
            if args.critic:
                critics.step()
        optimizer.zero_grad()
        critics.zero_grad()
        if args.tail and rank == 0 and step % 2:
            apart: Any = torch.tensor(float("nan"), requires_grad=True)  # Any: as above
            apart.backward()


session.run(train)
record.finish(session.digests())
