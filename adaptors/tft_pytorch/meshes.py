"""
What torch remembers of device meshes.

A `DeviceMesh` is equal to another one of the same shape over the same ranks, and torch keeps what it has
worked out for distributed tensors under the first of them, with its process groups in it. After the
groups were lost an equal mesh would be answered from there: the collectives of tensor parallelism
would go into groups that no longer exist, or, after the trial in `made.py`, into such as send nothing.
"""

import functools
import gc
from typing import Any

from torch._C import _clear_DTensor_sharding_propagator_cache
from torch.distributed.tensor import _redistribute

_caches: list[Any] = []  # Any: functools has no name for the type of what it makes


def forget() -> None:
    """
    Empty every cache of `torch.distributed` that may know a mesh.
    """
    if not _caches:
        _caches.extend(_found())
    for cache in _caches:
        cache.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _clear_DTensor_sharding_propagator_cache()


def _found() -> list[Any]:
    """
    All `functools.lru_cache` there: some are inside closures, and can be had in no other way. They are
    made when torch's operators are registered, as its modules are imported.
    """
    made = type(functools.lru_cache(lambda: None))
    return [
        each
        for each in gc.get_objects()
        if type(each) is made and str(each.__module__).startswith("torch.distributed")
    ]
