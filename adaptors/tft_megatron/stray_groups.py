"""
Finds the process groups that a script keeps in its own variables, where tft cannot replace them.
The script builds its objects with pretended groups, which send nothing and report no error. If the
script later used such a group from a variable, all-reduces would give wrong results without an
error.
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
    Raise `UsageError` if one of the groups to which `freed` refers still exists, although tft and
    Megatron have dropped all references to it. The message names the object that refers to it.
    """
    for each in freed:
        group = each()
        if group is None:
            continue
        # Use a general text if nothing is found: if only a local variable refers to the group, the
        # garbage collector lists no object that refers to the group.
        where = next(_keepers(group), "a variable or a dict of the script's own")
        del group
        raise UsageError(
            f"{where} keeps a process group of Megatron, which tft cannot replace there when "
            "groups are formed again: ask megatron.core.parallel_state for the group each time, "
            "or keep the group in the model, the optimizer or the scheduler"
        )


def _keepers(group: dist.ProcessGroup) -> Iterator[str]:
    """
    Yield a text for each object that refers to the group. The text names the object in a message.
    """
    # compare by id, because a reference to `group` in the expression below would be a new referrer
    own = id(group)
    for holder in gc.get_referrers(group):
        if isinstance(holder, dict):
            names = ", ".join(repr(key) for key, value in holder.items() if id(value) == own)
            module = next((n for n, m in list(sys.modules.items()) if vars(m) is holder), None)
            yield f"{names} of a dict" if module is None else f"{names} of the module {module}"
        elif not isinstance(holder, FrameType):
            yield f"an object of {type(holder).__module__}.{type(holder).__qualname__}"
