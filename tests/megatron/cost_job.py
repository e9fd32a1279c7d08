"""
A job that measures the cost of a step under tft.

The same processes train three models over the same groups, one step of each in turn. tft protects
only the first model. Other load on the machine therefore affects all three measurements alike.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from sys import path

path.insert(0, str(Path(__file__).parents[2]))

import megatron.core.parallel_state as ps
import tft_megatron
import torch
from megatron.core.num_microbatches_calculator import (
    get_num_microbatches,
    init_num_microbatches_calculator,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

import tft
from tests.megatron import shim
from tests.megatron.gpt import (
    GLOBAL_BATCH,
    LENGTH,
    MICRO_BATCH,
    Built,
    add_arguments,
    build,
    forward,
    samples,
    sizes,
)

args = add_arguments(argparse.ArgumentParser()).parse_args()

torch.set_num_threads(1)
shim.install()
session = tft.init()
tft_megatron.begin(session, **sizes(args))
torch.manual_seed(1234)
model_parallel_cuda_manual_seed(1234)
replicas = ps.get_data_parallel_world_size()
init_num_microbatches_calculator(session.rank, None, GLOBAL_BATCH, MICRO_BATCH, replicas)

kept = build(args)
data = tft_megatron.Data(samples)
tft_megatron.enable(session, kept.wrapped, kept.optimizer, kept.scheduler, data=data)


def one(built: Built, read: tft_megatron.Data, step: int) -> None:
    """
    Train one step, with the calls in the order of Megatron's own `train_step`.
    """
    built.wrapped.zero_grad_buffer()
    built.optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=read.begin(step),
        model=[built.wrapped],
        num_microbatches=get_num_microbatches(),
        seq_length=LENGTH,
        micro_batch_size=MICRO_BATCH,
        forward_only=False,
    )
    built.optimizer.step()
    built.scheduler.step(increment=GLOBAL_BATCH)


def train(session: tft.Session) -> None:
    """
    Train all three models and write the seconds of each step to `cost-rank<R>.json`.

    The two unprotected models are built here because the real process groups exist only now. The
    model that goes first changes from step to step.
    """
    others = [(build(args), tft_megatron.Data(samples)) for _ in range(2)]
    steps = session.steps(args.steps)

    def looked_after(_: int) -> None:
        one(kept, data, next(steps))

    def alone(which: int, step: int) -> None:
        one(*others[which], step)

    turns: list[Callable[[int], None]] = [looked_after, partial(alone, 0), partial(alone, 1)]
    rows = []
    for step in range(1, args.steps + 1):
        row = [0.0] * len(turns)
        for turn in range(len(turns)):
            at = (turn + step) % len(turns)
            begun = time.monotonic()
            turns[at](step)
            row[at] = time.monotonic() - begun
        rows.append(row)
    assert next(steps, None) is None
    (session.run_dir / f"cost-rank{session.rank}.json").write_text(json.dumps(rows))


session.run(train)
