"""
Measure the cost of the loop audit: audited steps of the example's model against steps without the
audit, in turns, in one process without groups. The cost is also given in units of one digest of the
state; the audit makes three of them.
"""

import json
import statistics
import time

import torch
from corpus import Batches, load_corpus
from gpt import GPT, SIZES, make_optimizer, make_scheduler

from tft.plugins import load_adaptor
from tft.worker.audit import Audit, Findings

STEPS = 120
WARM = 10


def main() -> None:
    """
    Print one line for each size of the model.
    """
    torch.set_num_threads(1)
    for size in SIZES:
        print(json.dumps({"benchmark": "audit_cost", "size": size, **measured(size)}))


def measured(size: str) -> dict[str, float | str]:
    """
    Return the median times for a model of this size.
    """
    hook = load_adaptor("pytorch").hook
    model = GPT(SIZES[size])
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer, STEPS)
    data = Batches(
        load_corpus(), batch=SIZES[size].batch, context=SIZES[size].context, seed=0, rank=0
    )
    hook.tft_adopt(
        parts={"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data},
        wrap=None,
    )
    step = 0
    audit = Audit(
        hook=hook, findings=Findings(rank=0, strict=True), loop=main.__code__,
        failed=lambda error, raised: None, awake=lambda: None,
        position=lambda: (step, False),
    )  # fmt: skip
    audit.begin(["dense"])
    plain: list[float] = []
    audited: list[float] = []
    reads: list[float] = []
    for step in range(1, STEPS + 1):
        looks = step % 2 == 0
        began = time.perf_counter()
        model(*data.next()).backward()
        hook.tft_capture(closing=False)
        optimizer.step()
        hook.tft_capture(closing=True)
        if looks:
            audit.window_closed(step, tails=True)
        scheduler.step()
        if looks:
            audit.step_ends(step, leaves=False)
        optimizer.zero_grad()
        seconds = time.perf_counter() - began
        if looks:  # also measure the opening of the next window, which is not part of the audit
            began = time.perf_counter()
            hook.tft_compare(shard="dense")
            reads.append(time.perf_counter() - began)
            audit.left(None)
            seconds += reads[-1]
        (audited if looks else plain).append(seconds)
    without, with_, read = (
        statistics.median(times[WARM // 2 :]) for times in (plain, audited, reads)
    )
    return {
        "unit": "audited step / step without",
        "median": round(with_ / without, 3),
        "reads": round((with_ - without) / read, 2),
        "step_ms": round(1e3 * without, 2),
        "read_ms": round(1e3 * read, 2),
    }


if __name__ == "__main__":
    main()
