"""
The adaptor for Lightning. `Trainer(strategy=TftStrategy())` makes a `Trainer` fault tolerant. This
adaptor uses the adaptor for PyTorch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tft_lightning.strategy import TftStrategy

__all__ = ["TftStrategy"]


def __getattr__(name: str) -> Any:  # Any: the attributes of a module have no common type
    """
    Return the class `TftStrategy`. Its module imports Lightning, so this module imports it only on
    first use, after the version of Lightning was checked.
    """
    if name != "TftStrategy":
        raise AttributeError(f"module 'tft_lightning' has no attribute {name!r}")
    from tft_lightning.versions import LIGHTNING

    LIGHTNING.check()
    from tft_lightning.strategy import TftStrategy

    return TftStrategy
