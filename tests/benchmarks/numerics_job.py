"""
The example with the numbers of every second step judged, in one run. Rank 0 writes for each pair of
steps the ratio of their times, and of the processor times of the training thread. Started by
`numerics_step`.
"""

import argparse
import json
import time
from dataclasses import replace
from sys import path

import torch
from tft_pytorch.step_numbers import watch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad, clip_grad_norm_

import tft

path.append("examples/gpt")
from corpus import Batches, load_corpus
from gpt import GPT, SIZES, make_optimizer, make_scheduler

parser = argparse.ArgumentParser()
parser.add_argument("--pairs", type=int, required=True)
parser.add_argument("--no-clip", action="store_true")
args = parser.parse_args()
WARM = 100
"""Steps before the first pair: the audit, the buckets, and the values that a history needs."""
STEPS = WARM + 2 * args.pairs

session = tft.init()
torch.manual_seed(0)
model = GPT(SIZES["tiny"])
optimizer = make_optimizer(model)
scheduler = make_scheduler(optimizer, STEPS)
data = Batches(load_corpus(), batch=8, context=64, seed=0, rank=session.rank)
session.adopt(
    model=model, optimizer=optimizer, scheduler=scheduler, data=data, wrap=lambda: DDP(model)
)


class Switch:
    """
    Switches between steps whose numbers are judged and steps as without the plugin.
    """

    def __init__(self) -> None:
        self._watched = torch.autograd.backward, clip_grad._get_total_norm, watch._refuse
        self._plain = watch._native["backward"], watch._native["norm"], None
        self._edges = session._loop._edges

    def turn(self, on: bool) -> None:
        """
        Judge the numbers of the next step, or not.
        """
        functions = self._watched if on else self._plain
        torch.autograd.backward, clip_grad._get_total_norm, watch._refuse = functions
        numbers = self._edges.numbers if on else None
        session._loop._edges = replace(self._edges, numbers=numbers)


def train(session: tft.Session) -> None:
    """
    Train all steps. In each pair of steps the order of the two kinds changes.
    """
    clocks = {"time": time.perf_counter, "processor": time.thread_time}
    switch, taken = Switch(), {True: dict.fromkeys(clocks, 0.0), False: dict.fromkeys(clocks, 0.0)}
    ratios: dict[str, list[float]] = {name: [] for name in clocks}
    for step in session.steps(STEPS):
        pair, second = divmod(step - WARM - 1, 2)
        on = (pair + second) % 2 == 0
        switch.turn(on or step <= WARM)
        began = {name: clock() for name, clock in clocks.items()}
        loss = session.model(*data.next())
        loss.backward()
        if not args.no_clip:
            clip_grad_norm_(model.parameters(), 1.0)
        with session.update():
            optimizer.step()
            scheduler.step()
        optimizer.zero_grad()
        taken[on] = {name: clock() - began[name] for name, clock in clocks.items()}
        if second and step > WARM:
            for name, each in ratios.items():
                each.append(taken[True][name] / taken[False][name])
    if session.rank == 0:
        (session.run_dir / "ratios.json").write_text(json.dumps(ratios))


session.run(train)
