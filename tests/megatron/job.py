"""
A job that trains a small GPT of real megatron-core under `tft run --adaptor megatron`.

The calls have the order of Megatron's own `train_step`. Dropout is on, so the losses also depend on
the state of the random number generators.
"""

import argparse
import os
import signal
from functools import partial
from itertools import count
from pathlib import Path
from sys import path
from typing import Any

path.insert(0, str(Path(__file__).parents[2]))
path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))

import megatron.core.parallel_state as ps
import tft_megatron
import torch
from megatron.core.num_microbatches_calculator import (
    get_current_running_global_batch_size,
    get_num_microbatches,
    init_num_microbatches_calculator,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from record import Record

import tft
from tests.e2e.jobs import until
from tests.megatron import shim
from tests.megatron.copies import Copies
from tests.megatron.gpt import (
    GLOBAL_BATCH,
    LENGTH,
    MICRO_BATCH,
    add_arguments,
    build,
    forward,
    samples,
    sizes,
)

parser = add_arguments(argparse.ArgumentParser())
parser.add_argument("--rampup", action="store_true", help="begin with half of the global batch")
parser.add_argument(
    "--wrong", metavar="WORDS", help="raised by rank 1 in step 7, once step 6 is saved"
)
parser.add_argument(
    "--dies",
    metavar="STEP:WHERE",
    default="0:",
    help="rank 1, in its second `micro` batch, or `scaled`: its sums given, and rank 0 a step ahead",
)
parser.add_argument("--copies", action="store_true", help="write down what each rank holds")
args = tft_megatron.add_arguments(parser).parse_args()

if args.enable_high_availability:
    spread = {**vars(args), **sizes(args), "context_parallel_size": 1}
    tft_megatron.settle(argparse.Namespace(**spread, use_distributed_optimizer=args.instances > 0))
torch.set_num_threads(1)
shim.install()
session = tft.init()
tft_megatron.begin(session, **sizes(args))
torch.manual_seed(1234 + 100 * ps.get_pipeline_model_parallel_rank())
model_parallel_cuda_manual_seed(1234)

built = build(args)
wrapped, optimizer, scheduler = built.wrapped, built.optimizer, built.scheduler

replicas = ps.get_data_parallel_world_size()
half = GLOBAL_BATCH // 2
rampup = [half, half, 4 * half] if args.rampup else None
init_num_microbatches_calculator(session.rank, rampup, GLOBAL_BATCH, MICRO_BATCH, replicas)
data = tft_megatron.Data(samples)
wrong = [RuntimeError(args.wrong)] if args.wrong and session.rank == 1 else []
record = Record(session.run_dir, session.rank)
copies = Copies(session, wrapped) if args.copies else None
# This seed is for the dropout that Megatron's tracker does not draw. Each model replica has its own
# seed. The tensor-parallel ranks of a replica must draw the same numbers. Otherwise the parameters
# that all of them hold would become different.
torch.manual_seed(ps.get_data_parallel_rank())
tft_megatron.enable(session, wrapped, optimizer, scheduler, data=data)
ahead = Path(session.run_dir, "ahead")
prepare = optimizer.prepare_grads
batches = count()


def strikes(where: str) -> bool:
    return (session.rank, session.incarnation, args.dies) == (1, 0, f"{session.step}:{where}")


def prepared() -> bool:
    found: bool = prepare()
    if strikes("scaled"):
        until(ahead.exists, "that rank 0 has made the step")
        os.kill(os.getpid(), signal.SIGKILL)
    return found


def forward_or_die(micro: Any, model: Any) -> Any:  # Any: see `forward`
    if strikes("micro") and next(batches) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return forward(micro, model)


optimizer.prepare_grads = prepared


def train(session: tft.Session) -> None:
    step_forward_backward = partial(get_forward_backward_func(), forward_step_func=forward_or_die)
    for step in session.steps(args.steps):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        losses = step_forward_backward(
            data_iterator=data.begin(step),
            model=[wrapped],
            num_microbatches=get_num_microbatches(),
            seq_length=LENGTH,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        if step == 7 and wrong:
            newest = session.checkpoints.place(6) / "manifest.json"
            until(newest.exists, "that the checkpoint of step 6 is complete")
            raise wrong.pop()
        record.write(step, sum((float(each["loss"]) for each in losses), start=0.0))
        done, _, _ = optimizer.step()
        if done:
            scheduler.step(increment=get_current_running_global_batch_size())
        if session.rank == 0 and args.dies == f"{step}:scaled":
            ahead.touch()
        if copies is not None:
            copies.write(step)


session.run(train)
record.finish(session.digests())
