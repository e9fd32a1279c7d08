"""
The adaptor for MindSpore: data-parallel training in PyNative mode, and state that only some ranks
hold, as the user declares it. Scripts import the functions and classes that they use from here.

The modules that read the environment or name files also run where MindSpore is not installed. So
MindSpore and numpy are imported here only when they are needed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tft_mindspore.process import groups as _groups

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
"""The names that scripts use, each with the module that has it."""


def __getattr__(name: str) -> Any:  # Any: classes
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_OFFERED[name]}"), name)


def group() -> "Group":
    """
    Return the group of all ranks that was formed last. Use it as in `group().mean(gradients)`.

    Call this function again in every step, because an incident replaces the group. Raises
    `GroupBroken` if no group exists.
    """
    return _groups().present
