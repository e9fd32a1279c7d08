"""
The loop of the comparison with torchrun: after a loss all processes start again and load the newest
checkpoint.

    torchrun --nproc-per-node 3 --max-restarts 3 with_torchrun.py DIRECTORY KILL
"""

import os
import sys
from pathlib import Path

import torch.distributed as dist

from tests.benchmarks.peers.checkpoints import train
from tests.benchmarks.peers.workload import Record, make_model, make_optimizer

directory, rank = Path(sys.argv[1]), int(os.environ["RANK"])
record = Record(directory, rank, kill=sys.argv[2] == "kill")
model = make_model()
optimizer = make_optimizer(model)
dist.init_process_group("gloo")
train(directory, rank, record, model, optimizer)
record.ends(model)
dist.destroy_process_group()
