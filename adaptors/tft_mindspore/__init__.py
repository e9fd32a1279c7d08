"""
The adaptor for MindSpore: data-parallel training in PyNative mode. The user may also declare state
that only some ranks hold. Training scripts import the public names of the adaptor from this
package.

Some modules of the package only read the environment or the names of files. These modules must also
run where MindSpore is not installed. So `__init__.py`, which Python runs before every module of the
package, imports MindSpore and numpy only when they are needed.
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
"""Maps each public name for scripts to the module of this package that defines the name."""


def __getattr__(name: str) -> Any:  # Any: the names are those of classes and functions
    if name not in _OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_OFFERED[name]}"), name)


def group() -> "Group":
    """
    Return the present process group of all ranks, for calls such as `group().mean(gradients)`.

    Call this function again in every step, because an incident replaces the group. Raises
    `GroupBroken` if no group exists.
    """
    return _groups().present
