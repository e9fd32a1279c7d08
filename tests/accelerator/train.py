"""
A DDP job on a real device. At the end, each rank records its whole state.

    train.py [--gloo] [--steps N]

All ranks of a node share its devices in turn. With `--gloo`, gloo reduces the gradients, so several
ranks can share one device: NCCL refuses that.
"""

import argparse
import os
from sys import path

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel as DDP

import tft

path.append("examples/gpt")
from record import Record

WIDTH = 64
parser = argparse.ArgumentParser()
parser.add_argument("--gloo", action="store_true")
parser.add_argument("--steps", type=int, default=40)
args = parser.parse_args()

kind = torch.accelerator.current_accelerator()
assert kind is not None
if args.gloo:
    distributed_c10d.Backend.default_device_backend_map[kind.type] = "gloo"
place = torch.device(kind.type, int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it to be deterministic
torch.use_deterministic_algorithms(True)
session = tft.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(WIDTH, 256), nn.Dropout(0.1), nn.GELU(), nn.Linear(256, WIDTH))
model.to(place)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
record = Record(session.run_dir, session.rank)


def batch(step: int) -> Tensor:
    """
    Return the batch of this rank, (8, WIDTH).
    """
    generator = torch.Generator().manual_seed(1000 * session.rank + step)
    return torch.randn(8, WIDTH, generator=generator).to(place)


def train(session: tft.Session) -> None:
    """
    Run the training loop.
    """
    for step in session.steps(args.steps):
        loss = session.model(batch(step)).square().mean()
        loss.backward()
        record.write(step, loss.item())
        with session.update():
            optimizer.step()
        optimizer.zero_grad()


session.adopt(model=model, optimizer=optimizer, wrap=lambda: DDP(model, device_ids=[place]))
session.run(train)
record.finish(session.digests())
