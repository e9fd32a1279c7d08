"""
A job on a real device whose model is cut into parts: `tft run --nproc-per-node 4 sharded.py`. All
ranks share the first device over NCCL. At the end, each rank records the digests of its state.

    sharded.py [--layout fsdp|tensor] [--steps N]

With `fsdp`, every parameter is sharded over two ranks, twice (FSDP2). With `tensor`, the layers are
cut over two ranks (tensor parallelism), twice.
"""

import argparse
from sys import path

import torch
from tft_pytorch import Made
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import tft

path += [".", "examples/gpt"]
from record import Record

from tests.accelerator.sharing import share_device

CUT = 2
"""The ranks that have one whole model together."""
WIDTH = 64
parser = argparse.ArgumentParser()
parser.add_argument("--layout", choices=("fsdp", "tensor"), default="fsdp")
parser.add_argument("--steps", type=int, default=30)
args = parser.parse_args()

kind = torch.accelerator.current_accelerator()
assert kind is not None
share_device()
place = torch.device(kind.type, 0)
session = tft.init()
record = Record(session.run_dir, session.rank)
reader = session.rank if args.layout == "fsdp" else session.rank // CUT


def make() -> Made:
    """
    Make the model over the present process groups.
    """
    torch.manual_seed(0)  # the same weights on every rank
    layers = [
        nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH), nn.Dropout(0.1))
        for _ in range(3)
    ]
    model = nn.Sequential(*layers).to(place)
    names = ("replicate", "shard", "tensor")
    sizes = (CUT, CUT, 1) if args.layout == "fsdp" else (CUT, 1, CUT)
    mesh = init_device_mesh(place.type, sizes, mesh_dim_names=names)
    for layer in layers:
        if args.layout == "tensor":
            parallelize_module(
                layer, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
            )
        fully_shard(layer, mesh=mesh["replicate", "shard"])
    fully_shard(model, mesh=mesh["replicate", "shard"])
    return Made(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))


def batch(step: int) -> Tensor:
    """
    Return the batch of this rank, (8, WIDTH).
    """
    generator = torch.Generator().manual_seed(1000 * reader + step)
    return torch.randn(8, WIDTH, generator=generator).to(place)


def train(session: tft.Session) -> None:
    """
    Run the training loop.
    """
    made = session.model
    for step in session.steps(args.steps):
        loss = made.model(batch(step)).square().mean()
        record.write(step, loss.item())
        loss.backward()
        with session.update():
            made.optimizer.step()
        made.optimizer.zero_grad()


torch.manual_seed(reader)  # each reader has a dropout of its own
session.adopt(make=make)
session.run(train)
record.finish(session.digests())
