"""
A DDP job on a real device. At the end, each rank records its whole state.

    train.py [--gloo | --apart] [--steps N] [--seconds S] [--amp bfloat16|float16] [--loader]
             [--tail] [--free] [--error assert|memory|skip [--reduced] [--declared]]

All ranks of a node share its devices in turn. NCCL refuses ranks of one host that share a device.
With `--gloo`, gloo reduces the gradients. With `--apart`, NCCL takes the ranks for ranks of several
hosts (`sharing.py`), so they can share a device.

With `--amp`, the job computes in 16 bits and clips its gradients. With float16 too, a GradScaler
begins with a scale that is too large, so the first steps are skipped. With `--loader`, batches come
from a DataLoader with workers and pinned memory. With `--seconds`, each step takes at least so
long. With `--tail`, each step reduces its loss after the update, and each fifth step is evaluated.
With `--free`, rank 0 records how much memory of the device is free after each step.

With `--error`, rank 1 makes a real error of its device in step 12, once in the job. `assert` is an
assertion in a kernel, after which the device takes no more work from the process. `memory` is a
request for more memory than there is. The host learns of an assertion when it reads the loss, or
while the gradients are reduced (`--reduced`). With `--declared`, the script waits for the error,
and raises a fault that says what is lost. `skip` is an all-reduce that all other ranks begin.
"""

import argparse
import os
import time
from collections.abc import Mapping
from sys import path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from tft_pytorch import Batches
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tft

path += [".", "examples/gpt"]
from record import Record

from tests.accelerator.sharing import share_device
from tests.e2e.job_parts import whole
from tests.once import once

WIDTH = 64
ROWS = 160
"""The rows of the loader's dataset: 10 batches of each of two ranks in an epoch."""
VICTIM = 1
"""The rank that makes an error of its device."""
FAILING = 12
"""The step in which it does."""
COUNTED = 5
"""The elements of the all-reduce that the rank skips."""
EVALUATED = 5
"""A step is evaluated each time after so many."""
parser = argparse.ArgumentParser()
parser.add_argument("--gloo", action="store_true")
parser.add_argument("--apart", action="store_true")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--seconds", type=float, default=0.0)
parser.add_argument("--amp", choices=("bfloat16", "float16"))
parser.add_argument("--loader", action="store_true")
parser.add_argument("--tail", action="store_true")
parser.add_argument("--free", action="store_true")
parser.add_argument("--error", choices=("assert", "memory", "skip"))
parser.add_argument("--reduced", action="store_true")
parser.add_argument("--declared", action="store_true")
args = parser.parse_args()

kind = torch.accelerator.current_accelerator()
assert kind is not None
if args.gloo:
    distributed_c10d.Backend.default_device_backend_map[kind.type] = "gloo"
place = torch.device(kind.type, int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
if args.apart:
    share_device()
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it to be deterministic
torch.use_deterministic_algorithms(True)
session = tft.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(WIDTH, 256), nn.Dropout(0.1), nn.GELU(), nn.Linear(256, WIDTH))
model.to(place)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler(
    kind.type, init_scale=2.0**28, growth_interval=1000, enabled=args.amp == "float16"
)
dataset = TensorDataset(torch.randn(ROWS, WIDTH))
sampler: DistributedSampler[Any] = DistributedSampler(dataset, session.world, session.rank)
batches = (
    Batches(DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2, pin_memory=True))
    if args.loader
    else None
)
record = Record(session.run_dir, session.rank)
torch.manual_seed(session.rank)  # each rank has generators of its own, for its dropout


def batch(step: int) -> Tensor:
    """
    Return the batch of this rank, (8, WIDTH).
    """
    if batches is not None:
        found: Tensor = batches.next()[0].to(place, non_blocking=True)
        return found
    generator = torch.Generator().manual_seed(1000 * session.rank + step)
    return torch.randn(8, WIDTH, generator=generator).to(place)


def fail(step: int) -> None:
    """
    Make the error of the arguments, if this is its rank and its step.
    """
    if args.error == "skip":
        if (session.rank, step) != (VICTIM, FAILING) or not once(session.run_dir / "failed"):
            dist.all_reduce(torch.ones(COUNTED, device=place))
        return
    if (
        args.error is None
        or (session.rank, step) != (VICTIM, FAILING)
        or not once(session.run_dir / "failed")
    ):
        return
    try:
        if args.error == "memory":
            torch.empty(2**50, dtype=torch.uint8, device=place)
        torch.zeros(WIDTH, device=place)[torch.tensor([WIDTH], device=place)]
        if args.declared:
            torch.accelerator.synchronize(place)
    except (RuntimeError, IndexError) as error:
        if not args.declared:
            raise
        declare(error)


def declare(error: Exception) -> NoReturn:
    """
    Raise a fault that says what the error has cost: the state in memory, or the whole process.
    """
    if args.error == "memory":
        raise tft.TrainingFault("a request for memory has failed", kind="memory") from error
    raise tft.TrainingFault("an assertion of a kernel has failed", context_lost=True) from error


def train(session: tft.Session) -> None:
    """
    Run the training loop.
    """
    assert kind is not None
    for step in session.steps(args.steps):
        dtype = getattr(torch, args.amp or "bfloat16")
        with torch.autocast(kind.type, dtype=dtype, enabled=args.amp is not None):
            loss = session.model(batch(step)).float().square().mean()
        if not args.reduced:
            fail(step)
        record.write(step, loss.item())
        if args.reduced:
            fail(step)
        scaler.scale(loss).backward()
        if args.amp is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if args.seconds:
            time.sleep(args.seconds)
        with session.update():
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        if args.tail:
            dist.all_reduce(loss.detach())
        if args.free and session.rank == 0:
            free, _ = torch.get_device_module(kind.type).mem_get_info(place)
            with (session.run_dir / "free.txt").open("a") as told:
                told.write(f"{step} {free}\n")


def evaluate(step: int) -> None:
    """
    Reduce the loss of a batch that no step trains with.
    """
    model.eval()
    with torch.no_grad():
        dist.all_reduce(model(batch(-step)).square().mean())
    model.train()


def state() -> Mapping[str, str]:
    """
    Return the whole state of this rank: the digests of tft, and the state that is read from the
    objects themselves. The name `rng, later` has the digest of the random state of tft after the
    device has drawn a number.
    """
    moments = {
        f"{number}.{name}": value
        for number, kept in optimizer.state_dict()["state"].items()
        for name, value in kept.items()
    }
    own = torch.get_device_module(place.type).get_rng_state(place)
    found = {
        **session.digests(),
        "weights": whole(dict(model.named_parameters())),
        "moments": whole(moments),
        "scale": repr(scaler.state_dict()),
        "generator": whole({"torch": torch.get_rng_state()}),
        "generator of the device": whole({"device": own}),
    }
    torch.rand(1, device=place)
    return {**found, "rng, later": session.digests()["rng"]}


session.adopt(
    model=model,
    optimizer=optimizer,
    data=batches,
    others={"scaler": scaler} if scaler.is_enabled() else {},
    wrap=lambda: DDP(model, device_ids=[place]),
)
if args.tail:
    session.evaluate(evaluate, every=EVALUATED)
session.run(train)
record.finish(state())
