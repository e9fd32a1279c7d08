"""
How long processes need to form a gloo group anew, without tft: free the old group, connect to each
other through a store, and add one number on all of them.
"""

import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from tft.bus.ports import free_address

ROUNDS = 12
"""The groups that are formed in one measurement. The first two are not counted."""


def reform_seconds(world: int) -> list[float]:
    """
    Return the seconds that `world` new processes take to form a group, once for each round.
    """
    port = free_address("127.0.0.1").rpartition(":")[2]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.bare_group", str(rank), str(world), port],
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit("the processes could not form groups")
    return [float(line) for line in outputs[0].splitlines()][2:]


def main() -> None:
    """
    As one of the processes, form the groups. Print the seconds of each round.
    """
    rank, world, port = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, world, is_master=rank == 0, timeout=timedelta(seconds=60))
    for number in range(ROUNDS):
        if number:
            dist.barrier()
        began = time.perf_counter()
        if number:
            dist.destroy_process_group()
        dist.init_process_group(
            "gloo", store=PrefixStore(str(number), store), rank=rank, world_size=world
        )
        dist.all_reduce(torch.ones(1))
        print(time.perf_counter() - began, flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
