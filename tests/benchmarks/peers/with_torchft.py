"""
The loop of the comparison with torchft: each rank is a replica. After a loss the others go on, and
the replacement copies their state.

    with_torchft.py DIRECTORY KILL, once for each rank
"""

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from tests.benchmarks.peers.workload import (
    RANKS,
    STEPS,
    Record,
    backward,
    batch,
    make_model,
    make_optimizer,
)

rank = int(os.environ.pop("REPLICA"))
record = Record(Path(sys.argv[1]), rank, kill=sys.argv[2] == "kill")
model = make_model()
inner = make_optimizer(model)


def state() -> dict[str, Any]:  # Any: what state_dict returns
    """
    Return the state that a replacement copies.
    """
    return {"model": model.state_dict(), "optimizer": inner.state_dict()}


def take(state: dict[str, Any]) -> None:
    """
    Take the state of another replica.
    """
    model.load_state_dict(state["model"])
    inner.load_state_dict(state["optimizer"])


store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
    min_replica_size=RANKS - 1,
    load_state_dict=take,
    state_dict=state,
    replica_id=f"replica_{rank}",
    rank=0,
    world_size=1,
    store_addr="127.0.0.1",
    store_port=store.port,
    hostname="127.0.0.1",
    init_sync=False,
)
wrapped = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, inner)
while manager.current_step() < STEPS:
    step = manager.current_step() + 1
    optimizer.zero_grad()  # this begins the quorum of the step
    inputs = batch(rank, step)
    outputs = wrapped(inputs)
    record.forward_ended(step)
    backward(outputs, inputs)
    optimizer.step()
    if manager.current_step() >= step:
        record.step_ended(manager.current_step())
record.ends(model)
manager.shutdown(wait=False)
