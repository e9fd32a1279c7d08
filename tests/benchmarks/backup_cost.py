"""
Measure the cost of copies in host memory: blocks of steps of the example's model with copies every
1, 10 and 50 steps, against blocks without copies, in turns, in one process without groups.

The noise is the result of the same measurement with blocks without copies on both sides.
"""

import json
import os
import statistics
import time

import torch
from corpus import Batches, load_corpus
from gpt import GPT, SIZES, make_optimizer, make_scheduler

from tft.plugins import load_adaptor

BLOCK = 50
ROUNDS = {"tiny": 12, "small": 3}
EVERY = (1, 10, 50)


def main() -> None:
    """
    Print one line for each size of the model.
    """
    torch.set_num_threads(1)
    for size in SIZES:
        print(json.dumps({"benchmark": "backup_cost", "size": size, **measured(size)}))


def measured(size: str) -> dict[str, object]:
    """
    Return the median ratios for a model of this size.
    """
    hook = load_adaptor("pytorch").hook
    model = GPT(SIZES[size])
    optimizer = make_optimizer(model)
    rounds = ROUNDS[size]
    steps = BLOCK * (rounds * (2 + len(EVERY)) + 1)
    scheduler = make_scheduler(optimizer, steps)
    data = Batches(
        load_corpus(), batch=SIZES[size].batch, context=SIZES[size].context, seed=0, rank=0
    )
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data}
    hook.tft_adopt(parts=parts, wrap=None)
    done = 0
    begins: list[float] = []
    waits: list[float] = []

    def block(every: int) -> float:
        """
        Train a block of steps with a copy every `every` steps. Return the mean time of a step.
        """
        nonlocal done
        began, copied = time.perf_counter(), None
        for number in range(1, BLOCK + 1):
            model(*data.next()).backward()
            hook.tft_capture(closing=False)
            if copied is not None:
                since, copied = time.perf_counter(), copied()
                waits.append(time.perf_counter() - since)
            optimizer.step()
            scheduler.step()
            hook.tft_capture(closing=True)
            optimizer.zero_grad()
            hook.tft_end_step(tail=True)
            done += 1
            if every and number % every == 0:
                since = time.perf_counter()
                copied = hook.tft_backup(step=done, sound=done, copies=2)
                begins.append(time.perf_counter() - since)
        if copied is not None:
            copied()
        return (time.perf_counter() - began) / BLOCK

    block(1)  # allocates the memory of the copies
    ratios: dict[int, list[float]] = {every: [] for every in (0, *EVERY)}
    plain: list[float] = []
    begins.clear()
    waits.clear()
    for turn in range(rounds):
        kinds = (0, *EVERY) if turn % 2 else (*reversed(EVERY), 0)
        times = {every: block(every) for every in kinds}
        plain.append(block(0))
        for every, seconds in times.items():
            ratios[every].append(seconds / plain[-1])
    state = sum(p.numel() * p.element_size() for p in model.parameters()) * 3
    found = {every: round(statistics.median(each), 3) for every, each in ratios.items()}
    return {
        "unit": "mean step with copies / without",
        "ratios": {str(every): found[every] for every in EVERY},
        "noise": round(abs(found[0] - 1), 3),
        "plain_ms": round(1e3 * statistics.median(plain), 2),
        "begin_ms": round(1e3 * statistics.median(begins), 2),
        "wait_ms": round(1e3 * statistics.median(waits), 2),
        "state_mb": round(state / 1e6, 1),
        "load": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    main()
