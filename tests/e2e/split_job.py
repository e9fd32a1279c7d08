"""
A job in which each step trains one global batch, split over any number of ranks.

    split_job.py --out DIR                      under `tft run`
    split_job.py --out DIR --resume CHECKPOINT  under torchrun: nothing of tft is imported

Under tft the job uses a `ReplicaOptimizer`. Under torchrun it runs in plain torch, from a
checkpoint that tft has saved.
"""

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ExponentialLR

GLOBAL_BATCH = 16
WIDTH = 32


def build() -> nn.Module:
    """
    Return a small network that is the same on every rank.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 64), nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(64, WIDTH))


def batch(step: int, rank: int, world: int) -> Tensor:
    """
    Return this rank's rows of the batch of a step.
    """
    generator = torch.Generator().manual_seed(step)
    return torch.randn(GLOBAL_BATCH, WIDTH, generator=generator)[rank::world]


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """
    Return the loss of predicting the rows, rolled by one.
    """
    return (model(rows) - rows.roll(1, dims=1)).square().mean()  # type: ignore[no-any-return]  # torch has no types here


class Losses:
    """
    The writer of one rank's file of losses by step.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"losses-rank{rank}.jsonl"

    def add(self, step: int, loss: float) -> None:
        """
        Append a loss to the file. If a step is computed again, readers use its last loss.
        """
        with self._path.open("a") as file:
            file.write(json.dumps([step, loss.hex()]) + "\n")


def train_with_tft(out: Path, steps: int) -> None:
    """
    Train under `tft run`.
    """
    from tft_pytorch import ReplicaOptimizer

    import tft

    session = tft.init()
    rank, world = session.rank, session.world
    model = build()
    optimizer = ReplicaOptimizer(
        model.parameters(), torch.optim.AdamW, rank=rank, world=world, lr=0.01
    )
    scheduler = ExponentialLR(optimizer, 0.99)
    losses = Losses(out, rank)
    wrap = partial(DDP, model, find_unused_parameters=True)
    session.adopt(model=model, optimizer=optimizer, scheduler=scheduler, wrap=wrap)

    def train(session: tft.Session) -> None:
        for step in session.steps(steps):
            loss = loss_of(session.model, batch(step, rank, world))
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
            with session.update():
                optimizer.step()
                scheduler.step()
            optimizer.zero_grad()
            losses.add(step, loss.item())

    session.run(train)


def train_plainly(out: Path, steps: int, first: int, checkpoint: Path) -> None:
    """
    Train under torchrun, from a checkpoint of the step before `first`.
    """
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = ExponentialLR(optimizer, 0.99)

    weights, state = get_state_dict(model, optimizer)
    found: dict[str, Any] = {"model": weights, "optim": state, "scheduler": scheduler.state_dict()}
    dcp.load(found, checkpoint_id=checkpoint, no_dist=True)  # type: ignore[attr-defined]  # as in torch's documentation
    set_state_dict(
        model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"]
    )
    scheduler.load_state_dict(found["scheduler"])

    wrapped = DDP(model, find_unused_parameters=True)
    losses = Losses(out, rank)
    for step in range(first, steps + 1):
        loss = loss_of(wrapped, batch(step, rank, world))
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.add(step, loss.item())
    assert not [name for name in sys.modules if name.split(".")[0].startswith("tft")]
    dist.barrier()
    os._exit(0)  # skips gloo's own teardown, which sometimes hangs


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--first", type=int, default=1)
    args = parser.parse_args()
    if args.resume is None:
        train_with_tft(args.out, args.steps)
    else:
        train_plainly(args.out, args.steps, args.first, args.resume)
