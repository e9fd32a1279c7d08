"""
A DDP job that does some work after its update window. At the end, each rank records its whole
state.

    tails_job.py HABIT [--slow before|after|head] [--slowly STEP,STEP...] [--own] [--evaluates]
                 [--rows] [--die RANK,STEP[,INCARNATION]]

With `--rows`, each rank records a row of each step before the backward pass. With `--evaluates`,
all ranks evaluate after each step and record their common result once.

In the steps of `--slowly`, each rank sleeps for 0.2 s times its rank. `--slow` says where: before
the window, after it, or at the head of the step. Each rank writes its positions to
`trail-rankR.INCARNATION`.
"""

import argparse
import os
import signal
import time
from collections.abc import Iterator, Mapping
from sys import path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import tft

path += [".", "examples/gpt"]
from record import Record

from tests.e2e.job_parts import WIDTH, Batches, averaged, whole_state

APART = 0.2
"""Seconds by which one rank is behind the next lower rank, in the steps of `--slowly`."""


class Net(nn.Module):
    """
    A small network with dropout, and with buffers that its forward pass changes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """
        Map a (batch, WIDTH) tensor to a tensor of the same shape.
        """
        return self.last(torch.tanh(self.dropout(self.norm(self.first(x)))))  # type: ignore[no-any-return]  # torch has no types here


parser = argparse.ArgumentParser()
parser.add_argument("habit")
parser.add_argument("--slow", choices=["before", "after", "head"], default="after")
parser.add_argument("--slowly", default="")
parser.add_argument("--own", action="store_true")
parser.add_argument("--evaluates", action="store_true")
parser.add_argument("--rows", action="store_true")
parser.add_argument("--die", default="")
parser.add_argument("--steps", type=int, default=12)
args = parser.parse_args()

session = tft.init()
rank = session.rank
slowly = {int(step) for step in args.slowly.split(",") if step}
dies = tuple(map(int, args.die.split(","))) if args.die else (-1, -1)
torch.set_num_threads(1)
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = Batches(rank)
record = Record(session.run_dir, rank)


class Habit:
    """
    A loop that does nothing after its update window. Each subclass adds one habit.
    """

    scheduler: Any = None  # Any: as in torch
    scaler = GradScaler("cpu", enabled=False)

    def __init__(self) -> None:
        self.others: dict[str, Any] = {}  # Any: the values have different types

    def head(self, step: int) -> None:
        """
        Run the code at the beginning of an iteration. The default does nothing.
        """

    def tail(self, step: int) -> None:
        """
        Run the code after the update window. The default does nothing.
        """


class Schedules(Habit):
    """
    The loop advances a scheduler.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = StepLR(optimizer, step_size=1, gamma=0.9)

    def tail(self, step: int) -> None:
        """
        Advance the scheduler, which gives each step its own learning rate.
        """
        self.scheduler.step()


class Averages(Habit):
    """
    The loop keeps a moving average of the parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.average = averaged(model)
        self.others = {"average": self.average}

    def tail(self, step: int) -> None:
        """
        Update the average with the parameters of this step.
        """
        self.average.update_parameters(model)


class Plateaus(Habit):
    """
    The loop advances a scheduler with a number that all ranks have summed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.9)

    def tail(self, step: int) -> None:
        """
        Advance the scheduler, which changes the learning rate after most steps.
        """
        found = torch.tensor(float(step % 3 + rank))
        dist.all_reduce(found)
        self.scheduler.step(found.item())


