"""
Measure the time that tft takes in the training thread in one step, in microseconds: the captures of
the rank-local state, the writes to the page, the lock, and the work at the end of a step. The
example's model and optimizer are adopted, but nothing is computed.

In a job on several nodes the state is also captured at the end of the forward pass, and the agent
is woken. Every second round is such a round; a second process reads what wakes the agent.
"""

import json
import os
import statistics
import time
from dataclasses import replace
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
    Print one line for a job on one node and one for a job on several nodes: the median and the 99th
    percentile of rounds of 100 steps.
    """
    page = Page.create()
    settings = RankSettings(
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
    session = Session(settings)
    several = replace(settings, bell=_agent())
    torch.set_num_threads(1)
    model = GPT(SIZES["tiny"])
    optimizer = make_optimizer(model)
    data = Batches(load_corpus(), batch=2, context=64, seed=0, rank=0)
    session.adopt(
        model=model, optimizer=optimizer, scheduler=make_scheduler(optimizer, 10), data=data
    )
    rounds: dict[str, list[float]] = {"one": [], "several": []}
    for number in range(2 * ROUNDS):
        nodes = "several" if number % 2 else "one"
        session._loop.settings = several if number % 2 else settings
        began = time.perf_counter()
        for _ in range(STEPS):
            data.skip(1)  # a batch is drawn in each step
            if number % 2:
                session.contributing()  # at the end of the forward pass
            session.contributing()
            with session.update():
                pass
            session.end_step()
        rounds[nodes].append((time.perf_counter() - began) / STEPS * 1e6)
    for nodes, taken in rounds.items():
        taken.sort()
        print(
            json.dumps(
                {
                    "benchmark": "step_cost",
                    "nodes": nodes,
                    "unit": "us per step in the training thread",
                    "median": round(statistics.median(taken), 2),
                    "p99": round(taken[int(0.99 * len(taken))], 2),
                    **({"limit": 20} if nodes == "one" else {}),
                    "steps": ROUNDS * STEPS,
                }
            )
        )


def _agent() -> int:
    """
    Start a process that reads what wakes an agent, and return the pipe to write to. The process
    ends with this one.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    if os.fork() == 0:
        os.close(writing)
        while os.read(reading, 4096):
            pass
        os._exit(0)
    os.close(reading)
    os.set_blocking(writing, False)
    return writing


if __name__ == "__main__":
    main()
