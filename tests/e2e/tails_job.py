"""
A job of DDP that does something behind its update window, and all there is of its state at the end, on each rank.

    tails_job.py HABIT [--slow before|after|head] [--slowly STEP,STEP...] [--own] [--evaluates] [--die RANK,STEP[,INCARNATION]]

With `--evaluates` all ranks evaluate after each step, and write down what they find together, once. In the steps of
`--slowly` each rank waits 0.2 s for every rank below it: before its window, behind it, or at the
head of the step. Each rank writes down where it comes to, in `trail-rankR.INCARNATION`.
"""

import argparse
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from sys import path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tft

path.append("examples/gpt")
from record import Record

WIDTH = 8
APART = 0.2
"""Seconds between one rank and the next, in the steps in which they are apart."""


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
        (batch, WIDTH) to the same.
        """
        return self.last(torch.tanh(self.dropout(self.norm(self.first(x)))))  # type: ignore[no-any-return]  # torch has no types here


class Batches:
    """
    Each rank's own, drawn from a generator of theirs.
    """

    def __init__(self, rank: int) -> None:
        self._generator = torch.Generator().manual_seed(1000 + rank)
        self._taken = 0

    def next(self) -> Tensor:
        """
        (4, WIDTH)
        """
        self._taken += 1
        return torch.randn(4, WIDTH, generator=self._generator)

    def state_dict(self) -> dict[str, object]:
        """
        The position.
        """
        return {"taken": self._taken, "generator": self._generator.get_state().numpy().tobytes()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: each has its own type
        """
        To this position.
        """
        self._taken = state["taken"]
        self._generator.set_state(
            torch.frombuffer(bytearray(state["generator"]), dtype=torch.uint8)
        )


parser = argparse.ArgumentParser()
parser.add_argument("habit")
parser.add_argument("--slow", choices=["before", "after", "head"], default="after")
parser.add_argument("--slowly", default="")
parser.add_argument("--own", action="store_true")
parser.add_argument("--evaluates", action="store_true")
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
    A loop that does nothing behind its window; what others do otherwise.
    """

    scheduler: Any = None  # Any: as in torch
    scaler = GradScaler("cpu", enabled=False)

    def __init__(self) -> None:
        self.others: dict[str, Any] = {}  # Any: each has its own type

    def head(self, step: int) -> None:
        """
        What an iteration begins with.
        """

    def tail(self, step: int) -> None:
        """
        What follows the update window.
        """


class Schedules(Habit):
    """
    A scheduler's step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = StepLR(optimizer, step_size=1, gamma=0.9)

    def tail(self, step: int) -> None:
        """
        Each step has a rate of its own.
        """
        self.scheduler.step()


class Averages(Habit):
    """
    A moving average of the parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        towards: Any = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]  # torch has no types here
        self.average = AveragedModel(model, multi_avg_fn=towards)
        self.others = {"average": self.average}

    def tail(self, step: int) -> None:
        """
        Every step is in it once.
        """
        self.average.update_parameters(model)


class Plateaus(Habit):
    """
    A scheduler that is told what all ranks have found together.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.9)

    def tail(self, step: int) -> None:
        """
        The rate changes with most steps.
        """
        found = torch.tensor(float(step % 3 + rank))
        dist.all_reduce(found)
        self.scheduler.step(found.item())


class Scales(Habit):
    """
    A scaler, whose scale grows with every second step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scaler = GradScaler("cpu", init_scale=64.0, growth_interval=2)
        self.others = {"scaler": self.scaler}

    def tail(self, step: int) -> None:
        """
        As torch's examples have it.
        """
        self.scaler.update()


class ByHand(Habit):
    """
    The learning rate is set at the head of each iteration, as nanoGPT does.
    """

    def head(self, step: int) -> None:
        """
        Each step has a rate of its own.
        """
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * 0.9**step


class Evaluates(Habit):
    """
    Every third step, not in the mode of training, and all ranks average what they find.
    """

    def tail(self, step: int) -> None:
        """
        The victim of `--die` dies in it.
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
    A part of the model stops training, for good, behind the window of a step.
    """

    def tail(self, step: int) -> None:
        """
        Its running statistics stay what they are from then on.
        """
        if step == 6:
            model.norm.eval()
            wait_within(step)


class LeavesModes(Habit):
    """
    Rank 0 evaluates alone and leaves the mode as it is; each iteration begins with that of training.
    """

    def head(self, step: int) -> None:
        """
        Whatever it was.
        """
        model.train()

    def tail(self, step: int) -> None:
        """
        On rank 0.
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
    The victim, at its step, in one of its processes.
    """
    if (rank, step, session.incarnation) == (*dies, 0)[:3]:
        come("dies", step)
        os.kill(os.getpid(), signal.SIGKILL)


def come(place: str, step: int) -> None:
    """
    Write down where this process is.
    """
    trail.write(f"{place} {step}\n".encode())


def wait(where: str, step: int) -> None:
    """
    For the ranks below.
    """
    if where == args.slow and step in slowly:
        time.sleep(APART * rank)


def wait_within(step: int) -> None:
    """
    In the midst of a tail, for the ranks below.
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
    What all ranks find with the model as it is, in another mode and with random numbers.
    """
    model.eval()
    with torch.no_grad():
        loss = model(torch.randn(2, WIDTH)).square().mean()
    wait_within(step)
    dist.all_reduce(loss)
    session.record({"evaluated": loss.item()})


def steps(session: tft.Session) -> Iterator[int]:
    """
    Those that are left; with `--own` in a loop that says itself where a step ends.
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


def whole(tensors: Mapping[str, Tensor]) -> str:
    """
    A digest of their content.
    """
    found = xxhash.xxh3_128()
    for name, tensor in tensors.items():
        found.update(name.encode())
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def told(state: Callable[[], object] | None) -> str:
    """
    What an object says of itself.
    """
    return "" if state is None else repr(state())


if args.evaluates:
    session.evaluate(evaluate, every=1)
session.run(train)
record.finish(
    {
        **session.digests(),
        "modes": json.dumps([module.training for module in model.modules()]),
        "buffers": whole(dict(model.named_buffers())),
        "weights": whole(dict(model.named_parameters())),
        "averaged": whole(
            {
                k: dict(v.named_parameters())
                for k, v in habit.others.items()
                if isinstance(v, nn.Module)
            }.get("average", {})
        ),
        "trained": json.dumps([each.requires_grad for each in model.parameters()]),
        "rates": json.dumps([group["lr"] for group in optimizer.param_groups]),
        "schedule": told(habit.scheduler and habit.scheduler.state_dict),
        "scale": told(habit.scaler.state_dict),
        "generator": whole({"torch": torch.get_rng_state()}),
    }
)
