"""
The loop of the comparison with NVIDIA's resiliency extension, restarted in the process: the function
is called again on the ranks that are left, and loads the newest checkpoint.

    with_nvrx.py DIRECTORY KILL MILLISECONDS, once for each rank

MILLISECONDS is the interval of its monitors, and the time for last calls.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import nvidia_resiliency_ext.inprocess as inprocess
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from tests.benchmarks.peers.checkpoints import train as train_from_checkpoint
from tests.benchmarks.peers.workload import Record, make_model, make_optimizer

directory, original = Path(sys.argv[1]), int(os.environ["RANK"])
record = Record(directory, original, kill=sys.argv[2] == "kill")
interval = timedelta(milliseconds=int(sys.argv[3]))
model = make_model()
optimizer = make_optimizer(model)
store = TCPStore(
    os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=original == 0,
    wait_for_workers=False,
)  # fmt: skip


@inprocess.Wrapper(  # type: ignore[untyped-decorator] # it has no types
    store_kwargs={"port": int(os.environ["MASTER_PORT"]) + 1},
    monitor_thread_interval=interval,
    monitor_process_interval=interval,
    last_call_wait=interval,
)
def train(call_wrapper: inprocess.CallWrapper | None = None) -> None:
    """
    Run the training loop, with the rank and the number of ranks that the wrapper has set.
    """
    assert call_wrapper is not None
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    groups = PrefixStore(str(call_wrapper.iteration), store)
    dist.init_process_group("gloo", store=groups, rank=rank, world_size=world)
    train_from_checkpoint(directory, rank, record, model, optimizer)
    dist.destroy_process_group()


train()
record.ends(model)
