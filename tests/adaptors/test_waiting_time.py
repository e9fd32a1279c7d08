"""
How the PyTorch adaptor measures the waits of a rank for other ranks, in real process groups.
"""

import copy
import io
import threading
import time
import weakref
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

Case = Callable[[float, int, WaitingTime], None]


def ddp(late: float, rank: int, waits: WaitingTime) -> None:
    """
    Let rank 1 be late with its last gradients.
    """
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    wrapped = DDP(model, bucket_cap_mb=0.01)
    waits.watch(wrapped)
    waits.step_begins()
    wrapped(torch.ones(2, 64)).sum().backward()
    if rank == 1:
        next(model.parameters()).register_hook(lambda _: time.sleep(late))  # type: ignore[no-untyped-call]  # torch has no types here
    waits.step_begins()
    wrapped(torch.ones(2, 64)).sum().backward()


def two_passes(late: float, rank: int, waits: WaitingTime) -> None:
    """
    Let rank 1 be late with the first of two backward passes, whose forward passes came before both.
    """
    wrapped = [DDP(nn.Linear(64, 64)) for _ in range(2)]
    losses = [each(torch.ones(2, 64)).sum() for each in wrapped]
    if rank == 1:
        time.sleep(late)
    for loss in losses:
        loss.backward()


def collective(late: float, rank: int, waits: WaitingTime) -> None:
    """
    Let rank 1 be late for an all-reduce.
    """
    if rank == 1:
        time.sleep(late)
    dist.all_reduce(torch.ones(8))


def message(late: float, rank: int, waits: WaitingTime) -> None:
    """
    Let rank 1 be late with a message to rank 0, as a stage of a pipeline.
    """
    if rank == 1:
        time.sleep(late)
        dist.send(torch.ones(8), dst=0)
    else:
        dist.recv(torch.ones(8), src=1)


CASES: dict[str, Case] = {
    "ddp": ddp,
    "two passes": two_passes,
    "collective": collective,
    "message": message,
}


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
    waits.begin(lambda: forwards.append(time.monotonic()))
    CASES[name](0.0, rank, waits)  # the first time takes longer, and not equally long on both ranks
    dist.barrier()
    forwards.clear()
    before = waits.waited()
    began = time.monotonic()
    CASES[name](LATE, rank, waits)
    seconds = waits.waited() - before
    Path(directory, f"rank-{rank}").write_text(f"{seconds} {time.monotonic() - began}")
    assert len(forwards) == (2 if name == "ddp" else 0)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.soak
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


def test_only_the_first_forward_pass_of_a_step_is_noticed() -> None:
    """When the wrapper is a collection of modules, then the first forward pass of a step is noticed.
    The modules of an earlier wrapper are forgotten."""
    waits = WaitingTime()
    seen: list[int] = []
    waits.begin(lambda: seen.append(1))
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    waits.watch({"a": first, "b": second, "c": "no module"})
    first(torch.ones(2))
    assert not seen
    for _ in range(2):
        waits.step_begins()
        first(torch.ones(2))
        second(torch.ones(2))
    assert len(seen) == 2
    waits.watch([second])
    waits.step_begins()
    first(torch.ones(2))
    assert len(seen) == 2
    second(torch.ones(2))
    assert len(seen) == 3
    interruptible.time_waits(WaitingTime())


@pytest.mark.parametrize("hooked", [False, True])
def test_wrapper_is_freed_when_others_drop_it(hooked: bool) -> None:
    """When a wrapper is dropped, as before its process group is freed, then it is freed although its
    forward passes are noticed. Its group would otherwise be freed by the training thread, which may
    take half an hour."""
    waits = WaitingTime()
    waits.begin(lambda: None)
    model = nn.Linear(2, 2)
    freed = threading.Event()
    weakref.finalize(model, freed.set)
    waits.watch([model])
    if hooked:
        waits.step_begins()
    del model
    assert freed.is_set()
    waits.watch([nn.Linear(2, 2)])
    interruptible.time_waits(WaitingTime())


class Uncopyable:
    """
    An object that cannot be copied or saved, as a page of shared memory.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def computing(self) -> None:
        """
        Do nothing.
        """


def test_a_watched_module_is_copied_saved_and_scripted() -> None:
    """When a module is watched, then it can still be copied and saved as a whole, and scripted once
    its forward pass has begun."""
    waits = WaitingTime()
    waits.begin(Uncopyable().computing)
    module = nn.Linear(2, 2)
    waits.watch(module)
    waits.step_begins()
    assert torch.equal(copy.deepcopy(module).weight, module.weight)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False).weight, module.weight)
    module(torch.ones(2))
    torch.jit.script(module)
    interruptible.time_waits(WaitingTime())
