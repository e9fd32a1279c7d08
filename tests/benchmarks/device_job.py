"""
A training loop on one device that runs in several ways in turns: a block of steps of each way, then
the next block. Rank 0 writes the times of all blocks. Started by `device_step`.

    device_job.py --ways WAY,... [--rounds N] [--block N] [--gloo] [--small] [--reads]

| way | what a step is |
|---|---|
| `tft` | `session.steps` and `session.update`, with what the options of the job ask for |
| `quiet` | the same, without digests of slices and copies in host memory |
| `plain` | forward, backward and optimizer alone: the host runs ahead of the device |
| `waiting` | the same, and the host waits for the loss of each step |

All ranks compute the same batches, and reduce nothing: their copies stay equal. With `--reads`, rank
0 measures reads of the whole state afterwards. With `--small`, the model is small, and on the CPU if
there is no device.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from tft_pytorch import adaptor
from tft_pytorch.device import Devices, copy_to_host, devices_of, host_tensor
from torch import Tensor, nn
from torch.distributed import distributed_c10d

import tft

parser = argparse.ArgumentParser()
parser.add_argument("--ways", required=True)
parser.add_argument("--rounds", type=int, default=0)
parser.add_argument("--block", type=int, default=10)
parser.add_argument("--gloo", action="store_true")
parser.add_argument("--small", action="store_true")
parser.add_argument("--reads", action="store_true")
args = parser.parse_args()
WIDTH, LAYERS, ROWS = (32, 4, 16) if args.small else (2048, 24, 8192)
WARM = 25
"""Steps before the first block: memory is taken, also that of two copies in host memory."""
SECONDS = 12.0
"""The time of all blocks, if the number of rounds is not given."""
MOST = 60
"""The most rounds in this time."""
FEWEST = 8
READS = 3
"""How often each read of the state is measured."""

kind = torch.accelerator.current_accelerator()
if kind is None:
    assert args.small, "there is no accelerator on this machine"
    kind = torch.device("cpu")
    torch.set_num_threads(1)
place = torch.device("cpu") if kind.type == "cpu" else torch.device(kind.type, 0)
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it to be deterministic
torch.use_deterministic_algorithms(True)
if args.gloo:  # NCCL refuses ranks that share a device
    distributed_c10d.Backend.default_device_backend_map[kind.type] = "gloo"
session = tft.init()
torch.manual_seed(0)


class Layer(nn.Module):
    """
    A normed linear layer, whose result is added to its input.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """
        Map (rows, width) to the same shape.
        """
        result: Tensor = x + nn.functional.gelu(self.linear(self.norm(x)))
        return result


model = nn.Sequential(*(Layer() for _ in range(LAYERS))).to(place)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
batch = torch.randn(ROWS, WIDTH, device=place)


def synchronize() -> None:
    """
    Wait until the device has done all its work.
    """
    if place.type != "cpu":
        torch.accelerator.synchronize(place)


def compute() -> Tensor:
    """
    Compute forward and backward in bfloat16, with parameters of 32 bits. Return the loss.
    """
    with torch.autocast(place.type, dtype=torch.bfloat16):
        loss: Tensor = model(batch).float().square().mean()
    loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
    return loss


def plain_step(*, waits: bool) -> None:
    """
    Train one step without tft.
    """
    loss = compute()
    optimizer.step()
    optimizer.zero_grad()
    if waits:
        loss.item()


class Turns:
    """
    The blocks of steps, each of one way.
    """

    def __init__(self, steps: Iterator[int]) -> None:
        self._steps = steps
        self._settings = session._loop.settings
        self._digests = session._observers.watch_ends

    def block(self, way: str) -> float:
        """
        Train a block of steps this way. Return the mean time of a step in seconds.

        The first step is not counted: it ends the last step of another way.
        """
        began = 0.0
        for number in range(args.block):
            if number == 1:
                synchronize()
                began = time.perf_counter()
            if way in ("plain", "waiting"):
                plain_step(waits=way == "waiting")
                continue
            next(self._steps)
            if not number:
                self._turn(on=way == "tft")
            compute()
            with session.update():
                optimizer.step()
            optimizer.zero_grad()
        synchronize()
        mean: float = (time.perf_counter() - began) / (args.block - 1)
        return mean

    def _turn(self, *, on: bool) -> None:
        """
        Digest slices and copy the state to host memory from the end of this step on, or not.
        """
        session._observers.watch_ends = self._digests and on
        every = self._settings.backup_every if on else 0
        session._loop.settings = replace(self._settings, backup_every=every)


def train(session: tft.Session) -> None:
    """
    Train all blocks. Every second round takes the ways in the opposite order.
    """
    assert session.step == 1, "there was an incident: the times say nothing"
    ways = args.ways.split(",")
    through_tft = sum(way in ("tft", "quiet") for way in ways)
    times: dict[str, list[float]] = {way: [] for way in ways}
    steps = session.steps(WARM + rounds * through_tft * args.block)
    turns = Turns(steps)
    for _ in range(WARM):
        next(steps)
        compute()
        with session.update():
            optimizer.step()
        optimizer.zero_grad()
    for turn in range(rounds):
        for way in ways if turn % 2 else reversed(ways):
            times[way].append(turns.block(way))
    assert next(steps, None) is None
    found["times"] = times


def fitting() -> int:
    """
    Return the number of rounds for which the time suffices. This trains some steps.
    """
    for _ in range(5):
        plain_step(waits=True)
    began = time.perf_counter()
    for _ in range(10):
        plain_step(waits=True)
    step = (time.perf_counter() - began) / 10
    number = SECONDS / (step * args.block * len(args.ways.split(",")))
    return max(FEWEST, min(MOST, int(number)))


def reads() -> dict[str, object]:
    """
    Return the size of the state in bytes, and the median time in seconds of each way to read it.
    """
    tensors = [each.detach() for each in model.parameters()]
    for kept in optimizer.state.values():
        tensors += [kept["exp_avg"], kept["exp_avg_sq"]]
    devices: Devices = devices_of(tensors)
    pairs = [(each, host_tensor(each)) for each in tensors]

    def summed() -> None:
        for each in tensors:
            each.sum()
        synchronize()

    ways: dict[str, Callable[[], object]] = {
        "sum on the device": summed,
        "copy to pinned host memory": lambda: copy_to_host(pairs, devices),
        "digests of the whole state": session.digests,
        "comparison in an incident": lambda: adaptor.tft_compare(shard="dense"),
    }
    return {"bytes": sum(each.nbytes for each in tensors)} | {
        name: _median_time(way) for name, way in ways.items()
    }


def _median_time(way: Callable[[], object]) -> float:
    way()
    taken = []
    for _ in range(READS):
        synchronize()
        began = time.perf_counter()
        way()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


found: dict[str, object] = {"parameters": sum(each.numel() for each in model.parameters())}
rounds = args.rounds or fitting()
session.adopt(model=model, optimizer=optimizer)
if args.reads:
    for _ in range(2):
        plain_step(waits=True)  # the optimizer has a state from its first step on
    found["reads"] = reads()
session.run(train)
if session.rank == 0:
    found["device"] = (
        "cpu" if place.type == "cpu" else torch.get_device_module(place.type).get_device_name(place)
    )
    (session.run_dir / "times.json").write_text(json.dumps({"rounds": rounds, **found}))
