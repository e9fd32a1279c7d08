"""
How the PyTorch adaptor measures the waits of a rank for other ranks, in real process groups.
"""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tft_pytorch import interruptible
from tft_pytorch.waiting_time import WaitingTime
from torch import nn
from torch._C._distributed_c10d import FileStore  # the class torch.distributed.FileStore
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel as DDP

LATE = 0.4
"""How many seconds rank 1 comes later than rank 0."""

Case = Callable[[int, WaitingTime], None]


def ddp(rank: int, waits: WaitingTime) -> None:
    """
    Let rank 1 be late with its last gradients.
    """
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    wrapped = DDP(model, bucket_cap_mb=0.01)
    waits.watch(wrapped)
    wrapped(torch.ones(2, 64)).sum().backward()
    if rank == 1:
        next(model.parameters()).register_hook(lambda _: time.sleep(LATE))  # type: ignore[no-untyped-call]  # torch has no types here
    wrapped(torch.ones(2, 64)).sum().backward()


def collective(rank: int, waits: WaitingTime) -> None:
    """
    Let rank 1 be late for an all-reduce.
    """
    if rank == 1:
        time.sleep(LATE)
    dist.all_reduce(torch.ones(8))


def message(rank: int, waits: WaitingTime) -> None:
    """
    Let rank 1 be late with a message to rank 0, as a stage of a pipeline.
    """
    if rank == 1:
        time.sleep(LATE)
        dist.send(torch.ones(8), dst=0)
    else:
        dist.recv(torch.ones(8), src=1)


CASES: dict[str, Case] = {"ddp": ddp, "collective": collective, "message": message}


def play(rank: int, name: str, directory: str) -> None:
    """
    Run a case as one of two ranks, and write how long this rank has waited.
    """
    torch.set_num_threads(1)
    interruptible.install()
    store = FileStore(f"{directory}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    waits = WaitingTime()
    forwards: list[float] = []
    waited = waits.begin(lambda: forwards.append(time.monotonic()))
    dist.barrier()
    before = waited()
    began = time.monotonic()
    CASES[name](rank, waits)
    seconds = waited() - before
    Path(directory, f"rank-{rank}").write_text(f"{seconds} {time.monotonic() - began}")
    assert len(forwards) == (2 if name == "ddp" else 0)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.timeout(120)
def test_only_the_rank_that_is_on_time_waits(tmp_path: Path, name: str) -> None:
    """When one rank of two is late, then the other rank's wait is measured, and the late rank has
    hardly waited, although both need the same time."""
    spawn(play, (name, str(tmp_path)), nprocs=2)  # type: ignore[no-untyped-call]  # torch has no types here
    on_time, late = (
        [float(each) for each in (tmp_path / f"rank-{rank}").read_text().split()] for rank in (0, 1)
    )
    assert LATE / 2 < on_time[0] <= on_time[1]
    assert late[0] < LATE / 2 < late[1]


def test_modules_in_a_collection_are_watched_once() -> None:
    """When the wrapper is a collection of modules, then a forward pass of each one is noticed. The
    modules of an earlier wrapper are forgotten."""
    waits = WaitingTime()
    seen: list[int] = []
    waits.begin(lambda: seen.append(1))
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    waits.watch({"a": first, "b": second, "c": "no module"})
    first(torch.ones(2))
    second(torch.ones(2))
    assert len(seen) == 2
    waits.watch([second])
    first(torch.ones(2))
    second(torch.ones(2))
    assert len(seen) == 3
    interruptible.time_waits(WaitingTime())
