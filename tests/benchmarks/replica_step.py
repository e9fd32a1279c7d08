"""
Measure the step of a `ReplicaOptimizer`, including the exchange at the close of the update window,
against the step of torch's `ZeroRedundancyOptimizer`, round by round side by side: four processes,
two copies, the same model, gradients and groups. The time of the pre-update barrier, which torch
does not have, is given separately, with the ratio that includes it.
"""

import json
import multiprocessing
import statistics
import time
from collections.abc import Callable

import structlog
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tft_pytorch import ReplicaOptimizer, adaptor
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore  # torch.distributed imports it from here
from torch.distributed.optim import ZeroRedundancyOptimizer

WORLD = 4
COPIES = 2
WARM = 10
ROUNDS = 200
LIMIT = 1.05
SIZES = {"2 MiB": (256, 8), "32 MiB": (1024, 8), "2 MiB in 128 pieces": (64, 128)}
"""The width of square layers, and how many there are."""


def rank(number: int, port: int) -> None:
    """
    Run one rank. Rank 0 prints a line for each size: median times in microseconds and the median
    ratios.
    """
    # hide warnings about groups that are freed late
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    torch.set_num_threads(1)
    for size, (width, layers) in SIZES.items():
        adaptor.tft_clear()
        ways, equal = prepared(number, port, size, width, layers)
        took: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(WARM + ROUNDS):
            names = list(ways)
            # rotate the order: the time of one way depends on which way ran before it
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                dist.barrier()
                began = time.perf_counter()
                ways[name]()
                took[name].append((time.perf_counter() - began) * 1e6)
        assert equal(), "both go the same way, bit for bit"
        if number == 0:
            tell(size, {name: each[WARM:] for name, each in took.items()})


def prepared(
    number: int, port: int, size: str, width: int, layers: int
) -> tuple[dict[str, Callable[[], object]], Callable[[], bool]]:
    """
    Return the functions to measure, and True if all optimizers have computed the same parameters.
    """
    models = [net(width, layers) for _ in range(3)]
    ours = ReplicaOptimizer(
        models[0].parameters(), torch.optim.AdamW, rank=number, world=WORLD, copies=COPIES
    )
    adaptor.tft_adopt({"model": models[0], "optimizer": ours}, None)
    adaptor.tft_regroup(size, "127.0.0.1", port, number, WORLD)
    adaptor.tft_rebuild()
    first = number - number % (WORLD // COPIES)
    for start in range(0, WORLD, WORLD // COPIES):
        group = dist.new_group(list(range(start, start + WORLD // COPIES)))
        if start == first:
            own = group
    pieces, buckets = (
        ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, process_group=own, parameters_as_bucket_view=view
        )
        for model, view in zip(models[1:], (False, True), strict=True)
    )

    def step() -> None:
        ours.step()
        adaptor.tft_updated()

    def equal() -> bool:
        weights: list[tuple[Tensor, ...]] = list(
            zip(*(model.parameters() for model in models), strict=True)
        )
        return all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in weights)

    ways: dict[str, Callable[[], object]] = {
        "tft": step,
        "torch": pieces.step,
        "torch_buckets": buckets.step,
        "meeting": lambda: adaptor.tft_pre_update_barrier(refuses=None),
    }
    return ways, equal


def net(width: int, layers: int) -> nn.Module:
    """
    Return a model with gradients, which no function changes.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def tell(size: str, took: dict[str, list[float]]) -> None:
    """
    Print one line of results.
    """
    met = [step + meeting for step, meeting in zip(took["tft"], took["meeting"], strict=True)]

    def ratio(ours: list[float], theirs: str) -> float:
        return statistics.median(a / b for a, b in zip(ours, took[theirs], strict=True))

    ratios = {name: ratio(took["tft"], name) for name in ("torch", "torch_buckets")}
    print(
        json.dumps(
            {
                "benchmark": "replica_step",
                "size": size,
                "unit": "us, tft / ZeroRedundancyOptimizer",
                "ratio": round(ratios["torch"], 3),
                "ratio_buckets": round(ratios["torch_buckets"], 3),
                "ratio_with_meeting": round(ratio(met, "torch"), 3),
                **{name: round(statistics.median(each)) for name, each in took.items()},
                "limit": LIMIT,
                "holds": all(ratio <= LIMIT for ratio in ratios.values()),
            }
        ),
        flush=True,
    )


def main() -> None:
    """
    Start the ranks and a store for them.
    """
    # the fork server imports these modules once for all ranks
    multiprocessing.set_forkserver_preload(["tests.adaptors.preloaded"])
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.start_processes(rank, (server.port,), WORLD, start_method="forkserver")  # type: ignore[no-untyped-call,attr-defined]  # torch has no types here


if __name__ == "__main__":
    main()
