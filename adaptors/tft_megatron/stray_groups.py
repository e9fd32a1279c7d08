"""
Finds the process groups that a script keeps in its own variables, where tft cannot replace them. A
pretended group sends no data and reports no error. So an all-reduce over a pretended group would
give wrong results from the first step on.
"""

import gc
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from weakref import ReferenceType

import torch.distributed as dist

from tft.errors import UsageError


def refuse_kept(freed: Iterable[ReferenceType[dist.ProcessGroup]]) -> None:
    """
    Refuse to continue if one of these groups still exists, after tft and Megatron have dropped all
    references to it. Raises `UsageError`, which names the object that keeps the group.
    """
    for each in freed:
        group = each()
        if group is None:
            continue
        # Python does not show a function that is running, nor a dict that has nothing else in it
        where = next(_keepers(group), "a variable or a dict of the script's own")
        del group
        raise UsageError(
            f"{where} keeps a process group of Megatron, which tft cannot replace there when "
            "groups are formed again: ask megatron.core.parallel_state for it each time, or keep "
            "it in the model, the optimizer or the scheduler"
        )


def _keepers(group: dist.ProcessGroup) -> Iterator[str]:
    """
    Yield a description, for the operator, of each object that refers to the group.
    """
    own = id(group)  # the generator expression below would refer to the group
    for holder in gc.get_referrers(group):
        if isinstance(holder, dict):
            names = ", ".join(repr(key) for key, value in holder.items() if id(value) == own)
            module = next((n for n, m in list(sys.modules.items()) if vars(m) is holder), None)
            yield f"{names} of a dict" if module is None else f"{names} of the module {module}"
        elif not isinstance(holder, FrameType):
            yield f"an object of {type(holder).__module__}.{type(holder).__qualname__}"
