"""
The small GPT with its model cut into parts: `tft run --nproc-per-node 4 sharded.py --layout fsdp`.

    fsdp   every parameter is sharded over two ranks, twice (FSDP2 on a mesh of 2 x 2)
    tensor the perceptrons are cut over two ranks (tensor parallelism), twice

With `--copies 2` the optimizer state is also cut into shares, among the ranks with the same part of
the model, and two of them keep each share. That takes four such ranks, so eight ranks in all.

`make` makes the objects that need process groups: at the start, and again after every incident.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from corpus import Batches, load_corpus
from gpt import GPT, SIZES, make_optimizer, make_scheduler
from record import Record
from tft_pytorch import Made, ReplicaOptimizer
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.utils import get_total_norm
from torch.optim import AdamW, Optimizer

import tft

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--size", choices=SIZES, default="tiny")
parser.add_argument("--cut", type=int, default=2, help="how many ranks share one model")
parser.add_argument("--layout", choices=("fsdp", "tensor"), default="fsdp")
parser.add_argument("--copies", type=int, help="how many ranks keep each share of the optimizer")
parser.add_argument("--compile", metavar="BACKEND", help="have torch.compile make the model faster")
args = parser.parse_args()
size = SIZES[args.size]
text = load_corpus()

session = tft.init()
rank, copies = session.rank, session.world // args.cut
reader = rank if args.layout == "fsdp" else rank // args.cut  # tensor parallelism: same batch
data = Batches(text, batch=size.batch, context=size.context, seed=args.seed, rank=reader)
record = Record(session.run_dir, rank)


def make() -> Made:
    torch.manual_seed(args.seed)  # the same weights on every rank
    model = GPT(size)
    if args.layout == "fsdp":
        mesh = init_device_mesh("cpu", (copies, args.cut), mesh_dim_names=("replicate", "shard"))
        over = mesh
    else:
        names = ("replicate", "shard", "tensor")
        mesh = init_device_mesh("cpu", (copies, 1, args.cut), mesh_dim_names=names)
        over = mesh["replicate", "shard"]
        plan = {"perceptron.0": ColwiseParallel(), "perceptron.2": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], plan)
    for block in model.blocks:
        fully_shard(block, mesh=over)
    fully_shard(model, mesh=over)
    kind: Callable[..., Optimizer] = AdamW
    if args.copies:
        group = mesh["replicate"].get_group()
        kind = partial(ReplicaOptimizer, optimizer=AdamW, group=group, copies=args.copies)
    optimizer = make_optimizer(model, kind)
    trained = torch.compile(model, backend=args.compile) if args.compile else model
    return Made(model=trained, optimizer=optimizer, scheduler=make_scheduler(optimizer, args.steps))


def clip(parameters: list[Any], most: float) -> None:  # Any: distributed tensors
    """
    Clip as `clip_grad_norm_` does, which does not accept parameters of different meshes.
    """
    grads: dict[DeviceMesh, list[Any]] = {}
    for parameter in parameters:
        grads.setdefault(parameter.device_mesh, []).append(parameter.grad)
    totals: list[Any] = [get_total_norm(alike) for alike in grads.values()]
    norms = [total.full_tensor() for total in totals]
    share = most / (torch.linalg.vector_norm(torch.stack(norms)).item() + 1e-6)
    for grad in (grad for alike in grads.values() for grad in alike if share < 1):
        grad.mul_(share)


torch.manual_seed(1000 * args.seed + reader)  # but its own dropout on each
session.adopt(make=make, data=data)
if args.copies:
    print(session.topology())


def train(session: tft.Session) -> None:
    made = session.model
    for step in session.steps(args.steps):
        loss = made.model(*data.next())
        record.write(step, loss.item())
        loss.backward()
        clip(list(made.model.parameters()), 1.0)
        with session.update():
            made.optimizer.step()
            made.scheduler.step()
        made.optimizer.zero_grad()
        if rank == 0 and step % 20 == 0:
            print(f"step {step} loss {loss.item():.3f}")


session.run(train)
record.finish(session.digests())
