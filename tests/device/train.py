"""
A DDP job on the test device. At the end, each rank records its whole state.

    train.py [--groups] [--plateau] [--messages] [--guard] [--norm] [--plain] [--steps N]
             [--raises RANK,STEP] [--slow STEP] [--fails RANK,STEP] [--dies RANK,STEP,PLACE]

With `--groups`, the four ranks also add up a quantity over the two rows and the two columns of a
square, as a model over several groups does. With `--plateau`, the loop adds up a metric over all ranks
after each step, and sets the learning rate by it. With `--messages` too, rank 0 adds up the metric
from messages, and sends it to all others. With `--guard`, each rank counts the tokens of all ranks
after the backward pass, and raises an exception if their number is wrong. With `--norm`, the model
has running statistics, and a copy from ordinary host memory to the device waits for the stream, as on
a real device. With `--plain`, the loop does not say where its steps end.

With `--raises`, a rank raises an exception of the user's own in that step, once. With `--fails`, a rank reports a failed link after its backward pass,
while its all-reduces are pending. With `--slow`, the
device of each rank takes long for the optimizer step of that step, and the host stays in the window
until a rank has died. With `--dies`, a rank is killed
in that step, once, at one of these places: `window`, when its host has entered the update window;
`tail`, before it contributes to the metric; `evaluation`, before it contributes to the loss of an
evaluation.
"""

import argparse
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from sys import path

import torch
import torch.distributed as dist
from tft_pytorch import forward_buffers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau

import tft

path += [".", "examples/gpt"]
from record import Record

from tests.device.group import install
from tests.device.stream import stream
from tests.once import once

WIDTH = 16
SLOW = 3.0
"""Seconds that a slow device takes: longer than the start of another process."""
parser = argparse.ArgumentParser()
parser.add_argument("--groups", action="store_true")
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--plateau", action="store_true")
parser.add_argument("--messages", action="store_true")
parser.add_argument("--guard", action="store_true")
parser.add_argument("--norm", action="store_true")
parser.add_argument("--plain", action="store_true")
parser.add_argument("--raises", default="-1,-1")
parser.add_argument("--fails", default="-1,-1")
parser.add_argument("--slow", type=int, default=-1)
parser.add_argument("--dies", default="-1,-1,never")
args = parser.parse_args()

install()
session = tft.init()
torch.set_num_threads(1)
torch.manual_seed(0)
norm = [nn.BatchNorm1d(64)] if args.norm else []
model = nn.Sequential(nn.Linear(WIDTH, 64), *norm, nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, WIDTH))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
plateau = ReduceLROnPlateau(optimizer, factor=0.9, patience=0, threshold=0.01)
record = Record(session.run_dir, session.rank)
sides: list[dist.ProcessGroup] = []
"""The groups of this rank: its row, and its column."""


