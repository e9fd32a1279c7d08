"""
Imports early the modules that torch would import late. A replacement process starts while the other
ranks wait. After the process has joined the other ranks, an import would delay all ranks.

The list of modules was found by comparing `sys.modules` before and after a first step, a first move
of a shard and a first checkpoint. `tests/adaptors/test_preload.py` makes the same comparison.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy.random
import torch

from tft.spi.generators import global_states

_JEMALLOC = "JE_ARROW_MALLOC_CONF"
"""The environment variable with the settings of the memory allocator that pyarrow brings."""


def preload() -> None:
    """
    Import the modules that torch imports late.

    This takes 0.7 to 1 s in addition to `import torch`, most of it for `torch._dynamo`. The import
    starts no thread and touches no device, so the process can be forked.
    """
    import torch._dynamo  # noqa: F401 (the first `optimizer.step` would import it)

    import tft_pytorch.checkpoints  # noqa: F401 (takes 0.1 s after torch._dynamo)

    _keep_generators_apart()


@contextmanager
def without_threads_of_arrow() -> Iterator[None]:
    """
    Keep pyarrow's memory allocator from starting a thread when pyarrow is imported in the `with`
    block, because a process that has a thread cannot be forked. The package `datasets` imports
    pyarrow.

    If the user has set the allocator's environment variable, its value is not changed.
    """
    if _JEMALLOC in os.environ:  # noqa: TID251  # pyarrow reads this variable
        yield
        return
    os.environ[_JEMALLOC] = "background_thread:false"  # noqa: TID251
    try:
        yield
    finally:
        del os.environ[_JEMALLOC]  # noqa: TID251


def _keep_generators_apart() -> None:
    """
    Give each process that is forked after this call its own random numbers from numpy's and torch's
    global generators.

    Otherwise all ranks would draw the same numbers, and use the same dropout masks. Python seeds
    its own generator again after a fork. A generator that was seeded or used before the fork is
    left alone, because then the script wants the forked processes to inherit it.
    """
    imported, started = global_states(("numpy",)), torch.get_rng_state()

    def seed() -> None:
        if global_states(("numpy",)) == imported:
            numpy.random.seed()
        if torch.equal(torch.get_rng_state(), started):
            torch.seed()

    os.register_at_fork(after_in_child=seed)
