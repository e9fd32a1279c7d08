"""
The example's training loop, in which what observers do and the judgement of numbers are switched on
and off in turns. Of each two blocks of steps, one has the plugins of the job and one has not. Which
comes first is drawn, so that no work with a period of its own falls on one kind only. All ranks
switch at the same step.
"""

import argparse
import json
import random
import time
from dataclasses import replace
from sys import path
from typing import Any

import torch
from tft_pytorch.step_numbers import watch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad, clip_grad_norm_

import tft

path.append("examples/gpt")
from corpus import Batches, load_corpus
from gpt import GPT, SIZES, make_optimizer, make_scheduler

FLAGS = ("watch_windows", "watch_tails", "watch_ends", "watch_releases", "watch_numbers")

parser = argparse.ArgumentParser()
parser.add_argument("--blocks", type=int, default=1400)
parser.add_argument("--block", type=int, default=5)
parser.add_argument("--warm", type=int, default=30)
parser.add_argument("--no-clip", action="store_true")
parser.add_argument("--size", choices=SIZES, default="tiny")
parser.add_argument("--batch", type=int, help="samples of a batch; by default as in the example")
args = parser.parse_args()
size = SIZES[args.size]
size = replace(size, batch=args.batch or size.batch)
steps = args.warm + args.blocks * args.block

session = tft.init()
torch.manual_seed(0)
model = GPT(size)
optimizer = make_optimizer(model)
scheduler = make_scheduler(optimizer, steps)
data = Batches(load_corpus(), batch=size.batch, context=size.context, seed=0, rank=session.rank)
session.adopt(
    model=model, optimizer=optimizer, scheduler=scheduler, data=data, wrap=lambda: DDP(model)
)
drawn = random.Random(0)
second = [drawn.randrange(2) for _ in range(args.blocks // 2)]
"""For each two blocks: 1 if the plugins are on in the second one."""
times: dict[str, list[float]] = {"time": [], "processor": []}


def _functions() -> tuple[Any, ...]:  # Any: functions of torch
    """
    Return the functions of torch that are in place now, of those that tft replaces to note numbers.
    """
    return (
        torch.autograd.backward,
        clip_grad._get_total_norm,
        clip_grad._group_tensors_by_device_and_dtype,  # type: ignore[attr-defined]
    )


class Switch:
    """
    Switches between steps with the plugins of the job and steps without. It is made in the loop,
    when the plugins have begun to watch.
    """

    def __init__(self) -> None:
        self._observers = session._observers
        self._wanted = {flag: getattr(self._observers, flag, False) for flag in FLAGS}
        self._edges = session._loop._edges
        self._judges = self._edges.numbers is not None
        if self._judges:
            self._watched = _functions()
            self._plain = tuple(watch._native[name] for name in ("backward", "norm", "grouped"))
            self._refuse = watch._refuse

    def turn(self, on: bool) -> None:
        """
        Switch the plugins on or off for the next step.
        """
        for flag, value in self._wanted.items():
            setattr(self._observers, flag, value and on)
        if self._judges:
            torch.autograd.backward, clip_grad._get_total_norm, grouped = (
                self._watched if on else self._plain
            )
            clip_grad._group_tensors_by_device_and_dtype = grouped  # type: ignore[attr-defined]
            watch._refuse = self._refuse if on else None
            numbers = self._edges.numbers if on else None
            session._loop._edges = replace(self._edges, numbers=numbers)


def train(session: tft.Session) -> None:
    """
    Train all steps, and note when each begins.
    """
    switch = Switch()
    for step in session.steps(steps):
        times["time"].append(time.perf_counter())
        times["processor"].append(time.thread_time())
        number = (step - args.warm - 1) // args.block
        switch.turn(number < 0 or number % 2 == second[number // 2])
        loss = session.model(*data.next())
        loss.backward()
        if not args.no_clip:
            clip_grad_norm_(model.parameters(), 1.0)
        with session.update():
            optimizer.step()
            scheduler.step()
        optimizer.zero_grad()


session.run(train)
if session.rank == 0:
    (session.run_dir / "times.json").write_text(
        json.dumps({"warm": args.warm, "block": args.block, "times": times, "second": second})
    )