def wrap() -> nn.Module:
    """
    Form the rows and columns, and wrap the model.

    Gradients are views of DDP's buckets. So they are complete when the device has carried out the
    all-reduces.
    """
    if args.groups:
        rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        sides[:] = [rows[session.rank // 2], columns[session.rank % 2]]
    return DDP(model, gradient_as_bucket_view=True)


def batch(step: int) -> Tensor:
    """
    Return the batch of this rank, (4, WIDTH).
    """
    generator = torch.Generator().manual_seed(1000 * session.rank + step)
    return torch.randn(4, WIDTH, generator=generator)


def add_over_sides(step: int) -> None:
    """
    Sum a quantity of each rank over its row, then over its column, and add it to a gradient.
    """
    total = batch(step)[0].detach().clone()
    for group in sides:
        dist.all_reduce(total, group=group)
    gradient = bias.grad
    assert gradient is not None
    stream.submit(lambda: gradient.add_(total, alpha=0.1))


bias = list(model.parameters())[-1]


def add_by_messages(metric: Tensor) -> None:
    """
    Sum a metric over all ranks by messages to rank 0, and from it.
    """
    if session.rank:
        dist.send(metric, 0)
        dist.recv(metric, 0)
        return
    for rank in range(1, session.world):
        part = torch.zeros_like(metric)
        dist.recv(part, rank)
        stream.submit(partial(metric.add_, part))
    for rank in range(1, session.world):
        dist.send(metric, rank)


def count_tokens() -> None:
    """
    Raise an exception if the number of tokens of all ranks is wrong, as scripts do that check it.
    """
    tokens = torch.ones(1)
    dist.all_reduce(tokens)
    stream.synchronize()
    if tokens.item() != session.world:
        raise ValueError(f"the number of tokens of all ranks is {tokens.item()}")


def slow_copies() -> None:
    """
    Let copies from ordinary host memory to the device wait for the stream.
    """
    write = forward_buffers._write

    def behind_the_stream(present: list[tuple[int, Tensor]], content: bytes) -> None:
        stream.synchronize()
        write(present, content)

    forward_buffers._write = behind_the_stream


def die(step: int, place: str) -> None:
    """
    Kill this process if the arguments name its rank, this step and this place.
    """
    if f"{session.rank},{step},{place}" == args.dies and once(session.run_dir / "died"):
        os.kill(os.getpid(), signal.SIGKILL)


def evaluate(step: int) -> None:
    """
    Sum the loss of a batch that is in no training step over all ranks.
    """
    model.eval()
    with torch.no_grad():
        loss = model(batch(-step)).square().mean()
    die(step, "evaluation")
    dist.all_reduce(loss)
    stream.synchronize()
    evaluated[:] = [loss.item()]
    model.train()


evaluated: list[float] = []
"""The loss of the last evaluation."""


def note(step: int) -> None:
    """
    Write the loss of the last evaluation to a file, as a script does that keeps the best checkpoint.
    """
    with (session.run_dir / f"noted-{session.rank}").open("a") as file:
        file.write(f"{step} {evaluated[0]}\n")


def steps(session: tft.Session) -> Iterator[int]:
    """
    Yield the remaining steps.
    """
    if not args.plain:
        yield from session.steps(args.steps)
        return
    while session.step <= args.steps:
        yield session.step


def train(session: tft.Session) -> None:
    """
    Run the training loop. The host waits for the device once in a step, before the forward pass.
    """
    for step in steps(session):
        stream.synchronize()
        loss = session.model(batch(step)).square().mean()
        record.write(step, loss.item())
        if f"{session.rank},{step}" == args.raises and once(session.run_dir / "raised"):
            raise ValueError("an exception of the user's own")
        loss.backward()
        if f"{session.rank},{step}" == args.fails and once(session.run_dir / "failed"):
            raise tft.TrainingFault("a link of this rank has failed", kind="network")
        if sides:
            add_over_sides(step)
        if args.guard:
            count_tokens()
        with session.update():
            die(step, "window")
            slow = step == args.slow and once(session.run_dir / f"slow-{session.rank}")
            if slow:
                stream.submit(lambda: time.sleep(SLOW))
            stream.submit(optimizer.step)
            stream.submit(optimizer.zero_grad)
            if slow:
                time.sleep(SLOW / 3)  # the order to leave the loop arrives during this wait
        if args.plateau:
            die(step, "tail")
            metric = loss.detach().clone()
            if args.messages:
                add_by_messages(metric)
            else:
                dist.all_reduce(metric)
            stream.synchronize()  # on a real device, `item()` waits for the stream
            session.record({"metric": metric.item(), "best": plateau.best})
            plateau.step(metric.item())


if args.norm:
    slow_copies()
session.adopt(model=model, optimizer=optimizer, scheduler=plateau, wrap=wrap)
session.evaluate(evaluate, every=7)
session.after_step(note, every=7)
session.run(train)
stream.synchronize()
record.finish(session.digests())
