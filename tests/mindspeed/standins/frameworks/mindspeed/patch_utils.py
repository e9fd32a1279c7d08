"""
MindSpeed's way of replacing functions and methods of Megatron and torch.
"""

import importlib
import sys
from collections.abc import Callable
from typing import Any


class MindSpeedPatchesManager:
    """
    The patches of one process.

    A new function whose name ends in `wrapper` or `decorator` wraps the existing function. Any
    other new function replaces it.
    """

    def __init__(self) -> None:
        self._patches: dict[str, list[Callable[..., Any]]] = {}

    def register_patch(self, name: str, new: Callable[..., Any], force_patch: bool = False) -> None:
        """
        Register a patch of the function or method with this full name.

        Of several wrappers, the first that is registered is the innermost.
        """
        self._patches.setdefault(name, []).append(new)

    def apply_patches(self) -> None:
        """
        Apply all patches registered since the last call, in every module that has imported the
        function.
        """
        patches, self._patches = self._patches, {}
        for name, found in patches.items():
            place, _, last = name.rpartition(".")
            owner = _owner(place)
            original = patched = getattr(owner, last)
            for new in found:
                wraps = new.__name__.endswith(("wrapper", "decorator"))
                patched = new(patched) if wraps else new
            for module in [owner, *list(sys.modules.values())]:
                if module is not None and vars(module).get(last) is original:
                    setattr(module, last, patched)


def _owner(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        place, _, last = name.rpartition(".")
        return getattr(_owner(place), last)
