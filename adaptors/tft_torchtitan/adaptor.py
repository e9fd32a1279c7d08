"""
The hooks of the adaptor for TorchTitan. The entry point of the adaptor names this module.

They are those of the adaptor for PyTorch. The fork server also imports what TorchTitan needs.
"""

from tft_pytorch import adaptor as _pytorch
from tft_pytorch.adaptor import *  # noqa: F403 (all hooks, and those that will be added)

from tft.spi import hookimpl
from tft_torchtitan.preload import preload


@hookimpl  # type: ignore[no-redef]  # in the place of the imported one
def tft_preload() -> None:
    _pytorch.tft_preload()
    preload()
