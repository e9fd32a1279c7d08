"""
The loop of the comparison with tft.

    tft run --nproc-per-node 3 with_tft.py DIRECTORY KILL
"""

import sys
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel as DDP

import tft
from tests.benchmarks.peers.workload import (
    STEPS,
    Record,
    backward,
    batch,
    make_model,
    make_optimizer,
)

session = tft.init()
model = make_model()
optimizer = make_optimizer(model)
record = Record(Path(sys.argv[1]), session.rank, kill=sys.argv[2] == "kill")


def train(session: tft.Session) -> None:
    """
    Run the training loop.
    """
    for step in session.steps(STEPS):
        inputs = batch(session.rank, step)
        outputs = session.model(inputs)
        record.forward_ended(step)
        backward(outputs, inputs)
        with session.update():
            optimizer.step()
            optimizer.zero_grad()
        record.step_ended(step)


session.adopt(model=model, optimizer=optimizer, wrap=lambda: DDP(model))
session.run(train)
record.ends(model)
