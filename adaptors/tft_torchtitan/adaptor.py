"""
The hooks of the adaptor for TorchTitan. tft finds this module through the adaptor's Python entry
point.

The hooks are those of the adaptor for PyTorch, except that modules for TorchTitan are imported
early too.
"""

from tft_pytorch import adaptor as _pytorch
from tft_pytorch.adaptor import *  # noqa: F403 (all hooks, and those that will be added)

from tft.spi import hookimpl
from tft_torchtitan.preload import preload


@hookimpl  # type: ignore[no-redef]  # replaces the hook that was imported with *
def tft_preload() -> None:
    _pytorch.tft_preload()
    preload()
