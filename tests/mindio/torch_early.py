"""
A program written for MindIO that forms its process groups before it trains, as MindSpeed-LLM does.

    torch_early.py PORT RING DIRECTORY STEPS OPTIONS

OPTIONS is JSON. With `late`, the program imports torch only after it has joined the job. It writes
the result of one all-reduce into DIRECTORY.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

from mindio_ttp import framework_ttp as ttp

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
port, directory = int(sys.argv[1]), Path(sys.argv[3])
if not json.loads(sys.argv[5]).get("late"):
    import torch
if rank == 0:
    ttp.tft_init_controller(rank, world, False)
    ttp.tft_start_controller("127.0.0.1", port, enable_tls=False)
ttp.tft_init_processor(rank, world, False, enable_tls=False)
ttp.tft_start_processor("127.0.0.1", port)
import torch  # noqa: E402  # with `late`, the first import of torch
import torch.distributed as dist  # noqa: E402

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
told = torch.tensor([rank + 1])
dist.all_reduce(told)
(directory / f"sum-{rank}").write_text(str(int(told)))
dist.destroy_process_group()


@ttp.tft_exception_handler
def train() -> None:
    """
    Train one step, so that the job is complete.
    """
    ttp.tft_start_updating_os()
    ttp.tft_end_updating_os(1)


train()
ttp.tft_destroy_processor()