class Scales(Habit):
    """
    The loop uses a gradient scaler, whose scale grows in every second step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scaler = GradScaler("cpu", init_scale=64.0, growth_interval=2)
        self.others = {"scaler": self.scaler}

    def tail(self, step: int) -> None:
        """
        Update the gradient scaler, as torch's examples do.
        """
        self.scaler.update()


class ByHand(Habit):
    """
    The loop sets the learning rate at the head of each iteration, as nanoGPT does.
    """

    def head(self, step: int) -> None:
        """
        Set the learning rate of this step.
        """
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * 0.9**step


class Evaluates(Habit):
    """
    The loop evaluates in every third step, outside training mode, and all ranks sum the losses.
    """

    def tail(self, step: int) -> None:
        """
        Evaluate in every third step. The victim of `--die` dies in the evaluation.
        """
        if step % 3 == 0:
            model.eval()
            with torch.no_grad():
                loss = model(torch.ones(2, WIDTH)).square().mean()
            die(step)
            dist.all_reduce(loss)
            model.train()


class Switches(Habit):
    """
    The loop stops the training of one part of the model for good, after the window of a step.
    """

    def tail(self, step: int) -> None:
        """
        Switch the norm layer to evaluation mode in step 6. From then on its running statistics do
        not change.
        """
        if step == 6:
            model.norm.eval()
            wait_within(step)


class LeavesModes(Habit):
    """
    Rank 0 evaluates alone and leaves the model in evaluation mode.

    The loop sets training mode at the head of each iteration.
    """

    def head(self, step: int) -> None:
        """
        Set training mode.
        """
        model.train()

    def tail(self, step: int) -> None:
        """
        Leave the model in evaluation mode on rank 0.
        """
        if rank == 0:
            model.eval()


HABITS: Mapping[str, type[Habit]] = {
    "schedules": Schedules,
    "averages": Averages,
    "plateaus": Plateaus,
    "scales": Scales,
    "by-hand": ByHand,
    "evaluates": Evaluates,
    "switches": Switches,
    "leaves-modes": LeavesModes,
}


def die(step: int) -> None:
    """
    Kill this process if `--die` names its rank, this step and its incarnation.
    """
    if (rank, step, session.incarnation) == (*dies, 0)[:3]:
        come("dies", step)
        os.kill(os.getpid(), signal.SIGKILL)


def come(place: str, step: int) -> None:
    """
    Append the position of this process, `place` and `step`, to its trail file.
    """
    trail.write(f"{place} {step}\n".encode())


def wait(where: str, step: int) -> None:
    """
    In the steps of `--slowly`, sleep for 0.2 s times the rank, if `--slow` names the place `where`.
    """
    if where == args.slow and step in slowly:
        time.sleep(APART * rank)


def wait_within(step: int) -> None:
    """
    In the steps of `--slowly`, sleep for 0.2 s times the rank, in the middle of a tail.
    """
    if step in slowly:
        time.sleep(APART * rank)


habit = HABITS[args.habit]()
trail = (session.run_dir / f"trail-rank{rank}.{session.incarnation}").open("ab", buffering=0)
torch.manual_seed(100 + rank)
session.adopt(
    model=model, optimizer=optimizer, data=data, wrap=lambda: DDP(model, forward_sync_buffers=False),
    **({} if habit.scheduler is None else {"scheduler": habit.scheduler}),
    **({"others": habit.others} if habit.others else {}),
)  # fmt: skip


def evaluate(step: int) -> None:
    """
    Record the common loss of all ranks, in evaluation mode and with random input.
    """
    model.eval()
    with torch.no_grad():
        loss = model(torch.randn(2, WIDTH)).square().mean()
    wait_within(step)
    dist.all_reduce(loss)
    session.record({"evaluated": loss.item()})


def steps(session: tft.Session) -> Iterator[int]:
    """
    Yield the remaining steps. With `--own`, the loop itself reports where a step ends.
    """
    if not args.own:
        yield from session.steps(args.steps)
        return
    while (step := session.step) <= args.steps:
        yield step
        session.end_step()


def train(session: tft.Session) -> None:
    for step in steps(session):
        habit.head(step)
        come("head", step)
        wait("head", step)
        loss = session.model(data.next()).square().mean()
        if args.rows:
            session.record({"loss": loss.item()})
        habit.scaler.scale(loss).backward()
        record.write(step, loss.item())
        wait("before", step)
        with session.update():
            habit.scaler.step(optimizer)
        come("window", step)
        optimizer.zero_grad()
        wait("after", step)
        habit.tail(step)
        come("tail", step)


if args.evaluates:
    session.evaluate(evaluate, every=1)
session.run(train)
record.finish(
    whole_state(
        session, model, optimizer, habit.scheduler, habit.others.get("average"), habit.scaler
    )
)
