"""
Empties the caches in which torch keeps results for device meshes.

A `DeviceMesh` is equal to another mesh of the same shape over the same ranks. torch caches results
for distributed tensors by mesh, and these results refer to process groups. A mesh that is made
after an incident equals the old mesh, so torch would use the old results for the new mesh. The
collectives of tensor parallelism would then use groups that no longer exist. After the trial call
of the user's factory (see `factory_maker.py`), the collectives would use groups that send nothing.
"""

import functools
import gc
from typing import Any

from torch._C import _clear_DTensor_sharding_propagator_cache
from torch.distributed.tensor import _redistribute

_caches: list[Any] = []  # Any: the class of functools' caches has no public name


def forget() -> None:
    """
    Empty every cache of `torch.distributed` that may refer to a mesh.
    """
    if not _caches:
        _caches.extend(_found())
    for cache in _caches:
        cache.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _clear_DTensor_sharding_propagator_cache()


def _found() -> list[Any]:
    """
    Return all `functools.lru_cache` objects of `torch.distributed`.

    The search goes through all objects in memory, because some caches are inside closures. All
    caches exist once the modules of torch are imported, because torch registers its operators
    during the import.
    """
    made = type(functools.lru_cache(lambda: None))
    return [
        each
        for each in gc.get_objects()
        if type(each) is made and str(each.__module__).startswith("torch.distributed")
    ]
