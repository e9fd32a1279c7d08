"""
A job with a model of two independent parts, each on two of the four ranks.

    apart_job.py STEPS [--die RANK,STEP]

The two ranks of a part all-reduce its gradients between them. Only the pre-update barrier of tft
keeps the ranks of one part from training steps ahead of the other part.
"""

import argparse
import os
import signal
import time
from pathlib import Path
from sys import path

import torch
from tft_pytorch import Made
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import tft

path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))
from record import Record

parser = argparse.ArgumentParser()
parser.add_argument("steps", type=int)
parser.add_argument("--die", default="")
args = parser.parse_args()

session = tft.init()
rank, part = session.rank, session.rank % 2
record = Record(session.run_dir, rank)
summed = session.run_dir / "summed"
"""The file that exists when rank 1 has finished its all-reduces of the step in which another rank
dies."""


def make() -> Made:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "part"))
    torch.manual_seed(part)
    model = DDP(nn.Linear(8, 8), process_group=mesh["replicate"].get_group())
    return Made(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))


torch.manual_seed(rank)
session.adopt(make=make)


def train(session: tft.Session) -> None:
    made = session.model
    for step in session.steps(args.steps):
        rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = made.model(rows).square().mean()
        first = session.incarnation == 0 and args.die.endswith(f",{step}")
        if first and args.die == f"{rank},{step}":
            while not summed.exists():
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        if first and rank == 1:
            summed.touch()
        with session.update():
            made.optimizer.step()
        made.optimizer.zero_grad()
        record.write(step, loss.item())


session.run(train)
record.finish(session.digests())
