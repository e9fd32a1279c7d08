"""
Measure the time that tft takes in the training thread in one step, in microseconds: the captures of
the rank-local state, the writes to the page, the lock, and the work at the end of a step. The
example's model and optimizer are adopted, but nothing is computed.
"""

import json
import statistics
import time
from pathlib import Path

import torch
from corpus import Batches, load_corpus
from gpt import GPT, SIZES, make_optimizer, make_scheduler

from tft.config import RankSettings
from tft.page import Page
from tft.worker.session import Session

ROUNDS = 200
STEPS = 100


def main() -> None:
    """
    Print one line: the median and the 99th percentile of rounds of 100 steps.
    """
    page = Page.create()
    session = Session(
        RankSettings(
            rank=0,
            world=1,
            job="bench",
            run_dir=Path("."),
            broker="127.0.0.1:1",
            adaptor="pytorch",
            incarnation=0,
            page=page.fd,
            host="127.0.0.1",
        )
    )
    torch.set_num_threads(1)
    model = GPT(SIZES["tiny"])
    optimizer = make_optimizer(model)
    data = Batches(load_corpus(), batch=2, context=64, seed=0, rank=0)
    session.adopt(
        model=model, optimizer=optimizer, scheduler=make_scheduler(optimizer, 10), data=data
    )
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(STEPS):
            data.skip(1)  # a batch is drawn in each step
            session.contributing()
            with session.update():
                pass
            session.end_step()
        rounds.append((time.perf_counter() - began) / STEPS * 1e6)
    rounds.sort()
    print(
        json.dumps(
            {
                "benchmark": "step_cost",
                "unit": "us per step in the training thread",
                "median": round(statistics.median(rounds), 2),
                "p99": round(rounds[int(0.99 * len(rounds))], 2),
                "limit": 20,
                "steps": ROUNDS * STEPS,
            }
        )
    )


if __name__ == "__main__":
    main()
