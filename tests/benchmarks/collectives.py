"""
Measure the cost of interruptible gloo collectives: all-reduces in a group of torch and in a group
of tft, round by round side by side, between two processes.
"""

import json
import statistics
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tft_pytorch import interruptible
from torch._C._distributed_c10d import TCPStore  # torch.distributed imports it from here

WORLD = 2
ROUNDS = 30
SUMS = 50
SIZES = {"1 KiB": 2**8, "1 MiB": 2**18}
"""Numbers of four bytes."""


def rank(number: int, port: int) -> None:
    """
    Run one of the two processes. Rank 0 prints one line: the medians of both groups in microseconds
    per all-reduce, and the median of their ratio.
    """
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, WORLD, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=number, world_size=WORLD)
    torchs = dist.new_group([0, 1])
    interruptible.install()
    groups = {"torch": torchs, "tft": dist.new_group([0, 1])}
    results = []
    for size, count in SIZES.items():
        numbers = torch.zeros(count)
        took: dict[str, list[float]] = {name: [] for name in groups}
        for _ in range(ROUNDS):
            for name, group in groups.items():
                took[name].append(sums(numbers, group))
        ratios = [ours / theirs for ours, theirs in zip(took["tft"], took["torch"], strict=True)]
        results.append(
            {
                "size": size,
                "ratio": round(statistics.median(ratios), 3),
                **{name: round(statistics.median(each), 1) for name, each in took.items()},
            }
        )
    if number == 0:
        print(json.dumps({"benchmark": "collectives", "unit": "us per sum", "sums": results}))


def sums(numbers: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    """
    Return the mean time of one all-reduce in microseconds.
    """
    began = time.perf_counter()
    for _ in range(SUMS):
        dist.all_reduce(numbers, group=group)
    return (time.perf_counter() - began) / SUMS * 1e6


def main() -> None:
    """
    Start two processes and the store through which they meet.
    """
    server = TCPStore("127.0.0.1", 0, WORLD, is_master=True, wait_for_workers=False)
    mp.spawn(rank, args=(server.port,), nprocs=WORLD)  # type: ignore[no-untyped-call,attr-defined]  # torch has no types here


if __name__ == "__main__":
    main()
