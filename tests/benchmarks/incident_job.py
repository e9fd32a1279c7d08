"""
Train layers of numbers by DDP and AdamW, so that the state has a size that counts.

    incident_job.py WIDTH STEPS EVERY

After every EVERY steps each rank reads its state with one thread, all ranks at once, and rank 0
adds a line with the seconds of the reading to `readings`. The incidents of the benchmark are in other
steps.
"""

import sys
import time

import torch
import torch.distributed as dist
import xxhash
from tft_pytorch.memory import readable
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import tft

LAYERS = 12
WIDTH, STEPS, EVERY = map(int, sys.argv[1:])

session = tft.init()
torch.set_num_threads(1)
torch.manual_seed(0)


class Numbers(nn.Module):
    """
    Layers of numbers whose gradients take no time to compute.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([torch.randn(WIDTH, WIDTH) for _ in range(LAYERS)])

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        """
        Return the mean of all numbers, times `factor`.
        """
        return factor * torch.stack([layer.mean() for layer in self.layers]).mean()


model = Numbers()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def read() -> float:
    """
    Return the seconds that one thread takes to read the parameters and moments of this rank.
    """
    tensors = [
        tensor
        for parameter in model.parameters()
        for tensor in (parameter.data, *optimizer.state[parameter].values())
    ]
    dist.barrier()
    began = time.perf_counter()
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        digest.update(readable("", tensor).view)
    return time.perf_counter() - began


def train(session: tft.Session) -> None:
    """
    Run the training loop.
    """
    for step in session.steps(STEPS):
        session.model(torch.ones(())).backward()
        with session.update():
            optimizer.step()
            optimizer.zero_grad()
        if step % EVERY == EVERY // 2:
            seconds = read()
            if session.rank == 0:
                with (session.run_dir / "readings").open("a") as readings:
                    readings.write(f"{seconds}\n")


session.adopt(model=model, optimizer=optimizer, wrap=lambda: DDP(model))
session.run(train)
