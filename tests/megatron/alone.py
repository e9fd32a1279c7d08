"""
A script that runs one rank in its own process, without `tft run`, and prints its results as JSON.

The script calls the hooks of the Megatron adaptor in the order in which a session calls them. The
process groups are real groups of one rank. `test_alone.py` runs the script.
"""

import argparse
import gc
import json
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import tft_megatron
import torch
from megatron.core import parallel_state as ps
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from tft_megatron import adaptor
from torch._C._distributed_c10d import TCPStore  # torch.distributed imports it from here
from torch.distributed import distributed_c10d

from tests.megatron import shim
from tests.megatron.gpt import (
    LENGTH,
    MICRO_BATCH,
    add_arguments,
    build,
    forward,
    samples,
    sizes,
)

adaptor.tft_preload()
imported = set(sys.modules)
threads = len(os.listdir("/proc/self/task"))


class Alone:
    """
    A stand-in for `tft.Session`, with only the members that `tft_megatron.begin` and
    `tft_megatron.enable` use.
    """

    adaptor = "megatron"
    rank, world = 0, 1

    def adopt(self, *, save: None, load: None, **parts: Any) -> None:
        adaptor.tft_watch(lambda: None, early=False)
        adaptor.tft_adopt(parts, None)

    @contextmanager
    def update(self) -> Iterator[None]:
        yield
        adaptor.tft_updated()


def referrers(group: Any) -> list[str]:
    """
    Describe each object that still refers to a process group.
    """
    return [
        f"{type(each).__name__} {sorted(map(str, each))[:8] if isinstance(each, dict) else ''}"
        for each in gc.get_referrers(group)
        if not isinstance(each, ModuleType)
    ]


torch.set_num_threads(1)
shim.install()
args = add_arguments(argparse.ArgumentParser()).parse_args()
session = Alone()
tft_megatron.begin(session, **sizes(args))
model_parallel_cuda_manual_seed(1)
built = build(args)
init_num_microbatches_calculator(0, None, 2, MICRO_BATCH, 1)
data = tft_megatron.Data(samples)
pretended = [weakref.ref(each) for each in distributed_c10d._world.pg_map]
tft_megatron.enable(session, built.wrapped, built.optimizer, built.scheduler, data=data)
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

left: list[list[str]] = []
digests: list[dict[str, str]] = []
for number in range(2):
    adaptor.tft_regroup(f"number {number}", "127.0.0.1", store.port, 0, 1)
    adaptor.tft_rebuild()
    real = [weakref.ref(each) for each in distributed_c10d._world.pg_map]
    left += [referrers(each()) for each in (pretended if not number else ()) if each() is not None]
    for step in (1, 2):
        built.wrapped.zero_grad_buffer()
        built.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=data.begin(2 * number + step),
            model=[built.wrapped],
            num_microbatches=2,
            seq_length=LENGTH,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        adaptor.tft_capture(closing=False)
        built.optimizer.step()
        built.scheduler.step(increment=2)
        adaptor.tft_capture(closing=True)
    before = dict(adaptor.tft_digests())
    for shard in adaptor.tft_shards(0, 1):
        payload = adaptor.tft_give(shard.shard, 0, kept=False)
        adaptor.tft_take(shard.shard, payload.meta)
        adaptor.tft_taken(shard.shard, payload.meta)
    adaptor.tft_quiesce()
    adaptor.tft_clear()
    gc.collect()
    left += [referrers(each()) for each in real if each() is not None]
    digests += [before, dict(adaptor.tft_digests())]

late = sorted(set(sys.modules) - imported)
backend = distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
found = {
    "left": left,
    "digests": digests,
    "late": late,
    "pretends": type(backend).__name__,
    "ranks": [ps.get_data_parallel_rank(), ps.get_data_parallel_world_size()],
    "cuda": torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]  # torch has no types here
    "threads": threads,
}
sys.stdout.write(json.dumps(found))
sys.stdout.flush()
os._exit(0)  # skips gloo's own teardown, which sometimes hangs
