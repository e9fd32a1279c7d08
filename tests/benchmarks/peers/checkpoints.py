"""
The checkpoints of the loops that go back to one after a loss.
"""

import os
from pathlib import Path

import torch
from torch import nn


def save(directory: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """
    Write the state of the end of `step`.
    """
    new = directory / "checkpoint.new"
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, new)
    os.replace(new, directory / "checkpoint")


def load(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
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
