"""
What the loops of the comparison with other systems share: the model, the batches, the moment of the
kill, and the record of the steps.
"""

import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn

RANKS = 3
"""With three ranks, every rank is a neighbour of the lost one in gloo's ring, and its all-reduce fails
at once. One of the systems cannot interrupt a rank that waits for a living neighbour."""
STEPS = 120
VICTIM = 2
"""The rank that is killed. It is not rank 0, whose loss one of the systems does not survive."""
KILLED = 65
"""The step in which the rank is killed, between its forward and its backward pass."""
EVERY = 10
"""The steps between two checkpoints, for the systems that go back to a checkpoint."""
WIDTH = 512
BATCH = 16


def make_model() -> nn.Module:
    """
    Return a model of 1.1 million parameters, equal on all ranks.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH)]
    for _ in range(3):
        layers += [nn.ReLU(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """
    Return the optimizer for `model`.
    """
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch(rank: int, step: int) -> Tensor:
    """
    Return the batch of a rank for a step. It has BATCH rows of WIDTH numbers.
    """
    numbers = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(BATCH, WIDTH, generator=numbers)


def backward(outputs: Tensor, inputs: Tensor) -> None:
    """
    Compute the gradients of the loss. The model learns to reverse its inputs.
    """
    loss = (outputs - inputs.flip(1)).square().mean()
    loss.backward()  # type: ignore[no-untyped-call] # torch has no types here


class Record:
    """
    The record of one rank's steps in the directory of the job. `kill` is False in an undisturbed
    job.
    """

    def __init__(self, directory: Path, rank: int, *, kill: bool) -> None:
        self._directory, self._rank, self._kill = directory, rank, kill
        self._steps = (directory / f"steps-{rank}").open("a", buffering=1)

    def forward_ended(self, step: int) -> None:
        """
        Kill this process if it is the victim and `step` is the step of the kill. Do so only once in
        a job.
        """
        killed = self._directory / "killed"
        if self._kill and (self._rank, step) == (VICTIM, KILLED) and not killed.exists():
            killed.write_text(f"{time.monotonic()}")
            os.kill(os.getpid(), signal.SIGKILL)

    def step_ended(self, step: int) -> None:
        """
        Note the moment at which this rank has completed `step`.
        """
        self._steps.write(f"{time.monotonic()} {step}\n")

    def ends(self, model: nn.Module) -> None:
        """
        Note the parameters with which this rank ends the job.
        """
        state = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        (self._directory / f"end-{self._rank}").write_bytes(state.numpy().tobytes())
