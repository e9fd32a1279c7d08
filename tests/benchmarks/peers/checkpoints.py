"""
The loop of the systems that go back to a checkpoint after a loss.
"""

import os
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.benchmarks.peers.workload import EVERY, STEPS, Record, backward, batch


def train(
    directory: Path, rank: int, record: Record, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """
    Train to the last step, from the newest checkpoint in `directory` if there is one. Rank 0 writes
    the checkpoints.
    """
    first = _load(directory, model, optimizer) + 1
    wrapped = DDP(model)
    for step in range(first, STEPS + 1):
        inputs = batch(rank, step)
        outputs = wrapped(inputs)
        record.forward_ended(step)
        backward(outputs, inputs)
        optimizer.step()
        optimizer.zero_grad()
        record.step_ended(step)
        if step % EVERY == 0 and rank == 0:
            _save(directory, step, model, optimizer)


def _save(directory: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """
    Write the state of the end of `step`.
    """
    new = directory / "checkpoint.new"
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, new)
    os.replace(new, directory / "checkpoint")


def _load(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """
    Load the newest checkpoint, and return its step. Return 0 if there is none.
    """
    path = directory / "checkpoint"
    if not path.exists():
        return 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])
