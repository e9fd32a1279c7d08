"""
The loop of the comparison with torchrun: after a loss all processes start again and load the newest
checkpoint.

    torchrun --nproc-per-node 3 --max-restarts 3 with_torchrun.py DIRECTORY KILL
"""

import os
import sys
from pathlib import Path

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.benchmarks.peers.checkpoints import load, save
from tests.benchmarks.peers.workload import (
    EVERY,
    STEPS,
    Record,
    backward,
    batch,
    make_model,
    make_optimizer,
)

directory, rank = Path(sys.argv[1]), int(os.environ["RANK"])
record = Record(directory, rank, kill=sys.argv[2] == "kill")
model = make_model()
optimizer = make_optimizer(model)
dist.init_process_group("gloo")
first = load(directory, model, optimizer) + 1
wrapped = DDP(model)
for step in range(first, STEPS + 1):
    inputs = batch(rank, step)
    outputs = wrapped(inputs)
    record.forward_ended(step)
    backward(outputs, inputs)
    optimizer.step()
    optimizer.zero_grad()
    record.step_ended(step)
    if step % EVERY == 0 and rank == 0:
        save(directory, step, model, optimizer)
record.ends(model)
dist.destroy_process_group()
