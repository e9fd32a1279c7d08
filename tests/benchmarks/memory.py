"""
Measure the memory of training, in bytes per parameter and rank: the slope between two sizes of a
model with parameters of equal size, after a step and before its gradients are freed. The formulas
of `tft replicas` are printed beside it. The memory is counted twice: as all tensors, and as the
bytes that the allocator has given out.
"""

import json
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass

import structlog
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tft_pytorch import ReplicaOptimizer, adaptor
from torch import nn
from torch._C._distributed_c10d import TCPStore  # torch.distributed imports it from here
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.adaptors.living import allocated_bytes, live_bytes
from tft.placement.memory_cost import Gradients, cost

WIDTHS = (512, 256, 512)
"""The first so that whatever is allocated once is there."""
LAYERS = 8
STEPS = 3
LIMIT = 0.02
"""How far from the formula a rank may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """
    One configuration of training.
    """

    what: str
    ranks: int
    copies: int
    """Of each shard of the optimizer; 0: torch's own AdamW."""
    gradients: Gradients | None
    """Of parameters of 16 bits; None: parameters of 32."""
    formula: str
    expected: float


def rows() -> Iterator[Row]:
    """
    Return all configurations.
    """
    yield Row(what="AdamW, fp32", ranks=4, copies=0, gradients=None, formula="16", expected=16.0)
    for gradients in Gradients:
        for what, ranks, copies in (
            ("not distributed", 4, 4),
            ("two copies, d=4", 4, 2),
            # each of the two replica groups is like four ranks with one copy
            ("two copies, d=8; one copy, d=4", 8, 2),
        ):
            told = cost(gradients, ranks, copies)
            yield Row(
                what=what,
                ranks=ranks,
                copies=copies,
                gradients=gradients,
                formula=told.formula,
                expected=told.total,
            )


def rank(number: int, port: int, row: Row) -> None:
    """
    Run one rank of the measurement. Rank 0 prints the row.
    """
    # hide warnings about groups that are freed late
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    torch.set_num_threads(1)
    _, small, large = (
        train(number, port, row, width, f"{turn}") for turn, width in enumerate(WIDTHS)
    )
    live, allocated = ((large[at] - small[at]) / (large[0] - small[0]) for at in (1, 2))
    told: list[tuple[float, float]] = [(0.0, 0.0)] * row.ranks
    dist.all_gather_object(told, (live, allocated))
    if number == 0:
        print(
            json.dumps(
                {
                    "benchmark": "memory",
                    "unit": "bytes per parameter and rank",
                    "what": row.what,
                    "gradients": row.gradients and row.gradients.value,
                    "ranks": row.ranks,
                    "copies": row.copies,
                    "formula": row.formula,
                    "expected": row.expected,
                    "tensors": [round(each, 3) for each, _ in told],
                    "allocated": [round(each, 3) for _, each in told],
                    "holds": all(abs(n / row.expected - 1) <= LIMIT for each in told for n in each),
                }
            ),
            flush=True,
        )


def train(number: int, port: int, row: Row, width: int, group: str) -> tuple[int, int, int]:
    """
    Train some steps. Return the number of parameters, and the memory afterwards: of tensors, and
    allocated.
    """
    adaptor.tft_clear()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    model.to(torch.float32 if row.gradients is None else torch.bfloat16)
    if row.gradients is Gradients.SINGLE:
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32
    optimizer: torch.optim.Optimizer
    if row.copies:
        optimizer = ReplicaOptimizer(
            model.parameters(), torch.optim.AdamW, rank=number, world=row.ranks, copies=row.copies
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters())
    # DDP all-reduces gradients only in the type of the parameters. The loop therefore all-reduces
    # gradients of another type itself.
    summed = row.gradients is Gradients.SINGLE
    # without bucket views DDP's buckets are a second copy of the gradients
    wrap = None if summed else lambda: DDP(model, gradient_as_bucket_view=True)
    adaptor.tft_adopt({"model": model, "optimizer": optimizer}, wrap)
    adaptor.tft_regroup(group, "127.0.0.1", port, number, row.ranks)
    built = adaptor.tft_rebuild()
    for _ in range(STEPS):
        optimizer.zero_grad()
        one_step(built, optimizer, width, summed=summed)
    return sum(p.numel() for p in model.parameters()), live_bytes(), allocated_bytes()


def one_step(
    built: nn.Module, optimizer: torch.optim.Optimizer, width: int, *, summed: bool
) -> None:
    """
    Train one step without freeing its gradients.
    """
    dtype = next(built.parameters()).dtype
    built(torch.randn(2, width, dtype=dtype)).square().mean().backward()
    if summed:
        for parameter in built.parameters():
            dist.all_reduce(parameter.grad)
    adaptor.tft_capture(closing=False)
    optimizer.step()
    adaptor.tft_capture(closing=True)
    adaptor.tft_updated()


def main() -> None:
    """
    Print one line for each configuration.
    """
    # the fork server imports these modules once for all ranks
    multiprocessing.set_forkserver_preload(["tests.adaptors.preloaded"])
    for row in rows():
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        mp.start_processes(rank, (server.port, row), row.ranks, start_method="forkserver")  # type: ignore[no-untyped-call,attr-defined]  # torch has no types here


if __name__ == "__main__":
    main()
