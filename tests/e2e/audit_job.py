"""
A DDP job for the audit, with habits in its loop that an incident cannot repair.

    audit_job.py HABIT... [--steps N] [--die RANK,STEP]

The habit `clean` means a loop without such habits.
"""

import argparse
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from sys import path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import tft

path.append("examples/gpt")
from record import Record

WIDTH = 8


class Batches:
    """
    Batches of one rank. The position is the number of batches that were taken.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._taken = 0

    def next(self) -> Tensor:
        """
        Return the next batch, a (4, WIDTH) tensor.
        """
        self._taken += 1
        generator = torch.Generator().manual_seed(1000 * self._rank + self._taken)
        return torch.randn(4, WIDTH, generator=generator)

    def state_dict(self) -> dict[str, int]:
        """
        Return the position.
        """
        return {"taken": self._taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """
        Set the position to the one in `state`.
        """
        self._taken = state["taken"]


parser = argparse.ArgumentParser()
parser.add_argument("habits", nargs="+")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--die")
args = parser.parse_args()

session = tft.init()
rank = session.rank
victim, fatal = map(int, args.die.split(",")) if args.die else (-1, -1)
record = Record(session.run_dir, rank)
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, WIDTH)
)
average = AveragedModel(model[0])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.0)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
loader = DataLoader(TensorDataset(torch.ones(4, WIDTH)))
evaluating = DataLoader(
    TensorDataset(torch.ones(4, WIDTH)), batch_size=2, num_workers=1, generator=torch.Generator()
)
torch.manual_seed(100 + rank)
batches = Batches(rank)
session.adopt(
    model=model,
    optimizer=optimizer,
    scheduler=scheduler,
    others={"average": average, "scaler": scaler},
    data=batches,
    wrap=lambda: DDP(model),
)


def die() -> None:
    """
    Kill this process once, if it is the victim and at the fatal step.
    """
    if (rank, session.step - 1) == (victim, fatal) and session.incarnation == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def draw(loss: Tensor) -> None:
    """
    Draw a number from torch's default generator, which the training also uses.
    """
    torch.rand(1)


def iterate(loss: Tensor) -> None:
    """
    Start to iterate over a data loader that has no generator of its own.
    """
    for _ in loader:
        break


def decide(loss: Tensor) -> None:
    """
    Set the learning rate from the summed loss of all ranks.
    """
    found = loss.detach().clone()
    dist.all_reduce(found)
    scheduler.step(found)


def swallow(loss: Tensor) -> None:
    """
    Set the learning rate from the summed loss of all ranks.

    If the all-reduce fails, the function ignores the error and uses the loss of this rank.
    """
    die()
    found = loss.detach().clone()
    with suppress(RuntimeError):
        dist.all_reduce(found)
    scheduler.step(found)


def decline(loss: Tensor) -> None:
    """
    Set a learning rate that is the same on all ranks and falls during the training.
    """
    scheduler.step(1.0)


def evaluate(loss: Tensor) -> None:
    """
    Evaluate on all ranks, with data loader workers, and do not use the result.
    """
    model.eval()
    with torch.no_grad():
        found = torch.stack([session.model(batch).mean() for (batch,) in evaluating]).mean()
    dist.all_reduce(found)
    model.train()


def train_twice(loss: Tensor) -> None:
    """
    Train with a further batch, in an update window of its own.
    """
    session.model(batches.next()).abs().mean().backward()
    with session.update():
        optimizer.step()
    optimizer.zero_grad()


TAILS: Mapping[str, Callable[[Tensor], None]] = {
    "draws": draw,
    "iterates": iterate,
    "decides": decide,
    "swallows": swallow,
    "unended": decline,
    "twice": train_twice,
    "clean": evaluate,
}


def decay_in_backward() -> None:
    """
    Register hooks that shrink each parameter in the backward pass, as soon as the gradient of the
    parameter is complete.
    """

    def decay(parameter: Tensor) -> None:
        parameter.data.mul_(0.99)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(decay)  # type: ignore[no-untyped-call]  # torch has no types here


def steps(session: tft.Session) -> Iterator[int]:
    """
    Yield the remaining steps. With the habit `unended`, the loop does not report where a step ends.
    """
    if "unended" not in args.habits:
        yield from session.steps(args.steps)
    while (step := session.step) <= args.steps:
        yield step


def train(session: tft.Session) -> None:
    ahead = batches.next() if {"prefetches", "behind"} & {*args.habits} else None
    for step in steps(session):
        if "averages" in args.habits:
            average.update_parameters(model[0])
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / step
        batch = batches.next() if ahead is None else ahead
        with torch.autocast("cpu") if "clean" in args.habits else nullcontext():
            loss = session.model(batch).square().mean()
        if "prefetches" in args.habits:
            ahead = batches.next()
        record.write(step, loss.item())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with session.update():
            scaler.step(optimizer)
            if "clean" in args.habits:
                average.update_parameters(model[0])
        if "behind" in args.habits:
            ahead = batches.next()
        optimizer.zero_grad()
        scaler.update()
        for habit in args.habits:
            if habit in TAILS:
                TAILS[habit](loss)


if "backward" in args.habits:
    decay_in_backward()
session.run(train)
record.finish(session.digests())
