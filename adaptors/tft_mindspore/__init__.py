"""
The adaptor for MindSpore: data-parallel training in PyNative mode, and whatever the user says is held by
whom; and what scripts use of it.

The modules that read the environment and name files are used without MindSpore, so nothing of it, nor numpy, is
imported here before it is needed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tft_mindspore.adaptor import groups as _groups

if TYPE_CHECKING:
    from tft_mindspore.callback import TrainFaultTolerance
    from tft_mindspore.datasets import Rows
    from tft_mindspore.groups import Group, GroupBroken
    from tft_mindspore.state import Part

__all__ = ["Group", "GroupBroken", "Part", "Rows", "TrainFaultTolerance", "group"]

_OFFERED = {
    "Group": "groups", "GroupBroken": "groups", "Part": "state", "Rows": "datasets",
    "TrainFaultTolerance": "callback",
}  # fmt: skip
"""What scripts use, by the module it is in."""


def __getattr__(name: str) -> Any:  # Any: classes
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_OFFERED[name]}"), name)


def group() -> "Group":
    """
    The group of all ranks, as the last regroup has formed it: `group().mean(gradients)`. Ask anew in
    every step. Raises `GroupBroken` where there is none.
    """
    return _groups().present
