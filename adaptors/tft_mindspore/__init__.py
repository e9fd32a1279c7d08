"""
The adaptor for MindSpore: data-parallel training in PyNative mode, and state that only some ranks
hold, as the user declares it. Scripts import their part of the adaptor from here.

The modules that read the environment and name files are used without MindSpore. So MindSpore and
numpy are imported here only when they are needed.
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
    Return the group of all ranks that the last regroup has formed: `group().mean(gradients)`.

    Call it anew in every step. Raises `GroupBroken` if there is no group.
    """
    return _groups().present
